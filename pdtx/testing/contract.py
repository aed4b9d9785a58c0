"""The contract of movers. Each check takes a Subject and raises ContractViolation."""

import itertools
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pdtx.errors import (
    AddressInUse,
    AuthenticationFailed,
    DeadlineExceeded,
    PdtxError,
    PeerLost,
    PeerUnreachable,
    PlanError,
    TransferAborted,
    TransferError,
    TransferRefused,
)
from pdtx.layout import LAYOUT_ORDERS
from pdtx.plan import Runs, Slices, TransferPlan
from pdtx.testing.pair import LISTEN_AT, PATIENCE_S, Leaks, MakeMover, MoverPair, require, require_error
from pdtx.testing.receivers import FaultyReceiver, Gate, GrantingReceiver
from pdtx.testing.scene import BufferScene, Scene
from pdtx.transports import Connection, Placement, TransferHandle, TransferState


@dataclass(frozen=True)
class Subject:
    """The mover under test: how to make one, and an address at which it can listen."""

    make: MakeMover
    listen_at: str = LISTEN_AT

    def pair(self) -> MoverPair:
        """Return a fresh pair."""
        return MoverPair(self.make, self.listen_at)

    def held_pair(self, gate: Gate) -> MoverPair:
        """Return a fresh pair whose receiver waits at gate before it places anything."""
        grants = GrantingReceiver()
        receiver = FaultyReceiver(grants, before_place=lambda _: gate.hold())
        return MoverPair(self.make, self.listen_at, receiver, grants)


Check = Callable[[Subject], None]

_LAYOUT_PAIRS = [(src, dst) for src in LAYOUT_ORDERS for dst in LAYOUT_ORDERS]


def soon(seconds: float = PATIENCE_S) -> float:
    """Return the deadline so many seconds from now."""
    return time.monotonic() + seconds


def start(
    pair: MoverPair, connection: Connection, scene: BufferScene, plan: TransferPlan, session_id: str = "session"
) -> TransferHandle:
    """Grant a plan to a session and put it; scene expects it from now on."""
    pair.grants.grant(session_id, scene.key(plan), scene.placement(plan))
    scene.moved(plan)
    return connection.put(scene.key(plan), scene.src.region, plan.flat, soon())


def require_works(pair: MoverPair, connection: Connection, session_id: str = "session") -> None:
    """Move a whole request of its own, and check it."""
    scene = Scene(seed=99)
    start(pair, connection, scene, scene.plan(), session_id).wait()
    scene.require_exact()


# -- bytes -------------------------------------------------------------------------------------------------------------


def check_every_layout_pair(subject: Subject) -> None:
    """Scattered runs arrive exactly where the consumer's plan wants them, and no other byte changes."""
    with subject.pair() as pair:
        connection = pair.connect()
        for seed, (layouts, sizes) in enumerate(itertools.product(_LAYOUT_PAIRS, ((4, 4), (4, 8), (8, 4)))):
            scene = Scene(layouts, block_sizes=sizes, seed=seed)
            start(pair, connection, scene, scene.plan()).wait()
            scene.require_exact()


def check_partial_ranges(subject: Subject) -> None:
    """Some layers and some tokens of a request arrive alone, down to one token of one layer."""
    with subject.pair() as pair:
        connection = pair.connect()
        for layers, tokens in ((range(1, 3), range(5, 18)), (range(1), range(3, 4)), (range(3), range(16, 19))):
            scene = Scene(seed=tokens.start)
            start(pair, connection, scene, scene.plan(layers, tokens)).wait()
            scene.require_exact()


def check_many_ranges_in_one_call(subject: Subject) -> None:
    """Thousands of small runs, more than one system call takes, and more bytes than a socket holds."""
    with subject.pair() as pair:
        scene = Scene(num_layers=2, tokens=2003, heads=8, head_size=64, block_sizes=(16, 32))
        start(pair, pair.connect(), scene, scene.plan()).wait()
        scene.require_exact()


