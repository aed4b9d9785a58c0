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
    """See TransferHandle. Once it has ended, its region belongs to the caller again, whoever has ended it."""

    def __init__(self, key: TransferKey, nbytes: int, peer: str, deadline: float) -> None:
        super().__init__(key, nbytes, peer, deadline)
        self._filling = 0
        self._stopping = False
        self._idle = threading.Condition()

    @property
    def ending(self) -> bool:
        """Whether it has ended, or somebody waits for the step under way in order to end it."""
        return self._stopping or self.state.final

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Surround each step that writes into the region; short, for whoever ends the transfer waits for it.

        Raises Stopped instead if the transfer is at its end.
        """
        with self._idle:
            if self._stopping:
                raise Stopped
            self._filling += 1
        try:
            yield
        finally:
            with self._idle:
                self._filling -= 1
                self._idle.notify_all()

    def _end(self, error: PdtxError | None, state: TransferState, from_state: TransferState | None) -> bool:
        if from_state is None:
            with self._idle:
                self._stopping = True
                self._idle.wait_for(lambda: not self._filling)
        return super()._end(error, state, from_state)

    def _late(self) -> DeadlineExceeded:
        phase = "its turn" if self.state is TransferState.PENDING else "bytes"
        waited = round(time.monotonic() - self.created, 3)
        return DeadlineExceeded(
            f"{phase} of {self.key}", self.peer, waited, f"{self.moved} of {self.nbytes} bytes received"
        )
