"""Gets: the listener's bytes come to who has connected, by the same rules as the other way round."""

import contextlib
import threading
import time

import numpy as np

from pdtx.errors import (
    DeadlineExceeded,
    PdtxError,
    PeerLost,
    PlanError,
    TransferAborted,
    TransferError,
    TransferRefused,
)
from pdtx.layout import LAYOUT_ORDERS
from pdtx.plan import Runs, Slices, TransferPlan
from pdtx.testing.contract.subject import Subject, get, large_scene, offer, require_works, soon, start, start_get
from pdtx.testing.pair import MoverPair, require, require_error
from pdtx.testing.receivers import Gate, GrantingReceiver, Placed
from pdtx.testing.scene import Scene
from pdtx.transports import Connection, Placement, TransferHandle, TransferState


def _given(pair: MoverPair, scene: Scene, plan: TransferPlan) -> Placed:
    """Wait for the one call of offered() for a plan."""
    key, grants = scene.key(plan), pair.grants
    grants.wait_for(lambda: any(placed.key == key for placed in grants.given), f"offered() for {key}")
    calls = [placed for placed in grants.given if placed.key == key]
    require(len(calls) == 1, f"offered() was called {len(calls)} times for one get")
    return calls[0]


def check_get_every_layout_pair(subject: Subject) -> None:
    """Bytes that are got land where the runs say, no other byte changes, and the receiver hears of it once."""
    with subject.pair() as pair:
        connection = pair.connect()
        layouts = [(src, dst) for src in LAYOUT_ORDERS for dst in LAYOUT_ORDERS]
        for seed, (sides, sizes) in enumerate(zip(layouts, ((4, 4), (4, 8), (8, 4)) * len(layouts), strict=False)):
            scene = Scene(sides, block_sizes=sizes, seed=seed)
            plan = scene.plan()
            handle = start_get(pair, connection, scene, plan)
            handle.wait()
            scene.require_exact()
            require(handle.state is TransferState.DONE, f"a get without an error ended as {handle.state.name}")
            require(handle.moved == handle.nbytes, f"DONE with {handle.moved} of {handle.nbytes} bytes moved")
            given = _given(pair, scene, plan)
            require(given.error is None, f"a get is DONE, but the receiver was told {given.error}")
            require(given.nbytes == handle.nbytes, f"the receiver was told {given.nbytes} of {handle.nbytes} bytes")


def check_large_get(subject: Subject) -> None:
    """Thousands of small runs, more than one system call takes, and more bytes than a socket holds."""
    with subject.pair() as pair:
        scene = Scene(num_layers=2, tokens=2003, heads=8, head_size=64, block_sizes=(16, 32))
        start_get(pair, pair.connect(), scene, scene.plan()).wait()
        scene.require_exact()


def check_partial_and_empty_gets(subject: Subject) -> None:
    """Some layers and some tokens alone, down to one token of one layer, and down to nothing."""
    with subject.pair() as pair:
        connection = pair.connect()
        for layers, tokens in ((range(1, 3), range(5, 18)), (range(1), range(3, 4))):
            scene = Scene(seed=tokens.start)
            start_get(pair, connection, scene, scene.plan(layers, tokens)).wait()
            scene.require_exact()
        scene = Scene()
        start_get(pair, connection, scene, scene.plan(range(1), range(5, 5))).wait()


def check_gets_and_puts_mixed(subject: Subject) -> None:
    """64 puts and gets started without waiting are all exact, and each kind is served in the order of its calls."""
    with subject.pair() as pair:
        connection = pair.connect()
        scenes = [Scene(seed=seed, num_layers=1) for seed in range(64)]
        begin = [start if seed % 2 else start_get for seed in range(64)]
        handles = [call(pair, connection, scene, scene.plan()) for call, scene in zip(begin, scenes, strict=True)]
        for handle, scene in zip(handles, scenes, strict=True):
            handle.wait()
            scene.require_exact()
        gets = [handle.key for handle in handles[::2]]
        pair.grants.wait_for(lambda: len(pair.grants.given) == len(gets), "offered() of every get")
        puts, given = ([placed.key for placed in calls] for calls in (pair.grants.heard, pair.grants.given))
        require(puts == [handle.key for handle in handles[1::2]], "puts arrived out of order")
        require(given == gets, "gets ended out of order")