def check_many_at_once(subject: Subject) -> None:
    """64 transfers put without waiting all arrive, in the order of their puts."""
    with subject.pair() as pair:
        connection = pair.connect()
        scenes = [Scene(seed=seed, num_layers=1) for seed in range(64)]
        handles = [start(pair, connection, scene, scene.plan()) for scene in scenes]
        for handle, scene in zip(handles, scenes, strict=True):
            handle.wait()
            scene.require_exact()
        order = [placed.key for placed in pair.grants.heard]
        require(
            order == [handle.key for handle in handles], "transfers arrived in another order than that of their puts"
        )


def check_several_producers(subject: Subject) -> None:
    """Producers with sessions of their own do not disturb each other at one consumer."""
    movers = [subject.make() for _ in range(3)]
    try:
        with subject.pair() as pair:
            connections = [pair.connect(f"session-{i}", mover) for i, mover in enumerate(movers)]
            scenes = [Scene(seed=seed) for seed in range(12)]
            handles = [
                start(pair, connections[i % 3], scene, scene.plan(), f"session-{i % 3}")
                for i, scene in enumerate(scenes)
            ]
            for handle, scene in zip(handles, scenes, strict=True):
                handle.wait()
                scene.require_exact()
    finally:
        for mover in movers:
            mover.close()


def check_several_consumers(subject: Subject) -> None:
    """One producer serves several consumers; each gets what was put to it."""
    producer = subject.make()
    pairs = [subject.pair() for _ in range(3)]
    try:
        connections = [pair.connect("session", producer) for pair in pairs]
        scenes = [Scene(seed=seed) for seed in range(12)]
        handles = [start(pairs[i % 3], connections[i % 3], scene, scene.plan()) for i, scene in enumerate(scenes)]
        for handle, scene in zip(handles, scenes, strict=True):
            handle.wait()
            scene.require_exact()
    finally:
        producer.close()
        for pair in pairs:
            pair.close()


def check_empty_transfer(subject: Subject) -> None:
    """A transfer of no bytes ends as DONE."""
    with subject.pair() as pair:
        connection = pair.connect()
        scene = Scene()
        start(pair, connection, scene, scene.plan(tokens=range(5, 5), layers=range(1))).wait()


# -- ends --------------------------------------------------------------------------------------------------------------


def check_done_means_arrived(subject: Subject) -> None:
    """DONE comes after the receiver has heard of the bytes, and they lie in its memory then."""
    grants = GrantingReceiver()
    receiver = FaultyReceiver(grants, before_placed=lambda _: time.sleep(0.1))
    with MoverPair(subject.make, subject.listen_at, receiver, grants) as pair:
        connection = pair.connect()
        scene = Scene(num_layers=8, tokens=600)
        handle = start(pair, connection, scene, scene.plan())
        handle.wait()
        require(handle.state is TransferState.DONE, f"a transfer ended as {handle.state.name} without an error")
        require(len(grants.heard) == 1, "DONE was reported before the receiver had heard of the bytes")
        placed = grants.heard[0]
        require(placed.error is None, f"DONE, but the receiver was told {placed.error}")
        require(placed.nbytes == handle.nbytes, f"the receiver was told {placed.nbytes} of {handle.nbytes} bytes")
        scene.require_exact()


def check_times_are_ordered(subject: Subject) -> None:
    """created <= posted <= sent <= ended, and the callback comes once."""
    with subject.pair() as pair:
        connection = pair.connect()
        for seed in range(20):
            scene, calls = Scene(seed=seed, num_layers=1), list[TransferHandle]()
            handle = start(pair, connection, scene, scene.plan())
            handle.on_end(calls.append)
            handle.wait()
            times = handle.created, handle.posted, handle.sent, handle.ended
            require(list(times) == sorted(times), f"times out of order: created, posted, sent, ended = {times}")
            require(handle.moved == handle.nbytes, f"DONE with {handle.moved} of {handle.nbytes} bytes moved")
            handle.on_end(calls.append)
            # wait() may return just before the mover's thread has made its call.
            limit = soon(2.0)
            while len(calls) < 2 and time.monotonic() < limit:
                time.sleep(0.001)
            require(len(calls) == 2, f"2 callbacks at the end of a transfer were called {len(calls)} times")


