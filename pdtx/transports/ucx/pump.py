"""Letting a worker make progress until something has come about, without burning a core when nothing happens."""

import ctypes
import select
import time
from abc import ABC, abstractmethod

from pdtx.native import Native
from pdtx.transports.ucx.libucp import Ucp
from pdtx.transports.ucx.status import IN_PROGRESS

_SPIN_S = 100e-6
"""Asking again is faster than sleeping as long as the next event is this near."""

_TURNS = 16
"""Times that a busy worker is asked to go on before anything else is looked at."""

_MAX_SLEEP_S = 60.0


class Pump(ABC):
    """Drives one worker. Used by one thread at a time, but for interrupt()."""

    def __init__(self, ucp: Ucp, worker: int) -> None:
        self._ucp, self._worker = ucp, worker
        self._interrupted = ctypes.c_int64()
        self._event = ucp.event_descriptor(worker)

    def interrupt(self) -> None:
        """Make a run() that is under way, or else the next one, return soon. For any thread; the worker exists."""
        self._interrupted.value = 1
        self._ucp.signal(self._worker)

    def run(self, until: float, *, descriptor: int = -1, request: int = 0) -> bool:
        """Make progress until a descriptor can be read or a request has ended; False if neither is so.

        until: time.monotonic() at which it returns; earlier when interrupted. Raises UcsError.
        """
        came_about = self._run(until, descriptor, request)
        if not came_about:
            self._interrupted.value = 0
        return came_about

    @abstractmethod
    def _run(self, until: float, descriptor: int, request: int) -> bool: ...


class NativePump(Pump):
    """See Pump. The loop is pdtx's C library's: Python's other threads do not slow it down."""

    def __init__(self, ucp: Ucp, worker: int, native: Native) -> None:
        super().__init__(ucp, worker)
        self._native = native
        self._progress, self._arm = ucp.address_of("ucp_worker_progress"), ucp.address_of("ucp_worker_arm")
        self._status = ucp.address_of("ucp_request_check_status")

    def _run(self, until: float, descriptor: int, request: int) -> bool:
        timeout_s = min(max(0.0, until - time.monotonic()), _MAX_SLEEP_S)
        status = self._native.pump(
            self._progress,
            self._arm,
            self._worker,
            self._event,
            descriptor,
            self._status,
            request,
            ctypes.addressof(self._interrupted),
            int(_SPIN_S * 1e9),
            int(timeout_s * 1e9),
        )
        if status < 0:
            raise self._ucp.error("wait for events", status)
        return status == 1


class PythonPump(Pump):
    """See Pump."""

    def _run(self, until: float, descriptor: int, request: int) -> bool:
        poll = self._poll(descriptor)
        quiet_since: float | None = None
        while True:
            busy = self._turn()
            if request and self._ucp.request_status(request) != IN_PROGRESS:
                return True
            if descriptor >= 0 and _readable(poll, descriptor, 0.0):
                return True
            now = time.monotonic()
            if now >= until or self._interrupted.value:
                return False
            if busy:
                quiet_since = None
            elif quiet_since is None:
                quiet_since = now
            elif now - quiet_since >= _SPIN_S and self._ucp.arm(self._worker):
                # What came before this was seen by the turn, and what comes from now on wakes the descriptor.
                if _readable(poll, descriptor, min(until - now, _MAX_SLEEP_S)):
                    return True
                quiet_since = None

    def _turn(self) -> bool:
        """Make some progress; whether there was any."""
        for turn in range(_TURNS):
            if not self._ucp.progress(self._worker):
                return turn > 0
        return True

    def _poll(self, descriptor: int) -> "select.poll":
        poll = select.poll()
        poll.register(self._event, select.POLLIN)
        if descriptor >= 0:
            poll.register(descriptor, select.POLLIN)
        return poll


def _readable(poll: "select.poll", descriptor: int, timeout_s: float) -> bool:
    return any(ready == descriptor for ready, _ in poll.poll(timeout_s * 1000))


def make_pump(ucp: Ucp, worker: int, native: Native | None) -> Pump:
    """Return a pump for a worker. Raises UcsError if it cannot be waited for."""
    return PythonPump(ucp, worker) if native is None else NativePump(ucp, worker, native)
