"""What became of each request of a replay, and the figures that are made of it."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from pdtx.serving import Ended
from pdtx.spans import union_seconds
from pdtx.units import gb_per_s

PERCENTILES = (50, 90, 99)


class ReplayRow(msgspec.Struct, kw_only=True):
    """One request. Sizes in bytes, lengths in tokens, times in seconds.

    arrival_s: after the replay's begin. queue_s: from the arrival until it had blocks and was asked for at the decode
    node. load_s: loading from tiers. compute_s: of its chunks. computed_s, ttft_s: from the arrival until its prompt
    was computed, and until all of its cache was at the decode node as well, which could begin then; None where
    that never came. exposed_s: the part of ttft_s after the prompt was computed, which is the transfer alone.
    hidden: share of move_s before that, 0 to 1. moves: when transfers were under way, after the replay's begin.
    wrong: elements; None where nobody looked.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    cached_tokens: int = 0
    cached_from: str = ""
    peer_cached_tokens: int = 0
    queue_s: float = 0.0
    load_s: float = 0.0
    load_bytes: int = 0
    compute_s: float = 0.0
    computed_s: float | None = None
    ttft_s: float | None = None
    exposed_s: float | None = None
    prepare_s: float = 0.0
    post_s: float = 0.0
    move_s: float = 0.0
    hidden: float = 0.0
    nbytes: int = 0
    num_runs: int = 0
    mode: str = ""
    wrong: int | None = None
    moves: list[tuple[float, float]] = []
    error: str | None = None


def row_of(ended: Ended, begun: float) -> ReplayRow:
    """Return the row of a request at its end. begun: the replay's begin, in time.monotonic()."""
    row, request = ended.row, ended.request
    found = ReplayRow(
        request_id=row.request_id,
        arrival_s=ended.arrived - begun,
        prompt_tokens=row.prompt_tokens,
        max_tokens=ended.job.max_tokens or 0,
        wrong=row.wrong,
        error=row.error,
    )
    if request is None:
        return found
    for name in ("cached_tokens", "cached_from", "peer_cached_tokens", "load_s", "load_bytes", "prepare_s", "post_s"):
        setattr(found, name, getattr(row, name))
    for name in ("move_s", "hidden", "nbytes", "num_runs", "mode"):
        setattr(found, name, getattr(row, name))
    found.queue_s = request.begun - ended.arrived
    found.compute_s = sum(chunk.ready[-1][2] for chunk in ended.chunks if chunk.ready)
    found.moves = [(start - begun, end - begun) for start, end in merged(request.moves)]
    if row.error is None and not math.isnan(request.computed):
        last = max((end for _, end in request.moves), default=request.computed)
        found.exposed_s = max(0.0, last - request.computed)
        found.computed_s = request.computed - ended.arrived
        found.ttft_s = found.computed_s + found.exposed_s
    return found


def merged(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return intervals (begin, end) in order, those that touch or overlap as one."""
    found = list[tuple[float, float]]()
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def figures(rows: Sequence[ReplayRow]) -> dict[str, Any]:
    """Return what a replay's rows come to.

    hit_rate: tokens that tiers of the prefill node had, of all tokens of prompts; of requests that ended well, as all
    figures but the counts. transfer_share: of all time to first token, that in which only the transfer was waited for.
    gb_per_s: bytes over the time in which at least one transfer was under way, of all requests together.
    """
    well = [row for row in rows if row.error is None]
    tokens = sum(row.prompt_tokens for row in well)
    first = [row.ttft_s for row in well if row.ttft_s is not None]
    exposed = [row.exposed_s or 0.0 for row in well if row.ttft_s is not None]
    nbytes = sum(row.nbytes for row in well)
    moving = union_seconds([interval for row in well for interval in row.moves])
    looked = [row.wrong for row in rows if row.wrong is not None]
    return {
        "requests": len(rows),
        "failed": len(rows) - len(well),
        "verified": sum(row.wrong is not None for row in well),
        "wrong": sum(looked) if looked else None,
        "prompt_tokens": tokens,
        "cached_tokens": sum(row.cached_tokens for row in well),
        "peer_cached_tokens": sum(row.peer_cached_tokens for row in well),
        "hit_rate": sum(row.cached_tokens for row in well) / tokens if tokens else 0.0,
        "ttft_s": _percentiles(first),
        "transfer_share": sum(exposed) / sum(first) if sum(first) else 0.0,
        "exposed_s": _percentiles(exposed),
        "queue_s": _percentiles([row.queue_s for row in well]),
        "move_s": _percentiles([row.move_s for row in well if row.nbytes]),
        "nbytes": nbytes,
        "moving_s": moving,
        "gb_per_s": gb_per_s(nbytes, moving),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Return percentiles and the extremes by name; None where there are no values."""
    if not values:
        return dict.fromkeys((*(f"p{percent}" for percent in PERCENTILES), "min", "max"))
    found = np.percentile(values, PERCENTILES)
    named = {f"p{percent}": float(value) for percent, value in zip(PERCENTILES, found, strict=True)}
    return {**named, "min": min(values), "max": max(values)}