def check_cancel(subject: Subject) -> None:
    """A transfer that has not begun can be cancelled; the one before it is unharmed, and its bytes never move."""
    gate = Gate()
    with subject.held_pair(gate) as pair:
        connection = pair.connect()
        # More than kernels buffer, so that the second cannot have begun while the receiver does not take the first.
        first = Scene(num_layers=4, tokens=1500, heads=8, head_size=128, block_sizes=(64, 64))
        second = Scene(seed=1)
        moving = start(pair, connection, first, first.plan())
        gate.wait_reached()
        plan = second.plan()
        waiting = connection.put(second.key(plan), second.src.region, plan.flat, soon())
        require(waiting.cancel(), "a transfer that has not begun could not be cancelled")
        require(waiting.state is TransferState.ABORTED, f"a cancelled transfer is {waiting.state.name}")
        require_error(TransferAborted, "wait() of a cancelled transfer", waiting.wait)
        require(not moving.cancel(), "a moving transfer said that it was cancelled")
        gate.open()
        moving.wait()
        first.require_exact()
        second.require_exact()
        require_works(pair, connection)


def check_deadline(subject: Subject) -> None:
    """A transfer ends as FAILED at its deadline while the receiver does not finish; so does one queued behind it."""
    gate = Gate()
    with subject.held_pair(gate) as pair:
        connection = pair.connect()
        scenes = [Scene(seed=seed, num_layers=1) for seed in range(2)]
        begun, handles = time.monotonic(), list[TransferHandle]()
        for scene in scenes:
            plan = scene.plan()
            pair.grants.grant("session", scene.key(plan), scene.placement(plan))
            handles.append(connection.put(scene.key(plan), scene.src.region, plan.flat, begun + 0.4))
        ended = threading.Event()
        handles[1].on_end(lambda _: ended.set())
        # Nobody waits on the handle: the mover itself must end it.
        require(ended.wait(2.0), "a transfer was still open long after its deadline")
        for handle in handles:
            error = require_error(DeadlineExceeded, "a transfer past its deadline", handle.wait)
            took = handle.ended - begun
            require(0.35 < took < 0.9, f"a deadline of 0.4 s ended a transfer after {took:.2f} s")
            require(handle.state is TransferState.FAILED, f"a transfer past its deadline is {handle.state.name}")
            require(handle.peer in str(error), f"a deadline's message names no peer: {error}")
        gate.open()


def check_close_with_work_pending(subject: Subject) -> None:
    """Closing a connection ends its transfers at once: FAILED if moving, ABORTED if not begun."""
    gate = Gate()
    with subject.held_pair(gate) as pair:
        connection = pair.connect()
        scenes = [Scene(seed=seed, num_layers=1) for seed in range(8)]
        scenes[0] = Scene(num_layers=4, tokens=1500, heads=8, head_size=128, block_sizes=(64, 64))
        handles = [start(pair, connection, scene, scene.plan()) for scene in scenes]
        gate.wait_reached()
        begun = time.monotonic()
        closing = threading.Thread(target=connection.close)
        closing.start()
        for handle in handles:
            require_error(TransferError, "a transfer of a closed connection", lambda handle=handle: handle.wait(1.0))  # type: ignore[misc]
        states = [handle.state for handle in handles]
        gate.open()
        closing.join()
        require(time.monotonic() - begun < 2.0, "close() took more than 2 s")
        require(states[0] is TransferState.FAILED, f"a moving transfer became {states[0].name} when closed")
        later = {state.name for state in states[1:]}
        require(later == {"ABORTED"}, f"transfers not begun became {', '.join(sorted(later))} when closed")
        connection.close()
        plan = scenes[1].plan()
        late = connection.put(scenes[1].key(plan), scenes[1].src.region, plan.flat, soon())
        require_error(TransferError, "put() on a closed connection", lambda: late.wait(1.0))


def check_consumer_closes(subject: Subject) -> None:
    """When the consumer closes, open transfers end with PeerLost, and so do later ones."""
    gate = Gate()
    with subject.held_pair(gate) as pair:
        connection = pair.connect()
        scenes = [Scene(seed=seed, num_layers=1) for seed in range(3)]
        handles = [start(pair, connection, scene, scene.plan()) for scene in scenes]
        gate.wait_reached()
        closing = threading.Thread(target=pair.consumer.close)
        closing.start()
        for handle in handles:
            error = require_error(PeerLost, "a transfer to a closed consumer", lambda handle=handle: handle.wait(2.0))  # type: ignore[misc]
            require(pair.address in str(error), f"the message of a lost peer does not name it: {error}")
        gate.open()
        closing.join()
        plan = scenes[0].plan()
        late = connection.put(scenes[0].key(plan), scenes[0].src.region, plan.flat, soon())
        require_error(PeerLost, "put() to a closed consumer", lambda: late.wait(2.0))


