"""A payload's way between a region and a socket, straight or through a stage."""

import contextlib
from collections.abc import Callable

import numpy as np

from pdtx.plan import Slices
from pdtx.ranges.iovec import IovecCursor, Iovecs, iovecs, range_of
from pdtx.transports.base import Region
from pdtx.transports.bounce import Stage
from pdtx.transports.wire import FOREVER, Guard, Wire

Progress = Callable[[int], None]


def straight(head: bytes, region: Region, slices: Slices) -> IovecCursor:
    """Return head and the payload's ranges themselves; the caller keeps both alive."""
    return IovecCursor(iovecs(region.address, slices, head), len(head) + slices.total)


def without_head(head: bytes, progress: Progress) -> Progress:
    """Return what counts the bytes after head only."""
    before = len(head)

    def count(nbytes: int) -> None:
        nonlocal before
        of_head = min(before, nbytes)
        before -= of_head
        if nbytes > of_head:
            progress(nbytes - of_head)

    return count


def send_payload(
    wire: Wire,
    head: bytes,
    stage: Stage | None,
    region: Region,
    slices: Slices,
    phase: str,
    deadline: float,
    stall_s: float,
    progress: Progress,
) -> None:
    """Send head and then the payload; progress is told the payload's bytes only."""
    count = without_head(head, progress)
    if stage is None:
        wire.send_vectors(straight(head, region, slices), phase, deadline, stall_s, count)
        return
    data = np.frombuffer(head, np.uint8)
    waiting: list[Iovecs] = [range_of(data.ctypes.data, len(data))] if head else []
    with contextlib.closing(stage.gather(region, slices)) as gathered:
        for vectors in gathered:
            # The head travels with the first bytes: one system call and one packet less.
            wire.send_vectors(np.concatenate((*waiting, vectors)), phase, deadline, stall_s, count)
            waiting.clear()
    if waiting:
        wire.send_vectors(waiting[0], phase, deadline, stall_s, count)


def receive_payload(
    wire: Wire,
    stage: Stage | None,
    region: Region,
    slices: Slices,
    phase: str,
    deadline: float = FOREVER,
    stall_s: float = FOREVER,
    progress: Progress | None = None,
    guard: Guard | None = None,
) -> None:
    """Receive a payload; whatever writes into the region does so inside a guard(), where there is one."""
    guarded = guard or contextlib.nullcontext
    if stage is None:
        wire.receive_vectors(straight(b"", region, slices), phase, deadline, stall_s, progress, guarded)
        return
    scattering = stage.scatter(region, slices, settled=guard is not None)
    try:
        while True:
            with guarded():
                vectors = next(scattering, None)
            if vectors is None:
                return
            # Into a buffer, which needs no guard.
            wire.receive_vectors(vectors, phase, deadline, stall_s, progress)
    finally:
        scattering.close()
