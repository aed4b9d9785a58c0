"""Real architectures of every kind of caching, with tiny random weights, over paged caches."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdtx.cache import KVCaches, PagedKVCache
from pdtx.errors import InputError, ModelError, ParallelError
from pdtx.node.prompts import read_prompts
from pdtx.report import RequestRow, read_result
from pdtx.runner import ModelRunner, PagedSequence, greedy, prefill
from tests.node_process import NodeProcess, run
from tests.ports import free_port
from tests.tiny_models import ARCHITECTURES, VOCAB, WINDOW, tiny_checkpoint

STEPS = 12
NUM_BLOCKS = 40
PROMPT = 2 * WINDOW + 13
"""Tokens: past the window, and no multiple of any block or chunk size used here."""

GROUPS = {
    "llama": {"full": ["full"]},
    "mistral": {"window": ["window"]},
    "gemma3_text": {"full": ["full"], "window": ["window"]},
    "gpt_oss": {"full": ["full"], "window": ["window"]},
    "llama4_text": {"full": ["full"], "chunk": ["chunk"]},
    "deepseek_v3": {"full": ["latent"]},
    "deepseek_v32": {"full": ["latent", "indexer"]},
    "deepseek_v4": {
        "compressed4": ["compressed_2", "indexer"],
        "compressed8": ["compressed"],
        "window8": ["compressed_inputs", "compressed_inputs_2", "indexer_inputs"],
        "window32": ["window", "window_2"],
    },
    "jamba": {"full": ["full"], "state": ["state"]},
    "bamba": {"full": ["full"], "state": ["state"]},
    "qwen3_next": {"full": ["full"], "state": ["state"]},
    "falcon_h1": {"full": ["full"], "state": ["state"]},
    "lfm2": {"full": ["full"], "state": ["state"]},
    "kimi_linear": {"full": ["latent"], "state": ["state"]},
    "whisper": {"full": ["full"], "cross": ["cross"]},
}


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelRunner]:
    directory = tmp_path_factory.mktemp("architectures")
    loaded: dict[str, ModelRunner] = {}

    def get(kind: str) -> ModelRunner:
        if kind not in loaded:
            loaded[kind] = ModelRunner.load(tiny_checkpoint(directory, kind, **ARCHITECTURES[kind]), threads=1)
        return loaded[kind]

    return get


def prompt(length: int = PROMPT, seed: int = 5) -> list[int]:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def features(runner: ModelRunner) -> torch.Tensor | None:
    shape = runner.features_shape
    return None if shape is None else torch.randn(shape, generator=torch.Generator().manual_seed(2))


def scattered(cache: KVCaches, seed: int = 0) -> PagedSequence:
    """A sequence over all blocks of a cache but the null blocks, in a shuffled order."""
    chance = torch.Generator().manual_seed(seed)
    tables = [torch.randperm(group.num_blocks - 1, generator=chance) + 1 for group in cache.groups]
    return PagedSequence(cache, tables)


def reference(runner: ModelRunner, token_ids: Sequence[int]) -> list[int]:
    """Greedy tokens by transformers' own generate, over the cache that it makes for itself."""
    from transformers import GenerationMixin

    model = runner._model
    given = features(runner)
    inputs = {"input_features": given[None]} if given is not None else {}
    name = "input_ids" if given is None else "decoder_input_ids"
    inputs[name] = torch.tensor([list(token_ids)])
    # Whisper's own generate is about transcribing; this is the loop beneath it.
    output = GenerationMixin.generate(model, **inputs, max_new_tokens=STEPS, do_sample=False, eos_token_id=VOCAB)
    tokens: list[int] = output[0, len(token_ids) :].tolist()
    return tokens


def paged(runner: ModelRunner, sequence: PagedSequence, token_ids: Sequence[int], chunk_size: int) -> list[int]:
    found = [prefill(runner, sequence, token_ids, chunk_size, features=features(runner))]
    while len(found) < STEPS:
        found.append(greedy(runner.forward(sequence, found[-1:])))
    return found


