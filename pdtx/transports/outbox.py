"""What every producer's connection needs: an ordered queue of transfers, and a watch over their deadlines."""

import logging
import threading
import time
from collections import deque
from typing import Generic, TypeVar

from pdtx.errors import PdtxError, TransferAborted
from pdtx.transports.base import TransferHandle, TransferState
from pdtx.transports.window import SendWindow

logger = logging.getLogger(__name__)

Job = TypeVar("Job")

_JOIN_S = 1.0


class DeadlineWatch:
    """Ends transfers at their deadlines, whatever the thread that moves them is stuck in. One per mover."""

    def __init__(self, name: str) -> None:
        self._open = dict[TransferHandle, None]()
        self._next = float("inf")
        self._closed = False
        self._changed = threading.Condition()
        self._name = name
        self._thread: threading.Thread | None = None

    def add(self, handle: TransferHandle) -> None:
        """Watch over a transfer until it ends."""
        with self._changed:
            if self._closed:
                return
            self._open[handle] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name=f"{self._name}-deadlines", daemon=True)
                self._thread.start()
            if handle.deadline < self._next:
                self._next = handle.deadline
                self._changed.notify_all()
        handle.on_end(self._forget)

    def _forget(self, handle: TransferHandle) -> None:
        with self._changed:
            self._open.pop(handle, None)

    def _watch(self) -> None:
        while True:
            with self._changed:
                left = self._next - time.monotonic()
                if not self._closed and left > 0:
                    # The longest wait that a platform's condition accepts is enough: the loop comes round again.
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                    continue
                if self._closed:
                    return
                now = time.monotonic()
                late = [handle for handle in self._open if handle.deadline <= now]
                open_deadlines = (handle.deadline for handle in self._open if handle.deadline > now)
                self._next = min(open_deadlines, default=float("inf"))
            # Outside the lock: the end of a transfer calls back into _forget and into users' code.
            for handle in late:
                handle.expire()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                logger.warning("%s is stuck in a callback and left behind", self._thread.name)


class Outbox(Generic[Job]):
    """The transfers of one connection that have not ended, and the queue of those not begun. Safe from many threads.

    window: what limits those that are begun; wake() tells that it has more room.
    """

    def __init__(self, watch: DeadlineWatch, window: SendWindow | None = None) -> None:
        self._watch, self._window = watch, window
        self._queue = deque[tuple[TransferHandle, Job]]()
        self._open = dict[TransferHandle, None]()
        self._closed = False
        self._woken = False
        self._lost: PdtxError | None = None
        self._changed = threading.Condition()

    def put(self, handle: TransferHandle, job: Job, *, wake: bool = True) -> None:
        """Queue a transfer; it ends at once if the outbox is closed. wake: whoever waits for one."""
        with self._changed:
            accepted = not self._closed
            if accepted:
                self._queue.append((handle, job))
                self._open[handle] = None
                if wake:
                    self._changed.notify()
        if not accepted:
            self._end(handle)
            return
        handle.on_end(self._forget)
        self._watch.add(handle)

    def _forget(self, handle: TransferHandle) -> None:
        with self._changed:
            self._open.pop(handle, None)

    def next(self) -> tuple[TransferHandle, Job] | None:
        """Wait for the next transfer and mark it as moving; None when the outbox is closed."""
        while (taken := self.take()) is not None:
            if taken[0].post():
                return taken
        return None

    @property
    def ended(self) -> PdtxError | None:
        """What closed the outbox; None while it is open."""
        with self._changed:
            return (self._lost or TransferAborted("the connection was closed")) if self._closed else None

    @property
    def waiting(self) -> bool:
        """Whether transfers wait to be begun."""
        return bool(self._queue)

    def next_now(self) -> tuple[TransferHandle, Job] | None:
        """Return the next transfer that can be begun, marked as moving; None if there is none now."""
        while True:
            with self._changed:
                if self._closed or not self._may_begin():
                    return None
                taken = self._queue.popleft()
            if taken[0].post():
                return taken

    def wake(self) -> None:
        """Make wait() return."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def wait(self) -> bool:
        """Wait for a transfer that may be begun, or for wake(); False when the outbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._woken or self._closed or self._may_begin())
            self._woken = False
            return not self._closed

    def _may_begin(self) -> bool:
        """Whether there is a transfer to begin and room for it; drops those that have ended before. Under the lock."""
        while self._queue and self._queue[0][0].state is not TransferState.PENDING:
            self._queue.popleft()
        return bool(self._queue) and (self._window is None or self._window.has_room(self._queue[0][0].nbytes))

    def take(self) -> tuple[TransferHandle, Job] | None:
        """Wait for the next transfer, which may have ended meanwhile; None when the outbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return None if self._closed else self._queue.popleft()

    def shut(self, lost: PdtxError | None = None) -> None:
        """Take and begin no more transfers; close() has yet to end those that are there. Only the first call counts."""
        with self._changed:
            if self._closed:
                return
            self._closed, self._lost = True, lost
            self._queue.clear()
            self._changed.notify_all()

    def close(self, lost: PdtxError | None = None) -> None:
        """End every transfer: as FAILED with what shut() was told first, or lost, else as abort() says. Idempotent."""
        self.shut(lost)
        with self._changed:
            handles, self._open = self._open, {}
        for handle in handles:
            self._end(handle)

    def _end(self, handle: TransferHandle) -> None:
        if self._lost is None:
            handle.abort("the connection was closed")
        else:
            handle.finish(self._lost)
