"""`pdtx granularity`: in what pieces each of vLLM's connectors moves a model's KV cache, computed from its layouts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from pdtx.cli.common import emit
from pdtx.cli.kvcache import one_page_size
from pdtx.cli.options import BlockSize, ConfigOrPreset, Json, KVCacheDtype, Ranks
from pdtx.cli.tables import aligned, both_sizes
from pdtx.errors import InputError
from pdtx.units import format_seconds, parse_bytes

if TYPE_CHECKING:
    from pdtx.granularity import HeadSplit, OffloadPool, OffloadSettings, RequestKind
    from pdtx.kvspec import KVCacheSpec

JSON_VERSION = 1
_LONGEST = 131_072
_WIDTH = 120


class Vllm(StrEnum):
    """Versions of vLLM to show."""

    OLD = "0.22"
    NEW = "0.32"
    BOTH = "both"


class Table(StrEnum):
    """Tables to show."""

    TRANSFER = "transfer"
    OFFLOAD = "offload"
    DESCRIPTORS = "descriptors"
    ALL = "all"


class _Case(NamedTuple):
    """What was asked for: the model's kinds of layers, the request, and how it is cut."""

    model: str
    kinds: "list[RequestKind]"
    groups: int
    block_bytes: int
    ranks: int
    peer_ranks: int | None
    tokens: int
    run_length: int
    versions: tuple[str, ...]
    splits: "list[HeadSplit | None]"
    offload: "OffloadSettings"


def granularity(
    model: ConfigOrPreset,
    block_size: BlockSize = 16,
    kv_cache_dtype: KVCacheDtype = "auto",
    tensor_parallel_size: Ranks = 1,
    peer_tp: Annotated[
        int | None, typer.Option(help="Ranks of the other side, where they differ.", min=1, show_default=False)
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of the request; default: 131072, or the model's most.", min=1, show_default=False),
    ] = None,
    encoder_tokens: Annotated[
        int | None,
        typer.Option(help="Positions of the encoder's input; default: the model's.", min=1, show_default=False),
    ] = None,
    run_length: Annotated[int, typer.Option(help="Blocks side by side on both sides (r).", min=1)] = 1,
    vllm: Annotated[Vllm, typer.Option(help="Version of vLLM.")] = Vllm.BOTH,
    table: Annotated[Table, typer.Option(help="Table to show.")] = Table.ALL,
    offload_block_size: Annotated[
        int | None, typer.Option(help="Tokens of a block on the host.", min=1, show_default=False)
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory for the pool; default: 16GiB, simple 8GiB.", show_default=False)
    ] = None,
    bus: Annotated[
        float, typer.Option(help="GB/s to the host in one direction, to reckon with.", min=0.001, max=1e6)
    ] = 25.0,
    as_json: Json = False,
) -> None:
    """Show in what pieces every connector of vLLM moves one request: bytes of a piece, pieces, what joins them."""
    from pdtx.granularity import OffloadSettings, Request, request_kinds
    from pdtx.models import context_length, layer_specs, load_config
    from pdtx.pool import bytes_per_block, get_kv_cache_groups

    config = load_config(model)
    length = tokens or min(_LONGEST, context_length(config))
    request = Request(tokens=length, encoder_tokens=encoder_tokens or _encoder_tokens(config))

    def layers(ranks: int) -> "Mapping[str, KVCacheSpec]":
        specs = layer_specs(
            config,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            tensor_parallel_size=ranks,
            max_model_len=length,
        )
        return one_page_size(specs)

    own = layers(tensor_parallel_size)
    if not own:
        raise InputError(f"{model} is an encoder: no layer keeps a KV cache, and nothing is to be moved")
    kinds, groups = request_kinds(own, request), get_kv_cache_groups(own)
    peers = None if peer_tp is None else request_kinds(layers(peer_tp), request)
    case = _Case(
        model=model,
        kinds=kinds,
        groups=len(groups),
        block_bytes=bytes_per_block(groups),
        ranks=tensor_parallel_size,
        peer_ranks=peer_tp,
        tokens=length,
        run_length=run_length,
        versions=("0.22", "0.32") if vllm is Vllm.BOTH else (str(vllm),),
        splits=[] if peers is None else _splits(kinds, peers),
        offload=OffloadSettings(
            block_size=next((kind.spec.block_size for kind in kinds if not kind.is_state), block_size),
            offload_block_size=offload_block_size,
            memory=None if host_memory is None else parse_bytes(host_memory),
            ranks=tensor_parallel_size,
            bytes_per_second=bus * 1e9,
        ),
    )
    tables = (Table.TRANSFER, Table.DESCRIPTORS, Table.OFFLOAD) if table is Table.ALL else (table,)
    emit(json.dumps(_record(case, tables), indent=2) if as_json else "\n".join(_text(case, tables)))


