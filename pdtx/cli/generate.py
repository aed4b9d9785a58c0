"""`pdtx generate`: one process doing both prefill and decode, with the runner of the nodes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdtx.cli import options as opt
from pdtx.cli.common import configure_logging, emit, load_runner, open_cache
from pdtx.cli.prompts import read_prompts
from pdtx.layout import layout_name

if TYPE_CHECKING:
    from pdtx.cache import PagedKVCache
    from pdtx.runner import ModelRunner


def generate(
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.", show_default=False)] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts, a line each: plain, or JSON lines.", show_default=False),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.", min=1)] = 32,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate --max-tokens whatever comes.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts into the model's chat template.")] = False,
    chunk_size: Annotated[int, typer.Option(help="Most prompt tokens computed at a time.", min=1)] = 256,
    model: opt.Model = None,
    dtype: opt.Dtype = "bfloat16",
    device: opt.Device = "cpu",
    threads: opt.Threads = None,
    layout: opt.Layout = "flash_attn_nhd",
    block_size: opt.BlockSize = 16,
    num_blocks: opt.NumBlocks = 512,
    json: opt.Json = False,
    verbose: opt.Verbose = False,
) -> None:
    """Generate in one process, nothing shipped: what a disaggregated run must equal, token for token."""
    configure_logging(verbose)
    layout_name(layout)
    asked = read_prompts(prompt, prompts)
    runner = load_runner(model, dtype, device, threads)
    cache, _ = open_cache(runner, layout=layout, block_size=block_size, num_blocks=num_blocks)

    import msgspec

    from pdtx.report import RequestRow

    rows = list[RequestRow]()
    for one in asked:
        ids = one.tokens(lambda text: runner.encode(text, chat))
        tokens = generate_locally(runner, cache, ids, max_tokens, chunk_size, ignore_eos=ignore_eos)
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
    cache: "PagedKVCache",
    prompt: list[int],
    max_tokens: int,
    chunk_size: int,
    *,
    ignore_eos: bool = False,
) -> list[int]:
    """Return the greedy continuation of one prompt, its K/V kept in blocks of cache.

    Raises OutOfBlocks or ModelError if it is too long for the cache or the model.
    """
    import torch

    from pdtx.cache import BlockAllocator
    from pdtx.runner import PagedSequence, greedy, prefill

    needed = -(-(len(prompt) + max_tokens) // cache.spec.block_size)
    blocks = BlockAllocator(cache.num_blocks).allocate(needed)
    sequence = PagedSequence(cache, torch.as_tensor(blocks.ids, device=cache.device))
    tokens = [prefill(runner, sequence, prompt, chunk_size)]
    while len(tokens) < max_tokens and (ignore_eos or tokens[-1] not in runner.eos_token_ids):
        tokens.append(greedy(runner.forward(sequence, tokens[-1:])))
    return tokens
