"""How far `pdtx bench` is: one line that changes on a terminal, now and then a line in a log."""

import shutil
import sys
import time
from typing import TYPE_CHECKING

from pdtx.cli.common import emit, note

if TYPE_CHECKING:
    from pdtx.bench.fleet import Progress

_LOG_EVERY_S = 10.0
_TERMINAL_EVERY_S = 0.1
_CLEAR = "\r\x1b[K"


class Teller:
    """Tells on stderr how far a run is, and puts rows on stdout without the two getting mixed up.

    total: cases that are going to run.
    """

    def __init__(self, total: int, deadline: float) -> None:
        self._total, self._deadline = total, deadline
        self._terminal = sys.stderr.isatty()
        self._number, self._label = 0, ""
        self._last = 0.0

    def case(self, label: str) -> None:
        """Say that the next case begins."""
        self._number, self._label = self._number + 1, label
        self._last = 0.0 if self._terminal else time.monotonic()
        self._say("begins")

    def __call__(self, progress: "Progress") -> None:
        """Say how far the case is, if it is long enough that anything was said."""
        every = _TERMINAL_EVERY_S if self._terminal else _LOG_EVERY_S
        if time.monotonic() - self._last >= every:
            detail = f", {progress.detail}" if progress.detail else ""
            self._say(f"{progress.phase} {progress.done} of {progress.total}{detail}")

    def _say(self, what: str) -> None:
        self._last = time.monotonic()
        text = f"case {self._number} of {self._total}: {self._label}: {what}"
        if not self._terminal:
            note(text)
            return
        left = max(0, round(self._deadline - time.monotonic()))
        text = f"{text} (deadline in {left} s)"
        sys.stderr.write(_CLEAR + text[: shutil.get_terminal_size().columns - 1])
        sys.stderr.flush()

    def row(self, text: str) -> None:
        """Put a row on stdout."""
        self.clear()
        emit(text)

    def clear(self) -> None:
        """Take the changing line away."""
        if self._terminal:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
