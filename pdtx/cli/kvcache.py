"""`pdtx kvcache`: what a model's KV cache costs, layer by layer, from its config.json."""

import importlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdtx.cli.common import emit, note
from pdtx.cli.options import BlockSize, ConfigOrPreset, Json, KVCacheDtype, Ranks
from pdtx.cli.tables import aligned, both_sizes
from pdtx.errors import InputError
from pdtx.units import parse_bytes

if TYPE_CHECKING:
    from pdtx.kvspec import KVCacheSpec, ServingLimits
    from pdtx.models import LayerKind

Layers = Mapping[str, "KVCacheSpec"]
Record = dict[str, Any]

_HEADS = ("kind of layer", "layers", "page", "block", "a token", "grows with", "greatest request")
_GROWTH = {
    "tokens": "tokens",
    "window": "tokens, to a bound",
    "states": "nothing",
    "encoder": "encoder input",
    "nothing": "nothing",
}
_CURVES = {
    "tokens": "grows with every token",
    "window": "grows to a bound: window or chunk, and a batch",
    "states": "constant: states",
    "encoder": "constant: encoder input",
    "nothing": "nothing",
}
_PLOT_POINTS = 200


def kvcache(
    model: ConfigOrPreset,
    block_size: BlockSize = 16,
    kv_cache_dtype: KVCacheDtype = "auto",
    tensor_parallel_size: Ranks = 1,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Tokens of the longest request; default: the model's.", min=1, show_default=False),
    ] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens computed in one step.", min=1)] = 2048,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of one rank for its pool, e.g. 56GiB; then the pool is planned.", show_default=False),
    ] = None,
    as_json: Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw bytes against tokens into this file.", show_default=False)
    ] = None,
) -> None:
    """Show what each kind of layer keeps on one rank, and how many requests a memory holds."""
    from pdtx.kvspec import ServingLimits
    from pdtx.models import context_length, layer_kinds, layer_specs, load_config

    available = None if memory is None else parse_bytes(memory)
    config = load_config(model)
    length = max_model_len or context_length(config)
    layers: Layers = layer_specs(
        config,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
        max_model_len=length,
    )
    layers = one_page_size(layers)
    limits = ServingLimits(max_model_len=length, max_num_batched_tokens=max_num_batched_tokens)
    kinds = layer_kinds(layers, limits)
    pool = None if available is None or not layers else _pool(layers, available, limits, block_size)
    if as_json:
        emit(json.dumps(_record(model, tensor_parallel_size, limits, kinds, pool), indent=2))
    else:
        emit("\n".join(_text(model, tensor_parallel_size, limits, kinds, pool)))
    if plot is not None:
        _draw(plot, model, layers, limits)


def one_page_size(layers: Layers) -> Layers:
    """Return layers as vLLM starts them: attention beside states with pages of one size."""
    from pdtx.kvspec import AttentionSpec, MambaSpec
    from pdtx.pool import align_hybrid_block_size

    attention = next((spec for spec in layers.values() if isinstance(spec, AttentionSpec)), None)
    state = next((spec for spec in layers.values() if isinstance(spec, MambaSpec)), None)
    if attention is None or state is None:
        return layers
    raised, padded = align_hybrid_block_size(attention, state)
    if raised.block_size != attention.block_size:
        note(f"blocks raised from {attention.block_size} to {raised.block_size} tokens, to hold a state in a page")
    return {
        name: replace(spec, page_size_padded=padded.page_size_padded)
        if isinstance(spec, MambaSpec)
        else spec.copy_with_new_block_size(raised.block_size)
        for name, spec in layers.items()
    }


def _pool(layers: Layers, available: int, limits: "ServingLimits", block_size: int) -> Record:
    from pdtx.pool import PoolSettings, blocks_per_request, bytes_per_block, get_max_concurrency, plan_pool

    plan = plan_pool([layers], [available], PoolSettings(limits=limits, block_size=block_size))
    config = plan.configs[0]
    groups = config.kv_cache_groups
    concurrency = get_max_concurrency(groups, config.num_blocks, limits)
    return {
        "memory_bytes": available,
        "groups": [
            {
                "spec_class": type(group.kv_cache_spec).__name__,
                "layers": len(group.layer_names),
                "block_size_tokens": group.kv_cache_spec.block_size,
            }
            for group in groups
        ],
        "num_blocks": config.num_blocks,
        "bytes_per_block": bytes_per_block(groups),
        "blocks_per_request": blocks_per_request(groups, limits),
        "max_concurrency": concurrency,
        "tokens": int(concurrency * limits.max_model_len),
    }


