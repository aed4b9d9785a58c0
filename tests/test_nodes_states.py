"""Hybrid models from nodes of one number of tensor-parallel ranks to nodes of another: tokens as of one process."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pdtx.engine import matching
from pdtx.node import CacheConfig, DecodeConfig, DecodeNode, ModelConfig, PrefillConfig, PrefillNode, Prompt
from pdtx.report import RequestRow
from pdtx.runner import ModelRunner, PagedSequence, greedy, prefill
from tests.test_engine_states import Moves, flat, swapped
from tests.tiny_models import ARCHITECTURES, prompt, tiny_checkpoint

pytestmark = pytest.mark.timeout(120)

STEPS, CHUNK = 8, 23
LENGTHS = (77, 33, 2)
RANKS = [(1, 2), (2, 1), (2, 4)]

KINDS = {
    "jamba": {},
    "bamba": {},  # of one group: B and C are copied to all ranks
    # Heads that four ranks can divide: nothing is copied but the attention's keys and values.
    "qwen3_next": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "falcon_h1": {"mamba_n_groups": 2},  # on 4 ranks each group is on two
    "kimi_linear": {},
    "lfm2": {},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRunner]:
    directory, found = tmp_path_factory.mktemp("hybrids"), dict[str, ModelRunner]()
    for kind, changes in KINDS.items():
        found[kind] = ModelRunner.load(tiny_checkpoint(directory, kind, **ARCHITECTURES[kind] | changes), threads=1)
    return found


def prompts() -> list[list[int]]:
    return [prompt(seed, length) for seed, length in enumerate(LENGTHS)]


def alone(runner: ModelRunner) -> list[list[int]]:
    """The answers of one process on one rank, as pdtx generate computes them."""
    answers = list[list[int]]()
    for token_ids in prompts():
        cache = runner.make_cache(num_blocks=12)
        sequence = PagedSequence(cache, [torch.arange(1, group.num_blocks) for group in cache.groups])
        found = [prefill(runner, sequence, token_ids, CHUNK)]
        while len(found) < STEPS:
            found.append(greedy(runner.forward(sequence, found[-1:])))
        answers.append(found)
    return answers


@contextmanager
def served(node: DecodeNode) -> Iterator[None]:
    thread = threading.Thread(target=node.run)
    with node:
        thread.start()
        try:
            yield
        finally:
            node.stop()
            thread.join(60.0)
    assert not thread.is_alive()


def disaggregated(path: Path, ranks: tuple[int, int], *, verify: bool = True) -> list[RequestRow]:
    """Run the prompts through a prefill and a decode node of so many ranks, over tcp."""
    model = ModelConfig(str(path), "float32", threads=1)
    there = CacheConfig("flashinfer_hnd,mla_blhnc,mamba_ds", 16, 40, ranks[1])
    here = CacheConfig("flash_attn_nhd,mla,mamba_sd", 8, 40, ranks[0])
    decode = DecodeNode(DecodeConfig(listen="127.0.0.1:0", verify=verify, model=model, cache=there))
    with served(decode):
        config = PrefillConfig(
            decode.address, max_tokens=STEPS, ignore_eos=True, chunk_size=CHUNK, model=model, cache=here
        )
        with PrefillNode(config) as node:
            return node.run([Prompt(token_ids=one) for one in prompts()])


def tokens(rows: Sequence[RequestRow]) -> list[list[int]]:
    return [list(row.token_ids) for row in rows]


@pytest.mark.parametrize("ranks", RANKS, ids="{0[0]}->{0[1]}".format)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_one_process(models: dict[str, ModelRunner], kind: str, ranks: tuple[int, int]) -> None:
    rows = disaggregated(models[kind].path, ranks)
    assert [(row.error, row.wrong) for row in rows] == [(None, 0)] * len(LENGTHS)
    assert tokens(rows) == alone(models[kind])


@pytest.mark.parametrize("moves", [flat, swapped])
def test_parts_on_the_wrong_rank_change_tokens_and_are_named(
    models: dict[str, ModelRunner], moves: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without verification nothing fails, and the answers are others."""
    monkeypatch.setattr(matching, "transfers", moves)
    monkeypatch.setattr(matching, "audit_moves", lambda *_: None)
    runner = models["qwen3_next"]
    rows = disaggregated(runner.path, (1, 2), verify=False)
    assert [row.error for row in rows] == [None] * len(LENGTHS)
    assert all(one != other for one, other in zip(tokens(rows), alone(runner), strict=True))
    for row in disaggregated(runner.path, (1, 2)):
        assert "first: buffer state rank 0 layer 0 state " in str(row.error)
