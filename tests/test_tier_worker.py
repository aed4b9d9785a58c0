"""The worker: bounded, never waiting in submit(), with a Future for everything."""

import threading
import time
from concurrent.futures import Future, wait

import pytest

from pdtx.errors import TierBusy, TierError
from pdtx.tiers.worker import Worker

SECONDS = 10.0


class Gate:
    """A job that goes on when it is let."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self, waited: float) -> str:
        self.begun.set()
        assert self.open.wait(SECONDS)
        return "done"


def test_jobs_are_done_in_order_and_tell_how_long_they_waited() -> None:
    worker, gate, order = Worker("w"), Gate(), list[int]()
    first = worker.submit(gate)
    assert gate.begun.wait(SECONDS)
    others = [worker.submit(lambda _, number=number: order.append(number)) for number in range(5)]  # type: ignore[misc]
    last = worker.submit(lambda waited: waited)
    time.sleep(0.05)
    gate.open.set()
    assert first.result(SECONDS) == "done"
    wait(others, SECONDS)
    assert order == [0, 1, 2, 3, 4]
    assert 0.04 < last.result(SECONDS) < SECONDS
    assert worker.close()


def test_a_full_queue_is_told_at_once_and_takes_more_later() -> None:
    worker, gate = Worker("the tier", most_jobs=2), Gate()
    worker.submit(gate)
    assert gate.begun.wait(SECONDS)
    waiting = [worker.submit(lambda _: 1) for _ in range(2)]
    begun = time.monotonic()
    with pytest.raises(TierBusy, match=r"the tier: 2 jobs .* waiting"):
        worker.submit(lambda _: 1)
    assert time.monotonic() - begun < 1
    gate.open.set()
    wait(waiting, SECONDS)
    assert worker.submit(lambda _: 2).result(SECONDS) == 2
    worker.close()


def test_bytes_bound_the_queue_too_and_one_job_is_always_taken() -> None:
    worker, gate = Worker("w", most_bytes=100), Gate()
    worker.submit(gate, 1000)
    assert gate.begun.wait(SECONDS)
    large = worker.submit(lambda _: 1, 1000)
    with pytest.raises(TierBusy, match="1000 bytes are waiting"):
        worker.submit(lambda _: 1, 1)
    gate.open.set()
    assert large.result(SECONDS) == 1
    assert worker.submit(lambda _: 2, 60).result(SECONDS) == 2
    worker.close()


def test_what_a_job_raises_is_its_futures_and_the_worker_goes_on() -> None:
    worker = Worker("w")

    def fail(_: float) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        worker.submit(fail).result(SECONDS)
    assert worker.submit(lambda _: 1).result(SECONDS) == 1
    worker.close()


def test_a_callback_may_submit_and_close() -> None:
    worker, second, closed = Worker("w", most_jobs=1), list[Future[int]](), threading.Event()

    def finish(_: "Future[int]") -> None:
        worker.close()
        closed.set()

    def more(_: "Future[int]") -> None:
        second.append(worker.submit(lambda _: 2))
        second[0].add_done_callback(finish)

    worker.submit(lambda _: 1).add_done_callback(more)
    assert closed.wait(SECONDS)
    assert second[0].result(SECONDS) == 2


def test_closing_refuses_what_waits_and_finishes_what_is_under_way() -> None:
    worker, gate = Worker("the tier"), Gate()
    running = worker.submit(gate)
    assert gate.begun.wait(SECONDS)
    waiting = worker.submit(lambda _: 1)
    waiting.add_done_callback(lambda _: gate.open.set())
    assert worker.close(SECONDS)
    assert running.result(0) == "done"
    with pytest.raises(TierError, match="the tier: closed before this was begun"):
        waiting.result(0)
    with pytest.raises(TierError, match="the tier: closed, and takes no more"):
        worker.submit(lambda _: 1)
    assert worker.close(), "a second time"


def test_closing_has_a_deadline() -> None:
    worker, gate = Worker("w"), Gate()
    worker.submit(gate)
    assert gate.begun.wait(SECONDS)
    begun = time.monotonic()
    assert not worker.close(0.05)
    assert time.monotonic() - begun < 2
    gate.open.set()
    assert worker.close(SECONDS)


def test_a_cancelled_job_is_not_done() -> None:
    worker, gate, done = Worker("w"), Gate(), list[int]()
    worker.submit(gate)
    assert gate.begun.wait(SECONDS)
    cancelled = worker.submit(lambda _: done.append(1))
    assert cancelled.cancel()
    gate.open.set()
    worker.submit(lambda _: None).result(SECONDS)
    assert done == []
    worker.close()


def test_several_threads_work_at_once() -> None:
    worker, meet = Worker("w", threads=2), threading.Barrier(2)
    jobs = [worker.submit(lambda _: meet.wait(SECONDS)) for _ in range(2)]
    assert sorted(job.result(SECONDS) for job in jobs) == [0, 1]
    worker.close()


@pytest.mark.parametrize("field", ["threads", "most_jobs", "most_bytes"])
def test_impossible_numbers_are_refused(field: str) -> None:
    with pytest.raises(TierError, match="1 thread, job and byte or more"):
        Worker("w", **{field: 0})
