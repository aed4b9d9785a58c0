"""Child processes that never outlive their parent."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from pdtx.errors import DeadlineExceeded, PdtxError

_PARENT = "PDTX_PARENT"
_PR_SET_PDEATHSIG = 1


def follow_parent() -> None:
    """In a node started by Node: end when the parent is gone, were it killed.

    Set by the child itself: preexec_fn would run Python's fork hooks in the parent, which swallow a signal's exception.
    """
    parent = os.environ.pop(_PARENT, None)
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # gone before we asked
        sys.exit(143)


class Node:
    """A node run as a child process: its stdout is read, its stderr goes through prefixed.

    Leaving the context ends it: SIGTERM, and SIGKILL after three seconds. quiet: lines of stderr that begin so are kept
    back. say: takes the others, in a thread of its own; default: this process' stderr.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        quiet: tuple[str, ...] = (),
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.name = name.strip()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, _PARENT: str(os.getpid())},
        )
        self._label, self._quiet = name, quiet
        self._say = say if say is not None else lambda text: sys.stderr.write(f"{text}\n")
        self._errors = list[str]()
        self._pump = threading.Thread(target=self._relay, daemon=True)
        self._pump.start()

    def _relay(self) -> None:
        for line in self.process.stderr or ():
            self._errors.append(line.rstrip())
            if not line.startswith(self._quiet):
                self._say(f"  {self._label} | {line.rstrip()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(3.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        self._pump.join()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def event(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Wait for a line {"event": name, ...} on stdout and return it.

        Raises PdtxError if the process ends first, DeadlineExceeded after timeout_s.
        """
        killer = self._killer(timeout_s)
        try:
            killer.start()
            line = self.process.stdout.readline() if self.process.stdout is not None else ""
        finally:
            expired = not killer.is_alive()
            killer.cancel()
        if expired:
            raise DeadlineExceeded(f"event {name!r}", self.name, timeout_s)
        if not line:
            raise self._died()
        return msgspec.json.decode(line, type=dict[str, Any])

    def result(self, timeout_s: float) -> str:
        """Wait for the end and return stdout, whatever the exit code, if there is any.

        Raises PdtxError if it printed nothing, DeadlineExceeded after timeout_s.
        """
        killer = self._killer(timeout_s)
        try:
            killer.start()
            text = self.process.stdout.read() if self.process.stdout is not None else ""
            self.process.wait()
        finally:
            expired = not killer.is_alive()
            killer.cancel()
        if expired:
            raise DeadlineExceeded("its result", self.name, timeout_s)
        if not text.strip():
            raise self._died()
        return text

    def _killer(self, timeout_s: float) -> threading.Timer:
        """Return what will kill the process; a signal that comes while it is started must not be held up by it."""
        killer = threading.Timer(timeout_s, self.process.kill)
        killer.daemon = True
        return killer

    def _died(self) -> PdtxError:
        code = self.process.wait()
        self._pump.join()
        last = self._errors[-1] if self._errors else "no word on stderr"
        error = PdtxError(f"{self.name} ended with exit code {code}: {last.partition('error: ')[2] or last}")
        error.exit_code = code if code in (1, 2) else 1
        return error