def _encoder_tokens(config: Mapping[str, Any]) -> int:
    """Positions that the model's encoder makes of its input; 1 where there is none, and none is counted."""
    found = config.get("max_source_positions", 1)
    return found if isinstance(found, int) and found > 0 else 1


def _splits(own: "list[RequestKind]", peer: "list[RequestKind]") -> "list[HeadSplit | None]":
    if len(own) != len(peer):
        raise InputError(f"{len(own)} kinds of layers here and {len(peer)} there: these ranks cannot exchange caches")
    return [_split(*pair) for pair in zip(own, peer, strict=True)]


def _split(own: "RequestKind", peer: "RequestKind") -> "HeadSplit | None":
    from pdtx.granularity import HeadSplit
    from pdtx.kvspec import AttentionSpec

    if own.is_latent or not (isinstance(own.spec, AttentionSpec) and isinstance(peer.spec, AttentionSpec)):
        return None
    return HeadSplit.of(own.spec.num_kv_heads, peer.spec.num_kv_heads)


def _record(case: _Case, tables: Sequence[Table]) -> dict[str, Any]:
    from pdtx.granularity import descriptor_rows, offload_rows, transfer_rows

    record: dict[str, Any] = {
        "version": JSON_VERSION,
        "model": case.model,
        "vllm": list(case.versions),
        "tensor_parallel_size": case.ranks,
        "peer_tensor_parallel_size": case.peer_ranks,
        "tokens": case.tokens,
        "run_length": case.run_length,
        "request_bytes": sum(kind.nbytes for kind in case.kinds),
        "kinds": [_kind_record(kind) for kind in case.kinds],
    }
    if Table.TRANSFER in tables:
        rows = transfer_rows(case.kinds, versions=case.versions, run_length=case.run_length, splits=case.splits)
        record["transfer"] = [asdict(row) for row in rows]
    if Table.DESCRIPTORS in tables:
        found = descriptor_rows(case.kinds, versions=case.versions, splits=case.splits)
        record["descriptors"] = [asdict(row) for row in found]
    if Table.OFFLOAD in tables:
        record["offload"] = {
            "block_size_factor": case.offload.factor,
            "bus_bytes_per_second": round(case.offload.bytes_per_second),
            "bus_seconds": _bus_seconds(case),
            "units": [asdict(row) for row in offload_rows(case.kinds, case.offload, versions=case.versions)],
            "pools": [asdict(pool) for pool in _pools(case)],
        }
    return record


def _kind_record(kind: "RequestKind") -> dict[str, Any]:
    return {
        "spec_class": type(kind.spec).__name__,
        "layers": kind.layers,
        "groups": [{"layers": layers, "count": count} for layers, count in kind.groups],
        "page_bytes": kind.page_bytes,
        "block_size_tokens": kind.spec.block_size,
        "positions": [kind.positions.start, kind.positions.stop],
        "blocks": kind.blocks,
        "request_bytes": kind.nbytes,
    }


def _pools(case: _Case) -> "list[OffloadPool]":
    from pdtx.granularity import offload_pools

    return offload_pools(
        case.kinds, case.offload, block_bytes=case.block_bytes, groups=case.groups, versions=case.versions
    )


def _bus_seconds(case: _Case) -> float:
    return sum(kind.nbytes for kind in case.kinds) / case.offload.bytes_per_second


def _text(case: _Case, tables: Sequence[Table]) -> list[str]:
    total = sum(kind.nbytes for kind in case.kinds)
    peer = "" if case.peer_ranks is None else f" (other side: {case.peer_ranks})"
    lines = [
        f"{case.model}: one of {case.ranks} ranks{peer}, a request of {case.tokens:,} tokens, run length r = "
        f"{case.run_length}",
        f"{both_sizes(total)} in all",
        "",
    ]
    for index, kind in enumerate(case.kinds, 1):
        lines += _kind_text(index, kind)
    sections = {Table.TRANSFER: _transfer_text, Table.DESCRIPTORS: _descriptor_text, Table.OFFLOAD: _offload_text}
    for table in tables:
        lines += sections[table](case)
    return lines


def _kind_text(number: int, kind: "RequestKind") -> list[str]:
    from pdtx.granularity import symbols

    groups = ", ".join(f"{count} of {layers}" for layers, count in kind.groups)
    positions = "1 state" if kind.is_state else f"positions {kind.positions.start:,}..{kind.positions.stop:,}"
    layers = "/".join(str(layers) for layers, _ in kind.groups)
    letters = [f"{name} = {value:,}" for name, value in symbols(kind).items()]
    return [
        f"kind {number}: {kind.layers} {type(kind.spec).__name__} (groups: {groups}), page {kind.page_bytes:,} B",
        f"        {positions}: {kind.blocks:,} blocks, {both_sizes(kind.nbytes)}",
        f"        {', '.join([f'L = {layers}', *letters])}",
    ]


