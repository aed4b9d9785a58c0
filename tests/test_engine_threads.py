"""The page of docs/architecture.md that says who owns what, held against the code; and the owner's rule itself."""

import ast
import re
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pdtx.engine import control_thread
from pdtx.engine.control_thread import ControlThread
from pdtx.engine.inbound_messages import InboundMessages
from pdtx.engine.outbound_control import OutboundControl
from pdtx.engine.shipping import Shipper
from pdtx.engine.states import OutboundLife
from pdtx.errors import IllegalTransition, NotTheOwner, TransferError
from pdtx.sidechannel import Dialer, Listener
from tests.engine_pair import LAYERS, PATIENCE_S, Pair, begin, settle, ship, wait_until

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text().partition("## Threads: who owns what")[2].partition("\n## ")[0]
LOCKS = {"Lock", "RLock", "Condition"}


def locks_in_code() -> set[str]:
    """Every lock that a class of the engine or the cache has, as Class.attribute."""
    found = set[str]()
    for path in [*(ROOT / "pdtx/engine").glob("*.py"), *(ROOT / "pdtx/cache").glob("*.py")]:
        for cls in [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]:
            for node in ast.walk(cls):
                if isinstance(node, ast.Assign):
                    found |= {f"{cls.name}.{name}" for name in _locks_of(node)}
    return found


def _locks_of(node: ast.Assign) -> list[str]:
    pairs = list[tuple[ast.expr, ast.expr]]()
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs += zip(target.elts, node.value.elts, strict=True)
        else:
            pairs.append((target, node.value))
    return [at.attr for at, value in pairs if isinstance(at, ast.Attribute) and _makes_lock(value)]


