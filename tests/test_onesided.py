"""One-sided movers, with engines that copy in memory: the contract, and what only they can do wrong."""

import contextlib
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import torch

from pdtx.errors import DeadlineExceeded, PdtxError, PeerLost, ProtocolError, TransferAborted, TransferError
from pdtx.plan import Runs
from pdtx.testing.contract import CONTRACT, Check, Subject
from pdtx.testing.pair import MoverPair
from pdtx.testing.receivers import FaultyReceiver, Gate, GrantingReceiver
from pdtx.testing.scene import Scene
from pdtx.transports import Connection, Placement, Region, TransferHandle, TransferKey, TransferState
from pdtx.transports import listener as listener_module
from pdtx.transports.base import NOTICE_KEY
from pdtx.transports.handshake import Dialect, admit_producer, prove_to_consumer
from pdtx.transports.onesided import Progress, Shared
from pdtx.transports.onesided import acceptor as acceptor_module
from pdtx.transports.onesided.frames import (
    MAX_FRAME_BYTES,
    VERSION,
    Ask,
    ControlStream,
    Done,
    End,
    Go,
    Greeting,
    Message,
    Notice,
    Ranges,
    Refused,
    Share,
    pack_key,
    unpack_slices,
)
from pdtx.transports.onesided.initiator import OneSidedConnection
from pdtx.transports.onesided.sharing import MAX_REGIONS, Opened
from pdtx.transports.sockets import bind_tcp, dial_local, dial_tcp
from pdtx.transports.wire import Wire
from tests.engine_pair import wait_until
from tests.memory_engine import MemoryLink, PullingMover, PushingMover

WAIT_S = 10.0
"""Of what another thread is about to do."""


@pytest.mark.parametrize("make", [PushingMover, PullingMover])
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_the_contract_holds(check: Check, make: type[PushingMover | PullingMover]) -> None:
    check(Subject(make))


def _start(pair: MoverPair, connection: Connection, scene: Scene, **how: bool) -> TransferHandle:
    plan = scene.plan()
    pair.grants.grant("session", scene.key(plan), scene.placement(plan))
    scene.moved(plan)
    return connection.put(scene.key(plan), scene.src.region, plan.flat, time.monotonic() + 10, **how)


def _producer_link(pair: MoverPair) -> MemoryLink:
    assert isinstance(pair.producer, PushingMover)
    return pair.producer.fabric.links[-1]


def _slow_to_stop(link: MemoryLink, monkeypatch: pytest.MonkeyPatch, rest: Callable[[], object]) -> list[float]:
    """Let a write take until it is stopped, and then a rest; return the times at which it had ended."""
    stopped = list[float]()
    inner = link.write

    def write(*arguments: object) -> None:
        try:
            inner(*arguments)  # type: ignore[arg-type]
        finally:
            rest()
            stopped.append(time.monotonic())

    monkeypatch.setattr(link, "write", write)
    link.slow_s = 30.0
    return stopped


@pytest.mark.parametrize("layouts", [("flash_attn_nhd", "flashinfer_hnd"), ("flashinfer_hnd", "flash_attn_nhd")])
def test_a_staged_put_in_many_pieces_is_exact(layouts: tuple[str, str]) -> None:
    with MoverPair(PushingMover) as pair:
        connection = pair.connect()
        assert connection.stages
        for seed in range(3):
            scene = Scene(layouts, seed=seed)
            handle = _start(pair, connection, scene, staged=True)
            handle.wait()
            assert handle.moved == handle.nbytes > 3 * 1000  # several pieces
            scene.require_exact()


def test_memory_that_is_pulled_is_not_staged() -> None:
    with MoverPair(PullingMover) as pair:
        connection = pair.connect()
        assert not connection.stages
        scene = Scene()
        _start(pair, connection, scene, staged=True).wait()
        scene.require_exact()


