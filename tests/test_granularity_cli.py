"""`pdtx granularity`: the tables as text, the JSON, and errors in one line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pdtx.cli import app
from pdtx.cli.common import run_app

Streams = tuple[pytest.CaptureFixture[str], pytest.MonkeyPatch]


@pytest.fixture
def streams(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Streams:
    return capsys, monkeypatch


def run(streams: Streams, *arguments: str) -> tuple[int, str, str]:
    """Run `pdtx granularity`; return exit code, stdout and stderr."""
    capsys, monkeypatch = streams
    monkeypatch.setattr(sys, "argv", ["pdtx", "granularity", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_app(app, "pdtx")
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def record(streams: Streams, *arguments: str) -> dict[str, Any]:
    code, out, err = run(streams, *arguments, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_tables_of_llama(streams: Streams) -> None:
    code, out, err = run(streams, "llama-3-8b", "--tokens", "131072")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "llama-3-8b: one of 1 ranks, a request of 131,072 tokens, run length r = 1"
    assert lines[1] == "17,179,869,184 B = 16 GiB in all"
    assert "Nixl NIXL READ block x layer x K|V bs*H*D*s 32,768 524,288 no" in lines
    assert "Mooncake FA RDMA write r blocks x layer x K|V r*bs*H*D*s 32,768 524,288 runs" in lines
    assert "LMCacheV1 gather kernel chunk x L layers 256*2*L*H*D*s 33,554,432 512 gather" in lines
    assert "FI cross-layer HND 1 block x L layers x K|V L*bs*H*D*s 1,048,576 2,097,152 2 16,384" in lines
    assert "Offloading 0.22 16 GiB 2,097,152 8,192 131,072 hash, group LRU, ARC" in lines
    assert "the request, 17,179,869,184 B = 16 GiB, one way at 25 GB/s: 687 ms" in lines
    assert max(len(line) for line in out.splitlines()) <= 120


@pytest.mark.parametrize("model", ["gemma-3-27b", "deepseek-v3.2", "jamba", "whisper-large-v3"])
def test_other_models_fit_the_terminal_too(model: str, streams: Streams) -> None:
    code, out, _ = run(streams, model, "--peer-tp", "2", "--run-length", "7")
    assert code == 0
    assert max(len(line) for line in out.splitlines()) <= 120
    assert "kind 2" in out


def test_json_has_whole_numbers(streams: Streams) -> None:
    found = record(streams, "llama-3-8b", "--tokens", "131072", "--run-length", "4")
    assert (found["version"], found["model"], found["tokens"], found["run_length"]) == (1, "llama-3-8b", 131_072, 4)
    assert found["request_bytes"] == 16 * 2**30
    assert found["kinds"] == [
        {
            "spec_class": "FullAttentionSpec",
            "layers": 32,
            "groups": [{"layers": 32, "count": 1}],
            "page_bytes": 65_536,
            "block_size_tokens": 16,
            "positions": [0, 131_072],
            "blocks": 8_192,
            "request_bytes": 16 * 2**30,
        }
    ]
    joined = next(row for row in found["transfer"] if row["connector"] == "MooncakeConnector")
    assert (joined["unit_bytes"], joined["units"], joined["coalesces"]) == (4 * 32_768, 524_288 // 4, "runs")
    assert found["offload"]["bus_seconds"] == pytest.approx(0.687, abs=5e-4)
    assert {row["version"] for row in found["transfer"]} == {"0.22", "0.32"}


@pytest.mark.parametrize(
    ("table", "keys"),
    [
        ("transfer", {"transfer"}),
        ("descriptors", {"descriptors"}),
        ("offload", {"offload"}),
        ("all", {"transfer", "descriptors", "offload"}),
    ],
)
def test_one_table_of_one_version(table: str, keys: set[str], streams: Streams) -> None:
    found = record(streams, "llama-3-8b", "--table", table, "--vllm", "0.32")
    assert found.keys() & {"transfer", "descriptors", "offload"} == keys
    assert found["vllm"] == ["0.32"]
    for key in keys - {"offload"}:
        assert {row["version"] for row in found[key]} == {"0.32"}


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [(["llama-3-8b"], 8_192), (["deepseek-v3"], 131_072), (["llama-3-8b", "--tokens", "1000"], 1_000)],
)
def test_tokens_are_128k_or_the_models_most(arguments: list[str], tokens: int, streams: Streams) -> None:
    assert record(streams, *arguments, "--table", "descriptors")["tokens"] == tokens


def test_whisper_moves_what_its_encoder_made(streams: Streams) -> None:
    found = record(streams, "whisper-large-v3", "--table", "descriptors")
    assert [kind["positions"] for kind in found["kinds"]] == [[0, 448], [0, 1_500]]
    found = record(streams, "whisper-large-v3", "--encoder-tokens", "100")
    assert found["kinds"][1]["blocks"] == 7


def test_ranks_of_both_sides(streams: Streams) -> None:
    """To ranks that have half the heads: half the bytes; to ranks that have twice as many: twice the pieces."""
    for ranks, peer, nbytes, count in ((1, 2, 16_384, 524_288), (2, 1, 16_384, 1_048_576), (16, 8, 4_096, 524_288)):
        arguments = ["--tokens", "131072", "--tp", str(ranks), "--peer-tp", str(peer), "--table", "descriptors"]
        rows = record(streams, "llama-3-8b", *arguments)["descriptors"]
        row = next(row for row in rows if row["layout"] == "FlashAttention HND")
        assert (row["nbytes"], row["count"]) == (nbytes, count)


def test_blocks_of_the_host_hold_raised_blocks(streams: Streams) -> None:
    """Jamba's blocks are raised from 16 to 80 tokens, and that is what the host's are a multiple of."""
    code, out, err = run(streams, "jamba", "--offload-block-size", "240", "--table", "offload", "--json")
    assert code == 0
    assert "raised from 16 to 80" in err
    assert json.loads(out)["offload"]["block_size_factor"] == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpt-17"], "no config.json at gpt-17"),
        (["llama-3-8b", "--tp", "3"], "cannot be divided over tensor_parallel_size 3"),
        (["llama-3-8b", "--offload-block-size", "24"], "not whole blocks of 16 tokens"),
        (["llama-3-8b", "--host-memory", "much"], "not a size"),
    ],
)
def test_errors_are_one_line(arguments: list[str], words: str, streams: Streams) -> None:
    code, out, err = run(streams, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert words in err


def test_an_encoder_has_nothing_to_move(tmp_path: Path, streams: Streams) -> None:
    folder = tmp_path
    config = {"model_type": "bert", "num_hidden_layers": 12, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    code, _, err = run(streams, str(folder))
    assert code == 2
    assert "nothing is to be moved" in err