@pytest.mark.parametrize("kind", ARCHITECTURES)
class TestLocal:
    def test_tokens_equal_transformers_own(self, load: Callable[[str], ModelRunner], kind: str) -> None:
        runner = load(kind)
        expected = reference(runner, prompt())
        assert len(set(expected)) > 2, "an answer of one token repeated would hide mistakes"
        for chunk_size, block_size in ((1000, 16), (23, 8)):
            cache = runner.make_cache(block_size=block_size, num_blocks=NUM_BLOCKS)
            assert paged(runner, scattered(cache, block_size), prompt(), chunk_size) == expected

    def test_groups_and_buffers(self, load: Callable[[str], ModelRunner], kind: str) -> None:
        cache = load(kind).make_cache(num_blocks=NUM_BLOCKS)
        found = {
            group.name: [buffer.name for buffer in cache.buffers if buffer.group == at]
            for at, group in enumerate(cache.groups)
        }
        assert found == GROUPS[kind]


# Layouts and block sizes of the prefill and the decode side; one of each kind that a model may need.
SIDES = (("flash_attn_nhd,mla,mamba_sd", 8), ("flashinfer_hnd,mla_blhnc,mamba_ds", 16))
CHUNK = 23
# Past the window; where a window and a chunk end; less than a convolution looks back on.
LENGTHS = (PROMPT, 2 * WINDOW, WINDOW + 1, 2, 1)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory, load: Callable[[str], ModelRunner]) -> Callable[[str], Path]:
    """Files of prompts: the same for all models but those with an encoder, which also get features."""
    directory = tmp_path_factory.mktemp("prompts")

    def write(kind: str) -> Path:
        given = features(load(kind))
        lines: list[dict[str, Any]] = [{"id": f"n{n}", "token_ids": prompt(n)} for n in LENGTHS]
        if given is not None:
            np.save(directory / f"{kind}.npy", given.numpy())
            lines = [line | {"features": f"{kind}.npy"} for line in lines]
        file = directory / f"{kind}.jsonl"
        file.write_text("\n".join(map(json.dumps, lines)))
        return file

    return write


def side(layout: str, block_size: int, *more: str) -> list[str]:
    common = ["--dtype", "float32", "--threads", "1", "--num-blocks", str(NUM_BLOCKS)]
    return [*common, "--layout", layout, "--block-size", str(block_size), *more]


def disaggregated(model: Path, file: Path, prefill_side: list[str], decode_side: list[str]) -> list[RequestRow]:
    """Run prompts through a prefill and a decode process, every byte verified. They start at the same time."""
    address = f"127.0.0.1:{free_port()}"
    serve = ["--listen", address, "--verify", "--json", "--model", str(model), *decode_side]
    work = ["--prompts", str(file), "--max-tokens", str(STEPS), "--ignore-eos", "--chunk-size", str(CHUNK)]
    flags = ["--connect", address, "--connect-timeout", "90", "--json", "--model", str(model), *work, *prefill_side]
    with NodeProcess(file.parent, "decode", "decode_node", *serve):
        done = run("prefill_node", *flags, timeout=150.0)
    assert done.code == 0, done.stderr
    return read_result(done.stdout).requests