def test_the_memory_stays_granted_while_a_late_transfer_may_still_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline passes while the engine writes: the consumer hears of the end only after the engine has stopped."""
    with MoverPair(PushingMover) as pair:
        connection = pair.connect()
        writing, go = threading.Event(), threading.Event()
        link = _producer_link(pair)
        stopped = _slow_to_stop(link, monkeypatch, lambda: go.wait(WAIT_S))
        monkeypatch.setattr(link, "write", _after(writing.set, link.write))
        scene = Scene()
        plan = scene.plan()
        pair.grants.grant("session", scene.key(plan), scene.placement(plan))
        handle = connection.put(scene.key(plan), scene.src.region, plan.flat, time.monotonic() + 3 * WAIT_S)
        assert writing.wait(WAIT_S)
        handle.expire()  # as at its deadline, which cannot be told to come now
        with pytest.raises(DeadlineExceeded):
            handle.wait()
        time.sleep(0.3)  # for an end to be heard of that did not wait for the engine
        assert not pair.grants.heard
        go.set()
        pair.grants.wait_for(lambda: bool(pair.grants.heard), "the end of the transfer")
        heard = time.monotonic()
        assert stopped
        assert heard >= stopped[0]
        assert pair.grants.heard[0].error is not None
        scene.require_exact()


def test_a_source_that_may_have_changed_while_it_was_pulled_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer's deadline passes, or it closes, in the middle of the read: what was read counts for nothing."""
    for closes in (False, True):
        with MoverPair(PullingMover) as pair:
            connection = pair.connect()
            scene = Scene()
            plan = scene.plan()
            inner, reading, go = MemoryLink.read, threading.Event(), threading.Event()

            def slow_read(
                self: MemoryLink,
                *arguments: object,
                inner: Callable[..., None] = inner,
                reading: threading.Event = reading,
                go: threading.Event = go,
            ) -> None:
                inner(self, *arguments)
                reading.set()
                assert go.wait(WAIT_S)  # an engine that looks at the clock seldom

            monkeypatch.setattr(MemoryLink, "read", slow_read)
            pair.grants.grant("session", scene.key(plan), scene.placement(plan))
            limit = time.monotonic() + (2 * WAIT_S if closes else 1.0)
            handle = connection.put(scene.key(plan), scene.src.region, plan.flat, limit)
            if closes:
                assert reading.wait(WAIT_S)
                connection.close()
            with pytest.raises(TransferError):
                handle.wait()
            go.set()
            heard = pair.grants.heard
            pair.grants.wait_for(heard.__len__, "the end of the transfer")  # type: ignore[arg-type]
            assert heard[0].error is not None
            monkeypatch.setattr(MemoryLink, "read", inner)


def test_a_source_may_change_while_the_end_waits_to_be_read() -> None:
    """The consumer is busy until the put's deadline has passed: it must not take what its owner may have changed."""
    grants, gate = GrantingReceiver(), Gate()
    busy = FaultyReceiver(grants, before_placed=lambda key: gate.hold() if key.request_id == "request-0" else None)
    with MoverPair(PullingMover, receiver=busy, grants=grants) as pair:
        connection = pair.connect()
        scenes = [Scene(seed=seed, num_layers=1) for seed in range(2)]
        first = _start(pair, connection, scenes[0])
        gate.wait_reached(WAIT_S)
        plan = scenes[1].plan()
        grants.grant("session", scenes[1].key(plan), scenes[1].placement(plan))
        late = connection.put(scenes[1].key(plan), scenes[1].src.region, plan.flat, time.monotonic() + 1.0)
        with pytest.raises(DeadlineExceeded):
            late.wait()
        gate.open()
        first.wait()
        grants.wait_for(lambda: len(grants.heard) == 2, "the end of both")
        assert {heard.key: heard.error is None for heard in grants.heard} == {first.key: True, late.key: False}


def test_a_transfer_ends_only_after_a_pulling_peer_is_cut_off() -> None:
    """Whoever hears of the end may change the source: the peer must not be able to take it any more."""
    gate, grants = Gate(), GrantingReceiver()
    receiver = FaultyReceiver(grants, before_place=lambda _: gate.hold())
    with MoverPair(PullingMover, receiver=receiver, grants=grants) as pair:
        connection = pair.connect()
        scene = Scene()
        handle = _start(pair, connection, scene)
        gate.wait_reached()
        cut = list[bool]()
        assert isinstance(connection, OneSidedConnection)
        handle.on_end(lambda _: cut.append(connection._stream.wire.hung_up()))
        closing = threading.Thread(target=connection.close)
        closing.start()
        with pytest.raises(TransferError):
            handle.wait(5)
        gate.open()
        closing.join()
        assert cut == [True]