def _makes_lock(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in LOCKS


def test_the_page_names_every_lock_and_no_other() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `") and "._" in line.split("|")[1]]
    named = {name for row in rows for name in re.findall(r"`(\w+\.\w+)`", row.split("|")[1])}
    assert named == locks_in_code()


def test_the_page_names_every_thread_of_the_engine() -> None:
    named = set(re.findall(r"`(pdtx-[a-z]+)`", PAGE))
    with Pair(mover="tcp") as pair:
        request = begin(pair.producer, 20)
        ship(pair.producer, request)
        pair.finish(pair.next_ready())
        names = {re.sub(r"[_-]\d+$", "", thread.name) for thread in threading.enumerate() if "pdtx" in thread.name}
    transports = {name for name in names if name.startswith("pdtx-tcp")}
    assert transports
    assert names - transports <= named
    assert {"pdtx-producer", "pdtx-consumer", "pdtx-shipper", "pdtx-scrubber"} <= names


def test_a_piece_is_handed_over_six_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that touch one layer piece, in their order; a new one of the same process is a hand-over."""
    ways = list[tuple[str, str]]()

    def trace(cls: type, name: str, side: str) -> None:
        inner = getattr(cls, name)

        def traced(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - as inner
            ways.append((side, threading.current_thread().name))
            return inner(*args, **options)

        monkeypatch.setattr(cls, name, traced)

    with Pair(mover="tcp") as pair:
        request = begin(pair.producer, 20)
        wait_until(lambda: request.grant is not None, "a grant")
        settle(pair.producer)
        trace(OutboundControl, "on_ready", "producer")
        trace(Shipper, "_post", "producer")
        route = pair.producer.core.session.route
        assert route is not None
        trace(type(route.connection), "put", "producer")
        trace(type(pair.consumer.receiver), "place", "network")
        trace(type(pair.consumer.receiver), "placed", "network")
        trace(OutboundControl, "on_piece_end", "producer")
        trace(Dialer, "_transmit", "producer")
        trace(Listener, "_deliver", "network")
        trace(InboundMessages, "_on_notice", "network")
        ways.append(("producer", threading.current_thread().name))
        pair.producer.layer_ready(request, 0, 0, 0, 20)
        wait_until(lambda: any(name == "pdtx-consumer" for _, name in ways), "the notice")
        monkeypatch.undo()
        for layer in range(1, LAYERS):
            pair.producer.layer_ready(request, 0, layer, 0, 20)
        pair.producer.cancel(request, "enough")
    handed = sum(one != other and one[0] == other[0] for one, other in pairwise(ways))
    # The thread that ends the handle is not traced, and hands over to the control thread.
    assert handed + 1 <= 6, ways


# -- the owner's rule --------------------------------------------------------------------------------------------------


def test_no_other_thread_changes_a_request() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        received = pair.received("r")
        with pytest.raises(NotTheOwner, match=r"OutboundRequest.deadline was set by thread MainThread; only pdtx-prod"):
            request.deadline = 0.0
        with pytest.raises(NotTheOwner, match=r"InboundRequest.deadline was set by thread MainThread; only pdtx-cons"):
            received.deadline = 0.0
        pair.producer.control.call(setattr, request, "first_token", 3)
        assert request.first_token == 3
        pair.producer.cancel(request, "enough")


def test_tests_run_with_the_rule() -> None:
    """The tooth of the one above: without the variable any thread may."""
    assert control_thread.Owned.__setattr__ is not object.__setattr__


def test_an_illegal_transition_is_counted_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        wait_until(lambda: request.grant is not None, "a grant")

        def illegal() -> None:
            request.go(OutboundLife.ENDED)

        pair.producer.control.post(illegal)
        settle(pair.producer)
        assert pair.producer.control.errors == 1
        assert "an error of pdtx" in caplog.text
        with pytest.raises(IllegalTransition, match="request r cannot go from OPEN to ENDED"):
            pair.producer.control.call(illegal)
        ship(pair.producer, request)
        pair.finish(pair.next_ready())
        assert pair.producer.wait(request).text == "done"


def never(_: float) -> bool:
    return False


def test_events_run_in_order_and_calls_wait_for_those_before() -> None:
    control, seen = ControlThread("pdtx-test", never), list[int]()
    for number in range(1000):
        control.post(seen.append, number)
    assert control.call(len, seen) == 1000
    assert seen == list(range(1000))
    control.close()


def test_an_error_of_a_call_is_its_callers() -> None:
    control = ControlThread("pdtx-test", never)

    def fails() -> None:
        raise TransferError("no")

    with pytest.raises(TransferError, match="no"):
        control.call(fails)
    assert control.errors == 0
    control.post(fails)
    control.close()
    assert control.errors == 1


def test_what_is_posted_after_the_end_runs_in_its_own_thread() -> None:
    control, ran = ControlThread("pdtx-test", never), list[bool]()
    control.close()
    control.post(lambda: ran.append(control.is_current))
    assert ran == [True]
    assert control.call(lambda: control.call(lambda: 7)) == 7
    assert not control.is_current
    control.close()


def test_many_threads_may_post_and_call() -> None:
    counts, control = [0], ControlThread("pdtx-test", never)

    def add() -> None:
        counts[0] += 1  # no lock: the thread is the lock

    def work(ask: Callable[..., object]) -> None:
        for _ in range(500):
            ask(add)

    threads = [threading.Thread(target=partial(work, ask)) for ask in (control.post, control.call) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    control.close()
    assert counts == [8 * 500]


def test_timers_are_looked_at_while_events_keep_coming() -> None:
    ticks, going = threading.Event(), True

    def tick(_: float) -> bool:
        ticks.set()
        return True

    control = ControlThread("pdtx-test", tick, tick_s=0.01)

    def again() -> None:
        if going:
            control.post(again)

    ticks.clear()
    control.post(again)
    assert ticks.wait(10.0)
    going = False
    control.close()


def test_an_event_may_post_another_while_the_thread_is_being_closed() -> None:
    control, entered, go = ControlThread("closing", never), threading.Event(), threading.Event()
    ran = list[str]()

    def event() -> None:
        entered.set()
        go.wait(PATIENCE_S)
        control.post(ran.append, "posted by an event")

    control.post(event)
    assert entered.wait(PATIENCE_S)
    closer = threading.Thread(target=control.close)
    closer.start()
    wait_until(lambda: control._closing, "close() to have begun")
    go.set()
    closer.join(PATIENCE_S)
    assert ran == ["posted by an event"]
    assert not control.errors


def test_a_new_thread_is_not_taken_for_a_control_thread_that_has_ended() -> None:
    taken = list[bool]()
    for _ in range(20):  # the system gives a new thread the number of one that has ended, sooner or later
        control = ControlThread("ended", never)
        control.close()
        other = threading.Thread(target=lambda of=control: taken.append(of.is_current))
        other.start()
        other.join()
    assert not any(taken)
