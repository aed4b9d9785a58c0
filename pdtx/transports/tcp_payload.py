"""A payload's way between a region and a socket, through a stage."""

import contextlib
from collections.abc import Callable

import numpy as np

from pdtx.plan import Slices
from pdtx.transports.base import Region
from pdtx.transports.bounce import Stage
from pdtx.transports.iovec import Iovecs, range_of
from pdtx.transports.wire import FOREVER, Guard, Wire

Progress = Callable[[int], None]


def send_payload(
    wire: Wire,
    head: bytes,
    stage: Stage,
    region: Region,
    slices: Slices,
    phase: str,
    deadline: float = FOREVER,
    stall_s: float = FOREVER,
    progress: Progress | None = None,
) -> None:
    """Send head and then the payload; progress is told the payload's bytes only."""
    before = len(head)

    def count(nbytes: int) -> None:
        nonlocal before
        of_head = min(before, nbytes)
        before -= of_head
        if progress is not None and nbytes > of_head:
            progress(nbytes - of_head)

    data = np.frombuffer(head, np.uint8)
    waiting: list[Iovecs] = [range_of(data.ctypes.data, len(data))]
    with contextlib.closing(stage.gather(region, slices)) as gathered:
        for vectors in gathered:
            # The head travels with the first bytes: one system call and one packet less.
            wire.send_vectors(np.concatenate((*waiting, vectors)), phase, deadline, stall_s, count)
            waiting.clear()
    if waiting:
        wire.send_vectors(waiting[0], phase, deadline, stall_s, count)


def receive_payload(
    wire: Wire,
    stage: Stage,
    region: Region,
    slices: Slices,
    phase: str,
    deadline: float = FOREVER,
    stall_s: float = FOREVER,
    progress: Progress | None = None,
    guard: Guard = contextlib.nullcontext,
) -> None:
    """Receive a payload; whatever writes into the region does so inside a guard()."""
    scattering = stage.scatter(region, slices)
    try:
        while True:
            with guard():
                vectors = next(scattering, None)
            if vectors is None:
                return
            wire.receive_vectors(vectors, phase, deadline, stall_s, progress, guard)
    finally:
        scattering.close()
