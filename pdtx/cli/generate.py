"""`pdtx generate`: one process doing both prefill and decode, with the runner of the nodes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdtx.cli import options as opt
from pdtx.cli.common import configure_logging, emit, note
from pdtx.node.config import CacheConfig, ModelConfig
from pdtx.node.model import load_runner, open_cache
from pdtx.node.prompts import read_prompts

if TYPE_CHECKING:
    import torch

    from pdtx.cache import KVCaches
    from pdtx.runner import ModelRunner


def generate(
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.", show_default=False)] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts, a line each: plain, or JSON lines.", show_default=False),
    ] = None,
    max_tokens: opt.MaxTokens = 32,
    ignore_eos: opt.IgnoreEos = False,
    chat: opt.Chat = False,
    chunk_size: opt.ChunkSize = 256,
    model: opt.Model = None,
    dtype: opt.Dtype = "bfloat16",
    device: opt.Device = "cpu",
    threads: opt.Threads = None,
    layout: opt.Layout = "flash_attn_nhd",
    block_size: opt.BlockSize = 16,
    num_blocks: opt.NumBlocks = 512,
    tensor_parallel_size: opt.TensorParallel = 1,
    json: opt.Json = False,
    verbose: opt.Verbose = False,
) -> None:
    """Generate in one process, nothing shipped: what a disaggregated run must equal, token for token."""
    configure_logging(verbose)
    shape = CacheConfig(layout, block_size, num_blocks, tensor_parallel_size)
    asked = read_prompts(prompt, prompts)
    runner = load_runner(ModelConfig(model, dtype, device, threads), note)
    cache, _ = open_cache(runner, shape)

    import msgspec

    from pdtx.report import RequestRow

    rows = list[RequestRow]()
    for one in asked:
        ids = one.tokens(lambda text: runner.encode(text, chat))
        tokens = generate_locally(
            runner, cache, ids, max_tokens, chunk_size, ignore_eos=ignore_eos, features=one.load_features()
        )
        rows.append(
            RequestRow(
                request_id=str(one.id),
                prompt_tokens=len(ids),
                token_ids=tokens,
                text=runner.decode(tokens),
                transport="none",
            )
        )
    if json:
        emit(msgspec.json.encode({"version": 1, "requests": rows}).decode())
    else:
        for row in rows:
            emit(f"[{row.request_id}] {row.text}")


def generate_locally(
    runner: "ModelRunner",
    cache: "KVCaches",
    prompt: list[int],
    max_tokens: int,
    chunk_size: int,
    *,
    ignore_eos: bool = False,
    features: "torch.Tensor | None" = None,
) -> list[int]:
    """Return the greedy continuation of one prompt, all that is kept of it in blocks of cache.

    features: see ModelRunner.forward.
    Raises OutOfBlocks or ModelError if it is too long for the cache or the model.
    """
    from pdtx.cache import GroupAllocator
    from pdtx.runner import PagedSequence, greedy, prefill

    counts = [len(group.table_blocks(len(prompt) + max_tokens)) for group in cache.groups]
    blocks = GroupAllocator({group.name: group.num_blocks for group in cache.groups}).allocate(counts)
    sequence = PagedSequence(cache, [taken.ids for taken in blocks.groups])
    tokens = [prefill(runner, sequence, prompt, chunk_size, features=features)]
    while len(tokens) < max_tokens and (ignore_eos or tokens[-1] not in runner.eos_token_ids):
        tokens.append(greedy(runner.forward(sequence, tokens[-1:])))
    return tokens
