"""Nodes with tiers that compute prompts with common beginnings in other chunks each time: no sound request fails."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.node_process import run
from tests.test_nodes import NODE, decode_node
from tests.tiny_models import prompt, tiny_checkpoint

_TIERS = ("--kv-offloading-size", "0.01", "--kv-offloading-block-size", "32")
# Few blocks: what waits for them at the decode node is looked up there when more is kept than at the prefill node then.
_BLOCKS = ("--num-blocks", "12")
_PREFILL = ("--max-num-seqs", "4", "--chunk-size", "20", "--max-tokens", "6", "--ignore-eos", "--json")
pytestmark = pytest.mark.timeout(240)


def prompts_with_common_beginnings(count: int, turn: int) -> list[list[int]]:
    """Prompts that begin alike for 40 to 201 tokens and then go on differently; other ones each turn."""
    return [
        [*prompt(100 * turn, 40 + 23 * (5 * at % 8)), *prompt(100 * turn + 10 + at, 5 + 11 * (at % 4))]
        for at in range(count)
    ]


def requests_of(folder: Path, count: int, turn: int) -> list[dict[str, Any]]:
    """Run two nodes with tiers of their own over prompts; return the rows of the requests."""
    model, file = tiny_checkpoint(folder, "llama"), folder / "prompts.jsonl"
    lines = [{"id": f"p{at}", "token_ids": ids} for at, ids in enumerate(prompts_with_common_beginnings(count, turn))]
    file.write_text("\n".join(map(json.dumps, lines)))
    with decode_node(folder, "--model", model, *NODE, "--verify", *_TIERS, *_BLOCKS) as node:
        address = node.wait_for_address()
        done = run("prefill_node", "--model", model, *NODE, "--connect", address, "--prompts", file, *_PREFILL, *_TIERS)
        assert node.stop() == 0, node.said
    return list(done.requests.values())


def check(rows: list[dict[str, Any]], count: int) -> None:
    """Require that all went well, and that the decode node has loaded what the prefill node had computed anew."""
    assert len(rows) == count
    assert [row["error"] for row in rows if row["error"]] == []
    assert sum(row["wrong"] for row in rows) == 0
    assert any(row["peer_cached_tokens"] > row["cached_tokens"] for row in rows)


def test_what_the_decode_node_kept_is_not_held_against_other_chunks(tmp_path: Path) -> None:
    check(requests_of(tmp_path, 30, 0), 30)


@pytest.mark.thorough
@pytest.mark.parametrize("turn", range(3))
def test_three_runs_of_prompts_with_common_beginnings(tmp_path: Path, turn: int) -> None:
    check(requests_of(tmp_path, 30, turn), 30)
