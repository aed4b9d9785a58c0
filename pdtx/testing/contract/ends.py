"""How transfers end: DONE, at a deadline, cancelled, or because a connection ends."""

import threading
import time

from pdtx.errors import DeadlineExceeded, PdtxError, PeerLost, TransferAborted, TransferError
from pdtx.testing.contract.subject import Subject, large_scene, require_works, soon, start
from pdtx.testing.pair import require, require_error
from pdtx.testing.receivers import Gate, GrantingReceiver
from pdtx.testing.scene import Scene
from pdtx.transports import TransferHandle, TransferState


def check_done_means_arrived(subject: Subject) -> None:
    """DONE comes after the receiver has heard of the bytes, and they lie in its memory then."""
    grants = GrantingReceiver()
    with subject.faulty_pair(grants, before_placed=lambda _: time.sleep(0.1)) as pair:
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
            limit = soon(5.0)
            while len(calls) < 2 and time.monotonic() < limit:
                time.sleep(0.001)
            require(len(calls) == 2, f"2 callbacks at the end of a transfer were called {len(calls)} times")


def check_cancel(subject: Subject) -> None:
    """A transfer that has not begun can be cancelled; the one before it is unharmed, and its bytes never move."""
    gate = Gate()
    with subject.held_pair(gate) as pair:
        connection = pair.connect()
        first = large_scene()
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
        plans = [scene.plan() for scene in scenes]
        begun, handles = time.monotonic(), list[TransferHandle]()
        for scene, plan in zip(scenes, plans, strict=True):
            pair.grants.grant("session", scene.key(plan), scene.placement(plan))
            handles.append(connection.put(scene.key(plan), scene.src.region, plan.flat, begun + 0.4))
        ended = threading.Event()
        handles[1].on_end(lambda _: ended.set())
        # Nobody waits on the handle: the mover itself must end it.
        require(ended.wait(5.0), "a transfer was still open long after its deadline")
        for handle in handles:
            error = require_error(DeadlineExceeded, "a transfer past its deadline", handle.wait)
            took = handle.ended - begun
            require(0.35 < took < 3.0, f"a deadline of 0.4 s ended a transfer after {took:.2f} s")
            require(handle.state is TransferState.FAILED, f"a transfer past its deadline is {handle.state.name}")
            require(handle.peer in str(error), f"a deadline's message names no peer: {error}")
        gate.open()


def check_close_with_work_pending(subject: Subject) -> None:
    """Closing a connection ends its transfers at once: FAILED if moving, ABORTED if not begun."""
    gate = Gate()
    with subject.held_pair(gate) as pair:
        connection = pair.connect()
        scenes = [Scene(seed=seed, num_layers=1) for seed in range(8)]
        scenes[0] = large_scene()
        handles = [start(pair, connection, scene, scene.plan()) for scene in scenes]
        gate.wait_reached()
        begun = time.monotonic()
        closing = threading.Thread(target=connection.close)
        closing.start()
        for handle in handles:
            require_error(TransferError, "a transfer of a closed connection", lambda handle=handle: handle.wait(5.0))  # type: ignore[misc]
        states = [handle.state for handle in handles]
        gate.open()
        closing.join()
        require(time.monotonic() - begun < 5.0, "close() took more than 5 s")
        require(states[0] is TransferState.FAILED, f"a moving transfer became {states[0].name} when closed")
        later = {state.name for state in states[1:]}
        require(later == {"ABORTED"}, f"transfers not begun became {', '.join(sorted(later))} when closed")
        connection.close()
        plan = scenes[1].plan()
        late = connection.put(scenes[1].key(plan), scenes[1].src.region, plan.flat, soon())
        require_error(TransferError, "put() on a closed connection", lambda: late.wait(5.0))


def check_consumer_closes(subject: Subject) -> None:
    """When the consumer closes, open transfers end with PeerLost, once the connection says so; later ones, too."""
    gate = Gate()
    with subject.held_pair(gate) as pair:
        connection = pair.connect()
        scenes = [Scene(seed=seed, num_layers=1) for seed in range(3)]
        handles = [start(pair, connection, scene, scene.plan()) for scene in scenes]
        reasons = list[PdtxError | None]()
        for handle in handles:
            handle.on_end(lambda _: reasons.append(connection.ended))
        gate.wait_reached()
        closing = threading.Thread(target=pair.consumer.close)
        closing.start()
        for handle in handles:
            error = require_error(PeerLost, "a transfer to a closed consumer", lambda handle=handle: handle.wait(5.0))  # type: ignore[misc]
            require(pair.address in str(error), f"the message of a lost peer does not name it: {error}")
        require(None not in reasons, "a transfer was ended by a connection that did not say yet that it has ended")
        gate.open()
        closing.join()
        plan = scenes[0].plan()
        late = connection.put(scenes[0].key(plan), scenes[0].src.region, plan.flat, soon())
        require_error(PeerLost, "put() to a closed consumer", lambda: late.wait(5.0))
