"""Processes that are forked from one that has imported all they need, and has done once what they all do at first.

On an emulated processor the imports of torch and transformers take most of a process's time; forked, they are there.
"""

import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

_TICK_S = 0.05
_END_S = 30.0


_MODULES = (
    "pytest",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "pydantic.main",
    "pydantic.type_adapter",
    "decode_node.__main__",
    "prefill_node.__main__",
    "pdtx.node.loop",
    "pdtx.node.watching",
    "pdtx.engine",
    "pdtx.runner.paged",
    "pdtx.runner.runner",
    "pdtx.serving",
    "pdtx.transports.nixl.mover",
    "pdtx.transports.ucx.mover",
    "tests.rdma_faults",
)


def import_all() -> None:
    """Import what children use, but for the engines: those are to see each child's own settings."""
    for name in _MODULES:
        importlib.import_module(name)


class Child:
    """A function in a process of its own, with settings of its own and output to files. Use in a with statement.

    name: the files are NAME.out and NAME.log in folder.
    """

    def __init__(self, name: str, folder: Path, run: Callable[[], object], settings: Mapping[str, str]) -> None:
        self.out, self.log = folder / f"{name}.out", folder / f"{name}.log"
        self._status: int | None = None
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            self._be(run, settings)

    def _be(self, run: Callable[[], object], settings: Mapping[str, str]) -> NoReturn:
        status = 1
        try:
            os.environ.update(settings)
            for path, number in ((self.out, 1), (self.log, 2)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
            # Whoever has put something else in their place has done so for the parent.
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            faulthandler.register(signal.SIGUSR1, file=sys.stderr)
            status = _status_of(run)
        finally:
            # Engines with work in hand must not keep a process from ending.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def wait(self, timeout_s: float) -> int:
        """Return the exit status, negative for a signal. Raises TimeoutError."""
        limit = time.monotonic() + timeout_s
        while self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > limit:
                raise TimeoutError(f"{self.log.stem} has not ended within {timeout_s:g} s; {self.last_words()}")
            else:
                time.sleep(_TICK_S)
        return self._status

    def end(self) -> None:
        """Ask it to end, then kill it."""
        # Where it hangs goes to its log.
        for number, patience_s in ((signal.SIGTERM, _END_S), (signal.SIGUSR1, 1.0), (signal.SIGKILL, _END_S)):
            if self._status is None:
                os.kill(self._pid, number)
                with suppress(TimeoutError):
                    self.wait(patience_s)

    def last_words(self) -> str:
        """The last line of its log, or of its output."""
        for path in (self.log, self.out):
            lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
            if lines:
                return lines[-1]
        return "it said nothing"


def _status_of(run: Callable[[], object]) -> int:
    try:
        result = run()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        return 1
    except BaseException:  # noqa: BLE001 - the end of a process
        traceback.print_exc()
        return 1
    return result if isinstance(result, int) else 0
