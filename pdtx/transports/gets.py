"""The handle of a get: it ends only when nothing is being written into its region any more."""

import contextlib
import threading
import time
from collections.abc import Iterator

from pdtx.errors import DeadlineExceeded, PdtxError
from pdtx.transports.base import TransferHandle, TransferKey, TransferState


class Stopped(Exception):
    """The transfer has been given up: not one byte more may be written for it."""


class GetHandle(TransferHandle):
    """See TransferHandle. Once it has ended, its region belongs to the caller again, whoever has ended it.

    Nobody but wait() waits for the step under way: whoever ends the transfer before decides how, and the step's thread
    carries that out when it leaves the region.
    """

    def __init__(self, key: TransferKey, nbytes: int, peer: str, deadline: float) -> None:
        super().__init__(key, nbytes, peer, deadline)
        self._filling = 0
        self._stopping = False
        self._decided: tuple[PdtxError | None, TransferState] | None = None
        self._lock = threading.Lock()

    @property
    def ending(self) -> bool:
        """Whether it has ended, or will when the step under way has."""
        return self._stopping or self.state.final

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Surround each step that writes into the region; short, for the transfer ends only after it.

        Raises Stopped instead if the transfer is at its end.
        """
        with self._lock:
            if self._stopping:
                raise Stopped
            self._filling += 1
        try:
            yield
        finally:
            with self._lock:
                self._filling -= 1
                decided = None if self._filling else self._decided
            if decided is not None:
                super()._end(*decided, from_state=None)

    def _end(self, error: PdtxError | None, state: TransferState, from_state: TransferState | None) -> bool:
        if from_state is None:
            with self._lock:
                if self._decided is not None:
                    return False
                self._stopping = True
                if self._filling:
                    self._decided = error, state
                    return True
        return super()._end(error, state, from_state)

    def _late(self) -> DeadlineExceeded:
        phase = "its turn" if self.state is TransferState.PENDING else "bytes"
        waited = round(time.monotonic() - self.created, 3)
        return DeadlineExceeded(
            f"{phase} of {self.key}", self.peer, waited, f"{self.moved} of {self.nbytes} bytes received"
        )
