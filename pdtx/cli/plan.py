"""`pdtx plan`: what a transfer will be made of, before anything is sent."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdtx.cli.common import emit
from pdtx.cli.options import ConfigOrPreset, Json, KVCacheDtype
from pdtx.cli.tables import aligned, both_sizes, named
from pdtx.node.transport import parse_mode, read_costs

if TYPE_CHECKING:
    from pdtx.kvspec import KVCacheSpec
    from pdtx.plan import BufferPlan, CacheSide, Choice, Endpoint, RequestPlan

Record = dict[str, Any]
_PREFILL, _DECODE, _REQUEST = "Prefill node", "Decode node", "Request"
_HEADS = ("layers", "kind", "positions", "rank", "runs", "bytes each", "bytes")
_SIZES_SHOWN = 3
_MOST_TOKENS, _MOST_RANKS, _MOST_DRAFTS = 1 << 24, 1024, 1024
_RESULT_VERSION = 1


def _count(text: str, panel: str, *, least: int = 1, most: int = _MOST_TOKENS) -> Any:  # noqa: ANN401 - typer's own type
    """Return an option for a whole number within bounds."""
    return typer.Option(help=text, min=least, max=most, rich_help_panel=panel)


def plan(
    model: ConfigOrPreset,
    tokens: Annotated[int, _count("Tokens of the prompt.", _REQUEST)] = 1000,
    cached_tokens: Annotated[
        int, _count("Tokens that the decode node has already (prefix hit).", _REQUEST, least=0)
    ] = 0,
    encoder_tokens: Annotated[int, _count("Positions of an encoder's output.", _REQUEST)] = 1500,
    prefill_layout: Annotated[
        str, typer.Option(help="Layout preset; several with commas.", rich_help_panel=_PREFILL)
    ] = "flash_attn_nhd",
    decode_layout: Annotated[
        str, typer.Option(help="Layout preset; several with commas.", rich_help_panel=_DECODE)
    ] = "flash_attn_nhd",
    prefill_block_size: Annotated[int, _count("Tokens in a block.", _PREFILL)] = 16,
    decode_block_size: Annotated[int, _count("Tokens in a block.", _DECODE)] = 16,
    prefill_tp: Annotated[int, _count("Tensor-parallel ranks.", _PREFILL, most=_MOST_RANKS)] = 1,
    decode_tp: Annotated[int, _count("Tensor-parallel ranks.", _DECODE, most=_MOST_RANKS)] = 1,
    draft_layers: Annotated[
        int, _count("Layers of a draft model, here only.", _PREFILL, least=0, most=_MOST_DRAFTS)
    ] = 0,
    kv_cache_dtype: KVCacheDtype = "auto",
    consecutive: Annotated[
        bool, typer.Option("--consecutive", help="Blocks lie one after another, not scattered over the pool.")
    ] = False,
    whole_blocks: Annotated[
        bool, typer.Option("--whole-blocks", help="Fill up the last block, as connectors do that know blocks only.")
    ] = False,
    merge: Annotated[bool, typer.Option(help="Join runs that touch on both sides.")] = True,
    mode: Annotated[str, typer.Option(help="direct, staged, or auto: the cheaper one.")] = "auto",
    mover: Annotated[str, typer.Option(help="Whose costs auto reckons with; see PDTX_COSTS.")] = "tcp",
    as_json: Json = False,
) -> None:
    """Predict a transfer: runs, bytes of each, bytes on the wire and how many of them are copies."""
    from pdtx.models import layer_specs, load_config, state_sharding
    from pdtx.plan import choose_mode, plan_request

    asked = parse_mode(mode)
    config = load_config(model)

    def side(layout: str, block_size: int, tp_size: int, drafts: int, seed: int) -> "CacheSide":
        layers = layer_specs(config, block_size=block_size, kv_cache_dtype=kv_cache_dtype)
        return _side(with_drafts(layers, drafts), layout, tp_size, consecutive, seed)

    found = plan_request(
        side(prefill_layout, prefill_block_size, prefill_tp, draft_layers, seed=1),
        side(decode_layout, decode_block_size, decode_tp, 0, seed=2),
        tokens,
        cached_tokens=cached_tokens,
        encoder_positions=encoder_tokens,
        sharding=state_sharding(config),
        whole_blocks=whole_blocks,
        merge=merge,
    )
    costs, source = read_costs().of(mover, "cpu")
    choice = choose_mode(
        found.num_runs, found.wire_bytes, asked, costs, num_ranges=found.num_ranges, source=source
    )  # fmt: skip
    if as_json:
        emit(json.dumps(_record(model, found, choice), indent=2))
    else:
        plans = [plan for buffer in found.buffers for plan in buffer.plans]
        here = _side_text([plan.src for plan in plans], prefill_block_size, prefill_tp)
        there = _side_text([plan.dst for plan in plans], decode_block_size, decode_tp)
        sides = f"{here} -> {there}"
        emit("\n".join(_text(model, sides, found, choice)))


def with_drafts(layers: "Mapping[str, KVCacheSpec]", count: int) -> "dict[str, KVCacheSpec]":
    """Return layers and count more like the last one, named as a draft model's."""
    last = list(layers.values())[-1:]
    drafts = {f"draft.layers.{layer}": spec for layer in range(count) for spec in last}
    return {**layers, **drafts}


