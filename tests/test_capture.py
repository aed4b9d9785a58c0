"""Captures: what a node did is written down without its prompts, read back, and repeated by a replay."""

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from pdtx.errors import InputError
from pdtx.replay.pace import CapturedPace, RatePace
from pdtx.replay.recorder import Recorder
from pdtx.replay.source import Scale, Source
from pdtx.replay.synthetic import SyntheticModel
from pdtx.results.capture import read_block_tables, read_capture
from pdtx.runner import ModelRunner
from pdtx.serving import Ended, Job, ModelComputer, PrefillScheduler
from tests.node_process import run
from tests.replay_pair import replay_pair
from tests.test_nodes_tiers import nodes
from tests.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.timeout(120)

BLOCK = 32
"""Tokens in a block of the tier, see tests.test_nodes_tiers."""
SHARED = list(range(64))
PROMPTS = [[*SHARED, *range(100, 140)], [*SHARED, *range(150, 180)], [7] * 33, [*SHARED, *range(100, 150)]]
HITS = [0, 64, 0, 96]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def record(model: Path, file: Path, *, with_tokens: bool = False) -> list[Ended]:
    """Run the prompts, each after the one before has been stored, and record them."""
    runner, told = ModelRunner.load(model, "float32"), list[Ended]()
    with nodes(runner, prefill=True) as pair:
        recorder = Recorder(file, pair.producer, block_size=16, chunk_size=24, max_num_seqs=4, with_tokens=with_tokens)

        def end(ended: Ended) -> None:
            told.append(ended)
            recorder.record(ended)

        scheduler = PrefillScheduler(
            ModelComputer(runner),
            pair.producer,
            max_tokens=4,
            chunk_size=24,
            max_num_seqs=4,
            timeout_s=60.0,
            ignore_eos=True,
            prefix=pair.prefill,
            on_end=end,
        )
        for at, tokens in enumerate(PROMPTS):
            scheduler.run([Job(f"p{at}", tokens)])
        scheduler.run([Job("long", [1] * 300)])
        recorder.close()
    return told


@pytest.fixture(scope="module")
def captured(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Ended]]:
    file = tmp_path_factory.mktemp("capture") / "run.jsonl"
    return file, record(model, file)


def test_a_capture_repeats_as_the_same_requests_lengths_and_hits(
    model: Path, captured: tuple[Path, list[Ended]]
) -> None:
    file, _ = captured
    source = Source.open(file)
    requests = list(source.requests(4))
    jobs = list(Scale(source.block_tokens).jobs(iter(requests)))
    pace = CapturedPace({f"r{at}": one.chunks for at, one in enumerate(requests)}, RatePace(1e6))
    with replay_pair(model=SyntheticModel(str(model)), tier_tokens=BLOCK) as pair:
        rows = pair.run(jobs, pace=pace, chunk_size=24)
        chunks = [[(chunk.start, chunk.stop) for chunk in ended.chunks] for ended in pair.ended]
    assert [row.prompt_tokens for row in rows] == [len(tokens) for tokens in PROMPTS]
    assert [row.max_tokens for row in rows] == [4] * 4
    assert [row.cached_tokens for row in rows] == HITS
    assert [(row.error, row.wrong) for row in rows] == [(None, 0)] * 4
    assert chunks == [[(chunk.start, chunk.stop) for chunk in one.chunks] for one in requests]
    # As long as it took then, layer by layer.
    for one, row in zip(requests, rows, strict=True):
        assert row.compute_s >= sum(chunk.ready[-1][2] for chunk in one.chunks) * 0.999


def test_what_is_recorded_is_what_the_node_did(captured: tuple[Path, list[Ended]]) -> None:
    file, told = captured
    header, requests = read_capture(file)
    assert (header.block_tokens, header.chunk_size, header.model) == (16, 24, "tiny-llama-0")
    assert [one.request_id for one in requests] == ["p0", "p1", "p2", "p3", "long"]
    assert [one.cached_tokens for one in requests] == [*HITS, 0]
    assert [one.outcome for one in requests] == ["verified"] * 4 + ["failed"]
    for one, ended in zip(requests, told, strict=True):
        if ended.request is None:
            assert "exceed the model's" in (one.error or "")
            assert one.block_tables == ([], [])
            continue
        assert one.block_tables[0] == ended.request.sources[0].tolist()
        assert one.block_tables[1] == ended.request.destinations[0].tolist()
        assert one.computed_s is not None
        assert 0 < one.chunks[-1].begun + one.chunks[-1].ready[-1][2] <= one.computed_s
        assert len(one.chunks[0].ready) == 3
    # Names are shared as far as prompts are, and not beyond.
    names = [one.hash_ids for one in requests[:4]]
    assert [len(one) for one in names] == [7, 6, 3, 8]
    assert names[0][:4] == names[1][:4] == names[3][:4]
    assert names[0][:6] == names[3][:6]
    assert len({*names[0], *names[1], *names[2], *names[3]}) == 7 + 2 + 3 + 2
    assert read_block_tables(file) == [one.block_tables for one in requests[:4]]


