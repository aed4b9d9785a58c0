"""`pdtx bench tier`: what is printed, what is written, what is refused, and that wrong data is seen."""

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch

import benchmarks.tiers
from benchmarks.settings import Settings
from pdtx.bench.caches import block_bytes, model_caches, token_layers
from pdtx.bench.cpu_ways import cpu_ways
from pdtx.bench.disk_ways import disk_ways
from pdtx.bench.lookup import measure_lookup
from pdtx.bench.raw import Files
from pdtx.bench.scene import TierScene
from pdtx.bench.settings import RateSettings
from pdtx.bench.turns import MOVES_A_ROUND, Way, in_turns
from pdtx.cli import app
from pdtx.cli.common import run_app
from pdtx.errors import InputError
from pdtx.kvspec import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, SlidingWindowSpec
from pdtx.models import layer_specs, load_config
from pdtx.plan.runs import Int64s
from pdtx.tiers.copies import Copier

SAMPLE = Path(__file__).parent / "data" / "trace.jsonl"
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
TINY_BLOCK = 2 * 2 * 2 * 8 * 2 * 512
"""Bytes of 512 tokens: layers, K and V, heads, channels, bytes of an element, tokens."""

Run = Callable[..., tuple[int, str, str]]
Ways = AbstractContextManager[dict[str, Way]]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `pdtx bench tier`; return exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pdtx", "bench", "tier", *arguments])
        with pytest.raises(SystemExit) as ended:
            run_app(app, "pdtx")
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def scene(factor: int = 2, *, layout: str = "flash_attn_nhd") -> TierScene:
    layers = layer_specs(TINY, block_size=4)
    return TierScene(layers, layouts=(layout,), factor=factor, blocks=8)


class TestRates:
    def test_every_figure_has_what_it_is_compared_with_and_what_is_wrong(self, run: Run, model: str) -> None:
        code, out, err = run(model, "--blocks", "8", "--factor", "2", "--rounds", "1", "--json")
        assert code == 0
        said = err.splitlines()
        assert said[0] == "a median of 1 rounds says little: 7 is the least that counts"
        assert said[1].endswith("8 blocks, 1 rounds of both tiers; some seconds a round")
        assert said[-1] == "disk tier: round 1 of 1"  # also where nobody watches: it has not hung
        found = json.loads(out)
        assert found.keys() == {"version", "model", "rates", "lookup", "hits", "machine"}
        assert (found["model"], found["hits"]) == (model, None)
        assert [(one["name"], one["against"]) for one in found["rates"]] == [
            ("CPU tier store", "memcpy"),
            ("CPU tier load", "memcpy"),
            ("disk tier store", "raw pwrite"),
            ("disk tier load", "raw pread"),
        ]
        for one in found["rates"]:
            assert (one["bytes"], one["wrong"]) == (TINY_BLOCK // 512 * 8 * 16, 0)
            assert one["ratio"] == pytest.approx(one["against_seconds"][0] / one["seconds"][0])
        assert found["lookup"]["wrong"] == 0
        assert found["machine"]["cpus"]

    def test_the_table(self, run: Run, model: str) -> None:
        code, out, _ = run(model, "--blocks", "4", "--rounds", "1", "--page-cache", "cached")
        assert code == 0
        assert "4 blocks of 16 tokens in flash_attn_nhd, 8,192 B = 8 KiB; tiers with blocks of 16 tokens" in out
        assert "page cache holds it" in out
        assert "#wrong" in out
        assert "lookup of 8,192 blocks" in out

    @pytest.mark.parametrize("page_cache", ["auto", "dropped", "cached"])
    @pytest.mark.parametrize("layouts", [("flashinfer_hnd", None), ("flash_attn_nhd", ("flashinfer_hnd",))])
    def test_everything_arrives_between_layouts(
        self, page_cache: str, layouts: tuple[str, tuple[str, ...] | None], tmp_path: Path
    ) -> None:
        layout, tier_layouts = layouts
        settings = RateSettings(
            tier_layouts=tier_layouts,
            directory=tmp_path,
            page_cache=page_cache,  # type: ignore[arg-type]
        )
        blocks = scene(layout=layout)
        for make in (cpu_ways, disk_ways):
            with make(blocks, settings) as ways:
                timed = in_turns(ways, 1)
            assert {key: one.way.wrong for key, one in timed.items()} == dict.fromkeys(ways, 0)
        assert not list(tmp_path.iterdir())
        assert blocks.wrong_source() == 0

    @pytest.mark.parametrize("kind", ["windows", "latent"])
    def test_models_of_other_kinds(self, kind: str, tmp_path: Path) -> None:
        full = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="bfloat16")
        window = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="bfloat16", sliding_window=6)
        latent = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=12, dtype="bfloat16")
        layers: dict[str, dict[str, KVCacheSpec]] = {
            "windows": {"layers.0": window, "layers.1": full, "layers.2": window},
            "latent": {"layers.0": latent, "layers.1": latent},
        }
        blocks = TierScene(layers[kind], layouts=("flash_attn_nhd",), factor=2, blocks=8)
        assert len(blocks.source.groups) == (2 if kind == "windows" else 1)
        for make in (cpu_ways, disk_ways):
            with make(blocks, RateSettings(directory=tmp_path)) as ways:
                timed = in_turns(ways, 1)
            assert {key: one.way.wrong for key, one in timed.items()} == dict.fromkeys(ways, 0)
            assert {one.way.nbytes for one in timed.values()} == {blocks.nbytes}


