"""Receivers for tests: one that grants what it was told to, and one that fails on purpose."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdtx.errors import AuthenticationFailed, DeadlineExceeded, PdtxError, TransferRefused
from pdtx.transports import Placement, Receiver, TransferKey


@dataclass(frozen=True)
class Placed:
    """One call of placed() or offered()."""

    session_id: str
    key: TransferKey
    nbytes: int
    error: PdtxError | None


class GrantingReceiver:
    """A Receiver with a table of session tokens and two of grants, each good for one payload. Keeps what it hears.

    heard: the calls of placed(); given: those of offered(); notices: (session, data); ended: (session, reason).
    """

    def __init__(self) -> None:
        self._tokens = dict[str, bytes]()
        self._grants = dict[tuple[str, TransferKey], Placement]()
        self._offers = dict[tuple[str, TransferKey], Placement]()
        self._changed = threading.Condition()
        self.heard = list[Placed]()
        self.given = list[Placed]()
        self.notices = list[tuple[str, bytes]]()
        self.ended = list[tuple[str, str]]()

    def add_session(self, session_id: str, token: bytes) -> None:
        """Admit a session."""
        with self._changed:
            self._tokens[session_id] = token

    def grant(self, session_id: str, key: TransferKey, placement: Placement) -> None:
        """Let one payload in."""
        with self._changed:
            self._grants[session_id, key] = placement

    def grant_get(self, session_id: str, key: TransferKey, placement: Placement) -> None:
        """Let one payload out."""
        with self._changed:
            self._offers[session_id, key] = placement

    def admit(self, session_id: str) -> bytes:
        """See Receiver."""
        with self._changed:
            if session_id not in self._tokens:
                raise AuthenticationFailed(f"no session {session_id!r}")
            return self._tokens[session_id]

    def place(self, session_id: str, key: TransferKey) -> Placement:
        """See Receiver."""
        with self._changed:
            placement = self._grants.pop((session_id, key), None)
        if placement is None:
            raise TransferRefused(f"nothing was granted to session {session_id} for {key}")
        return placement

    def placed(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        """See Receiver."""
        with self._changed:
            self.heard.append(Placed(session_id, key, nbytes, error))
            self._changed.notify_all()

    def offer(self, session_id: str, key: TransferKey) -> Placement:
        """See Receiver."""
        with self._changed:
            placement = self._offers.pop((session_id, key), None)
        if placement is None:
            raise TransferRefused(f"nothing was offered to session {session_id} for {key}")
        return placement

    def offered(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        """See Receiver."""
        with self._changed:
            self.given.append(Placed(session_id, key, nbytes, error))
            self._changed.notify_all()

    def notified(self, session_id: str, data: bytes) -> None:
        """See Receiver."""
        with self._changed:
            self.notices.append((session_id, data))
            self._changed.notify_all()

    def closed(self, session_id: str, reason: str) -> None:
        """See Receiver."""
        with self._changed:
            self.ended.append((session_id, reason))
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = 5.0) -> None:
        """Wait until condition holds after something was heard. Raises DeadlineExceeded."""
        with self._changed:
            if not self._changed.wait_for(condition, timeout_s):
                raise DeadlineExceeded(what, "the mover", timeout_s)


class Gate:
    """A place in which threads are held until it opens."""

    def __init__(self, limit_s: float = 30.0) -> None:
        self._open = threading.Event()
        self._reached = threading.Event()
        self._limit_s = limit_s

    def hold(self) -> None:
        """Wait until the gate opens, or for its limit."""
        self._reached.set()
        self._open.wait(self._limit_s)

    def open(self) -> None:
        """Let everyone through from now on."""
        self._open.set()

    def wait_reached(self, timeout_s: float = 5.0) -> None:
        """Wait until someone is held. Raises DeadlineExceeded."""
        begun = time.monotonic()
        if not self._reached.wait(timeout_s):
            raise DeadlineExceeded("a call of the receiver", "the mover", round(time.monotonic() - begun, 3))


class FaultyReceiver:
    """A Receiver that calls a hook first, where there is one: to wait there, or to raise.

    inner: what gets the calls otherwise. before_notified gets the notice, the others the key.
    """

    def __init__(
        self,
        inner: Receiver,
        *,
        before_place: Callable[[TransferKey], None] | None = None,
        before_placed: Callable[[TransferKey], None] | None = None,
        before_offer: Callable[[TransferKey], None] | None = None,
        before_offered: Callable[[TransferKey], None] | None = None,
        before_notified: Callable[[bytes], None] | None = None,
    ) -> None:
        nothing: Callable[[object], None] = lambda _: None  # noqa: E731
        self._inner = inner
        self._before_place, self._before_placed = before_place or nothing, before_placed or nothing
        self._before_offer, self._before_offered = before_offer or nothing, before_offered or nothing
        self._before_notified = before_notified or nothing

    def admit(self, session_id: str) -> bytes:
        """See Receiver."""
        return self._inner.admit(session_id)

    def place(self, session_id: str, key: TransferKey) -> Placement:
        """See Receiver."""
        self._before_place(key)
        return self._inner.place(session_id, key)

    def placed(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        """See Receiver."""
        self._before_placed(key)
        self._inner.placed(session_id, key, nbytes, error)

    def offer(self, session_id: str, key: TransferKey) -> Placement:
        """See Receiver."""
        self._before_offer(key)
        return self._inner.offer(session_id, key)

    def offered(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        """See Receiver."""
        self._before_offered(key)
        self._inner.offered(session_id, key, nbytes, error)

    def notified(self, session_id: str, data: bytes) -> None:
        """See Receiver."""
        self._before_notified(data)
        self._inner.notified(session_id, data)

    def closed(self, session_id: str, reason: str) -> None:
        """See Receiver."""
        self._inner.closed(session_id, reason)
