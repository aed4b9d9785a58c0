"""What comes into a caller's thread from the side: exceptions of signals' handlers, as Ctrl-C is one; and os.fork()."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import pytest

from pdtx.engine import Arrived, OutboundRequest
from pdtx.errors import InputError
from tests.engine_pair import PATIENCE_S, wait_until
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


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("call", ["poll", "begin", "layer_ready", "wait", "expect", "next_ready", "stop", "close"])
def test_a_forked_child_cannot_use_an_engine_and_leaves_it_alone(call: str) -> None:
    with Callers() as callers:
        producer, consumer = callers.producer, callers.consumer
        consumer.expect("r", TOKENS, [[2, 5]], deadline_s=20.0)
        request = callers.begin()
        calls: dict[str, list[Callable[[], object]]] = {
            "poll": [producer.poll, consumer.poll],
            "begin": [lambda: callers.begin("s")],
            "layer_ready": [lambda: producer.layer_ready(request, 0, 0, 0, TOKENS)],
            "wait": [lambda: producer.wait(request)],
            "expect": [lambda: consumer.expect("s", TOKENS, [[3, 4]], deadline_s=20.0)],
            "next_ready": [lambda: consumer.next_ready(PATIENCE_S)],
            "stop": [producer.stop],
            "close": [producer.close, consumer.close],
        }
        child = os.fork()
        if child == 0:
            try:
                refused = [_is_refused(each) for each in calls[call]]
                os._exit(0 if all(each == (call not in ("stop", "close")) for each in refused) else 2)
            finally:
                os._exit(3)
        ended = list[int]()

        def look() -> bool:
            pid, status = os.waitpid(child, os.WNOHANG)
            ended.extend([status] if pid else [])
            return bool(ended)

        try:
            wait_until(look, "the end of the child")
        finally:
            if not ended:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(ended[0]) == 0
        callers.compute(request)
        producer.computed(request)
        assert callers.arrived().error is None
        assert callers.ended() is request


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except InputError as error:
        return "which forked this one" in str(error)
    return False
