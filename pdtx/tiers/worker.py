"""Work in the background: a bounded queue, some threads, and a Future for each job."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from pdtx.errors import TierBusy, TierError

T = TypeVar("T")

MOST_JOBS = 64
MOST_BYTES = 64 << 30


class _Job(Generic[T]):
    """A function to be called, and where its result goes."""

    def __init__(self, call: Callable[[float], T], nbytes: int) -> None:
        self.call, self.nbytes = call, nbytes
        self.future, self.since = Future[T](), time.monotonic()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.call(time.monotonic() - self.since)
        except BaseException as error:  # noqa: BLE001  # it is the caller's, who waits for it
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def refuse(self, error: TierError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Worker:
    """Threads that do one job after another. Safe to use from several threads, from callbacks of its Futures too.

    submit() never waits and no lock is held while a job or a Future's callback runs: a callback may submit.
    """

    def __init__(
        self, name: str, *, threads: int = 1, most_jobs: int = MOST_JOBS, most_bytes: int = MOST_BYTES
    ) -> None:
        """most_jobs, most_bytes: that may wait; one job is always taken, however large. Raises TierError below 1."""
        if min(threads, most_jobs, most_bytes) < 1:
            raise TierError(f"{name} needs 1 thread, job and byte or more, not {threads}, {most_jobs}, {most_bytes}")
        self._name, self._most_jobs, self._most_bytes = name, most_jobs, most_bytes
        self._waiting, self._nbytes, self._closed = deque[_Job[object]](), 0, False
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[float], T], nbytes: int = 0) -> "Future[T]":
        """Queue call(seconds that it has waited); what it raises becomes the Future's exception.

        nbytes: that it is going to move. Raises TierBusy where too much is waiting, TierError once closed.
        """
        job = _Job(call, nbytes)
        with self._changed:
            if self._closed:
                raise TierError(f"{self._name}: closed, and takes no more jobs")
            waiting = len(self._waiting)
            if waiting and (waiting >= self._most_jobs or self._nbytes + nbytes > self._most_bytes):
                raise TierBusy(
                    f"{self._name}: {waiting} jobs of {self._nbytes} bytes are waiting, and {self._most_jobs} jobs or "
                    f"{self._most_bytes} bytes may; try again when some are done"
                )
            self._waiting.append(job)  # type: ignore[arg-type]  # whatever its result is
            self._nbytes += nbytes
            self._changed.notify()
        return job.future

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            del job  # and what it refers to, while nothing is to be done

    def _next(self) -> "_Job[object] | None":
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()  # close() wakes it
            job = self._waiting.popleft()
            self._nbytes -= job.nbytes
            return job

    def close(self, seconds: float = 30.0) -> bool:
        """Refuse what is waiting, and wait for what is under way. Returns whether all threads have ended. Idempotent.

        A job may close its own worker; its thread is then not waited for.
        """
        with self._changed:
            self._closed = True
            refused, self._waiting, self._nbytes = list(self._waiting), deque(), 0
            self._changed.notify_all()
        for job in refused:
            job.refuse(TierError(f"{self._name}: closed before this was begun"))
        end = time.monotonic() + seconds
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in others)