# -- refusals ----------------------------------------------------------------------------------------------------------


def check_wrong_token(subject: Subject) -> None:
    """A wrong token and an unknown session are refused, without harm to who knows the token."""
    with subject.pair() as pair:
        pair.grants.add_session("guarded", secrets.token_bytes(32))
        for session_id in ("guarded", "unknown"):
            require_error(
                AuthenticationFailed,
                f"a wrong token for session {session_id}",
                lambda s=session_id: pair.producer.connect(pair.address, s, secrets.token_bytes(32), soon()),  # type: ignore[misc]
            )
        require_works(pair, pair.connect())


def _refused(pair: MoverPair, connection: Connection, scene: Scene, plan: TransferPlan, what: str) -> PdtxError:
    handle = connection.put(scene.key(plan), scene.src.region, plan.flat, soon())
    error = require_error(TransferRefused, what, handle.wait)
    require(handle.state is TransferState.FAILED, f"{what}: the transfer is {handle.state.name}")
    scene.require_exact()
    require_works(pair, connection)
    return error  # type: ignore[return-value]


def check_no_grant(subject: Subject) -> None:
    """Without a grant a transfer is refused with the receiver's words, and the connection stays usable."""
    with subject.pair() as pair:
        connection = pair.connect()
        scene = Scene(num_layers=4, tokens=2000, heads=8, head_size=64)
        error = _refused(pair, connection, scene, scene.plan(), "a transfer nobody granted")
        require("nothing was granted" in str(error), f"the receiver's reason is lost: {error}")
        require(len(pair.grants.heard) == 1, "placed() was called for a payload that was never placed")


def check_other_sessions_grant(subject: Subject) -> None:
    """A grant to one session cannot be used by another."""
    with subject.pair() as pair:
        pair.connect("owner")
        thief = pair.connect()
        scene = Scene()
        plan = scene.plan()
        pair.grants.grant("owner", scene.key(plan), scene.placement(plan))
        _refused(pair, thief, scene, plan, "a transfer with another session's grant")


def check_size_differs(subject: Subject) -> None:
    """A payload larger or smaller than the consumer's plan is refused; not one byte of it is written."""
    with subject.pair() as pair:
        connection = pair.connect()
        for seed, granted in enumerate((range(18), range(19))):
            scene = Scene(seed=seed)
            plan = scene.plan(tokens=range(19 - seed))
            other = scene.plan(tokens=granted)
            pair.grants.grant("session", scene.key(plan), scene.placement(other))
            heard = len(pair.grants.heard)
            _refused(pair, connection, scene, plan, "a payload of another size than planned")
            placed = pair.grants.heard[heard]
            require(placed.key == scene.key(plan), "placed() was not called for a payload of another size")
            require(placed.error is not None, "placed() reported no error for a payload of another size")