def _side(layers: "Mapping[str, KVCacheSpec]", layout: str, tp_size: int, consecutive: bool, seed: int) -> "CacheSide":
    from pdtx.layout import layout_for, parse_layouts
    from pdtx.plan import CacheSide

    names = parse_layouts(layout)
    return CacheSide(
        layers=layers,
        layout_for=lambda spec, name: layout_for(spec, name, names),
        tp_size=tp_size,
        fragmented=not consecutive,
        seed=seed,
    )


def _side_text(ends: "list[Endpoint]", block_size: int, tp_size: int) -> str:
    """Return what one side keeps its caches in."""
    names = ", ".join(dict.fromkeys(end.layout.name for end in ends)) or "no layer keeps a cache"
    return f"{names}, blocks of {block_size}, TP {tp_size}"


def _record(model: str, found: "RequestPlan", choice: "Choice") -> Record:
    return {
        "version": _RESULT_VERSION,
        "model": model,
        "tokens": found.num_tokens,
        "buffers": [_buffer_record(buffer) for buffer in found.buffers],
        "runs": found.num_runs,
        "destination_ranges": found.num_ranges,
        "wire_bytes": found.wire_bytes,
        "unique_bytes": found.unique_bytes,
        "amplification": found.amplification,
        "mode": str(choice.mode),
        "mode_reason": choice.reason,
        "not_sent": list(found.not_sent),
    }


def _buffer_record(buffer: "BufferPlan") -> Record:
    return {
        "spec_class": type(buffer.spec).__name__,
        "layers": list(buffer.layer_names),
        "positions": [buffer.positions.start, buffer.positions.stop],
        "wire_bytes": buffer.wire_bytes,
        "unique_bytes": buffer.unique_bytes,
        "unread_ranks": list(buffer.unread),
        "transfers": [
            {
                "prefill_rank": move.src_rank,
                "decode_rank": move.dst_rank,
                "prefill_layout": plan.src.layout.name,
                "decode_layout": plan.dst.layout.name,
                "bytes": plan.nbytes,
                "unmerged_runs": len(plan.runs),
                "runs": [{"bytes": size, "count": count} for size, count in plan.sizes.items()],
            }
            for move, plan in zip(buffer.moves, buffer.plans, strict=True)
        ],
    }


def _text(model: str, sides: str, found: "RequestPlan", choice: "Choice") -> list[str]:
    lines = aligned(_HEADS, (row for buffer in found.buffers for row in _rows(buffer)))
    unread = sorted({rank for buffer in found.buffers for rank in buffer.unread})
    notes = [f"not sent: {named(found.not_sent)} (only the prefill node has them)"] if found.not_sent else []
    if unread:
        notes.append(f"prefill ranks that nobody reads, only told of the end: {named(unread)}")
    if not found.wire_bytes:
        notes.append("nothing moves; the decode node is told all the same")
    return [
        f"{model}, {found.num_tokens:,} tokens: {sides}",
        "",
        *lines,
        "",
        f"runs {found.num_runs:,}, wire {both_sizes(found.wire_bytes)}, unique {both_sizes(found.unique_bytes)}, "
        f"amplification {found.amplification:.3f}",
        f"mode {choice.mode}: {choice.reason}",
        *notes,
    ]


def _rows(buffer: "BufferPlan") -> list[tuple[str, ...]]:
    """Return a row for each pair of ranks."""
    rows = list[tuple[str, ...]]()
    for move, plan in zip(buffer.moves, buffer.plans, strict=True):
        sizes = plan.sizes
        each = ", ".join(f"{size:,}" for size in list(sizes)[:_SIZES_SHOWN])
        rows.append(
            (
                f"{len(buffer.layer_names)}",
                type(buffer.spec).__name__,
                f"{buffer.positions.start:,}..{buffer.positions.stop:,}",
                f"{move.src_rank} -> {move.dst_rank}",
                f"{sum(sizes.values()):,}",
                each + (", ..." if len(sizes) > _SIZES_SHOWN else ""),
                f"{plan.nbytes:,}",
            )
        )
    return rows
