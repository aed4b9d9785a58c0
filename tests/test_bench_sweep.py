"""Sweeps: texts to values, values to cases, bytes to tokens, and what cannot be."""

from typing import Any

import msgspec
import pytest

from pdtx.bench import sweep as sweeps
from pdtx.bench.sweep import Point, Sweep, expand
from pdtx.bench.sweep_shapes import model_of, request_bytes, tokens_for
from pdtx.errors import InputError
from pdtx.results.model import Case
from pdtx.units import format_bytes

LLAMA_TOKEN = 2 * 8 * 128 * 2
"""Bytes of a token in one layer of llama-3-8b: K and V, heads, channels, bytes of an element."""

SMALL = {"model": "llama-3-8b", "layers": "2"}


def points(
    flags: dict[str, str],
    agents: tuple[int, int] = (1, 1),
    **others: Any,  # noqa: ANN401 - fields of Sweep
) -> list[Point]:
    return expand(Sweep.of({**SMALL, **flags}, **others), agents)


def reasons(flags: dict[str, str], agents: tuple[int, int] = (1, 1)) -> list[str | None]:
    return [point.skipped for point in points(flags, agents)]


class TestTexts:
    def test_every_axis_becomes_its_field(self) -> None:
        flags = {
            "kv-cache-dtype": "fp8",
            "pattern": "tp",
            "tp": "1:2",
            "layout": "flash_attn_nhd:flashinfer_hnd+mla_blhnc",
            "block-size": "16:32",
            "mover": "tcp",
            "streams": "4",
            "op": "pull",
            "mode": "direct",
            "merge": "off",
            "mean-run": "4.5",
            "depth": "2",
            "layers-per-transfer": "all",
            "layer-compute": "500us",
            "batch": "3",
            "tokens": "64",
        }
        assert {*flags, "model", "layers", "bytes"} == set(sweeps.AXES)
        (point,) = points(flags, mover_options={"stall_s": "2"}, isolated=True, seed=7)
        assert point.case == Case(
            model="llama-3-8b",
            layers=2,
            kv_cache_dtype="fp8",
            pattern="tp",
            tp=(1, 2),
            layout=("flash_attn_nhd", "flashinfer_hnd,mla_blhnc"),
            block_size=(16, 32),
            mover="tcp",
            mover_options={"stall_s": "2"},
            streams=4,
            op="pull",
            mode="direct",
            merge=False,
            mean_run=4.5,
            depth=2,
            layers_per_transfer=0,
            layer_compute_s=500e-6,
            batch=3,
            tokens=64,
            isolated=True,
            seed=7,
        )

    def test_all_is_none_of_a_number(self) -> None:
        (point,) = points({"mean-run": "all", "depth": "all", "layers": "all"})
        assert (point.case.mean_run, point.case.depth, point.case.layers) == (0.0, 0, None)

    @pytest.mark.parametrize(
        ("flag", "text", "said"),
        [
            ("tokens", "512,", "--tokens '512,' has an empty value"),
            ("tokens", "many", "--tokens takes whole numbers, not 'many'"),
            ("tokens", "0", "numbers from 1 to"),
            ("block-size", "16:32:64", "--block-size takes PREFILL:DECODE"),
            ("block-size", "16:", "--block-size takes PREFILL:DECODE"),
            ("bytes", "64 elephants", "--bytes: not a size"),
            ("bytes", "0", "sizes of 1 byte and more"),
            ("op", "shove", "--op takes push, pull, not 'shove'"),
            ("merge", "maybe", "--merge takes on or off"),
            ("mean-run", "0.5", "--mean-run takes a mean length of 1 or more blocks, or 'all'"),
            ("mean-run", "nan", "--mean-run"),
            ("layer-compute", "5", "durations with a unit"),
            ("elephants", "5", "nothing is swept by 'elephants'"),
        ],
    )
    def test_others_are_refused(self, flag: str, text: str, said: str) -> None:
        with pytest.raises(InputError) as refused:
            Sweep.of({flag: text})
        assert said in str(refused.value)

    def test_sizes_are_given_in_one_way(self) -> None:
        with pytest.raises(InputError, match="--tokens and --bytes both say"):
            Sweep.of({"tokens": "5", "bytes": "5MiB"})
        with pytest.raises(InputError, match="--tokens and --block-tables both say"):
            Sweep.of({"tokens": "5"}, block_tables=[([1], [1])])