def _transfer_text(case: _Case) -> list[str]:
    from pdtx.granularity import transfer_rows

    heads = ("connector", "mover", "unit", "formula", "bytes", "units", "joined by")
    lines = list[str]()
    rows = transfer_rows(case.kinds, versions=case.versions, run_length=case.run_length, splits=case.splits)
    for version, kind in _sections(case):
        notes = _Notes()
        cells = [
            (
                f"{row.connector.replace('Connector', '')} {row.variant}".strip(),
                row.mover,
                row.unit or "-",
                row.formula or "-",
                _number(row.unit_bytes),
                _number(row.units),
                " ".join([row.coalesces or "-", *notes.mark(_objects(row.objects), row.note)]),
            )
            for row in rows
            if (row.version, row.kind) == (version, kind)
        ]
        lines += ["", f"transfer, vLLM {version}{_of_kind(case, kind)}", *aligned(heads, cells), *notes.lines]
    return lines


def _descriptor_text(case: _Case) -> list[str]:
    from pdtx.granularity import descriptor_rows

    heads = ("layout", "regions", "descriptor", "formula", "bytes", "stride", "a block", "descriptors")
    lines = list[str]()
    rows = descriptor_rows(case.kinds, versions=case.versions, splits=case.splits)
    for version, kind in _sections(case):
        notes = _Notes()
        cells = [
            (
                " ".join([row.layout, *notes.mark(row.note)]),
                _number(row.regions),
                row.unit or "-",
                row.formula or "-",
                _number(row.nbytes),
                _number(row.stride),
                _number(row.per_block),
                _number(row.count),
            )
            for row in rows
            if (row.version, row.kind) == (version, kind)
        ]
        lines += ["", f"NIXL descriptors, vLLM {version}{_of_kind(case, kind)}", *aligned(heads, cells), *notes.lines]
    return lines


def _offload_text(case: _Case) -> list[str]:
    from pdtx.granularity import offload_rows

    heads = ("connector", "GPU unit, B", "factor", "CPU unit, B", "units", "GPU to CPU", "CPU to GPU")
    lines = list[str]()
    rows = offload_rows(case.kinds, case.offload, versions=case.versions)
    for version, kind in _sections(case):
        notes = _Notes()
        cells = [
            (
                " ".join([row.connector.replace("Connector", ""), *filter(None, [row.variant]), *notes.mark(row.note)]),
                _number(row.gpu_bytes),
                str(row.factor),
                _number(row.cpu_bytes),
                _number(row.units),
                row.store,
                row.load or "-",
            )
            for row in rows
            if (row.version, row.kind) == (version, kind)
        ]
        lines += ["", f"CPU offload, vLLM {version}{_of_kind(case, kind)}", *aligned(heads, cells), *notes.lines]
    return [*lines, *_pool_text(case)]


def _pool_text(case: _Case) -> list[str]:
    heads = ("connector", "vLLM", "host memory", "block, B", "blocks", "tokens", "found by", "eviction")
    cells = [
        (
            pool.connector.replace("Connector", ""),
            pool.version,
            both_sizes(pool.memory).partition(" = ")[2],
            f"{pool.block_bytes:,}",
            f"{pool.blocks:,}",
            _number(pool.tokens),
            pool.key,
            pool.policy,
        )
        for pool in _pools(case)
    ]
    total = sum(kind.nbytes for kind in case.kinds)
    rate = f"{case.offload.bytes_per_second / 1e9:g} GB/s"
    cost = f"the request, {both_sizes(total)}, one way at {rate}: {format_seconds(_bus_seconds(case))}"
    return ["", f"pools on the host, all of {case.ranks} ranks together", *aligned(heads, cells), cost]


class _Notes:
    """Footnotes of one table: equal texts get one number."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def mark(self, *texts: str) -> list[str]:
        """Return the marks of texts, noting the new ones; none for an empty text."""
        found = [text for text in texts if text]
        self._texts += [text for text in dict.fromkeys(found) if text not in self._texts]
        return [f"[{self._texts.index(text) + 1}]" for text in found]

    @property
    def lines(self) -> list[str]:
        """The notes, each on a line of its own or several."""
        return [
            line
            for number, text in enumerate(self._texts, 1)
            for line in wrap(text, _WIDTH, initial_indent=f"  [{number}] ", subsequent_indent="      ")
        ]


def _sections(case: _Case) -> list[tuple[str, int]]:
    return [(version, kind) for kind in range(len(case.kinds)) for version in case.versions]


def _of_kind(case: _Case, kind: int) -> str:
    return f", kind {kind + 1}: {type(case.kinds[kind].spec).__name__}" if len(case.kinds) > 1 else ""


def _objects(objects: int | None) -> str:
    return "" if objects is None else f"segments of {objects:,} objects, one for each block"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
