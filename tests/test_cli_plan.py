"""`pdtx plan`: predictions without a network."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdtx.cli import app
from pdtx.errors import PdtxError
from pdtx.plan import MeasuredCosts, save_costs


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def record(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return found


def test_the_record_adds_up() -> None:
    found = record("llama-3-8b", "--tokens", "1000", "--prefill-tp", "4", "--decode-tp", "2")
    assert found["version"] == 1
    (buffer,) = found["buffers"]
    moves = buffer["transfers"]
    assert [(m["prefill_rank"], m["decode_rank"]) for m in moves] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert sum(run["bytes"] * run["count"] for move in moves for run in move["runs"]) == found["wire_bytes"]
    assert found["wire_bytes"] == found["unique_bytes"] == 32 * 1000 * 2 * 8 * 128 * 2
    assert found["runs"] == sum(run["count"] for move in moves for run in move["runs"])


def test_whole_pages_and_every_merge_show_in_the_table() -> None:
    scattered = run("llama-3-8b", "--tokens", "1008")
    assert "4,032  32,768      132,120,576" in scattered
    merged = run("llama-3-8b", "--tokens", "1008", "--consecutive")
    assert "64    2,064,384   132,120,576" in merged
    unmerged = run("llama-3-8b", "--tokens", "1008", "--consecutive", "--no-merge")
    assert "4,032  32,768      132,120,576" in unmerged


def test_drafts_full_hits_and_unread_ranks_are_said() -> None:
    text = run("deepseek-v3", "--tokens", "64", "--cached-tokens", "64", "--prefill-tp", "2", "--draft-layers", "1")
    assert "not sent: draft.layers.0" in text
    assert "nobody reads, only told of the end: 1" in text
    assert "nothing moves; the decode node is told all the same" in text


def test_mode() -> None:
    assert record("llama-3-8b", "--mode", "direct", "--decode-layout", "flash_attn_hnd")["mode"] == "direct"
    found = record("llama-3-8b", "--decode-layout", "flash_attn_hnd")
    assert (found["mode"], found["destination_ranges"]) == ("staged", 32 * 2 * (62 + 8))
    assert found["mode_reason"].endswith("by default costs of tcp")


def test_mode_follows_the_measured_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDTX_COSTS", str(tmp_path / "costs.json"))
    same = {"device": "cpu", "wire_bytes_per_s": 3e9, "pack_run_s": 1e-8, "pack_bytes_per_s": 9e9}
    save_costs([MeasuredCosts(mover="tcp", run_s=0.0, **same), MeasuredCosts(mover="ucx", run_s=1e-4, **same)])  # type: ignore[arg-type]
    modes = [
        record("llama-3-8b", "--decode-layout", "flash_attn_hnd", "--mover", name)["mode"] for name in ("tcp", "ucx")
    ]
    assert modes == ["direct", "staged"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-3-8b", "--mode", "fast"], "mode 'fast' is not one of direct, staged, auto"),
        (["llama-3-8b", "--prefill-tp", "3"], "8 KV heads cannot be divided over tensor_parallel_size 3"),
        (["llama-3-8b", "--decode-block-size", "24"], r"block sizes 16 \(source\) and 24"),
        (["llama-3-8b", "--decode-layout", "nope"], "unknown layout 'nope'"),
        (["llama-3-8b", "--kv-cache-dtype", "nvfp4", "--decode-layout", "vllm_lhbnc"], "cannot be transferred"),
        (["llama-3-8b", "--cached-tokens", "1001"], "1001 cached tokens are not a part of a request of 1000"),
    ],
)
def test_refusals(arguments: list[str], message: str) -> None:
    with pytest.raises(PdtxError, match=message):
        run(*arguments)