def _refused(pair: MoverPair, connection: Connection, scene: Scene, plan: TransferPlan, what: str) -> PdtxError:
    handle = get(connection, scene, plan)
    error = require_error(TransferRefused, what, handle.wait)
    require(handle.state is TransferState.FAILED, f"{what}: the transfer is {handle.state.name}")
    scene.require_exact()
    require_works(pair, connection)
    return error  # type: ignore[return-value]


def check_get_without_offer(subject: Subject) -> None:
    """What is not offered is refused with the receiver's words, and so is what was offered to another session."""
    with subject.pair() as pair:
        connection, scene = pair.connect(), Scene()
        error = _refused(pair, connection, scene, scene.plan(), "a get of what nobody offered")
        require("nothing was offered" in str(error), f"the receiver's reason is lost: {error}")
        pair.connect("owner")
        stolen = Scene(seed=1)
        offer(pair, stolen, stolen.plan(), "owner")
        _refused(pair, connection, stolen, stolen.plan(), "a get of what was offered to another session")
        keys = {scene.key(scene.plan()), stolen.key(stolen.plan())}
        called = [placed.key for placed in pair.grants.given if placed.key in keys]
        require(not called, "offered() was called for what was never offered")


def check_get_of_another_size(subject: Subject) -> None:
    """A get of more or fewer bytes than are offered is refused; not one byte is written, and the receiver hears."""
    with subject.pair() as pair:
        connection = pair.connect()
        for seed, tokens in enumerate((range(18), range(19))):
            scene = Scene(seed=seed)
            plan = scene.plan(tokens=range(19 - seed))
            there = Placement(scene.src.region, scene.plan(tokens=tokens).flat.source())
            pair.grants.grant_get("session", scene.key(plan), there)
            _refused(pair, connection, scene, plan, "a get of another size than offered")
            require(_given(pair, scene, plan).error is not None, "offered() reported no error for another size")


