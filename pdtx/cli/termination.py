"""SIGTERM as something to wait for."""

import os
import select
import signal
from types import FrameType


class Termination:
    """Takes note of SIGTERM from when it is made, in the main thread.

    A threading.Event is nothing that a handler may set: the thread that it interrupts may hold the event's lock, be it
    in wait(), or in the set() of a signal just before.
    """

    def __init__(self) -> None:
        self._come = False
        self._hears, self._tells = os.pipe()
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if not self._come:  # a pipe that is full would hold up whoever is interrupted
            self._come = True
            os.write(self._tells, b"!")

    def is_set(self) -> bool:
        """Whether it has come."""
        return self._come

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has come, for timeout_s at most; whether it has."""
        select.select([self._hears], [], [], timeout_s)
        return self._come