def _leave_the_last(copy: Copier, group: int, src: Int64s, dst: Int64s, positions: range) -> tuple[int, int]:
    return _COPY(copy, group, src, dst, positions[:-1])


def _swap_two(copy: Copier, group: int, src: Int64s, dst: Int64s, positions: range) -> tuple[int, int]:
    swapped = src.copy()
    # Only on the way in: swapped again on the way out, nothing would be wrong.
    if copy._src.groups[group].block_size < copy._dst.groups[group].block_size:
        swapped[:2] = src[1::-1]
    return _COPY(copy, group, swapped, dst, positions)


def _touch_a_neighbour(copy: Copier, group: int, src: Int64s, dst: Int64s, positions: range) -> tuple[int, int]:
    done = _COPY(copy, group, src, dst, positions)
    memory = copy._dst.buffers[0].memory
    memory[0] ^= 1  # of the null block
    return done


_COPY = Copier.copy


class TestWrongData:
    @pytest.mark.parametrize("fault", [_leave_the_last, _swap_two, _touch_a_neighbour])
    def test_a_tier_that_copies_wrongly_is_found_out(
        self, fault: object, run: Run, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Copier, "copy", fault)
        code, out, err = run(model, "--blocks", "8", "--factor", "2", "--rounds", "1", "--json")
        wrong = {one["name"]: one["wrong"] for one in json.loads(out)["rates"]}
        assert wrong["CPU tier store"] > 0
        assert wrong["CPU tier load"] > 0
        assert code == 1
        assert "elements are not what was stored" in err

    def test_a_load_that_does_nothing_does_not_pass_for_the_one_before(self) -> None:
        blocks = scene()
        with cpu_ways(blocks, RateSettings()) as ways:
            ways["load"].round()
            assert ways["load"].wrong == 0
            ways["load"].prepare()
            assert ways["load"].count_wrong() == blocks.nbytes // 2

    def test_a_store_of_an_earlier_prompt_does_not_pass_for_this_one(self) -> None:
        blocks = scene()
        with cpu_ways(blocks, RateSettings()) as ways:
            ways["store"].round()
            blocks.poison()
            ways["load"].round()
            blocks.turn()
            assert blocks.wrong_loaded() > 0

    def test_one_byte_of_a_file(self, tmp_path: Path) -> None:
        files = Files(tmp_path, [4096, 8192], direct=False, threads=2)
        files.renew()
        files.write()
        files.read()
        assert files.wrong() == 0
        path = tmp_path / "1.raw"
        data = bytearray(path.read_bytes())
        data[4097] ^= 1
        path.write_bytes(data)
        files.read()
        assert files.wrong() == 1
        files.close()

    def test_a_source_that_was_changed(self) -> None:
        blocks = scene()
        assert blocks.wrong_source() == 0
        blocks.source.buffers[0].poison(torch.from_numpy(blocks.table[:1]))
        assert blocks.wrong_source() == blocks.nbytes // 8 // 2