def check(rows: list[RequestRow], runner: ModelRunner) -> None:
    """Every request ended well, all of it verified, and its tokens are those of one process doing both."""
    assert [(row.error, row.wrong) for row in rows] == [(None, 0)] * len(LENGTHS)
    cache = runner.make_cache(block_size=16, num_blocks=NUM_BLOCKS)
    for row, length in zip(rows, LENGTHS, strict=True):
        assert row.token_ids == paged(runner, scattered(cache, length), prompt(length), CHUNK), length
        assert row.nbytes > 0


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_disaggregated_equals_local(
    load: Callable[[str], ModelRunner], prompts: Callable[[str], Path], kind: str
) -> None:
    runner = load(kind)
    rows = disaggregated(runner.path, prompts(kind), side(*SIDES[0]), side(*SIDES[1]))
    check(rows, runner)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("llama", (1, 2)),
        ("llama", (2, 1)),
        ("llama", (2, 4)),
        ("deepseek_v32", (2, 4)),
        ("bamba", (2, 4)),
        ("kimi_linear", (2, 1)),
    ],
)
def test_tensor_parallel_sizes_may_differ(
    load: Callable[[str], ModelRunner], prompts: Callable[[str], Path], kind: str, ranks: tuple[int, int]
) -> None:
    """2 KV heads are divided over 2 ranks and copied over 4; latent vectors are copied over all.

    So are Bamba's B and C, of one group, between its x and after it. tests/test_state_ranks.py has the other models.
    """
    runner = load(kind)
    sides = [side(*one, "--tp", str(rank)) for one, rank in zip(SIDES, ranks, strict=True)]
    check(disaggregated(runner.path, prompts(kind), *sides), runner)


