"""What may be written of one request, and what has been: asked by the transport's threads, opened and closed by the
control thread."""

import threading
from collections.abc import Callable

from pdtx.engine.arrivals import Arrivals, Notice
from pdtx.engine.matching import BufferMatch
from pdtx.errors import TransferRefused
from pdtx.plan.runs import Int64s
from pdtx.transports import TransferKey


class Landing:
    """The blocks of one granted request, as transports see them. Its own lock guards all of it; nothing is called
    under that.

    arrivals: what is expected. tables: for each group the granted block table, once it is open.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self._lock = threading.Lock()
        self._arrivals = arrivals
        self._open, self._writers = False, 0
        self._on_idle: Callable[[], None] | None = None
        self.tables: tuple[Int64s, ...] = ()
        self.deadline = 0.0
        self.received_bytes = 0
        self.received_runs = 0

    # -- the control thread -------------------------------------------------------------------------------------------

    def open(self, tables: tuple[Int64s, ...], deadline: float, fewer: Arrivals | None) -> None:
        """Let payloads in, until deadline in time.monotonic(). fewer: what is expected now, where that has changed."""
        with self._lock:
            self._arrivals = fewer or self._arrivals
            self.tables, self.deadline, self._open = tables, deadline, True

    def close(self, on_idle: Callable[[], None]) -> bool:
        """Let nothing more in. Return whether nothing is being written; else on_idle is called once that is so."""
        with self._lock:
            self._open = False
            if self._writers:
                self._on_idle = on_idle
            return not self._writers

    def notice(self, key: TransferKey) -> Notice:
        """Take the producer's notice that key's payload has been delivered, see Arrivals."""
        with self._lock:
            return self._arrivals.notice(key)

    # -- transports' threads ------------------------------------------------------------------------------------------

    def begin(self, key: TransferKey) -> tuple[BufferMatch, int]:
        """Note that key's payload is coming; return its buffer and which of its moves it is. end() must follow.

        Raises TransferRefused if it was not granted, is outside the request, or came before.
        """
        with self._lock:
            if not self._open:
                raise TransferRefused(f"{key} was not granted")
            found = self._arrivals.expect(key)
            self._writers += 1
            return found

    def note_runs(self, count: int) -> None:
        """Count the runs that a payload is placed as."""
        with self._lock:
            self.received_runs += count

    def end(self, key: TransferKey, nbytes: int | None) -> None:
        """Note that nothing is written for key any more. nbytes: that have arrived, which is all; None if it failed."""
        with self._lock:
            if nbytes is not None:
                self._arrivals.arrive(key, nbytes)
                self.received_bytes += nbytes
            self._writers -= 1
            on_idle = self._on_idle if not self._writers else None
        if on_idle is not None:
            on_idle()

    # -- anybody ------------------------------------------------------------------------------------------------------

    def missing(self) -> str | None:
        """Say what has not arrived, see Arrivals."""
        with self._lock:
            return self._arrivals.missing()

    def unnoticed(self) -> str | None:
        """Say what has arrived without the producer's notice, see Arrivals."""
        with self._lock:
            return self._arrivals.unnoticed()
