"""A case as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: layers computed and moved on every link."""

from collections.abc import Iterator, Sequence
from typing import Any

from pdtx.results.model import CaseResult, Sample, Transfer
from pdtx.units import format_bytes

_MICRO = 1e6
_GAP_S = 1e-3
"""Between two iterations, which are laid end to end."""
_COMPUTE_LANE = 0

Event = dict[str, Any]


def chrome_trace(case: CaseResult, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the trace of some iterations: a process for each link, a thread for computing and for transfers under way.

    Times are microseconds of the clock of the side that posts, iterations one after the other.
    """
    events = list(_names(case, samples))
    offset = 0.0
    for sample in samples:
        events += _iteration(case, sample, offset)
        length = max((one.ended for one in sample.transfers), default=sample.wall_s)
        offset += max(length, sample.wall_s) + _GAP_S
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def lanes(transfers: Sequence[Transfer]) -> list[tuple[int, Transfer]]:
    """Put transfers that are under way at the same time on lanes of their own: (lane from 0, transfer)."""
    free: list[float] = []
    placed = []
    for transfer in sorted(transfers, key=lambda one: (one.posted, one.ended)):
        lane = next((number for number, end in enumerate(free) if end <= transfer.posted), len(free))
        if lane == len(free):
            free.append(0.0)
        free[lane] = transfer.ended
        placed.append((lane, transfer))
    return placed


def computations(case: CaseResult, transfers: Sequence[Transfer]) -> list[tuple[float, float, Transfer]]:
    """Return (begin, end, transfer) of the emulated computation of each slice of layers, once for each slice."""
    per_layer = case.case.layer_compute_s
    if per_layer <= 0:
        return []
    found, reached = [], float("-inf")
    first = {(one.request, one.layer_start, one.layer_stop): one for one in transfers}
    for one in sorted(first.values(), key=lambda one: one.ready):
        begin = max(one.ready - per_layer * (one.layer_stop - one.layer_start), reached, 0.0)
        if one.ready > begin:
            found.append((begin, one.ready, one))
            reached = one.ready
    return found


def layer_name(transfer: Transfer) -> str:
    """Return which layers a transfer moves, as a reader counts them."""
    last = transfer.layer_stop - 1
    return f"layer {last}" if last <= transfer.layer_start else f"layers {transfer.layer_start}-{last}"


def _names(case: CaseResult, samples: Sequence[Sample]) -> Iterator[Event]:
    for link in sorted({one.link for sample in samples for one in sample.transfers}):
        ends = case.links[link] if 0 <= link < len(case.links) else None
        name = f"link {link}" + (f": node {ends.prefill} to node {ends.decode}" if ends is not None else "")
        yield {"name": "process_name", "ph": "M", "pid": link, "tid": 0, "args": {"name": name}}
        yield {"name": "thread_name", "ph": "M", "pid": link, "tid": _COMPUTE_LANE, "args": {"name": "compute"}}


def _iteration(case: CaseResult, sample: Sample, offset: float) -> Iterator[Event]:
    for link in sorted({one.link for one in sample.transfers}):
        of_link = [one for one in sample.transfers if one.link == link]
        for begin, end, one in computations(case, of_link):
            args: Event = {"iteration": sample.iteration}
            yield _slice(
                f"compute {layer_name(one)}", "compute", link, _COMPUTE_LANE, offset + begin, end - begin, args
            )
        for lane, one in lanes(of_link):
            args = {
                "iteration": sample.iteration, "request": one.request, "buffer": one.buffer, "bytes": one.nbytes,
                "ranks": f"{one.src_rank} to {one.dst_rank}", "staged": one.staged,
                "post_us": (one.sent - one.posted) * _MICRO,
            }  # fmt: skip
            name = f"move {layer_name(one)}, {format_bytes(one.nbytes)}"
            yield _slice(name, "move", link, lane + 1, offset + one.posted, one.ended - one.posted, args)


def _slice(name: str, kind: str, link: int, lane: int, begin: float, seconds: float, args: Event) -> Event:
    times = {"ts": begin * _MICRO, "dur": max(seconds, 0.0) * _MICRO}
    return {"name": name, "cat": kind, "ph": "X", "pid": link, "tid": lane, **times, "args": args}