class TestHits:
    def test_a_row_for_each_policy_and_size_and_the_limit(self, run: Run, model: str) -> None:
        code, out, err = run(model, "--trace", str(SAMPLE), "--sizes", "4,64 blocks", "--json")
        assert (code, err) == (0, "")
        record = json.loads(out)
        found = record["hits"]
        assert record["rates"] is None
        assert found | {"rows": 0} == {
            "trace": "trace.jsonl",
            "block_tokens": 512,
            "block_bytes": TINY_BLOCK,
            "requests": 40,
            "blocks": 301,
            "tokens": 143159,
            "rows": 0,
        }
        assert [(row["policy"], row["size_blocks"]) for row in found["rows"]] == [
            *((policy, blocks) for policy in ("lru", "arc", "fifo", "s3fifo") for blocks in (4, 64)),
            ("-", None),
        ]
        assert found["rows"][0] == {
            "policy": "lru",
            "size_bytes": 4 * TINY_BLOCK,
            "size_blocks": 4,
            "hit_blocks": 44,
            "hit_tokens": 44 * 512,
            "block_rate": 44 / 301,
            "token_rate": 44 * 512 / 143159,
            "evicted_blocks": 105,
        }

    def test_the_table_names_the_model_and_its_bytes(self, run: Run, model: str) -> None:
        code, out, _ = run(model, "--trace", str(SAMPLE), "--sizes", "1,2 MiB", "--policies", "fifo,lru")
        assert code == 0
        assert f"a block of 512 tokens of {model} is 65,536 B = 64 KiB" in out
        assert [text.split()[:4] for text in out.splitlines()[3:]] == [
            ["fifo", "1", "MiB", "16"],
            ["fifo", "2", "MiB", "32"],
            ["lru", "1", "MiB", "16"],
            ["lru", "2", "MiB", "32"],
            ["-", "unbounded", "66.45%", "71.53%"],
        ]

    @pytest.mark.parametrize(
        ("more", "says"),
        [
            (["--policies", "random"], "no policy 'random'; one of lru, arc, fifo, s3fifo"),
            (["--sizes", "1 KiB"], "does not hold one block of 64 KiB"),
            (["--sizes", "many"], "no sizes of tiers"),
            (["--trace-block-tokens", "16", "--sizes", "8 blocks"], "line 1"),
            (["--sizes", "1,2,4096 GiB"], "blocks in all, and at most 16,777,216 are simulated at once"),
        ],
    )
    def test_what_cannot_be_is_one_line(self, more: list[str], says: str, run: Run, model: str) -> None:
        code, out, err = run(model, "--trace", str(SAMPLE), *more)
        assert (code, out) == (2, "")
        assert says in err
        assert err.count("\n") == 1

    def test_a_plot(self, run: Run, model: str, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        path = tmp_path / "hits.png"
        code, _, err = run(model, "--trace", str(SAMPLE), "--sizes", "4,64 blocks", "--plot", str(path))
        assert (code, err) == (0, f"drawn into {path}\n")
        assert path.read_bytes().startswith(b"\x89PNG")

    def test_a_plot_without_matplotlib_says_how_to_get_it(
        self, run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        code, out, err = run(model, "--trace", str(SAMPLE), "--sizes", "4 blocks", "--plot", str(tmp_path / "p.png"))
        assert code == 2
        assert "pip install 'pdtx[plot]'" in err
        assert out == ""


class TestInput:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--plot", "x.png"], "--plot draws the hit rates of a trace"),
            (["--no-rates"], "nothing to measure"),
            (["--page-cache", "warm"], "--page-cache is one of auto, direct, dropped, cached, not 'warm'"),
            (["--blocks", "7", "--factor", "2"], "7 blocks do not make two or more tier blocks of 2"),
            (["--blocks", "2", "--factor", "2"], "2 blocks do not make two or more"),
            (["--directory", "/absent", "--blocks", "4", "--rounds", "1"], "no directory for the disk tier"),
            (["--layout", "sideways"], "sideways"),
        ],
    )
    def test_what_cannot_be(self, arguments: list[str], says: str, run: Run, model: str) -> None:
        code, out, err = run(model, *arguments)
        assert (code, out) == (2, "")
        assert says in err.splitlines()[-1]

    def test_a_model_of_states_alone(self) -> None:
        with pytest.raises(InputError, match="keeps nothing for each token"):
            model_caches({}, layouts=("flash_attn_nhd",), num_blocks=3)