def check_get_outside(subject: Subject) -> None:
    """An offer that leaves the receiver's region is refused, and runs that leave one's own are a PlanError."""
    with subject.pair() as pair:
        connection, scene = pair.connect(), Scene()
        plan = scene.plan()
        there = plan.flat.source()
        offsets = there.offsets.copy()
        offsets[len(offsets) // 2] += 1 << 20
        pair.grants.grant_get("session", scene.key(plan), Placement(scene.src.region, Slices(offsets, there.nbytes)))
        _refused(pair, connection, scene, plan, "an offer outside the region")
        require(_given(pair, scene, plan).error is not None, "offered() reported no error for an offer outside")
        for shift in (scene.dst.region.nbytes, -scene.dst.region.nbytes):
            runs = Runs(plan.flat.src, plan.flat.dst + np.int64(shift), plan.flat.nbytes)
            require_error(
                PlanError,
                "runs outside the destination",
                lambda runs=runs: connection.get(scene.key(plan), scene.dst.region, runs, soon()),  # type: ignore[misc]
            )
        require_works(pair, connection)


def check_get_cancel(subject: Subject) -> None:
    """A get that has not begun can be cancelled; the put before it is unharmed, and its bytes never come."""
    gate = Gate()
    with subject.held_pair(gate) as pair:
        connection = pair.connect()
        first = large_scene()
        second = Scene(seed=1)
        moving = start(pair, connection, first, first.plan())
        gate.wait_reached()
        offer(pair, second, second.plan())
        waiting = get(connection, second, second.plan())
        require(waiting.cancel(), "a get that has not begun could not be cancelled")
        require(waiting.state is TransferState.ABORTED, f"a cancelled get is {waiting.state.name}")
        require_error(TransferAborted, "wait() of a cancelled get", waiting.wait)
        gate.open()
        moving.wait()
        first.require_exact()
        require_works(pair, connection)
        second.require_exact()


def check_get_deadline(subject: Subject) -> None:
    """A get ends as FAILED at its deadline while the receiver makes up its mind; not one byte comes after that."""
    gate = Gate()
    with subject.held_pair(gate) as pair:
        connection = pair.connect()
        scenes, begun = [Scene(seed=seed) for seed in range(2)], time.monotonic()
        for scene in scenes:
            offer(pair, scene, scene.plan())
        handles = [get(connection, scene, scene.plan(), 0.4) for scene in scenes]
        ended = threading.Event()
        handles[1].on_end(lambda _: ended.set())
        # Nobody waits on the handle: the mover itself must end it.
        require(ended.wait(5.0), "a get was still open long after its deadline")
        for handle in handles:
            error = require_error(DeadlineExceeded, "a get past its deadline", handle.wait)
            took = handle.ended - begun
            require(0.35 < took < 3.0, f"a deadline of 0.4 s ended a get after {took:.2f} s")
            require(handle.state is TransferState.FAILED, f"a get past its deadline is {handle.state.name}")
            require(handle.peer in str(error), f"a deadline's message names no peer: {error}")
        gate.open()
        require_works(pair, connection)
        for scene in scenes:
            scene.require_exact()
        told = _given(pair, scenes[0], scenes[0].plan())
        require(told.error is not None, "the receiver was told that a get arrived which had ended at its deadline")


def check_get_with_a_failing_receiver(subject: Subject) -> None:
    """A receiver that raises what it should not in offer() fails that get alone; in offered() it does no harm."""
    for hook in ("before_offer", "before_offered"):
        failures = [RuntimeError("on purpose")]

        def fail_once(_: object, failures: list[RuntimeError] = failures) -> None:
            if failures:
                raise failures.pop()

        with subject.faulty_pair(GrantingReceiver(), **{hook: fail_once}) as pair:
            connection, scene = pair.connect(), Scene()
            handle = start_get(pair, connection, scene, scene.plan())
            if hook == "before_offer":
                require_error(TransferError, "a receiver failing in offer()", handle.wait)
            else:
                with contextlib.suppress(TransferError):  # a mover may tell the receiver before or after the end
                    handle.wait()
            require_works(pair, connection)
            require(not failures, f"the receiver's {hook[7:]}() was never called")


def check_close_with_gets_pending(subject: Subject) -> None:
    """Closing a connection ends its gets at once; what has been offered is told to be over, and no byte comes."""
    gate = Gate()
    with subject.held_pair(gate) as pair:
        connection = pair.connect()
        scenes = [Scene(seed=seed) for seed in range(8)]
        handles = list[TransferHandle]()
        for scene in scenes:
            offer(pair, scene, scene.plan())
            handles.append(get(connection, scene, scene.plan()))
        gate.wait_reached()
        begun = time.monotonic()
        closing = threading.Thread(target=connection.close)
        closing.start()
        for handle in handles:
            require_error(TransferError, "a get of a closed connection", lambda handle=handle: handle.wait(5.0))  # type: ignore[misc]
        gate.open()
        closing.join()
        require(time.monotonic() - begun < 5.0, "close() took more than 5 s")
        pair.grants.wait_for(lambda: bool(pair.grants.ended), "the end of a session")
        told = _given(pair, scenes[0], scenes[0].plan())
        require(told.error is not None, "the receiver was told that a get arrived whose connection was closed")
        for scene in scenes:
            scene.require_exact()
        late = get(connection, scenes[1], scenes[1].plan())
        require_error(TransferError, "get() on a closed connection", lambda: late.wait(5.0))


def check_consumer_closes_under_gets(subject: Subject) -> None:
    """When the consumer closes, open gets end with PeerLost, and so do later ones."""
    gate = Gate()
    with subject.held_pair(gate) as pair:
        connection = pair.connect()
        scenes = [Scene(seed=seed, num_layers=1) for seed in range(3)]
        handles = list[TransferHandle]()
        for scene in scenes:
            offer(pair, scene, scene.plan())
            handles.append(get(connection, scene, scene.plan()))
        gate.wait_reached()
        closing = threading.Thread(target=pair.consumer.close)
        closing.start()
        for handle in handles:
            require_error(PeerLost, "a get from a closed consumer", lambda handle=handle: handle.wait(5.0))  # type: ignore[misc]
        gate.open()
        closing.join()
        late = get(connection, scenes[0], scenes[0].plan())
        require_error(PeerLost, "get() from a closed consumer", lambda: late.wait(5.0))
