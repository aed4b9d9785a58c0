"""A process of its own in which an object lives; its methods are called over a pipe, one at a time."""

import atexit
import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from typing import Concatenate, Generic, ParamSpec, TypeVar

from pdtx.errors import InputError, PdtxError

Actor = TypeVar("Actor", covariant=True)
Owner = TypeVar("Owner")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

logger = logging.getLogger(__name__)

_FOREIGN = ("UCX_", "NIXL_", "MC_", "MOONCAKE_", "GLOG_")
_PATIENCE_S = 120.0
_END_S = 5.0
_PR_SET_PDEATHSIG = 1

_environment = threading.Lock()


class Child(Generic[Actor]):
    """make(*arguments), made in a new process: this returns when the process has started, ready() when it is made.

    environment: variables for it. The caller's settings of the libraries that are compared do not reach it: what one
    way runs with must not change another.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        make: Callable[Arguments, Actor],
        *arguments: Arguments.args,
        **options: Arguments.kwargs,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = getattr(make, "__name__", "child")
        self.pipe, there = context.Pipe()
        self._process = context.Process(target=_live, args=(there, make, arguments, options), daemon=True)
        with _only(environment):
            self._process.start()
        there.close()
        # A stopped process does not end when it is asked to, which is what multiprocessing does at exit.
        atexit.register(self.end)

    def ready(self) -> None:
        """Wait until it is made; needed once, before anything else. Raises what call() raises."""
        Pending[None](self).result()

    def call(
        self: "Child[Owner]",
        method: Callable[Concatenate[Owner, Arguments], Result],
        *arguments: Arguments.args,
        **options: Arguments.kwargs,
    ) -> Result:
        """Call a method there and return its result. Raises InputError or PdtxError with its text if it raises."""
        return self.begin(method, *arguments, **options).result()

    def begin(
        self: "Child[Owner]",
        method: Callable[Concatenate[Owner, Arguments], Result],
        *arguments: Arguments.args,
        **options: Arguments.kwargs,
    ) -> "Pending[Result]":
        """Begin a call; its result must be taken before the next one."""
        self.pipe.send((method.__name__, arguments, options))
        return Pending(self)

    def pause(self) -> None:
        """Stop all threads until resume()."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the threads run again."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, number)

    def exit_status(self) -> int | None:
        """Wait a little for the end of a process that has closed its pipe; None if it has not ended."""
        self._process.join(_END_S)
        return self._process.exitcode

    def end(self) -> None:
        """End the process, by force if it does not. Idempotent."""
        atexit.unregister(self.end)
        self.resume()
        self.pipe.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            logger.warning("the process of %s had to be killed", self.name)
            self._process.kill()
            self._process.join()


class Pending(Generic[Result]):
    """A call under way."""

    def __init__(self, child: Child[object]) -> None:
        self._child = child

    def result(self) -> Result:
        """Wait for the result, see Child.call."""
        name, pipe = self._child.name, self._child.pipe
        if not pipe.poll(_PATIENCE_S):
            raise PdtxError(f"the process of {name} gave no answer within {_PATIENCE_S:g} s")
        try:
            failed, answer = pipe.recv()
        except (EOFError, ConnectionError):
            raise PdtxError(f"the process of {name} ended with status {self._child.exit_status()}") from None
        if failed is not None:
            raise failed(f"{name}: {answer}")
        result: Result = answer
        return result


@contextmanager
def awake(*children: Child[object]) -> Iterator[None]:
    """Let processes run for a while that are stopped otherwise.

    Some libraries spin while idle, and whoever is measured next wants the processor.
    """
    try:
        for child in children:
            child.resume()
        yield
    finally:
        for child in children:
            child.pause()


def environment_with(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process with settings, and with no other setting of a library that is compared."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)} | dict(settings)


@contextmanager
def _only(settings: Mapping[str, str]) -> Iterator[None]:
    """Have the processes that are started meanwhile run with settings."""
    with _environment:
        before = dict(os.environ)
        try:
            _replace_environment(environment_with(settings))
            yield
        finally:
            _replace_environment(before)


def _replace_environment(new: Mapping[str, str]) -> None:
    for name in set(os.environ).difference(new):
        del os.environ[name]
    os.environ.update(new)


def _live(pipe: Pipe, make: Callable[..., object], arguments: tuple[object, ...], options: dict[str, object]) -> None:
    """Run in the child: make the object, carry out calls until the pipe ends."""
    # Also when the parent is killed: a stopped child would stay for ever.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # libraries print to where results belong
    made = list[object]()
    good = _answer(pipe, lambda: made.append(make(*arguments, **options)))
    with contextlib.suppress(EOFError, ConnectionError):
        while good:
            _answer(pipe, _call_of(made[0], *pipe.recv()))
    pipe.close()
    # Not through the libraries' destructors: some hang, and nothing of them is measured.
    os._exit(0)


def _call_of(
    actor: object, name: str, arguments: tuple[object, ...], options: dict[str, object]
) -> Callable[[], object]:
    return lambda: getattr(actor, name)(*arguments, **options)


def _answer(pipe: Pipe, work: Callable[[], object]) -> bool:
    """Do work and send its result or its error; True if there was none."""
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  # whatever a library raises belongs to the caller
        pipe.send((InputError if isinstance(error, InputError) else PdtxError, _one_line(error)))
        return False
    pipe.send((None, result))
    return True


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, PdtxError) else f"{type(error).__name__}: {text}"
