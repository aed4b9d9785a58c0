"""Both nodes with their caches on a GPU, by every mover, every element verified. docs/gpu.md lists the paths."""

import json
from pathlib import Path

import pytest

from tests.contract_subjects import usable_mover
from tests.node_process import run
from tests.test_nodes import decode_node
from tests.tiny_models import tiny_checkpoint

_MODEL = ("--dtype", "float32", "--threads", "1")
_LENGTHS = (1, 33, 100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def moved(model: Path, folder: Path, mover: str, devices: tuple[str, str], mode: str) -> None:
    """Run both nodes; devices: of the prefill and the decode node."""
    prompts = folder / "prompts.jsonl"
    lines = [{"id": f"n{n}", "token_ids": [(7 * i + n) % 256 for i in range(n)]} for n in _LENGTHS]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    words = ("--model", model, *_MODEL, "--mover", mover, "--num-blocks", "40")
    with decode_node(folder, *words, "--device", devices[1], "--verify") as decode:
        more = ("--connect", decode.wait_for_address(), "--device", devices[0], "--mode", mode, "--prompts", prompts)
        done = run("prefill_node", *words, *more, "--max-tokens", "4", "--ignore-eos", "--json")
    assert done.code == 0, done.stderr
    assert {name: row["wrong"] for name, row in done.requests.items()} == {f"n{n}": 0 for n in _LENGTHS}


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")], ids="-".join)
@pytest.mark.parametrize("mover", ["tcp", "shm", "ucx", "nixl"])
def test_nodes_on_a_gpu(mover: str, devices: tuple[str, str], mode: str, model: Path, tmp_path: Path) -> None:
    moved(model, tmp_path, usable_mover(mover), devices, mode)


def test_the_same_without_a_gpu(model: Path, tmp_path: Path) -> None:
    moved(model, tmp_path, "tcp", ("cpu", "cpu"), "staged")