def _record(model: str, ranks: int, limits: "ServingLimits", kinds: "list[LayerKind]", pool: Record | None) -> Record:
    return {
        "model": model,
        "tensor_parallel_size": ranks,
        "max_model_len": limits.max_model_len,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "kinds": [
            {
                "spec_class": type(kind.spec).__name__,
                "layers": kind.count,
                "page_size_bytes": kind.spec.page_size_bytes,
                "block_size_tokens": kind.spec.block_size,
                "bytes_per_token": kind.bytes_per_token,
                "growth": str(kind.growth),
                "max_memory_bytes": kind.max_memory_bytes,
            }
            for kind in kinds
        ],
        "layers": sum(kind.count for kind in kinds),
        "bytes_per_token": _growing_bytes(kinds),
        "max_memory_bytes": sum(kind.max_memory_bytes for kind in kinds),
        "pool": pool,
    }


def _growing_bytes(kinds: "list[LayerKind]") -> float:
    """Return the bytes by which all layers together grow with a token, however many there are already."""
    return sum(kind.count * (kind.bytes_per_token or 0) for kind in kinds if kind.growth == "tokens")


def _text(model: str, ranks: int, limits: "ServingLimits", kinds: "list[LayerKind]", pool: Record | None) -> list[str]:
    head = (
        f"{model}: one of {ranks} ranks, requests of up to {limits.max_model_len:,} tokens, "
        f"{limits.max_num_batched_tokens:,} batched tokens"
    )
    if not kinds:
        return [head, "no layer keeps a KV cache: the model is an encoder"]
    total = sum(kind.max_memory_bytes for kind in kinds)
    rows = [_row(kind) for kind in kinds]
    layers, growing = sum(kind.count for kind in kinds), _per_token(_growing_bytes(kinds))
    rows.append(("total", str(layers), "", "", growing, "", both_sizes(total)))
    lines = aligned(_HEADS, rows)
    return [head, "", *lines, *(_pool_text(pool, limits) if pool else [])]


def _row(kind: "LayerKind") -> tuple[str, ...]:
    spec = kind.spec
    return (
        type(spec).__name__,
        str(kind.count),
        f"{spec.page_size_bytes:,} B",
        f"{spec.block_size:,} tokens",
        _per_token(kind.bytes_per_token),
        _GROWTH[kind.growth],
        both_sizes(kind.max_memory_bytes),
    )


def _per_token(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{nbytes:,.2f}".rstrip("0").rstrip(".") + " B"


def _pool_text(pool: Record, limits: "ServingLimits") -> list[str]:
    groups = [
        f"  group {number}: {group['layers']} {group['spec_class']}, {group['block_size_tokens']:,} tokens a page"
        for number, group in enumerate(pool["groups"])
    ]
    return [
        "",
        f"pool in {both_sizes(pool['memory_bytes'])}, groups: {len(groups)}",
        *groups,
        f"  {pool['num_blocks']:,} blocks of {both_sizes(pool['bytes_per_block'])}",
        f"  {pool['blocks_per_request']:,} blocks for a request of {limits.max_model_len:,} tokens: "
        f"{pool['max_concurrency']:.3f} requests at once, {pool['tokens']:,} tokens",
    ]


def _draw(path: Path, model: str, layers: Layers, limits: "ServingLimits") -> None:
    """Draw a curve for each growth. Raises InputError without matplotlib, or where the file cannot be written."""
    from pdtx.models import growth_curves

    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise InputError("--plot needs matplotlib; install it with: pip install 'pdtx[plot]'") from None
    points = min(_PLOT_POINTS, limits.max_model_len)
    lengths = sorted({max(1, limits.max_model_len * step // points) for step in range(points + 1)})
    figure = figures.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for curve in growth_curves(layers, limits, lengths):
        mebibytes = [nbytes / 2**20 for nbytes in curve.nbytes]
        axes.plot(curve.tokens, mebibytes, label=_CURVES[curve.growth])
    axes.set(title=f"{model}: one request", xlabel="tokens of the request", ylabel="KV cache (MiB)")
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot draw into {path}: {error}") from None
    note(f"drawn into {path}")
