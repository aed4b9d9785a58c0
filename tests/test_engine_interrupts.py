"""What comes into a caller's thread from the side: exceptions of signals' handlers, as Ctrl-C is one."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import pytest

from pdtx.engine import Arrived, OutboundRequest
from tests.test_engine_callers_blocks import TOKENS, Callers

ROUNDS = 400
GUARD_S = 60.0
"""When a call counts as locked for good."""


class Interrupt(BaseException):
    """What the handler raises."""


@pytest.fixture
def interrupted() -> Iterator[Callable[[Callable[[], object], float], bool]]:
    """A function that makes a call and interrupts it after so many seconds; whether that came in time."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Interrupt

    def make(call: Callable[[], object], after_s: float) -> bool:
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, after_s)
                call()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
        except Interrupt:
            return True
        return False

    def free_main() -> None:
        wait_s = GUARD_S
        while not over.wait(wait_s):
            signal.pthread_kill(main, signal.SIGALRM)
            wait_s = 1.0

    over, main, before = threading.Event(), threading.get_ident(), signal.signal(signal.SIGALRM, handler)
    guard = threading.Thread(target=free_main)
    guard.start()
    yield make
    over.set()
    guard.join()
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_an_interrupted_call_loses_no_end_and_locks_nothing(
    side: str, interrupted: Callable[[Callable[[], object], float], bool]
) -> None:
    with Callers("inproc", verify=False) as callers:
        names, found, interruptions = [f"r{number}" for number in range(ROUNDS)], list[Arrived | OutboundRequest](), 0
        ended: Callable[[], Sequence[Arrived | OutboundRequest]] = (
            callers.producer.poll if side == "producer" else callers.consumer.poll
        )

        def end(name: str, after_s: float) -> None:
            if side == "producer":
                request = callers.begin(name)
                interrupted(lambda: callers.producer.wait(request), after_s)
                callers.producer.cancel(request, "enough")
            else:
                callers.consumer.expect(name, TOKENS, [[2, 5]], deadline_s=20.0)
                interrupted(lambda: callers.consumer.next_ready(after_s), after_s)
                callers.consumer.cancel(name, "enough")

        def poll() -> None:
            while True:
                found.extend(ended())

        for number, name in enumerate(names):
            after_s = 2e-6 * (1 + number % 100)
            end(name, after_s)
            interruptions += interrupted(poll, after_s)
        found.extend(ended())
        assert interruptions == ROUNDS
        assert sorted(each.request_id for each in found) == sorted(names)
