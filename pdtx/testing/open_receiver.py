"""A receiver that lets everything in and out, and keys that say which bytes of its memory they mean."""

import threading
import time
from collections import Counter

import numpy as np

from pdtx.errors import AuthenticationFailed, PdtxError, TransferRefused
from pdtx.plan import Runs, Slices
from pdtx.transports import Placement, Region, TransferKey

BLOCK = 64 << 10

STRAIGHT, HELD = 0, 1
"""Layers of a key: it is served at once, or only when the receiver is released."""


def key_of(start: int, stop: int, layer: int = STRAIGHT) -> TransferKey:
    """Name the bytes start..stop of an OpenReceiver's memory."""
    return TransferKey("open", layer, layer + 1, start, stop)


def runs_of(start: int, stop: int) -> Runs:
    """Return the runs between two regions of the same size that move the bytes start..stop, in blocks."""
    starts = np.arange(start, stop, BLOCK, dtype=np.int64)
    return Runs(starts, starts, np.minimum(starts + BLOCK, stop) - starts)


class OpenReceiver:
    """See Receiver. Counts what is under way, per session.

    token: of every session. grant_s: seconds that each transfer is given.
    """

    def __init__(self, region: Region, token: bytes, grant_s: float = 60.0) -> None:
        self._region, self._token, self._grant_s = region, token, grant_s
        self._changed = threading.Condition()
        self._released, self._holding, self._held = threading.Event(), False, threading.Event()
        self._shut = set[str]()
        self.open, self.ended, self.failed = Counter[str](), Counter[str](), Counter[str]()
        self.closed_sessions = list[str]()

    def hold(self) -> None:
        """Serve nothing more until release()."""
        self._holding = True

    def wait_until_held(self, timeout_s: float) -> bool:
        """Wait until something is held."""
        return self._held.wait(timeout_s)

    def release(self) -> None:
        """Serve what is held."""
        self._released.set()

    def shut(self, session_id: str) -> None:
        """Refuse a session's transfers from now on."""
        with self._changed:
            self._shut.add(session_id)

    def wait_for_end(self, session_id: str, count: int, timeout_s: float) -> bool:
        """Wait until so many of a session's transfers have ended well."""
        with self._changed:
            return self._changed.wait_for(lambda: self.ended[session_id] >= count, timeout_s)

    def wait_until_idle(self, session_id: str, timeout_s: float) -> bool:
        """Wait until none of a session's transfers is under way."""
        with self._changed:
            return self._changed.wait_for(lambda: self.open[session_id] == 0, timeout_s)

    def wait_until_closed(self, session_id: str, timeout_s: float) -> bool:
        """Wait until a session's connection has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: session_id in self.closed_sessions, timeout_s)

    def admit(self, session_id: str) -> bytes:
        """See Receiver."""
        if not session_id:
            raise AuthenticationFailed("a session without a name")
        return self._token

    def place(self, session_id: str, key: TransferKey) -> Placement:
        """See Receiver."""
        with self._changed:
            if session_id in self._shut:
                raise TransferRefused("the receiver is shut")
            self.open[session_id] += 1
        if key.layer_start == HELD or self._holding:
            self._held.set()
            self._released.wait(60)
        runs = runs_of(key.token_start, key.token_stop)
        return Placement(self._region, Slices(runs.dst, runs.nbytes), time.monotonic() + self._grant_s)

    def placed(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        """See Receiver."""
        with self._changed:
            self.open[session_id] -= 1
            (self.ended if error is None else self.failed)[session_id] += 1
            self._changed.notify_all()

    offer, offered = place, placed

    def notified(self, session_id: str, data: bytes) -> None:
        """See Receiver."""

    def closed(self, session_id: str, reason: str) -> None:
        """See Receiver."""
        with self._changed:
            self.closed_sessions.append(session_id)
            self._changed.notify_all()