def check_placement_outside(subject: Subject) -> None:
    """A placement that leaves the receiver's region is refused before a byte is written."""
    with subject.pair() as pair:
        connection = pair.connect()
        for seed, shift in enumerate((1 << 20, -(1 << 20))):
            scene = Scene(seed=seed)
            plan = scene.plan()
            there = plan.flat.destination()
            offsets = there.offsets.copy()
            offsets[len(offsets) // 2] += shift
            placement = Placement(scene.dst.region, Slices(offsets, there.nbytes))
            pair.grants.grant("session", scene.key(plan), placement)
            _refused(pair, connection, scene, plan, "a placement outside the region")


def check_source_outside(subject: Subject) -> None:
    """put() refuses runs that leave the source's region."""
    with subject.pair() as pair:
        connection = pair.connect()
        scene = Scene()
        plan = scene.plan()
        for shift in (scene.src.region.nbytes, -scene.src.region.nbytes):
            runs = Runs(plan.flat.src + np.int64(shift), plan.flat.dst, plan.flat.nbytes)
            require_error(
                PlanError,
                "runs outside the source",
                lambda runs=runs: connection.put(scene.key(plan), scene.src.region, runs, soon()),  # type: ignore[misc]
            )
        require_works(pair, connection)


def check_failing_receiver(subject: Subject) -> None:
    """A receiver that raises what it should not fails that transfer alone."""
    grants = GrantingReceiver()
    calls = itertools.count()

    def fail_first(_: object) -> None:
        if next(calls) == 0:
            raise RuntimeError("on purpose")

    for hooks in ("before_place", "before_placed"):
        calls = itertools.count()
        receiver = FaultyReceiver(grants, **{hooks: fail_first})
        with MoverPair(subject.make, subject.listen_at, receiver, grants) as pair:
            connection = pair.connect()
            scene = Scene()
            handle = start(pair, connection, scene, scene.plan())
            require_error(TransferError, f"a receiver failing in {hooks[7:]}()", handle.wait)
            require_works(pair, connection)


# -- addresses and leaks -----------------------------------------------------------------------------------------------


def check_addresses(subject: Subject) -> None:
    """A taken address is refused; it can be listened at again after a close; nobody there is an error."""
    with subject.pair() as pair:
        require_works(pair, pair.connect())
        rival = subject.make()
        try:
            require_error(AddressInUse, "a taken address", lambda: rival.listen(pair.address, GrantingReceiver()))
        finally:
            rival.close()
        address = pair.address
    again = replace(subject, listen_at=address)
    with again.pair() as pair:
        require(pair.address == address, f"listening at {address} was advertised as {pair.address}")
        require_works(pair, pair.connect())
    producer = subject.make()
    try:
        call = lambda: producer.connect(address, "session", secrets.token_bytes(32), soon(2.0))  # noqa: E731
        require_error(PeerUnreachable, "an address at which nobody listens", call)
    finally:
        producer.close()


def check_nothing_left(subject: Subject) -> None:
    """After close() no thread and no descriptor is left, also of connections and sessions that failed."""
    leaks = Leaks()
    for seed in range(3):
        with subject.pair() as pair:
            connections = [pair.connect(f"session-{i}") for i in range(3)]
            scene = Scene(seed=seed)
            start(pair, connections[0], scene, scene.plan(), "session-0").wait()
            connections[1].close()
            bad = lambda pair=pair: pair.producer.connect(pair.address, "nobody", secrets.token_bytes(32), soon())  # noqa: E731
            require_error(AuthenticationFailed, "an unknown session", bad)
        pair.close()
        leaks.require_none("close()")


def check_sessions_end_is_heard(subject: Subject) -> None:
    """The receiver hears once of the end of each session's connection."""
    with subject.pair() as pair:
        connection = pair.connect("brief")
        require_works(pair, connection, "brief")
        connection.close()
        pair.grants.wait_for(lambda: bool(pair.grants.ended), "the end of a session")
    sessions = [session_id for session_id, _ in pair.grants.ended]
    require(sessions == ["brief"], f"the ends heard of are {sessions}, of one connection of session 'brief'")


CONTRACT: tuple[Check, ...] = (
    check_every_layout_pair,
    check_partial_ranges,
    check_many_ranges_in_one_call,
    check_many_at_once,
    check_several_producers,
    check_several_consumers,
    check_empty_transfer,
    check_done_means_arrived,
    check_times_are_ordered,
    check_cancel,
    check_deadline,
    check_close_with_work_pending,
    check_consumer_closes,
    check_wrong_token,
    check_no_grant,
    check_other_sessions_grant,
    check_size_differs,
    check_placement_outside,
    check_source_outside,
    check_failing_receiver,
    check_addresses,
    check_nothing_left,
    check_sessions_end_is_heard,
)
"""Every check, the fastest way to a broken mover first."""


def check_mover(make_mover: MakeMover, listen_at: str = LISTEN_AT) -> None:
    """Hold a mover to the whole contract; make_mover is called for every node of every check.

    Raises ContractViolation, saying which check failed and how.
    """
    for check in CONTRACT:
        check(Subject(make_mover, listen_at))
