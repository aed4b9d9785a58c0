"""Processes that need not import torch and transformers first, which takes most of the time of a short one.

They are forked from a process that has imported what nodes do and done nothing else. All else is as where a shell has
started them: arguments, environment, output, signals, exit status. Tests of what a start is like take subprocess.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.reduction import DupFd
from typing import IO, Any, Self

_WARM = multiprocessing.get_context("forkserver")
_WARM.set_forkserver_preload(["tests.warm_imports"])


class _Descriptor:
    """A file descriptor that is duplicated into the new process as this is sent there, as an int."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (DupFd(self._number),)


def _detached(duplicate: Any) -> int:  # noqa: ANN401 - multiprocessing keeps its class to itself
    number: int = duplicate.detach()
    return number


def _begin(environment: dict[str, str], function: Callable[..., object], arguments: Sequence[object]) -> None:
    """In the new process."""
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)


def _run_module(words: Sequence[str], output: int, errors: int) -> None:
    os.dup2(output, 1)
    os.dup2(errors, 2)
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


class WarmProcess:
    """function(*arguments) in a new process; to be used as subprocess.Popen is. Leaving the context kills it."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._process = _WARM.Process(target=_begin, args=(dict(os.environ), function, arguments), daemon=True)
        self._process.start()

    @classmethod
    def of_module(cls, module: str, *arguments: str, stdout: IO[Any], stderr: IO[Any]) -> Self:
        """Start python -m module arguments, with output to files."""
        return cls(_run_module, (module, *arguments), _Descriptor(stdout.fileno()), _Descriptor(stderr.fileno()))

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            # The fork server tells of an end only after it has taken the process away: there may be nobody any more.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