class TestCaches:
    def test_layers_that_do_not_count_tokens_are_left_out(self) -> None:
        for name, kept in (("bamba-9b", 3), ("whisper-large-v3", 32), ("llama-3-8b", 32)):
            assert len(token_layers(layer_specs(load_config(name), block_size=16))) == kept, name

    def test_bytes_of_a_block(self) -> None:
        """Llama 3 8B keeps 128 KiB a token, DeepSeek V3 61 vectors of 576 elements."""
        for name, per_token in (("llama-3-8b", 128 << 10), ("deepseek-v3", 61 * 576 * 2)):
            layers = token_layers(layer_specs(load_config(name), block_size=16))
            assert block_bytes(layers, 512) == 512 * per_token, name

    def test_groups_of_a_model_with_windows(self) -> None:
        layers = dict(list(layer_specs(load_config("gemma-3-27b"), block_size=16).items())[:8])
        cache = model_caches(layers, layouts=("flash_attn_nhd",), num_blocks=3)
        assert [(group.name, group.kind) for group in cache.groups] == [("window1024", "window"), ("full", "full")]
        assert [(buffer.group, buffer.num_layers) for buffer in cache.buffers] == [(0, 7), (1, 1)]


class Steps(Way):
    """Writes down what it is asked to do."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__(name, "", 100)
        self._log, self._times = log, iter([9.0, 9.0, 9.0, 3.0, 1.0, 2.0, 5.0, 4.0, 6.0])

    def prepare(self) -> None:
        self._log.append(f"{self.name}(")

    def move(self) -> float:
        self._log.append(".")
        return next(self._times)

    def count_wrong(self) -> int:
        self._log.append(")")
        return 1


def test_ways_take_turns_and_the_first_round_does_not_count() -> None:
    log, told = list[str](), list[int]()
    timed = in_turns({name: Steps(name, log) for name in "ab"}, 2, told.append)
    dots = "." * MOVES_A_ROUND
    assert "".join(log) == "".join(f"{name}({dots})" for name in "baab" + "ba")
    assert [one.seconds for one in timed.values()] == [[2.0, 5.0]] * 2
    assert (timed["a"].typical, timed["a"].rate, timed["a"].way.wrong) == (3.5, 100 / 3.5, 3)
    assert told == [0, 1, 2]


def test_lookups_find_everything() -> None:
    found = measure_lookup(2, blocks=64)
    assert (found.blocks, found.tokens, found.wrong, len(found.rounds)) == (64, 1024, 0, 2)
    assert found.lookup_s == pytest.approx(float(np.median(found.rounds)))


def test_the_benchmark_has_the_rows_that_are_held_to_bars() -> None:
    rows = benchmarks.tiers.tiers(Settings(rounds=1, quick=True))
    assert [(row.name, row.at_least, row.wrong, row.missing) for row in rows] == [
        ("cpu tier store : memcpy", 0.85, 0, ""),
        ("cpu tier load : memcpy", 0.85, 0, ""),
        ("disk tier store : raw pwrite", 0.9, 0, ""),
        ("disk tier load : raw pread", 0.9, 0, ""),
        ("lookup of 64 blocks : 5 ms", 1.0, 0, ""),
    ]
