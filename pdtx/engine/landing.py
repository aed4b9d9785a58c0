"""What may be written of one request, and what has been: asked by the transport's threads, opened and closed by the
control thread."""

import threading
from collections.abc import Callable

from pdtx.engine.arrivals import Arrivals, Notice
from pdtx.engine.matching import BufferMatch, Match
from pdtx.errors import TransferRefused
from pdtx.plan.runs import Int64s
from pdtx.protocol import Part
from pdtx.transports import TransferKey

OnIdle = Callable[[], None]


class Landing:
    """The blocks of one granted request, as transports see them. Its own lock guards all of it; nothing is called
    under that.

    arrivals: what is expected. tables: for each group the granted block table, once it is open.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self._lock = threading.Lock()
        self._arrivals = arrivals
        self._open, self._writers = False, 0
        self._on_idle: OnIdle | None = None
        self.tables: tuple[Int64s, ...] = ()
        self.deadline = 0.0
        self.received_runs = 0

    # -- the control thread -------------------------------------------------------------------------------------------

    def open(self, tables: tuple[Int64s, ...], deadline: float, fewer: Arrivals | None) -> None:
        """Let payloads in, until deadline in time.monotonic(). fewer: what is expected now, where that has changed."""
        with self._lock:
            self._arrivals = fewer or self._arrivals
            self.tables, self.deadline, self._open = tables, deadline, True

    def close(self, on_idle: OnIdle) -> bool:
        """Let nothing more in. Return whether nothing is being written; else on_idle is called once that is so."""
        with self._lock:
            self._open = False
            if self._writers:
                self._on_idle = on_idle
            return not self._writers

    def notice(self, key: TransferKey, nbytes: int) -> Notice:
        """Take the producer's notice that key's payload has been delivered, see Arrivals."""
        with self._lock:
            return self._arrivals.notice(key, nbytes)

    def keep_noticed(self, match: Match) -> list[Part]:
        """Forget what has come through a closed door but for what was noticed, which is returned, see Arrivals."""
        with self._lock:
            return self._arrivals.keep_noticed(match.of_consumer)

    # -- anybody ------------------------------------------------------------------------------------------------------

    @property
    def received_bytes(self) -> int:
        """Bytes of payloads that have arrived."""
        return self._arrivals.received_bytes

    @property
    def noticed_bytes(self) -> int:
        """Bytes of those whose delivery was noticed."""
        return self._arrivals.noticed_bytes

    def missing(self) -> str | None:
        """Say what has not arrived, see Arrivals."""
        with self._lock:
            return self._arrivals.missing()

    def unnoticed(self) -> str | None:
        """Say what has arrived without the producer's notice, see Arrivals."""
        with self._lock:
            return self._arrivals.unnoticed()


class Door:
    """What lets one session's payloads of a request in. match: of that session, which says what it may bring.

    Guarded by the landing's lock.
    """

    def __init__(self, landing: Landing, match: Match) -> None:
        self.landing, self.match = landing, match
        self._open, self._writers = True, 0
        self._on_idle: OnIdle | None = None

    def close(self, on_idle: OnIdle) -> bool:
        """Let nothing more in here. Return whether nothing of it is being written; else on_idle is called then."""
        with self.landing._lock:
            self._open = False
            if self._writers:
                self._on_idle = on_idle
            return not self._writers

    # -- transports' threads ------------------------------------------------------------------------------------------

    def begin(self, key: TransferKey) -> tuple[BufferMatch, int]:
        """Note that key's payload is coming; return its buffer and which of its moves it is. end() must follow.

        Raises TransferRefused if it was not granted, is outside the request, or came before.
        """
        with self.landing._lock:
            if not (self._open and self.landing._open):
                raise TransferRefused(f"{key} was not granted")
            match = self.match.of_consumer.get(key.buffer)
            if match is None:
                raise TransferRefused(f"{key} is for buffer {key.buffer}, of which nothing comes from there")
            found = self.landing._arrivals.expect(key, match)
            self._writers += 1
            self.landing._writers += 1
            return match, found

    def note_runs(self, count: int) -> None:
        """Count the runs that a payload is placed as."""
        with self.landing._lock:
            self.landing.received_runs += count

    def end(self, key: TransferKey, nbytes: int | None) -> None:
        """Note that nothing is written for key any more. nbytes: that have arrived, which is all; None if it failed."""
        landing = self.landing
        with landing._lock:
            if nbytes is not None:
                landing._arrivals.arrive(key, nbytes)
            self._writers -= 1
            landing._writers -= 1
            idle = self._on_idle if not self._writers else None, landing._on_idle if not landing._writers else None
        for on_idle in idle:
            if on_idle is not None:
                on_idle()
