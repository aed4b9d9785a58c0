"""What passes between threads of which one may be the main one: nothing here can be left locked or half done.

An exception that a signal's handler raises, as Ctrl-C does, comes in anywhere in the main thread. In the middle of
threading.Condition, and so of queue.Queue and Future, it may leave a lock locked for good that other threads need.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from typing import Generic, TypeVar

T = TypeVar("T")

_AGAIN_S = 0.25
"""How soon one who waits looks again unasked: an exception may have kept a ring away, or a signal come before sleep."""


class Bell:
    """Wakes those who wait for something. Nothing is locked while they look at it."""

    def __init__(self) -> None:
        self._sleepers = list[threading.Lock]()  # of each the lock that it sleeps on

    def ring(self) -> None:
        """Have all who wait look again."""
        for asleep in self._sleepers[:]:
            with suppress(RuntimeError):  # woken already
                asleep.release()

    def wait_for(self, look: Callable[[], bool], timeout_s: float) -> None:
        """Return when look() says that it has come, or after timeout_s."""
        if look():
            return
        until, asleep = time.monotonic() + timeout_s, threading.Lock()
        asleep.acquire()
        try:
            self._sleepers.append(asleep)
            while not look() and (left := until - time.monotonic()) > 0:
                asleep.acquire(timeout=min(left, _AGAIN_S))
        finally:
            with suppress(ValueError):
                self._sleepers.remove(asleep)


class Mailbox(Generic[T]):
    """A queue of any length."""

    def __init__(self) -> None:
        self._items, self._bell = deque[T](), Bell()

    def put(self, item: T) -> None:
        """Add something; never blocks."""
        self._items.append(item)
        self._bell.ring()

    def get(self, timeout_s: float) -> T:
        """Take the first thing. Raises queue.Empty after timeout_s."""
        taken = list[T]()
        self._bell.wait_for(lambda: self._take(taken), timeout_s)
        if not taken:
            raise Empty
        return taken[0]

    def _take(self, into: list[T]) -> bool:
        with suppress(IndexError):
            into.append(self._items.popleft())
        return bool(into)

    def empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._items


class Ended(Generic[T]):
    """What has ended and was not polled yet: added by the control thread, taken by whoever polls, each once.

    keeps: whether what ends is kept at all.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self._items, self._keeps = list[T](), keeps

    def add(self, item: T) -> None:
        """Keep something for the next take()."""
        if self._keeps:
            self._items.append(item)

    def keep(self) -> None:
        """Keep what is added from now on."""
        self._keeps = True

    def take(self) -> list[T]:
        """Return what there is."""
        # Nothing is called from here to the end: neither a signal nor another thread comes in between.
        taken, self._items = self._items, []
        return taken
