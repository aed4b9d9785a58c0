"""`pdtx demo`: the main job on one machine: prefill here, decode there, checked against one process doing both."""

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdtx.cli import options as opt
from pdtx.cli.common import emit, note
from pdtx.cli.movers import mover_flags, tier_flags
from pdtx.errors import ModelError
from pdtx.node.config import TierConfig
from pdtx.node.transport import parse_mode, parse_require
from pdtx.units import ceil_div

if TYPE_CHECKING:
    from pdtx.report import RequestRow, ResultDocument

_LONG = 1100
"""Tokens of the longest prompt, where the model can take them."""

_POOL_TOKENS = 2048
"""Tokens that either side's pool can hold, more than all prompts together."""

_TEXT = """\
A prefill node computes the keys and values of a prompt, and a decode node goes on from them. Between the two, gigabytes
must move, fast and exactly: one wrong head, one stale block, one page out of order, and the answer is fluent nonsense.
So every element is compared with its source, and a wrong one is named by layer, token, head and channel. """


def demo(
    model: opt.Model = None,
    max_tokens: opt.MaxTokens = 24,
    dtype: opt.Dtype = "bfloat16",
    device: opt.Device = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads for each process.", min=1)] = 1,
    chunk_size: opt.ChunkSize = 256,
    prefill_layout: Annotated[str, typer.Option(help="The prefill side's layout.")] = "flash_attn_nhd",
    decode_layout: Annotated[str, typer.Option(help="The decode side's layout.")] = "flashinfer_hnd",
    prefill_block_size: Annotated[int, typer.Option(help="The prefill side's tokens in a block.", min=1)] = 16,
    decode_block_size: Annotated[int, typer.Option(help="The decode side's tokens in a block.", min=1)] = 32,
    layout: Annotated[
        str | None, typer.Option(help="The layout of both sides, instead of the two above.", show_default=False)
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(help="Tokens in a block of both sides, instead of the two above.", min=1, show_default=False),
    ] = None,
    prefill_dtype: Annotated[
        str | None, typer.Option(help="The prefill side's own --dtype.", show_default=False)
    ] = None,
    decode_dtype: Annotated[str | None, typer.Option(help="The decode side's own --dtype.", show_default=False)] = None,
    prefill_device: Annotated[
        str | None, typer.Option(help="The prefill side's own --device.", show_default=False)
    ] = None,
    decode_device: Annotated[
        str | None, typer.Option(help="The decode side's own --device.", show_default=False)
    ] = None,
    prefill_tp: Annotated[int, typer.Option(help="The prefill side's --tensor-parallel-size.", min=1)] = 1,
    decode_tp: Annotated[int, typer.Option(help="The decode side's --tensor-parallel-size.", min=1)] = 1,
    mover: opt.Mover = "tcp",
    mover_option: opt.MoverOption = None,
    require: opt.Require = None,
    mode: opt.TransferMode = "auto",
    kv_offloading_size: opt.OffloadingSize = 0.0,
    kv_offloading_disk_size: opt.OffloadingDiskSize = 0.0,
    kv_offloading_dir: opt.OffloadingDir = None,
    kv_offloading_block_size: opt.OffloadingBlockSize = None,
    kv_offloading_policy: opt.OffloadingPolicy = "lru",
    kv_offloading_write: opt.OffloadingWrite = "through",
    inject_fault: Annotated[
        str | None,
        typer.Option(help="Make the decode side plan wrongly: swap two axes, as in 'token,head'.", show_default=False),
    ] = None,
    output: Annotated[Path, typer.Option(help="Where to write the result.")] = Path("results/demo.json"),
    json: opt.Json = False,
) -> None:
    """Run a real model disaggregated, verify every byte of its K/V, and compare with a single process."""
    parse_require(require)
    parse_mode(mode)
    offloading = TierConfig(
        kv_offloading_size,
        kv_offloading_disk_size,
        kv_offloading_dir,
        kv_offloading_block_size,
        kv_offloading_policy,
        kv_offloading_write,
    )
    sides = {
        "prefill": _side(
            layout or prefill_layout,
            block_size or prefill_block_size,
            prefill_dtype or dtype,
            prefill_device or device,
            prefill_tp,
        ),
        "decode": _side(
            layout or decode_layout,
            block_size or decode_block_size,
            decode_dtype or dtype,
            decode_device or device,
            decode_tp,
        ),
    }
    from pdtx.runner import resolve_model

    path = resolve_model(model, note)
    common = ["--model", str(path), "--threads", str(threads)]
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("\n".join(_prompts(path, block_size or prefill_block_size, max_tokens)), encoding="utf-8")
        work = [*common, "--prompts", str(prompts), "--max-tokens", str(max_tokens), "--chunk-size", str(chunk_size)]
        moving = mover_flags(mover, mover_option)
        how = ["--mode", mode, *(["--require", require] if require is not None else [])]
        both = {side: [*flags, *tier_flags(offloading, side)] for side, flags in sides.items()}
        found, decode = _disaggregated([*work, *how], common, both, moving, inject_fault)
        alone = _alone(work, sides["prefill"])
    transfer = {
        "mover": {"name": mover, "options": mover_option or []},
        "path": found.path,
        "registration": {
            side: {"registered_bytes": nbytes, "registration_s": seconds}
            for side, nbytes, seconds in (
                ("prefill", found.registered_bytes, found.registration_s),
                ("decode", decode["registered_bytes"], decode["registration_s"]),
            )
        },
    }
    _finish(found.requests, alone, path, sides, transfer, output, as_json=json)