class TestCombinations:
    def test_every_one_is_there_once_with_sizes_innermost(self) -> None:
        found = points({"tokens": "16,32,16", "op": "push,pull", "merge": "on,off"})
        assert [(one.case.op, one.case.merge, one.case.tokens) for one in found] == [
            (op, merge, tokens) for op in ("push", "pull") for merge in (True, False) for tokens in (16, 32)
        ]

    def test_nobody_waits_for_a_hundred_thousand(self) -> None:
        many = ",".join(str(number) for number in range(1, 1001))
        with pytest.raises(InputError, match="the sweep has 1,000,000 cases"):
            points({"tokens": many, "batch": many})

    def test_recorded_tables_are_cases_and_say_how_many_tokens(self) -> None:
        tables = [([3, 1], [5]), ([2, 900], [6]), ([7], [3])]
        found = points({"block-size": "16:32"}, block_tables=tables)
        assert [(one.case.tokens, one.case.block_tables) for one in found] == [
            (32, tables[:1]),
            (32, tables[1:2]),
            (16, tables[2:]),
        ]
        assert found[1].memory[0] > 900 * 16 * LLAMA_TOKEN
        with pytest.raises(InputError, match="leave --batch out"):
            Sweep.of({"batch": "2"}, block_tables=tables)


class TestSizes:
    def test_bytes_become_the_nearest_whole_blocks_of_both_sides(self) -> None:
        found = points({"bytes": "1,1MiB,1.1MiB,1.2MiB,64MiB", "block-size": "16:32"})
        assert 32 * LLAMA_TOKEN * 2 == 2**18  # a block of the larger size
        assert [one.case.tokens for one in found] == [32, 128, 128, 160, 8192]
        assert [one.request_bytes for one in found] == [one.case.tokens * LLAMA_TOKEN * 2 for one in found]

    def test_a_window_moves_what_is_in_reach(self) -> None:
        """mistral-7b looks 4,096 tokens back."""
        case = Case(model="mistral-7b", layers=2)
        assert request_bytes(msgspec.structs.replace(case, tokens=100)) == 100 * LLAMA_TOKEN * 2
        assert request_bytes(msgspec.structs.replace(case, tokens=100_000)) == 4095 * LLAMA_TOKEN * 2
        with pytest.raises(InputError, match=r"no request comes to 1 GiB: .* tokens are 31.99 MiB"):
            tokens_for(case, 1 << 30)

    def test_memory_counts_what_an_agent_holds(self) -> None:
        """Twice the requests twice the pool; of a tensor-parallel pattern an agent has its share."""
        one, two = points({"tokens": "16384", "batch": "1,2"})
        assert two.memory[0] == pytest.approx(2 * one.memory[0], rel=0.03)
        (fanned,) = points({"tokens": "16384", "pattern": "fan-in"}, (3, 1))
        assert fanned.memory[1] == pytest.approx(3 * one.memory[1], rel=0.05)
        (shared,) = points({"tokens": "16384", "pattern": "tp", "tp": "2:4"}, (2, 4))
        assert shared.memory[0] == pytest.approx(one.memory[0] / 2, rel=0.05)
        assert shared.memory[1] == pytest.approx(one.memory[1] / 4, rel=0.1)

    def test_what_does_not_fit_is_skipped_and_says_what_it_needs(self) -> None:
        small, large = points({"tokens": "16,4096"})
        limit = large.memory[1] - 1
        found = expand(Sweep.of({**SMALL, "tokens": "16,4096"}), (1, 1), (None, limit))
        assert found[0].skipped is None
        assert found[1].skipped == (
            f"a decode agent would need about {format_bytes(large.memory[1])} and may take {format_bytes(limit)}; give "
            "fewer tokens, a smaller batch or fewer --layers, or its --max-bytes"
        )
        assert small.memory[1] < limit


class TestImpossible:
    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            ({"block-size": "16:24"}, "one must be a multiple of the other"),
            ({"layout": "flash_attn_nhd:nonsense"}, "nonsense"),
            ({"mover": "inproc"}, "works within one process"),
            ({"op": "pull", "mode": "staged"}, "a pull has no staged mode"),
            ({"mover": "shm", "streams": "2"}, "mover shm has no option 'streams'"),
            ({"mover": "pigeon"}, "unknown mover 'pigeon'"),
            ({"model": "nowhere"}, "no preset of that name"),
            ({"tp": "3"}, "3"),
            ({"pattern": "tp", "tp": "1:2"}, None),
        ],
    )
    def test_it_is_said_why(self, flags: dict[str, str], said: str | None) -> None:
        (reason,) = reasons(flags)
        assert (reason is None) if said is None else (reason is not None and said in reason)

    def test_patterns_need_their_agents(self) -> None:
        pairs, fan_in, fan_out = reasons({"pattern": "pairs,fan-in,fan-out"}, (2, 1))
        assert pairs is not None
        assert "pattern pairs needs" in pairs
        assert fan_in is None
        assert fan_out is not None
        assert "pattern fan-out needs" in fan_out

    def test_the_others_are_measured_all_the_same(self) -> None:
        assert [reason is None for reason in reasons({"block-size": "16,16:24,16:32"})] == [True, False, True]

    def test_a_model_may_have_fewer_layers(self) -> None:
        assert model_of(Case(layers=1000)).num_layers == 32