def test_no_token_is_in_a_capture_unless_asked_for(
    model: Path, captured: tuple[Path, list[Ended]], tmp_path: Path
) -> None:
    file, _ = captured
    assert "token_ids" in file.read_text()
    assert all(json.loads(line)["token_ids"] is None for line in file.read_text().splitlines()[1:])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    record(model, tmp_path / "with", with_tokens=True)
    _, requests = read_capture(tmp_path / "with")
    assert [one.token_ids for one in requests[:4]] == PROMPTS


def test_a_line_that_was_cut_off_is_left_out_and_a_bad_one_is_named(
    captured: tuple[Path, list[Ended]], tmp_path: Path
) -> None:
    whole = captured[0].read_bytes()
    cut = tmp_path / "cut"
    cut.write_bytes(whole[:-20])
    assert len(read_capture(cut)[1]) == 4
    lines = whole.splitlines(keepends=True)
    cut.write_bytes(b"".join([lines[0], lines[1][:-20] + b"\n", *lines[2:]]))
    with pytest.raises(InputError, match=r"cut line 2 is no request of a capture"):
        read_capture(cut)
    document: dict[str, Any] = json.loads(lines[1])
    cut.write_text(lines[0].decode() + json.dumps(document | {"hash_ids": [1]}))
    with pytest.raises(InputError, match=r"1 hash_ids; 104 tokens in blocks of 16 have 7"):
        read_capture(cut)
    header = json.loads(lines[0])
    for change, said in (({"version": 2}, "of version 2; this pdtx reads version 1"), ({"block_tokens": 0}, "line 1")):
        cut.write_text(json.dumps(header | change))
        with pytest.raises(InputError, match=said):
            read_capture(cut)
    cut.write_text('{"timestamp": 0}')
    with pytest.raises(InputError, match="is no capture"):
        read_block_tables(cut)


def test_a_file_that_is_there_is_not_overwritten_but_another_node_of_the_run_takes_the_next_name(
    model: Path, tmp_path: Path
) -> None:
    runner = ModelRunner.load(model, "float32")
    with nodes(runner) as pair:
        settings: dict[str, Any] = {"block_size": 16, "chunk_size": 24, "max_num_seqs": 4, "with_tokens": False}
        Recorder(tmp_path / "run", pair.producer, **settings).close()
        with pytest.raises(InputError, match="there is a file"):
            Recorder(tmp_path / "run", pair.producer, **settings)
        second = Recorder(tmp_path / "run", pair.producer, numbered=True, **settings)
        second.close()
        assert second.path == tmp_path / "run.2"
        with pytest.raises(InputError, match="cannot write the capture"):
            Recorder(tmp_path / "no" / "run", pair.producer, **settings)


def test_the_command_is_run_with_the_file_in_its_environment(tmp_path: Path) -> None:
    file = tmp_path / "run"
    show = "import os, sys; print(os.environ['PDTX_CAPTURE'], os.environ.get('PDTX_PREFILL_CAPTURE_TOKENS'), sys.argv)"
    done = run("pdtx", "capture", file, "--capture-tokens", "--", sys.executable, "-c", show, "--json", "-o")
    assert done.code == 0
    assert done.stdout == f"{file} 1 ['-c', '--json', '-o']\n"
    assert run("pdtx", "capture", file, "--", sys.executable, "-c", "raise SystemExit(7)").code == 7
    assert "cannot run no-such-program" in run("pdtx", "capture", file, "--", "no-such-program").error
    file.write_text("kept")
    refused = run("pdtx", "capture", file, "--", os.devnull)
    assert refused.code == 2
    assert "is there already" in refused.error
    assert file.read_text() == "kept"
