"""The life of a node: started, run and closed by one thread at a time; whoever runs it closes what it runs on."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

from pdtx.errors import InputError
from pdtx.node.model import OnNote
from pdtx.node.stop import Flag


class Node(ABC):
    """A node as a context manager: entering it starts it, leaving it releases everything.

    what: the kind of node, for messages. on_note: called with a line about progress. Raises InputError.
    """

    def __init__(self, what: str, on_note: OnNote) -> None:
        if not callable(on_note):
            raise InputError(f"on_note of a {what} takes a function of a line, not {on_note!r}")
        self._what, self._note = what, on_note
        self._stack: ExitStack | None = None
        # Of the thread that starts, runs or closes. Reentrant: a callback or a signal's handler may close() there.
        self._turn = threading.RLock()
        self._busy = False
        self._closing = Flag()

    def __enter__(self) -> Self:
        with self._in_turn(already := f"this {self._what} is started already"):
            if self._stack is not None:
                raise InputError(already)
            self._closing.clear()
            with ExitStack() as stack:
                self._open(stack)
                self._stack = stack.pop_all()
        if self._stack is None:
            raise InputError(f"this {self._what} was closed while it started")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End run() if it is under way, and release everything. Idempotent; safe from any thread and in a callback.

        On run()'s own thread, as in on_note or a signal's handler, it returns at once, and run() releases everything
        as it ends. Elsewhere it waits for that.
        """
        self._closing.set()
        if self._stack is not None:
            self._interrupt()
        with self._turn:
            if not self._busy:
                self._release()

    @abstractmethod
    def _open(self, stack: ExitStack) -> None:
        """Start; what is to be released is put on stack."""

    @abstractmethod
    def _interrupt(self) -> None:
        """Have run() end soon. Must not wait: a signal's handler may call it within anything that run() does."""

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Be what runs. Raises InputError for a node that runs already, or is not started."""
        with self._in_turn(f"this {self._what} is running already; one run() at a time"):
            if self._stack is None:
                raise InputError(f"this {self._what} is not started; use it in a with statement")
            yield

    @contextmanager
    def _in_turn(self, taken: str) -> Iterator[None]:
        """Be the one who starts or runs, and release everything at the end if close() was called meanwhile."""
        if not self._turn.acquire(blocking=False):
            raise InputError(taken)
        try:
            if self._busy:
                raise InputError(taken)
            self._busy = True
            try:
                yield
            finally:
                self._busy = False
                if self._closing.is_set():
                    self._release()
        finally:
            self._turn.release()

    def _release(self) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()
