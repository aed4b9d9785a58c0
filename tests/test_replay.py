"""Replay: traces become prompts, contents follow from prompts, and figures from what has happened."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdtx.errors import InputError
from pdtx.replay import contents
from pdtx.replay.contents import PrefixContents, prefix_codes
from pdtx.replay.pace import CapturedPace, RatePace
from pdtx.replay.rows import ReplayRow, figures, merged
from pdtx.replay.source import Scale, Source, token_ids_of
from pdtx.replay.synthetic import SyntheticModel
from pdtx.results.capture import CapturedChunk
from pdtx.serving import Job
from pdtx.tiers.prefix import PrefixCache
from tests.node_process import run
from tests.replay_pair import replay_pair, write_trace

pytestmark = pytest.mark.timeout(120)


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_equal_names_are_equal_tokens_and_other_names_are_others() -> None:
    one, other = token_ids_of([7, 8, 9], 40, 16), token_ids_of([7, 8, 10], 48, 16)
    assert len(one) == 40
    assert one[:32] == other[:32]
    assert not set(one[32:]) & set(other[32:])
    assert len(set(other)) == 48
    assert all(0 <= token < 1 << 31 for token in other)


def test_lengths_are_scaled_by_whole_blocks_so_that_names_keep_their_places(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", (500, 1030, 100, [1, 2, 3]), (1500, 512, 0, [1]), (2500, 0, 5, []))
    source = Source.open(trace)
    scale = Scale(source.block_tokens, by=64, speedup=4.0)
    jobs = list(scale.jobs(source.requests(None)))
    assert [(len(job.token_ids), job.max_tokens, job.arrival_s) for job in jobs] == [(17, 2, 0.0), (8, 1, 0.25)]
    assert jobs[0].token_ids[:8] == jobs[1].token_ids


@pytest.mark.parametrize(("by", "speedup"), [(3, 1.0), (0, 1.0), (1024, 1.0), (1, 0.0), (1, float("nan"))])
def test_what_cannot_be_scaled_is_refused(by: int, speedup: float) -> None:
    with pytest.raises(InputError, match=r"--scale-tokens|--speedup"):
        Scale(512, by, speedup)


# -- contents ---------------------------------------------------------------------------------------------------------


def test_requests_are_replayed_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    rows: list[tuple[float, int, int, list[int]]] = [
        (500, 512, 1, [1]),
        (0, 512, 2, [2]),
        (250, 512, 3, [3]),
        (250, 512, 4, [4]),
        (600, 0, 5, []),
    ]
    source = Source.open(write_trace(tmp_path / "trace", *rows))
    jobs = list(Scale(512).jobs(source.requests(None)))
    assert [(job.arrival_s, job.max_tokens) for job in jobs] == [(0.0, 2), (0.25, 3), (0.25, 4), (0.5, 1)]
    assert [job.request_id for job in jobs] == ["r0", "r1", "r2", "r3"]
    assert source.out_of_order(None) == 3
    assert [one.timestamp for one in source.requests(2)] == [0, 500]  # the first two of the file
    assert Source.open(write_trace(tmp_path / "other", *sorted(rows))).out_of_order(None) == 0


def test_the_example_of_the_documentation_is_a_trace_in_order() -> None:
    source = Source.open(Path(__file__).parent.parent / "docs/examples/trace.jsonl")
    assert len(list(source.requests(None))) == 20
    assert source.out_of_order(None) == 0


def test_a_code_depends_on_its_token_and_all_before_it_and_on_none_after() -> None:
    tokens = list(range(100, 164))
    codes = prefix_codes(tokens)
    for at in (0, 17, 63):
        changed = [*tokens]
        changed[at] += 1
        same = prefix_codes(changed) == codes
        assert same[:at].all()
        assert not same[at:].any()
    swapped = prefix_codes([tokens[1], tokens[0], *tokens[2:]])
    assert not (swapped == codes).any()
    assert (prefix_codes(tokens[:20]) == codes[:20]).all()


@pytest.mark.parametrize("model", ["llama-3-8b", "gpt-oss-20b", "deepseek-v3"])
def test_contents_are_the_same_in_any_layout_and_a_block_of_another_prompt_is_found(model: str) -> None:
    shapes = SyntheticModel(model, layers=2)
    tokens = list(range(1, 41))
    codes, others = prefix_codes(tokens), prefix_codes([9, *tokens[1:]])
    layout = "flashinfer_hnd,mla_blhnc" if "deepseek" in model else "flashinfer_hnd"
    cache = shapes.make_cache(layout=layout, block_size=16, num_blocks=6)
    filled = PrefixContents(cache)
    tables = [np.array([4, 2, 5], np.int64) for _ in cache.groups]
    for index, buffer in enumerate(cache.buffers):
        for layer in range(buffer.num_layers):
            buffer.write_canonical(layer, torch.as_tensor(tables[0]), 0, filled.rows(index, layer, codes))
    assert filled.check(tables, codes).wrong == 0
    assert filled.check(tables, codes).compared > 0
    # One block of a prompt that differs in its first token only.
    buffer = cache.buffers[0]
    buffer.write_canonical(0, torch.as_tensor(tables[0]), 16, filled.rows(0, 0, others[16:32]))
    found = filled.check(tables, codes)
    assert found.wrong
    assert found.first is not None
    assert found.first.coordinate.token == 16


# -- the whole of it --------------------------------------------------------------------------------------------------

SHARED = [
    Job("r0", token_ids_of([1, 2, 3, 4], 64, 16), max_tokens=3),
    Job("r1", token_ids_of([1, 2, 3, 5], 60, 16), max_tokens=3),
    Job("r2", token_ids_of([1, 6], 32, 16), max_tokens=3),
    Job("r3", token_ids_of([7, 2], 32, 16), max_tokens=3),
    Job("r4", token_ids_of([1, 2, 3, 4], 64, 16), max_tokens=3),
]
"""Of the last one all blocks are known, and the last token must be computed all the same."""


def test_hits_are_those_of_the_shared_prefixes_and_everything_is_verified() -> None:
    with replay_pair() as pair:
        rows = pair.run(SHARED)
    assert [(row.error, row.wrong) for row in rows] == [(None, 0)] * 5
    assert [row.cached_tokens for row in rows] == [0, 48, 16, 0, 48]
    assert [row.cached_from for row in rows] == ["", "cpu", "cpu", "", "cpu"]
    found = figures(rows)
    assert found["prompt_tokens"] == 252
    assert found["hit_rate"] == pytest.approx(112 / 252)
    assert found["nbytes"] == 252 * 2 * 4096  # two layers of 8 heads of 128 channels, K and V, 2 bytes
    assert found["verified"] == 5


def test_a_block_of_another_prompt_is_found_although_both_sides_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    true_keys = PrefixCache.keys
    monkeypatch.setattr(PrefixCache, "keys", lambda self, tokens: true_keys(self, [1] * len(tokens)))
    with replay_pair() as pair:
        rows = pair.run([SHARED[0], SHARED[3]])
    assert rows[0].error is None
    assert rows[1].cached_tokens == 16
    assert rows[1].wrong
    assert "a block of another prompt was used" in (rows[1].error or "")


def test_without_tiers_nothing_is_found_and_the_same_is_moved() -> None:
    with replay_pair(tier=False) as pair:
        rows = pair.run(SHARED)
    assert [(row.error, row.wrong, row.cached_tokens) for row in rows] == [(None, 0, 0)] * 5


def test_prefill_takes_its_time_and_layers_are_ready_one_after_the_other() -> None:
    with replay_pair(tier=False) as pair:
        (row,) = pair.run([SHARED[0]], pace=RatePace(640.0), chunk_size=32)
        (ended,) = pair.ended
    assert row.compute_s >= 0.1
    assert row.computed_s is not None
    assert row.ttft_s is not None
    assert row.ttft_s >= row.computed_s >= 0.1
    assert [(chunk.start, chunk.stop) for chunk in ended.chunks] == [(0, 32), (32, 64)]
    for chunk in ended.chunks:
        first, second = (seconds for _, _, seconds in chunk.ready)
        assert first >= 0.025
        assert second >= 0.05


def test_requests_come_no_sooner_than_they_arrive_and_queueing_counts() -> None:
    jobs = [Job(f"r{at}", [at] * 16, max_tokens=1, arrival_s=at * 0.15) for at in range(2)]
    jobs.append(Job("r2", [2] * 16, max_tokens=1, arrival_s=0.15))
    with replay_pair(tier=False) as pair:
        rows = pair.run(jobs, pace=RatePace(80.0))
    assert [round(row.arrival_s, 3) for row in rows] == [0.0, 0.15, 0.15]
    assert rows[1].moves[0][0] >= 0.15
    # The second one keeps the third from beginning for 0.2 s, and both wait for the first one's rest.
    assert rows[2].queue_s >= 0.2
    assert rows[2].ttft_s is not None
    assert rows[2].ttft_s >= 0.4


def test_answers_take_their_time_without_holding_up_others() -> None:
    jobs = [Job("r0", [1] * 16, max_tokens=201), Job("r1", [2] * 16, max_tokens=1)]
    with replay_pair(tier=False, tokens_per_s=100.0) as pair:
        begun = time.monotonic()
        rows = pair.run(jobs)
        seconds = time.monotonic() - begun
    assert [row.error for row in rows] == [None] * 2
    assert [ended.job.request_id for ended in pair.ended] == ["r1", "r0"]
    assert seconds >= 2.0


def test_the_end_of_the_run_fails_what_is_under_way_and_begins_no_more() -> None:
    jobs = [Job(f"r{at}", [at] * 160, max_tokens=1) for at in range(50)]
    with replay_pair(tier=False) as pair:
        rows = pair.run(jobs, pace=RatePace(1000.0), until=time.monotonic() + 1.5)
        assert 0 < len(rows) < 50
        assert rows[0].error is None
        assert rows[-1].error is not None
        assert "deadline" in rows[-1].error
        assert all(row.error is None for row in pair.run([Job("r99", [1] * 16, max_tokens=1)]))


# -- pace and figures -------------------------------------------------------------------------------------------------


def test_captured_chunks_take_what_they_took_and_others_as_long_for_each_token() -> None:
    chunks = [
        CapturedChunk(0, 40, 0.0, [(0, 0, 0.1), (0, 1, 0.3)]),
        CapturedChunk(40, 60, 0.3, [(0, 0, 0.05), (0, 1, 0.1)]),
    ]
    pace = CapturedPace({"r0": chunks}, RatePace(1000.0))
    job, other = Job("r0", [1] * 60), Job("r1", [1] * 60)
    assert pace.ready(job, 0, 40, 2) == [0.1, 0.3]
    assert pace.ready(job, 0, 40, 1) == [0.3]
    assert pace.ready(job, 0, 40, 4) == [0.1, 0.1, 0.1, 0.3]
    assert pace.ready(job, 16, 46, 2) == pytest.approx([0.1, 0.2])  # 0.4 s for 60 tokens
    assert pace.ready(other, 0, 40, 2) == pytest.approx([0.02, 0.04])


def test_figures_tell_whole_rates_and_shares() -> None:
    def row(number: int, **what: Any) -> ReplayRow:  # noqa: ANN401
        return ReplayRow(request_id=f"r{number}", arrival_s=0.0, prompt_tokens=100, max_tokens=1, **what)

    rows = [
        row(0, ttft_s=1.0, exposed_s=0.1, computed_s=0.9, move_s=0.2, nbytes=10**9, moves=[(0.0, 1.0)], wrong=0),
        row(1, ttft_s=3.0, exposed_s=0.3, computed_s=2.7, move_s=0.4, nbytes=10**9, moves=[(0.5, 2.0)], wrong=0),
        row(2, error="lost", wrong=3, nbytes=10**12),
    ]
    rows[0].cached_tokens = 50
    found = figures(rows)
    assert found["gb_per_s"] == pytest.approx(1.0)  # 2 GB in the 2 s in which one at least was under way
    assert found["transfer_share"] == pytest.approx(0.1)
    assert found["hit_rate"] == pytest.approx(0.25)
    assert found["ttft_s"]["p50"] == pytest.approx(2.0)
    assert (found["requests"], found["failed"], found["wrong"], found["verified"]) == (3, 1, 3, 2)
    assert figures([])["ttft_s"]["p99"] is None
    assert merged([(2.0, 3.0), (0.0, 1.0), (0.5, 2.0), (4.0, 5.0)]) == [(0.0, 3.0), (4.0, 5.0)]


# -- the command ------------------------------------------------------------------------------------------------------

SMALL = ("llama-3-8b", "--layers", "1", "--pool-size", "4MiB", "--scale-tokens", "16")


def test_the_command_replays_with_a_decode_node_of_its_own(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "trace",
        (1000, 1500, 16, [1, 2, 3]),
        (0, 1024, 16, [1, 2]),
        (2000, 600, 16, [1, 4]),
    )
    result = tmp_path / "result.json"
    flags = ("--kv-offloading-size", "0.01", "--speedup", "2", "--decode-rate", "100", "-o", result)
    done = run("pdtx", "replay", trace, *SMALL, *flags)
    assert done.code == 0, done.stderr
    found = json.loads(result.read_text())
    assert (found["format"], found["version"], found["complete"]) == ("pdtx-replay", 1, True)
    assert [row["cached_tokens"] for row in found["requests"]] == [0, 64, 32]
    assert [row["wrong"] for row in found["requests"]] == [0, 0, 0]
    assert [row["prompt_tokens"] for row in found["requests"]] == [64, 94, 38]
    assert found["machine"]["pdtx"]
    assert "is not in the order of arrival: 1 request moved" in done.stderr
    assert "hit rate             48.98% of tokens" in done.stdout
    assert re.search(r"^tier cpu +.* used of .*; blocks: \d+ stored, 6 loaded, 0 evicted, ", done.stdout, re.MULTILINE)
    assert " 0.000 GB/s" not in done.stdout
    assert "#wrong               0 (3 of 3 requests verified)" in done.stdout


def test_a_request_that_fits_no_pool_is_refused_before_anything_begins(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", (0, 100_000, 16, list(range(196))))
    done = run("pdtx", "replay", trace, *SMALL)
    assert done.code == 2
    assert "6,250 tokens and 1 new ones does not fit into the prefill node's pool" in done.error
    assert "listening" not in done.stderr


def test_what_there_is_is_written_when_it_is_interrupted(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", *((at * 200, 512, 1, [at]) for at in range(500)))
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "pdtx", "replay", str(trace), *SMALL, "-o", str(result), "--log-level", "info"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        seen = ""
        while "request r3 ended well" not in seen:  # the rows of those before it are there then
            line = process.stderr.readline()
            assert line, seen
            seen += line
        process.send_signal(signal.SIGINT)
        text, rest = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    found = json.loads(result.read_text())
    assert process.returncode == 130, rest
    assert not found["complete"]
    assert 3 <= len(found["requests"]) < 500
    assert "CUT OFF: interrupted" in text
    assert "Traceback" not in rest


def test_a_tooth_codes_that_forget_what_came_before_let_a_wrong_block_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of contents stands and falls with codes that depend on all before: shown by codes that do not."""
    monkeypatch.setattr(contents, "prefix_codes", lambda tokens: np.asarray(tokens).astype(np.uint64))
    codes, others = contents.prefix_codes([1, 2, 3]), contents.prefix_codes([9, 2, 3])
    assert (codes[1:] == others[1:]).all()
    assert not (prefix_codes([1, 2, 3])[1:] == prefix_codes([9, 2, 3])[1:]).any()
