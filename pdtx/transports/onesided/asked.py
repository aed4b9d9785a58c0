"""What an initiator has asked its peer for: transfers that are under way, from the question to the last answer."""

import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from pdtx.plan import Slices
from pdtx.transports.base import Region, TransferHandle
from pdtx.transports.onesided.frames import Go, Refused
from pdtx.transports.window import SendWindow

NO_SLICES = Slices(np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True)
class Job:
    """What to do: move slices of region, or (region None) tell the peer data."""

    region: Region | None = None
    slices: Slices = NO_SLICES
    is_get: bool = False
    staged: bool = False
    data: bytes = b""


@dataclass
class Asked:
    """A transfer that has been asked for, or a notice that is to be sent."""

    sequence: int
    handle: TransferHandle
    job: Job
    begun: bool = False  # whether it is its turn, and nobody has cancelled it before
    over: bool = False  # whether its end, or the notice, has been sent
    answer: Go | Refused | None = None
    answered_at: float = 0.0  # when that came, in time.monotonic()
    arrived_before: int | None = None  # what the window returned for it, if it is in there


@dataclass
class Book:
    """What is under way on a connection. Changed, and asked, under the condition.

    pulls: see Fabric. The peer pulls a put some time after its end has been sent: the window limits how many of them.
    """

    pulls: bool
    changed: threading.Condition = field(default_factory=threading.Condition)
    asked: deque[Asked] = field(default_factory=deque)  # not moved yet, in order
    unanswered: dict[int, Asked] = field(default_factory=dict)  # by sequence, until Done or Refused
    closed: bool = False
    window: SendWindow = field(default_factory=lambda: SendWindow(lambda: 0.0))  # within a host

    def _is_pulled(self, asked: Asked) -> bool:
        return self.pulls and not asked.job.is_get and asked.job.region is not None

    def may_begin(self, asked: Asked) -> bool:
        """Whether the first that has been asked for may begin, or has ended before."""
        if asked.begun or asked.handle.state.final or not self._is_pulled(asked):
            return True
        return self.window.has_room(asked.handle.nbytes)

    def begin(self, asked: Asked) -> None:
        """Mark the first that has been asked for as moving, unless it has ended."""
        if asked.begun or not asked.handle.post():
            return
        asked.begun = True
        if self._is_pulled(asked):
            asked.arrived_before = self.window.begin(asked.handle.nbytes)

    def answered(self, asked: Asked) -> None:
        """Take out a transfer that has had its last answer."""
        del self.unanswered[asked.sequence]
        if asked.arrived_before is not None:
            handle = asked.handle
            if self.window.end(handle.nbytes, handle.posted, asked.arrived_before):
                self.changed.notify_all()
