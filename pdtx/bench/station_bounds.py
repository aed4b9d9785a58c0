"""Bounds of what a station is told to do, by arithmetic alone: before anything is made that grows with it."""

import math

from pdtx.bench.fragment import check_mean_run
from pdtx.bench.limits import MOST_BLOCK_SIZE, MOST_RANKS, MOST_REQUESTS, MOST_STREAMS, MOST_TOKENS
from pdtx.bench.station_caches import CaseShape
from pdtx.bench.station_pieces import num_pieces
from pdtx.bench.work import LinkWork, StationWork
from pdtx.errors import InputError
from pdtx.results.model import Case
from pdtx.units import format_bytes

_MOST_LINKS = 4096

_MOST_PIECES = 1 << 18
"""Of a station: what is told of more transfers than so many fits into no answer."""

_ENTRY_BYTES = 64
"""Of a block table's entry, with all that is in memory while blocks are being placed by chance."""


def check_work(work: StationWork) -> None:
    """Raise InputError for numbers that nobody measures with, and for ranks and links that do not go together."""
    _check_case(work.case)
    _within("pool_requests", work.pool_requests, 1, MOST_REQUESTS)
    _within("the number of a station's links", len(work.links), 1, _MOST_LINKS)
    _check_ranks(f"the {work.role} station", work.ranks, work.case.tp[0 if work.role == "prefill" else 1])
    for link in work.links:
        _check_link(work, link)
    if len({link.number for link in work.links}) < len(work.links):
        raise InputError("two links of a case have one number")


def check_size(work: StationWork, shape: CaseShape, max_bytes: int) -> None:
    """Raise InputError for more transfers than can be told of, or block tables that need more than max_bytes."""
    pieces = sum(num_pieces(shape, link) for link in work.links)
    if pieces > _MOST_PIECES:
        raise InputError(
            f"the case has {pieces:,} transfers in an iteration here, {_MOST_PIECES:,} at most; take a smaller "
            "batch or more layers_per_transfer"
        )
    needed = _ENTRY_BYTES * (shape.prefill.table_entries + shape.decode.table_entries)
    if needed > max_bytes:
        raise InputError(
            f"the block tables of this case need {format_bytes(needed)}, and --max-bytes allows "
            f"{format_bytes(max_bytes)}; take fewer tokens, a smaller batch or larger blocks, or raise it"
        )


def _check_case(case: Case) -> None:
    if case.tokens < 1:
        raise InputError(f"a case needs 1 token or more, not {case.tokens}")
    _within("tokens", case.tokens, 1, MOST_TOKENS)
    _within("depth", case.depth, 0)
    check_mean_run(case.mean_run)
    for size, tp_size in zip(case.block_size, case.tp, strict=True):
        _within("block_size", size, 1, MOST_BLOCK_SIZE)
        _within("tp", tp_size, 1, MOST_RANKS)
    if case.streams is not None:
        _within("streams", case.streams, 1, MOST_STREAMS)
    if not (math.isfinite(case.layer_compute_s) and case.layer_compute_s >= 0):
        raise InputError(f"layer_compute_s is {case.layer_compute_s:g}; needs seconds, 0 or more")


def _check_link(work: StationWork, link: LinkWork) -> None:
    for side, ranks, size in zip(
        ("prefill", "decode"), (link.prefill_ranks, link.decode_ranks), work.case.tp, strict=True
    ):
        _check_ranks(f"link {link.number} on the {side} side", ranks, size)
    requests = link.requests
    if not requests or requests.start < 0 or requests.stop > work.pool_requests:
        raise InputError(f"link {link.number} has requests {requests.start}..{requests.stop}, of {work.pool_requests}")
    needed = link.prefill_ranks if work.role == "prefill" else link.decode_ranks
    if needed.start < work.ranks.start or needed.stop > work.ranks.stop:
        raise InputError(
            f"link {link.number} needs {work.role} ranks {_told(needed)}, and {_told(work.ranks)} are here"
        )


def _check_ranks(whose: str, ranks: range, size: int) -> None:
    if not ranks or ranks.start < 0 or ranks.stop > size:
        raise InputError(f"{whose} has ranks {_told(ranks)}, of {size}")


def _told(ranks: range) -> str:
    return f"{ranks.start}..{ranks.stop}"


def _within(name: str, value: int, least: int, most: int | None = None) -> None:
    if value < least or (most is not None and value > most):
        bounds = f"{least:,} or more" if most is None else f"{least:,} to {most:,}"
        raise InputError(f"{name} is {value:,}; needs {bounds}")