def test_unknown_states_and_odd_heads_are_not_divided(
    load: Callable[[str], ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load("bamba")
    monkeypatch.setattr(runner, "_plans", {})
    monkeypatch.setattr(runner, "_architecture", replace(runner._architecture, sharding=None))
    with pytest.raises(InputError, match=r"tensor parallel size 2: how ranks share the states .* use --tp 1"):
        runner.make_cache(tp_size=2)
    monkeypatch.undo()
    with pytest.raises(ParallelError, match="8 units of x cannot be divided over tensor_parallel_size 3"):
        runner.make_cache(tp_size=3)
    with pytest.raises(ParallelError, match="2 KV heads cannot be divided over tensor_parallel_size 3"):
        load("llama").make_cache(tp_size=3)


def test_a_group_of_states_has_a_block_for_each_sequence(load: Callable[[str], ModelRunner]) -> None:
    sizes = [
        {group.name: group.num_blocks for group in load("bamba").make_cache(num_blocks=blocks).groups}
        for blocks in (40, 500)
    ]
    assert sizes == [{"full": 40, "state": 40}, {"full": 500, "state": 65}]


def test_states_that_do_not_go_on_are_found_out(load: Callable[[str], ModelRunner]) -> None:
    """Jamba's scan begins with nothing in every pass; Bamba's and Qwen3-Next's take what is there."""
    assert [load(kind).chunk(77, 23) for kind in ("llama", "lfm2", "bamba", "qwen3_next", "jamba")] == [23] * 4 + [77]
    runner = load("jamba")
    sequence = scattered(runner.make_cache(num_blocks=NUM_BLOCKS))
    runner.forward(sequence, prompt(5))
    with pytest.raises(ModelError, match=r"forgets its states .* give a prompt in one piece"):
        runner.forward(sequence, prompt(2))
    runner.forward(sequence, prompt(1))


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "llama4_text"])
def test_what_is_forgotten_is_not_read(load: Callable[[str], ModelRunner], kind: str) -> None:
    """As in a decode node: no blocks where nothing is needed any more, and nothing in what is left of a block."""
    runner = load(kind)
    cache = runner.make_cache(block_size=8, num_blocks=NUM_BLOCKS)
    sequence = scattered(cache)
    first = prefill(runner, sequence, prompt(), CHUNK)
    tables = []
    for at, group in enumerate(cache.groups):
        table = sequence.table(at).clone()
        gone = group.positions(PROMPT).start
        for buffer in cache.buffers:
            assert isinstance(buffer, PagedKVCache)
            # What is masked is multiplied by 0 all the same, and NaN stays NaN.
            nan = torch.full((gone, buffer.spec.num_kv_heads, buffer.head_size), torch.nan)
            for layer in range(buffer.num_layers if buffer.group == at else 0):
                buffer.write(layer, table, 0, nan, nan)
                buffer.view(layer)[:, 0] = torch.nan
        table[: gone // group.block_size] = 0
        tables.append(table)
    trimmed = PagedSequence(cache, tables, num_tokens=PROMPT)
    found = [first]
    while len(found) < STEPS:
        found.append(greedy(runner.forward(trimmed, found[-1:])))
    assert found == paged(runner, scattered(runner.make_cache(num_blocks=NUM_BLOCKS)), prompt(), CHUNK)
    assert any(not table[0] for table in tables)


def test_states_are_read_from_the_pages(load: Callable[[str], ModelRunner]) -> None:
    runner = load("qwen3_next")
    cache = runner.make_cache(num_blocks=NUM_BLOCKS)
    sequence = scattered(cache)
    runner.forward(sequence, prompt())
    block = sequence.table(1)[:1]
    state = cache.buffer("state")
    for part in (0, state.bytes_per_position - 4):  # the convolution's first element, the recurrence's last
        rows = state.canonical(1, block, 0, 1)
        logits = []
        for change in (0, 64):  # a bit of the exponent
            changed = rows.clone()
            changed[..., part + 3] ^= change
            state.write_canonical(1, block, 0, changed)
            sequence.num_tokens = PROMPT
            logits.append(runner.forward(sequence, [65]))
        assert not torch.equal(*logits)
        state.write_canonical(1, block, 0, rows)


class TestFeatures:
    def test_a_model_with_an_encoder_needs_them_once(self, load: Callable[[str], ModelRunner]) -> None:
        runner = load("whisper")
        given = features(runner)
        sequence = scattered(runner.make_cache(num_blocks=NUM_BLOCKS))
        with pytest.raises(ModelError, match=r"needs features of shape \(16, 100\) with a prompt, not none"):
            runner.forward(sequence, [1])
        with pytest.raises(ModelError, match=r"not \(16, 3\)"):
            runner.forward(sequence, [1], features=torch.zeros(16, 3))
        runner.forward(sequence, [1], features=given)
        with pytest.raises(ModelError, match="no features after the first pass"):
            runner.forward(sequence, [1], features=given)
        llama = load("llama")
        with pytest.raises(ModelError, match="no features with a prompt"):
            llama.forward(scattered(llama.make_cache(num_blocks=NUM_BLOCKS)), [1], features=given)

    def test_files_are_found_beside_the_prompts(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.ones((3, 4), np.float32))
        file = tmp_path / "prompts.jsonl"
        file.write_text('{"token_ids": [1], "features": "a.npy"}')
        (one,) = read_prompts(None, file)
        found = one.load_features()
        assert found is not None
        assert found.shape == (3, 4)
        assert read_prompts(["text"], None)[0].load_features() is None

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (None, "No such file"),
            (b"not an array", "cannot read the features of prompt p0"),
            (np.ones((3, 4)), r"holds float64 \(3, 4\); the features of a prompt are float32 \(mel, frames\)"),
            (np.ones(3, np.float32), r"holds float32 \(3,\)"),
        ],
    )
    def test_files_that_hold_none(self, tmp_path: Path, content: bytes | np.ndarray | None, words: str) -> None:
        if isinstance(content, bytes):
            (tmp_path / "a.npy").write_bytes(content)
        elif content is not None:
            np.save(tmp_path / "a.npy", content)
        file = tmp_path / "prompts.jsonl"
        file.write_text('{"token_ids": [1], "features": "a.npy"}')
        with pytest.raises(InputError, match=words) as caught:
            read_prompts(None, file)[0].load_features()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind != "whisper"])
def test_logits_do_not_depend_on_chunks(load: Callable[[str], ModelRunner], kind: str) -> None:
    """Tokens may be right by luck where little of a compressed entry or a state is wrong."""
    runner = load(kind)
    found = []
    for chunk_size in (1000, 23, 5):
        sequence, left = scattered(runner.make_cache(num_blocks=NUM_BLOCKS)), prompt()
        while left:
            size = runner.chunk(len(left), chunk_size)
            logits = runner.forward(sequence, left[:size])
            left = left[size:]
        found.append(logits)
    for logits in found[1:]:
        assert torch.allclose(logits, found[0], atol=1e-3)