def _side(layout: str, block_size: int, dtype: str, device: str, tp_size: int) -> list[str]:
    blocks = _POOL_TOKENS // block_size + 16
    return [
        "--layout",
        layout,
        "--block-size",
        str(block_size),
        "--num-blocks",
        str(blocks),
        "--dtype",
        dtype,
        "--device",
        device,
        "--tensor-parallel-size",
        str(tp_size),
    ]


def _prompts(model: Path, block_size: int, max_tokens: int) -> list[str]:
    """Return the demo's prompts as JSON lines: two texts, and token counts at the edges of a block."""
    import msgspec
    from tokenizers import Tokenizer

    config = msgspec.json.decode((model / "config.json").read_bytes(), type=dict[str, Any])
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"{model.name} needs features with its prompts, and the demo has text only; run the nodes with --prompts"
        )
    file = model / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{model} has no tokenizer.json, which the demo makes its prompts with")
    tokens = Tokenizer.from_file(str(file)).encode(_TEXT * 20).ids
    story = Tokenizer.from_file(str(file)).encode("The three things that matter most when moving data are").ids
    long = min(_LONG, config.get("max_position_embeddings", _LONG) - max_tokens)
    tokens *= ceil_div(_LONG, len(tokens))
    counts = {"long": tokens[:long], "one-token": tokens[:1], "one-block": tokens[:block_size]}
    counts |= {"block+1": tokens[: block_size + 1], "sentence": story}
    return [msgspec.json.encode({"id": name, "token_ids": ids}).decode() for name, ids in counts.items()]


def _disaggregated(
    work: list[str], common: list[str], sides: dict[str, list[str]], moving: list[str], fault: str | None
) -> "tuple[ResultDocument, dict[str, Any]]":
    """Run the prompts through a prefill and a decode process; return the former's result, what the latter said first.

    work: the prefill node's flags; moving: both sides' flags for the mover.
    """
    from pdtx.process import Node
    from pdtx.report import read_result

    serve = ["--listen", "127.0.0.1:0", "--verify", "--json", *common, *moving, *sides["decode"]]
    if fault is not None:
        serve += ["--inject-fault", fault]
    with Node("decode ", "decode_node", serve) as decode:
        listening = decode.event("listening", 300.0)
        ship = ["--connect", listening["address"], "--json", *work, *moving, *sides["prefill"]]
        with Node("prefill", "prefill_node", ship) as prefill:
            return read_result(prefill.result(1800.0)), listening


def _alone(work: list[str], side: list[str]) -> "list[RequestRow]":
    """Run the prompts through one process doing both."""
    from pdtx.process import Node
    from pdtx.report import read_result

    with Node("alone  ", "pdtx", ["generate", "--json", *work, *side]) as node:
        return read_result(node.result(1800.0)).requests


def _mapping(flags: list[str]) -> dict[str, str]:
    """Turn ["--block-size", "16", ...] into {"block_size": "16", ...}."""
    return {
        flag.removeprefix("--").replace("-", "_"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)
    }


def _finish(
    rows: "list[RequestRow]",
    alone: "list[RequestRow]",
    model: Path,
    sides: dict[str, list[str]],
    transfer: dict[str, Any],
    output: Path,
    *,
    as_json: bool,
) -> None:
    """Compare, print, write the result; exit 1 unless all is right."""
    import msgspec

    from pdtx.report import console_for, machine_facts, render_rows, write_json
    from pdtx.runner import fingerprint

    expected = {row.request_id: row.token_ids for row in alone}
    differing = [row.request_id for row in rows if row.token_ids != expected.get(row.request_id)]
    right = not differing and len(rows) == len(alone) and all(row.ok and row.wrong == 0 for row in rows)
    document: dict[str, Any] = {
        "version": 1,
        "command": sys.argv,
        "machine": machine_facts(),
        "model": {"name": model.name, "fingerprint": fingerprint(model)},
        "sides": {side: _mapping(flags) for side, flags in sides.items()},
        **transfer,
        "requests": msgspec.to_builtins(rows),
        "tokens_equal_one_process": not differing,
        "ok": right,
    }
    if as_json:
        emit(msgspec.json.encode(document).decode())
    else:
        render_rows(rows, console_for(sys.stdout))
    write_json(output, document)
    note(f"result written to {output}")
    if differing:
        note(f"tokens differ from those of one process: {', '.join(differing)}")
    if not right:
        note("FAILED")
        raise typer.Exit(1)
    note("ok: every element verified, tokens equal those of one process doing both")
