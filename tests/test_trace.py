"""Traces: what is read, what is refused, and what tiers of some sizes have of them."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from pdtx.bench.hits import NO_POLICY, HitRow, simulate
from pdtx.bench.sizes import UNBOUNDED, TierSize, parse_sizes
from pdtx.bench.trace import TraceRequest, read_trace
from pdtx.errors import InputError
from pdtx.tiers.policies import POLICIES

SAMPLE = Path(__file__).parent / "data" / "trace.jsonl"
GIB = 1 << 30


def line(*ids: int, length: int | None = None, **more: object) -> str:
    fields = {"timestamp": 0, "input_length": 512 * len(ids) if length is None else length, "output_length": 1}
    return json.dumps({**fields, "hash_ids": list(ids), **more})


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{one}\n" for one in lines))
    return path


def requests(*prompts: tuple[int, ...]) -> list[TraceRequest]:
    return [TraceRequest(0.0, 512 * len(prompt), 1, prompt) for prompt in prompts]


def hits(policy: str, blocks: int, *prompts: tuple[int, ...]) -> HitRow:
    row, _ = simulate(requests(*prompts), [policy], [TierSize(blocks, blocks)], 512)
    return row


class TestReading:
    def test_the_sample_is_read_in_order(self) -> None:
        found = list(read_trace(SAMPLE))
        raw = [json.loads(text) for text in SAMPLE.read_text().splitlines()]
        assert len(found) == 40
        assert [(one.timestamp, one.input_length, one.output_length, list(one.hash_ids)) for one in found] == [
            (one["timestamp"], one["input_length"], one["output_length"], one["hash_ids"]) for one in raw
        ]

    def test_lines_are_read_as_they_are_asked_for(self, tmp_path: Path) -> None:
        reading = read_trace(written(tmp_path, line(1, 2), "nonsense"))
        assert next(reading).hash_ids == (1, 2)
        with pytest.raises(InputError, match="line 2"):
            next(reading)

    def test_progress_is_told_in_bytes(self, tmp_path: Path) -> None:
        path, told = written(tmp_path, *[line(number) for number in range(600)]), list[tuple[int, int]]()
        assert len(list(read_trace(path, progress=lambda *at: told.append(at)))) == 600
        size = path.stat().st_size
        assert [total for _, total in told] == [size] * len(told)
        assert 0 < told[0][0] < told[-1][0] <= size

    def test_other_fields_and_empty_lines_are_passed_over(self, tmp_path: Path) -> None:
        assert len(list(read_trace(written(tmp_path, "", line(1, type="chat"), "  ", line(2))))) == 2

    @pytest.mark.parametrize(
        ("bad", "says"),
        [
            ("{", "no request of a trace"),
            ("[]", "Expected `object`"),
            ('{"timestamp": 0, "input_length": 1, "output_length": 1}', "hash_ids"),
            (line(1, timestamp="soon"), "timestamp"),
            (line(1, timestamp=-1), "timestamp"),
            (line(1, length=-512), "input_length"),
            (line(1, output_length=1.5), "output_length"),
            (line(-1), "hash_ids"),
            (line(1 << 63), "hash_ids"),
            (line(1, length=513), "513 tokens make 2 blocks of 512 tokens, but hash_ids has 1"),
            (line(1, 2, length=512), "512 tokens make 1 blocks of 512 tokens, but hash_ids has 2"),
            (line(1, 1), "names a block twice"),
            ('{"timestamp": NaN, "input_length": 0, "output_length": 0, "hash_ids": []}', "no request"),
            ("[" * 100_000, "no request"),
        ],
    )
    def test_a_bad_line_is_one_clear_error_with_its_number(self, bad: str, says: str, tmp_path: Path) -> None:
        path = written(tmp_path, line(7), bad)
        with pytest.raises(InputError) as error:
            list(read_trace(path))
        assert f"{path} line 2" in str(error.value)
        assert says in str(error.value)
        assert "\n" not in str(error.value)

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.jsonl"
        path.write_bytes(b'{"timestamp": 0, "x": "\xff\xfe"}\n')
        with pytest.raises(InputError, match="line 1"):
            list(read_trace(path))

    def test_a_line_without_end_is_not_read_to_its_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pdtx.bench.trace.MOST_LINE_BYTES", 100)
        with pytest.raises(InputError, match="line 2 has more than 100 bytes"):
            list(read_trace(written(tmp_path, line(1), "x" * 1000)))

    def test_nothing_to_read(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="has no requests"):
            list(read_trace(written(tmp_path)))
        with pytest.raises(InputError, match=r"cannot read the trace .*: No such file"):
            list(read_trace(tmp_path / "absent"))
        with pytest.raises(InputError, match="cannot read the trace"):
            list(read_trace(tmp_path))

    def test_blocks_of_another_size(self, tmp_path: Path) -> None:
        path = written(tmp_path, line(1, 2, 3, length=40))
        assert next(read_trace(path, 16)).input_length == 40
        with pytest.raises(InputError, match="--trace-block-tokens"):
            list(read_trace(path))


class TestSizes:
    def test_a_number_without_a_unit_has_that_of_the_last(self) -> None:
        sizes = parse_sizes("4, 1,16 GiB", GIB // 2)
        assert [(size.blocks, size.nbytes) for size in sizes] == [(2, GIB), (8, 4 * GIB), (32, 16 * GIB)]
        assert [str(size) for size in sizes] == ["1 GiB", "4 GiB", "16 GiB"]

    def test_each_may_have_its_own_and_blocks_are_one(self) -> None:
        assert [size.blocks for size in parse_sizes("512MiB,2GiB,1536MiB,512 MiB", 512 << 20)] == [1, 3, 4]
        assert [(size.blocks, size.nbytes) for size in parse_sizes("10,3 blocks", 1000)] == [(3, 3000), (10, 10_000)]

    def test_what_does_not_fill_a_block_is_not_counted(self) -> None:
        assert parse_sizes("10 B", 4)[0].blocks == 2

    @pytest.mark.parametrize("text", ["", "1,2", "GiB", "1 GiB,", "-1 GiB", "1 parsec", "1 GiB;2 GiB", "1 MiB"])
    def test_what_is_no_size(self, text: str) -> None:
        with pytest.raises(InputError):
            parse_sizes(text, 2 << 20)


class TestSimulation:
    """Found by hand: prompts of one block, in a tier of two."""

    @pytest.mark.parametrize(
        ("prompts", "found"),
        [
            ("ABACABCA", {"lru": 2, "fifo": 1, "arc": 3, "s3fifo": 1}),
            ("ABAACDA", {"lru": 2, "fifo": 2, "arc": 3, "s3fifo": 3}),
        ],
    )
    def test_each_policy_is_itself(self, prompts: str, found: dict[str, int]) -> None:
        assert set(found) == set(POLICIES)
        named = [(ord(name),) for name in prompts]
        assert {policy: hits(policy, 2, *named).hit_blocks for policy in POLICIES} == found

    @pytest.mark.parametrize("policy", POLICIES)
    def test_what_is_evicted_is_counted(self, policy: str) -> None:
        assert hits(policy, 2, (1,), (2,), (3,), (4,)).evicted == 2

    def test_a_block_is_found_only_after_all_before_it(self) -> None:
        # At the end 2 is there and 1 is not.
        row = hits("fifo", 3, (1,), (1, 2), (9,), (8,), (1, 2))
        assert (row.hit_blocks, row.hit_tokens, row.blocks) == (1, 512, 7)

    def test_the_end_of_a_prompt_goes_first(self) -> None:
        assert hits("lru", 3, (1, 2, 3), (4,), (1, 2, 3)).hit_blocks == 2

    def test_a_prompt_does_not_drive_its_own_blocks_out(self) -> None:
        assert [hits(policy, 2, (1, 2, 3), (1, 2, 3)).hit_blocks for policy in POLICIES] == [2] * len(POLICIES)

    def test_tokens_are_those_of_the_prompt_and_not_of_whole_blocks(self) -> None:
        twice = [TraceRequest(0.0, 700, 1, (1, 2))] * 2
        row, without_end = simulate(twice, ["lru"], [TierSize(5, 5)], 512)
        assert (row.tokens, row.hit_tokens, row.hit_blocks) == (1400, 700, 2)
        assert (row.block_rate, row.token_rate) == (0.5, 0.5)
        assert (without_end.hit_tokens, without_end.policy, without_end.size) == (700, NO_POLICY, UNBOUNDED)

    def test_more_room_finds_more_with_lru(self) -> None:
        sizes = [TierSize(blocks, blocks) for blocks in range(1, 140, 4)]
        *rows, _ = simulate(read_trace(SAMPLE), ["lru"], sizes, 512)
        for smaller, larger in pairwise(rows):
            assert smaller.hit_blocks <= larger.hit_blocks, larger.size.blocks
        assert rows[0].hit_blocks < rows[-1].hit_blocks

    def test_without_end_is_the_upper_limit_and_what_a_large_tier_comes_to(self) -> None:
        sizes = [TierSize(blocks, blocks) for blocks in (4, 32, 1000)]
        *rows, without_end = simulate(read_trace(SAMPLE), POLICIES, sizes, 512)
        seen, meant = set[int](), 0
        for request in read_trace(SAMPLE):
            meant += len(seen.intersection(request.hash_ids))
            seen.update(request.hash_ids)
        assert without_end.hit_blocks == meant
        assert all(row.hit_blocks <= meant for row in rows)
        assert [row.hit_blocks for row in rows if row.size.blocks == 1000] == [meant] * len(POLICIES)
        assert {row.requests for row in rows} == {40}
