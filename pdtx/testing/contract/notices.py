"""Notices: words that come after the bytes that were put before them."""

import time

from pdtx.errors import DeadlineExceeded, InputError, ProtocolError, TransferError, TransferRefused
from pdtx.testing.contract.subject import Subject, require_works, soon, start
from pdtx.testing.pair import require, require_error
from pdtx.testing.receivers import Gate, GrantingReceiver
from pdtx.testing.scene import Scene
from pdtx.transports import TransferState
from pdtx.transports.base import MAX_NOTICE_BYTES


def check_notices_follow_puts(subject: Subject) -> None:
    """A notice is heard after all that was put before it has been placed, however long the receiver takes."""
    grants, order = GrantingReceiver(), list[str]()

    def placed(_: object) -> None:
        time.sleep(0.02)
        order.append("put")

    pair = subject.faulty_pair(grants, before_placed=placed, before_notified=lambda data: order.append(data.decode()))
    with pair:
        connection, meant = pair.connect(), list[str]()
        scenes = [Scene(seed=seed) for seed in range(6)]
        handles = []
        for number, scene in enumerate(scenes):
            handles.append(start(pair, connection, scene, scene.plan()))
            handles.append(connection.notify(f"after {number}".encode(), soon()))
            meant += ["put", f"after {number}"]
        for handle in handles:
            handle.wait()
        require(order == meant, f"puts and notices were heard in the order {order}, not {meant}")
        for scene in scenes:
            scene.require_exact()


def check_notice_after_a_refusal(subject: Subject) -> None:
    """A put that is refused does not hold up the notice behind it."""
    with subject.pair() as pair:
        connection, scene = pair.connect(), Scene(num_layers=4, tokens=500, heads=8, head_size=64)
        plan = scene.plan()
        refused = connection.put(scene.key(plan), scene.src.region, plan.flat, soon())
        connection.notify(b"still here", soon()).wait()
        require_error(TransferRefused, "a put nobody granted", refused.wait)
        require(pair.grants.notices == [("session", b"still here")], f"the notices heard are {pair.grants.notices}")


def check_notice_sizes(subject: Subject) -> None:
    """A notice may be empty, and of up to MAX_NOTICE_BYTES of any values; more is an InputError."""
    with subject.pair() as pair:
        connection = pair.connect()
        meant = [b"", b"\0", bytes(range(256)), bytes(i * 7 % 256 for i in range(MAX_NOTICE_BYTES))]
        for data in meant:
            handle = connection.notify(data, soon())
            handle.wait()
            require(handle.state is TransferState.DONE, f"a notice ended as {handle.state.name}")
        require([data for _, data in pair.grants.notices] == meant, "a notice was heard otherwise than it was told")
        too_large = lambda: connection.notify(bytes(MAX_NOTICE_BYTES + 1), soon())  # noqa: E731
        require_error(InputError, "a notice that is too large", too_large)
        require_works(pair, connection)


def check_many_notices(subject: Subject) -> None:
    """200 notices told without waiting are heard once each, in order."""
    with subject.pair() as pair:
        connection = pair.connect()
        meant = [str(number).encode() for number in range(200)]
        for handle in [connection.notify(data, soon()) for data in meant]:
            handle.wait()
        require([data for _, data in pair.grants.notices] == meant, "notices were lost, doubled or out of order")


def check_notice_is_heard_when_done(subject: Subject) -> None:
    """DONE comes after the receiver has heard the notice."""
    pair = subject.faulty_pair(GrantingReceiver(), before_notified=lambda _: time.sleep(0.1))
    with pair:
        pair.connect().notify(b"slowly", soon()).wait()
        require(len(pair.grants.notices) == 1, "a notice was DONE before the receiver had heard it")


def check_notice_to_a_failing_receiver(subject: Subject) -> None:
    """A receiver that raises fails that notice alone: with its words if they are one of our errors."""
    failures: list[Exception] = [RuntimeError("on purpose"), ProtocolError("these words mean nothing")]

    def fail(_: bytes) -> None:
        if failures:
            raise failures.pop()

    with subject.faulty_pair(GrantingReceiver(), before_notified=fail) as pair:
        connection = pair.connect()
        error = require_error(TransferError, "a notice the receiver refuses", connection.notify(b"?", soon()).wait)
        require("these words mean nothing" in str(error), f"the receiver's reason is lost: {error}")
        require_error(TransferError, "a notice the receiver fails on", connection.notify(b"?", soon()).wait)
        connection.notify(b"!", soon()).wait()
        require_works(pair, connection)


def check_notice_deadline(subject: Subject) -> None:
    """A notice ends at its deadline while the receiver does not finish hearing it."""
    gate = Gate()
    with subject.faulty_pair(GrantingReceiver(), before_notified=lambda _: gate.hold()) as pair:
        connection, begun = pair.connect(), time.monotonic()
        handle = connection.notify(b"anyone?", begun + 0.4)
        error = require_error(DeadlineExceeded, "a notice past its deadline", handle.wait)
        took = time.monotonic() - begun
        require(0.35 < took < 3.0, f"a deadline of 0.4 s ended a notice after {took:.2f} s")
        require(handle.peer in str(error), f"a deadline's message names no peer: {error}")
        gate.open()