def test_memory_stays_granted_while_a_peer_that_cannot_be_cut_off_is_there() -> None:
    """The consumer ends the connection, for nonsense, and the peer has a put open: it may write until it hangs up."""
    with MoverPair(PushingMover) as pair:
        stream = _hostile(pair)
        scene = Scene()
        plan = scene.plan()
        pair.grants.grant("session", scene.key(plan), scene.placement(plan))
        stream.send(Ask(0, False, pack_key(scene.key(plan)), plan.nbytes))
        _until(stream, Go)
        stream.send(End(7, 0))
        with pytest.raises(PeerLost):
            _until(stream, Done)
        time.sleep(1.0)
        assert not pair.grants.heard
        stream.wire.close()
        pair.grants.wait_for(lambda: bool(pair.grants.heard), "the end of the transfer")


def test_a_lost_producers_transfer_ends_only_after_the_link_is_closed() -> None:
    closed_first = list[bool]()

    class Watching(GrantingReceiver):
        def placed(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
            closed_first.append(consumer_link().closed)
            super().placed(session_id, key, nbytes, error)

    grants = Watching()
    with MoverPair(PushingMover, receiver=grants, grants=grants) as pair:

        def consumer_link() -> MemoryLink:
            assert isinstance(pair.consumer, PushingMover)
            return pair.consumer.fabric.links[-1]

        stream = _hostile(pair)
        scene = Scene()
        plan = scene.plan()
        pair.grants.grant("session", scene.key(plan), scene.placement(plan))
        stream.send(Ask(0, False, pack_key(scene.key(plan)), plan.nbytes))
        assert isinstance(_until(stream, Go), Go)
        stream.wire.close()
        grants.wait_for(lambda: bool(grants.heard), "the end of the transfer")
        assert closed_first == [True]
        assert grants.heard[0].error is not None


@pytest.mark.parametrize("make", [PushingMover, PullingMover])
def test_a_notice_comes_after_the_transfers_before_it(make: type[PushingMover | PullingMover]) -> None:
    order = list[str]()

    class Ordered(GrantingReceiver):
        def placed(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
            order.append(key.request_id)
            super().placed(session_id, key, nbytes, error)

        def notified(self, session_id: str, data: bytes) -> None:
            order.append(data.decode())

    grants = Ordered()
    with MoverPair(make, receiver=grants, grants=grants) as pair:
        connection = pair.connect()
        scenes = [Scene(seed=seed, num_layers=1) for seed in range(3)]
        for mover in (pair.producer, pair.consumer):
            assert isinstance(mover, make)
            for link in mover.fabric.links:
                link.slow_s = 0.1
        handles = [_start(pair, connection, scene) for scene in scenes[:2]]
        notice = connection.notify(b"two are there", time.monotonic() + 10)
        handles.append(_start(pair, connection, scenes[2]))
        for handle in (*handles, notice):
            handle.wait()
        assert notice.key == NOTICE_KEY
        assert order == ["request-0", "request-1", "two are there", "request-2"]


def test_the_next_put_is_placed_while_one_is_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    placed, inner = threading.Event(), MemoryLink.read
    waited = list[bool]()

    def read(self: MemoryLink, *arguments: object) -> None:
        waited.append(placed.wait(5))
        inner(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryLink, "read", read)
    grants = GrantingReceiver()
    told = FaultyReceiver(grants, before_place=lambda key: placed.set() if key.request_id == "request-1" else None)
    with MoverPair(PullingMover, receiver=told, grants=grants) as pair:
        connection = pair.connect()
        scenes = [Scene(seed=seed, num_layers=1) for seed in range(2)]
        first = _start(pair, connection, scenes[0])
        time.sleep(0.1)  # it is being pulled, or will be in a moment
        second = _start(pair, connection, scenes[1])
        first.wait()
        second.wait()
        assert waited == [True, True]
        for scene in scenes:
            scene.require_exact()


def test_a_link_is_closed_only_after_the_pull_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read lies in memory that is gone with the link."""
    reading, closed = threading.Event(), list[bool]()

    def read(self: MemoryLink, remote: Region, region: Region, runs: Runs, deadline: float, progress: Progress) -> None:
        reading.set()
        while not progress.stopped:
            time.sleep(0.01)
        time.sleep(0.3)  # an engine that takes its time to stop
        closed.append(self.closed)
        raise TransferAborted("stopped")

    monkeypatch.setattr(MemoryLink, "read", read)
    with MoverPair(PullingMover) as pair:
        connection = pair.connect()
        scene = Scene()
        handle = _start(pair, connection, scene)
        assert reading.wait(5)
        connection.close()
        with pytest.raises(TransferError):
            handle.wait(5)
        heard = pair.grants.heard
        pair.grants.wait_for(heard.__len__, "the end of the transfer")  # type: ignore[arg-type]
        assert closed == [False]
        assert [each.error is None for each in heard] == [False]


@pytest.mark.parametrize("how", ["deadline", "close"])
def test_a_get_ends_only_when_its_region_is_left_alone(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with MoverPair(PushingMover) as pair:
        connection = pair.connect()
        link = _producer_link(pair)
        reading, stopped = threading.Event(), list[float]()

        def read(remote: Region, region: Region, runs: Runs, deadline: float, progress: Progress) -> None:
            reading.set()
            while not progress.stopped and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.3)  # an engine that takes its time to stop
            stopped.append(time.monotonic())
            raise TransferAborted("stopped")

        monkeypatch.setattr(link, "read", read)
        scene = Scene()
        plan = scene.plan()
        pair.grants.grant_get("session", scene.key(plan), Placement(scene.src.region, plan.flat.source()))
        handle = connection.get(scene.key(plan), scene.dst.region, plan.flat, time.monotonic() + 3 * WAIT_S)
        assert reading.wait(WAIT_S)
        if how == "close":
            connection.close()
        else:
            handle.expire()  # as at its deadline, which cannot be told to come now
        with pytest.raises(TransferError):
            handle.wait(WAIT_S)
        assert stopped
        assert handle.ended >= stopped[0]


def test_a_broken_engine_ends_the_connection_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with MoverPair(PushingMover) as pair:
        connection = pair.connect()

        def fail(*_: object) -> None:
            raise TransferError("the engine has no more credits")

        monkeypatch.setattr(_producer_link(pair), "write", fail)
        scene = Scene()
        handle = _start(pair, connection, scene)
        with pytest.raises(TransferError, match="no more credits"):
            handle.wait()
        pair.grants.wait_for(lambda: bool(pair.grants.heard), "the end of the transfer")
        assert "no more credits" in str(pair.grants.heard[0].error)
        late = connection.put(scene.key(scene.plan()), scene.src.region, scene.plan().flat, time.monotonic() + 5)
        with pytest.raises(PeerLost, match="no more credits"):
            late.wait()


def _ended_at_the_end_of(handle: TransferHandle, connection: Connection) -> "queue.Queue[PdtxError | None]":
    """What a connection says of its own end at the moment at which a transfer ends, once it has."""
    seen = queue.Queue[PdtxError | None]()
    handle.on_end(lambda _: seen.put(connection.ended))
    return seen


def test_a_connection_says_that_it_has_ended_before_a_transfer_ends_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hears of the failure tries again at once, and must not do so over the same connection."""
    with MoverPair(PushingMover) as pair:
        connection, gate = pair.connect(), Gate()

        def fail(*_: object) -> None:
            gate.hold()
            raise TransferError("the engine has no more credits")

        monkeypatch.setattr(_producer_link(pair), "write", fail)
        scenes = [Scene(seed=seed, num_layers=1) for seed in range(2)]
        first, second = (_start(pair, connection, scene) for scene in scenes)
        gate.wait_reached(WAIT_S)
        seen = _ended_at_the_end_of(first, connection)
        gate.open()
        assert "no more credits" in str(seen.get(timeout=WAIT_S))
        with pytest.raises(PeerLost, match="no more credits"):
            second.wait()


def test_a_connection_says_that_it_has_ended_before_a_get_ends_that_was_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with MoverPair(PushingMover) as pair:
        connection, scene, gate = pair.connect(), Scene(), Gate()

        def read(*of: object) -> None:
            gate.hold()
            raise TransferAborted("stopped")

        monkeypatch.setattr(_producer_link(pair), "read", read)
        plan = scene.plan()
        pair.grants.grant_get("session", scene.key(plan), Placement(scene.src.region, plan.flat.source()))
        handle = connection.get(scene.key(plan), scene.dst.region, plan.flat, time.monotonic() + WAIT_S)
        gate.wait_reached(WAIT_S)
        seen = _ended_at_the_end_of(handle, connection)
        assert handle.expire()
        gate.open()
        assert seen.get(timeout=WAIT_S) is not None


# -- hostile peers -----------------------------------------------------------------------------------------------------


def _hostile(pair: MoverPair) -> ControlStream:
    """A producer that knows its session's token, and says whatever the test wants."""
    token = secrets.token_bytes(32)
    pair.grants.add_session("session", token)
    deadline = time.monotonic() + 5
    wire = Wire(dial_tcp(pair.address, deadline), pair.address)
    prove_to_consumer(wire, Dialect("push", b"pdtx-pus", VERSION), "session", token, deadline)
    stream = ControlStream(wire)
    stream.send(Greeting(b"memory"))
    assert isinstance(stream.receive(deadline), Greeting)
    return stream


def _until(stream: ControlStream, kind: type[Message]) -> Message:
    """Return the next message of a kind."""
    while not isinstance(message := stream.receive(time.monotonic() + 5), kind):
        pass
    return message


_KEY = pack_key(TransferKey("r", 0, 1, 0, 1))

HOSTILE: dict[str, list[Message]] = {
    "an end of what never began": [End(7, 0)],
    "a greeting again": [Greeting(b"memory")],
    "an answer": [Go(0)],
    "done": [Done(0, 0)],
    "refused": [Refused(0, "no")],
    "a region out of turn": [Share(3, 10, b"k", 0)],
    "too many descriptors": [Share(0, 10, b"k", 99)],
    "a negative key": [Ask(0, False, ("r", -1, 1, 0, 1, 0, 0, 0), 4)],
    "a key backwards": [Ask(0, False, ("r", 3, 1, 0, 1, 0, 0, 0), 4)],
    "a long request id": [Ask(0, False, ("r" * 1000, 0, 1, 0, 1, 0, 0, 0), 4)],
    "a sequence again": [Ask(3, False, _KEY, 4), Ask(3, False, _KEY, 4)],
    "a sequence backwards": [Notice(3, b""), Notice(2, b"")],
    "a negative sequence": [Ask(-1, False, _KEY, 4)],
    "a size beyond all": [Ask(0, False, _KEY, (1 << 64) - 1)],
    "a region beyond all": [Share(0, (1 << 64) - 1, b"k", 0)],
    "a key beyond all": [Ask(0, False, ("r", 0, 1, 0, (1 << 64) - 1, 0, 0, 0), 4)],
    "an end at no time": [Ask(0, False, _KEY, 4), End(0, 4, None, float("nan"))],
    "a sequence far ahead": [Ask(1 << 40, False, _KEY, 4)],
    "a negative size": [Ask(0, False, _KEY, -4)],
    "a long notice": [Notice(0, b"x" * 5000)],
}


@pytest.mark.parametrize("messages", HOSTILE.values(), ids=HOSTILE.keys())
def test_nonsense_ends_the_connection_and_no_other(messages: list[Message]) -> None:
    with MoverPair(PushingMover) as pair:
        stream = _hostile(pair)
        for message in messages:
            stream.send(message)
        with pytest.raises(PeerLost):
            _until(stream, Notice)  # which an acceptor never sends
        stream.wire.close()
        pair.grants.wait_for(lambda: bool(pair.grants.ended), "the end of the session")
        scene = Scene()
        _start(pair, pair.connect(), scene).wait()
        scene.require_exact()


def test_done_counts_only_after_this_sides_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that says Done while the engine still moves, or with too few bytes, has not taken anything."""
    for done, slow_s in ((Done(0, 64), 2.0), (Done(0, 63), 0.0)):
        token, sock_address = secrets.token_bytes(32), bind_tcp("127.0.0.1:0")
        monkeypatch.setattr(MemoryLink, "open", lambda *_: Region(torch.zeros(64, dtype=torch.uint8)))

        def serve(sock: socket.socket, token: bytes, done: Done, early: bool) -> None:
            wire = Wire(sock.accept()[0], "producer")
            admit_producer(wire, Dialect("push", b"pdtx-pus", VERSION), lambda _: token, time.monotonic() + 5)
            stream = ControlStream(wire)
            stream.send(Greeting(b"memory"))
            _until(stream, Ask)
            stream.send(Share(0, 64, b"", 0))
            stream.send(Go(0, 0, Ranges((0).to_bytes(8, "little"), 64)))
            if not early:
                _until(stream, End)
            stream.send(done)
            _drain(stream)
            wire.close()

        thread = threading.Thread(target=serve, args=(sock_address[0], token, done, slow_s > 0))
        thread.start()
        mover = PushingMover()
        try:
            connection = mover.connect(sock_address[1], "session", token, time.monotonic() + 5)
            mover.fabric.links[-1].slow_s = slow_s
            runs = Runs(*(np.array([number], np.int64) for number in (0, 0, 64)))
            memory = Region(torch.zeros(64, dtype=torch.uint8))
            handle = connection.put(TransferKey("r", 0, 1, 0, 1), memory, runs, time.monotonic() + 5)
            with pytest.raises(PdtxError):
                handle.wait()
        finally:
            mover.close()
            thread.join(5)
            sock_address[0].close()


def test_a_transfer_can_be_ended_once_only() -> None:
    with MoverPair(PushingMover) as pair:
        stream = _hostile(pair)
        scene = Scene()
        plan = scene.plan()
        pair.grants.grant("session", scene.key(plan), scene.placement(plan))
        stream.send(Ask(0, False, pack_key(scene.key(plan)), plan.nbytes))
        _until(stream, Go)
        stream.send(End(0, plan.nbytes))
        _until(stream, Done)
        stream.send(End(0, plan.nbytes))
        with pytest.raises(PeerLost):
            _until(stream, Done)
        assert len(pair.grants.heard) == 1
        stream.wire.close()


def test_an_end_with_too_few_bytes_is_no_success() -> None:
    with MoverPair(PushingMover) as pair:
        stream = _hostile(pair)
        scene = Scene()
        plan = scene.plan()
        pair.grants.grant("session", scene.key(plan), scene.placement(plan))
        stream.send(Ask(0, False, pack_key(scene.key(plan)), plan.nbytes))
        _until(stream, Go)
        stream.send(End(0, plan.nbytes - 1))
        with pytest.raises(PeerLost):
            _until(stream, Done)
        stream.wire.close()
        pair.grants.wait_for(lambda: bool(pair.grants.heard), "the end of the transfer")
        assert pair.grants.heard[0].error is not None


@pytest.mark.parametrize(
    ("share", "go"),
    [
        (Share(0, 64, b"", 0), Go(0, 0, Ranges((32).to_bytes(8, "little"), 64))),
        (Share(0, 64, b"", 0), Go(0, 0, Ranges((-8).to_bytes(8, "little", signed=True), 64))),
        (Share(0, 64, b"", 0), Go(0, 0, Ranges((0).to_bytes(8, "little"), 63))),
        (Share(0, 64, b"", 0), Go(0, 1, Ranges((0).to_bytes(8, "little"), 64))),
        (Share(0, 64, b"", 0), Go(0)),
        (Share(0, 64, b"", 0), Done(0, 64)),
        (Share(0, 64, b"", 0), Go(0, 0, Ranges(bytes(32), struct.pack("<4q", *[1 << 62] * 3, (1 << 62) + 64)))),
        (Share(0, 64, b"", 0), Go(0, 0, Ranges(bytes(16), struct.pack("<2q", -64, 128)))),
        (Share(0, 64, b"", 0), Go(5)),
    ],
)
def test_a_hostile_consumers_answer_moves_nothing(share: Share, go: Message, monkeypatch: pytest.MonkeyPatch) -> None:
    token, moved = secrets.token_bytes(32), list[object]()
    monkeypatch.setattr(MemoryLink, "open", lambda *_: object())
    monkeypatch.setattr(MemoryLink, "write", lambda *arguments: moved.append(arguments))
    sock, address = bind_tcp("127.0.0.1:0")

    def serve() -> None:
        wire = Wire(sock.accept()[0], "producer")
        admit_producer(wire, Dialect("push", b"pdtx-pus", VERSION), lambda _: token, time.monotonic() + 5)
        stream = ControlStream(wire)
        stream.send(Greeting(b"memory"))
        _until(stream, Ask)
        stream.send(share)
        stream.send(go)
        _drain(stream)
        wire.close()

    thread = threading.Thread(target=serve)
    thread.start()
    mover = PushingMover()
    try:
        connection = mover.connect(address, "session", token, time.monotonic() + 5)
        memory = Region(torch.zeros(64, dtype=torch.uint8))
        runs = Runs(*(np.array([number], np.int64) for number in (0, 0, 64)))
        handle = connection.put(TransferKey("r", 0, 1, 0, 1), memory, runs, time.monotonic() + 5)
        with pytest.raises(PdtxError):
            handle.wait()
        assert not moved
    finally:
        mover.close()
        thread.join(5)
        sock.close()


@pytest.mark.parametrize("offset", [None, 0, -64], ids=["no source", "beyond the end", "before the beginning"])
def test_a_hostile_producers_source_is_not_read(offset: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = list[object]()
    monkeypatch.setattr(MemoryLink, "open", lambda *_: object())
    monkeypatch.setattr(MemoryLink, "read", lambda *arguments: moved.append(arguments))
    with MoverPair(PullingMover) as pair:
        token = secrets.token_bytes(32)
        pair.grants.add_session("session", token)
        wire = Wire(dial_local(pair.address, time.monotonic() + 5), pair.address)
        dialect = Dialect("pull", b"pdtx-pul", VERSION)
        prove_to_consumer(wire, dialect, "session", token, time.monotonic() + 5)
        stream = ControlStream(wire)
        stream.send(Greeting(b"memory"))
        scene = Scene()
        plan = scene.plan()
        pair.grants.grant("session", scene.key(plan), scene.placement(plan))
        stream.send(Share(0, 64, b"", 0))
        ranges = None if offset is None else Ranges(offset.to_bytes(8, "little", signed=True), plan.nbytes)
        stream.send(Ask(0, False, pack_key(scene.key(plan)), plan.nbytes, 0, ranges))
        with contextlib.suppress(PeerLost):
            stream.send(End(0, plan.nbytes))
        _drain(stream)
        wire.close()
        assert not moved
        scene.require_exact()


def test_no_more_transfers_than_the_limit_are_open() -> None:
    with MoverPair(PushingMover) as pair:
        stream = _hostile(pair)
        scene = Scene(num_layers=1)
        plan = scene.plan()
        thread = threading.Thread(target=_drain, args=(stream,))
        thread.start()
        with contextlib.suppress(PeerLost):
            for sequence in range(1100):
                key = TransferKey(f"r{sequence}", 0, 1, 0, 19)
                pair.grants.grant("session", key, scene.placement(plan))
                stream.send(Ask(sequence, False, pack_key(key), plan.nbytes))
        thread.join(10)
        assert not thread.is_alive()
        stream.wire.close()
        pair.grants.wait_for(lambda: bool(pair.grants.ended), "the end of the session")
        assert len(pair.grants.heard) == 1024


def _drain(stream: ControlStream) -> None:
    with contextlib.suppress(PdtxError):
        while True:
            stream.receive(time.monotonic() + 10)


# -- the control stream ------------------------------------------------------------------------------------------------


@pytest.fixture
def streams() -> Iterator[tuple[ControlStream, ControlStream]]:
    one, other = socket.socketpair()
    wires = Wire(one, "one"), Wire(other, "other")
    yield ControlStream(wires[0]), ControlStream(wires[1])
    for wire in wires:
        wire.close()


def test_a_message_that_is_announced_too_large_is_not_waited_for(streams: tuple[ControlStream, ControlStream]) -> None:
    streams[0].wire.send((MAX_FRAME_BYTES + 1).to_bytes(4, "big"), "room")
    with pytest.raises(ProtocolError, match="announced a message"):
        streams[1].receive(time.monotonic() + 1)


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x90", msgspec.msgpack.encode([99, 1]), b"\x93\x01\x02\x03"])
def test_what_is_no_message_is_refused(data: bytes, streams: tuple[ControlStream, ControlStream]) -> None:
    streams[0].wire.send(len(data).to_bytes(4, "big") + data, "room")
    with pytest.raises(ProtocolError, match="no message"):
        streams[1].receive(time.monotonic() + 1)


@pytest.mark.parametrize(
    "ranges",
    [None, Ranges(b"1234567", 8), Ranges(b"12345678", b"1234"), Ranges(b"12345678", -1), Ranges(b"12345678", 1 << 63)],
)
def test_ranges_that_are_none_are_refused(ranges: Ranges | None) -> None:
    with pytest.raises(ProtocolError, match="ranges"):
        unpack_slices(ranges, "peer")


def test_descriptors_travel_and_none_are_left(streams: tuple[ControlStream, ControlStream]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reading, writing = os.pipe()
    opened = Opened(MemoryLink(), streams[1])
    streams[0].send(Share(0, 10, b"k", 2), descriptors=(reading, writing))
    assert opened.accept(streams[1].receive(time.monotonic() + 1), time.monotonic() + 1)
    os.close(reading)
    os.close(writing)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    opened.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_more_regions_than_the_limit_are_shared(streams: tuple[ControlStream, ControlStream]) -> None:
    opened = Opened(MemoryLink(), streams[1])
    for number in range(MAX_REGIONS):
        assert opened.accept(Share(number, 10, b"k", 0), time.monotonic() + 1)
    with pytest.raises(ProtocolError, match="out of turn"):
        opened.accept(Share(MAX_REGIONS, 10, b"k", 0), time.monotonic() + 1)


def test_a_region_that_was_not_shared_is_refused(streams: tuple[ControlStream, ControlStream]) -> None:
    opened = Opened(MemoryLink(), streams[1])
    for number in (None, 0, 5):
        with pytest.raises(ProtocolError, match="has not shared"):
            opened.region(number)


def test_shared_keys_are_opened_when_they_are_used(streams: tuple[ControlStream, ControlStream]) -> None:
    seen = list[Shared]()

    class Counting(MemoryLink):
        def open(self, shared: Shared, nbytes: int) -> object:  # type: ignore[override]
            seen.append(shared)
            return nbytes

    opened = Opened(Counting(), streams[1])
    opened.accept(Share(0, 10, b"k", 0), time.monotonic() + 1)
    assert not seen
    assert opened.region(0) == opened.region(0) == (10, 10)
    assert seen == [Shared(b"k")]


def _after(first: Callable[[], object], call: Callable[..., None]) -> Callable[..., None]:
    def both(*arguments: object) -> None:
        first()
        call(*arguments)

    return both


def test_states_of_what_was_asked_for_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers behind the one that moves are not begun, though they have been asked for."""
    with MoverPair(PushingMover) as pair:
        connection, gate = pair.connect(), Gate()
        link = _producer_link(pair)
        monkeypatch.setattr(link, "_move", _after(gate.hold, link._move))
        scenes = [Scene(seed=seed, num_layers=1) for seed in range(4)]
        handles = [_start(pair, connection, scene) for scene in scenes]
        gate.wait_reached(WAIT_S)  # by the first of them
        wait_until(lambda: not pair.grants._grants, "all have been asked for, and placed")
        assert [handle.state for handle in handles[1:]] == [TransferState.PENDING] * 3
        assert handles[1].cancel()
        gate.open()
        for handle in (handles[0], *handles[2:]):
            handle.wait()
        pair.grants.wait_for(lambda: len(pair.grants.heard) == 4, "the end of all")
        assert [heard.error is None for heard in pair.grants.heard] == [True, False, True, True]


def test_a_consumer_that_closes_waits_for_the_writer_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that cannot be cut off finishes what it has begun: until then the memory is not given away."""
    # What a consumer that closes is patient for: a slow machine must not take that away from the writer below.
    monkeypatch.setattr(acceptor_module, "_STOP_S", WAIT_S)
    monkeypatch.setattr(listener_module, "_JOIN_S", WAIT_S)
    with MoverPair(PushingMover) as pair:
        connection = pair.connect()
        link = _producer_link(pair)
        stopped = _slow_to_stop(link, monkeypatch, lambda: time.sleep(0.3))
        heard = list[float]()
        placed = pair.grants.placed

        def note(*arguments: object) -> None:
            heard.append(time.monotonic())
            placed(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(pair.grants, "placed", note)
        begun = threading.Event()
        monkeypatch.setattr(link, "_move", _after(begun.set, link._move))
        handle = _start(pair, connection, Scene())
        assert begun.wait(WAIT_S)
        pair.consumer.close()
        with pytest.raises(PeerLost):
            handle.wait()
        assert stopped
        assert heard >= stopped
