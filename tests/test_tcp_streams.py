"""Several sockets as one connection: which belong together, what is cut over them, and how they end."""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

from pdtx.errors import InputError, PeerLost, PeerUnreachable, TransferError
from pdtx.plan import Runs, Slices
from pdtx.testing import Gate, GrantingReceiver, MoverPair
from pdtx.testing.contract import Subject, require_works
from pdtx.transports import Connection, Placement, Region, TransferHandle, TransferKey
from pdtx.transports import listener as listener_module
from pdtx.transports import tcp_consumer as consumer_module
from pdtx.transports.listener import HANDSHAKE_S
from pdtx.transports.tcp import TcpMover
from pdtx.transports.tcp_frames import Header, Kind
from pdtx.transports.tcp_producer import TcpConnection
from pdtx.transports.tcp_streams import MAX_STREAMS, PART_BYTES, READY, Gathering, Group, Join, Lanes, cut
from pdtx.transports.wire import Wire
from tests.tcp_clients import inbound_threads, stream_client, wait_until

KEY = TransferKey("request", 0, 1, 0, 16)
ID = b"c" * 16
Step = Callable[[int, Slices, Callable[[int], None]], None]


def three() -> TcpMover:
    return TcpMover(streams=3, part_bytes=1000)


def region_of(nbytes: int, fill: int = 0) -> Region:
    return Region(torch.full((nbytes,), fill, dtype=torch.uint8))


def whole(nbytes: int) -> Slices:
    return Slices(np.array([0]), np.array([nbytes]))


def put(pair: MoverPair, connection: Connection, there: Region, nbytes: int) -> TransferHandle:
    runs = Runs(np.array([0]), np.array([0]), np.array([nbytes]))
    pair.grants.grant("session", KEY, Placement(there, runs.destination()))
    return connection.put(KEY, region_of(nbytes, 7), runs, time.monotonic() + 10)


# -- cutting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part_bytes", [1, 100, PART_BYTES])
@pytest.mark.parametrize("streams", [1, 2, 3, MAX_STREAMS])
@pytest.mark.parametrize("nbytes", [0, 1, 99, 100, 101, 1 << 20, (64 << 20) + 17])
def test_parts_cover_the_payload_and_are_about_equal(nbytes: int, streams: int, part_bytes: int) -> None:
    edges = cut(nbytes, streams, part_bytes)
    sizes = np.diff(edges)
    assert edges[0] == 0
    assert edges[-1] == nbytes
    assert 1 <= len(sizes) <= streams
    if len(sizes) > 1:
        # A cut is moved by less than the alignment, and there are two to a part.
        slack = 1 if part_bytes < 64 << 10 else 64 << 10
        assert sizes.min() > min(part_bytes, nbytes // streams) - slack
        assert sizes.max() - sizes.min() <= 2 * slack


def test_small_payloads_are_not_cut() -> None:
    assert cut(2 * PART_BYTES - 1, 4, PART_BYTES) == [0, 2 * PART_BYTES - 1]
    assert len(cut(4 * PART_BYTES, 4, PART_BYTES)) == 5


@pytest.mark.parametrize("options", [{"streams": 0}, {"streams": MAX_STREAMS + 1}, {"streams": 2, "part_bytes": 0}])
def test_impossible_numbers_of_streams(options: dict[str, int]) -> None:
    with pytest.raises(InputError, match="1 to 16 streams"):
        TcpMover(**options)  # type: ignore[arg-type]


def test_the_connecting_side_chooses_and_the_path_says_so() -> None:
    with MoverPair(TcpMover) as pair:
        producer = three()
        try:
            connection = pair.connect("session", producer)
            assert str(connection.path).endswith(f" -> {pair.address}, 3 streams)")
            require_works(pair, connection)
        finally:
            producer.close()


# -- coming about ------------------------------------------------------------------------------------------------------


@contextmanager
def hasty_pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[MoverPair]:
    """Of which the consumer gives clients a second to come about with all they need, until told otherwise."""
    monkeypatch.setattr(consumer_module, "HANDSHAKE_S", 1.0)
    with MoverPair(TcpMover) as pair:
        yield pair


def require_shut(sock: socket.socket) -> None:
    with suppress(ConnectionResetError):
        assert sock.recv(1) == b""


@pytest.mark.parametrize(
    "joins",
    [
        [("one", Join(ID, 0, 2))],
        [("one", Join(ID, 1, 2))],
        [("one", Join(ID, 0, 2)), ("other", Join(ID, 1, 2))],
        [("one", Join(ID, 0, 2)), ("one", Join(b"d" * 16, 1, 2))],
        [("one", Join(ID, 0, 2)), ("one", Join(ID, 1, 3))],
        [("one", Join(ID, 0, 2)), ("one", Join(ID, 1, 2, part_bytes=5))],
        [("one", Join(ID, 0, 2)), ("one", Join(ID, 0, 2))],
    ],
    ids=["no second", "no first", "of another session", "another id", "of more", "cut otherwise", "one twice"],
)
def test_streams_that_do_not_belong_together_come_to_nothing(
    joins: list[tuple[str, Join]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hasty_pair(monkeypatch) as pair, ExitStack() as stack:
        socks = [stack.enter_context(stream_client(pair, join.pack(), session)) for session, join in joins]
        for sock in socks:
            require_shut(sock)
        wait_until("their threads end", lambda: inbound_threads() == 0)
        monkeypatch.setattr(consumer_module, "HANDSHAKE_S", HANDSHAKE_S)
        require_works(pair, pair.connect())
        assert not [session for session, _ in pair.grants.ended if session != "session"]


def test_a_stream_that_comes_twice_is_refused_and_the_connection_still_comes_about() -> None:
    with MoverPair(TcpMover) as pair, ExitStack() as stack:
        begun = time.monotonic()
        first, twice, second = (
            stack.enter_context(stream_client(pair, Join(ID, index, 2).pack())) for index in (0, 0, 1)
        )
        require_shut(twice)
        assert first.recv(1) == READY
        second.setblocking(False)
        with pytest.raises(BlockingIOError):
            second.recv(1)
        assert time.monotonic() - begun < 3, "it was refused only because time was over"


@pytest.mark.parametrize(
    "frame", [b"x" * 26, Join(ID, 2, 2).pack(), Join(ID, 0, 0).pack(), Join(ID, 0, 17).pack(), Join(ID, 0, 1, 0).pack()]
)
def test_a_malformed_name_of_a_stream(frame: bytes) -> None:
    with MoverPair(TcpMover) as pair, stream_client(pair, frame) as sock:
        require_shut(sock)
        require_works(pair, pair.connect())


def close_while_a_stream_is_missing(entered: threading.Event) -> None:
    """entered: set once the stream that has come waits for the other one, or is held shortly before that."""
    with MoverPair(TcpMover) as pair, stream_client(pair, Join(ID, 0, 2).pack()) as sock:
        assert entered.wait(5)
        begun = time.monotonic()
        pair.consumer.close()
        assert time.monotonic() - begun < HANDSHAKE_S - 1, "it waited until the streams' time was over"
        require_shut(sock)
        assert inbound_threads() == 0


def test_a_consumer_closes_while_a_stream_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "_JOIN_S", 2 * HANDSHAKE_S)
    entered, wait = threading.Event(), Group.wait

    def noting(group: Group, peer: str, deadline: float) -> Lanes:
        entered.set()
        return wait(group, peer, deadline)

    monkeypatch.setattr(Group, "wait", noting)
    close_while_a_stream_is_missing(entered)


def test_a_consumer_closes_before_a_stream_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "_JOIN_S", 2 * HANDSHAKE_S)
    reached, stopped = threading.Event(), threading.Event()
    enter, stop = Gathering.enter, consumer_module.Inbound.stop

    def held(gathering: Gathering, session_id: str, join: Join, wire: Wire) -> Group:
        reached.set()
        assert stopped.wait(5)
        return enter(gathering, session_id, join, wire)

    def noting(inbound: consumer_module.Inbound, reason: str) -> None:
        stop(inbound, reason)
        stopped.set()

    monkeypatch.setattr(Gathering, "enter", held)
    monkeypatch.setattr(consumer_module.Inbound, "stop", noting)
    close_while_a_stream_is_missing(reached)


def test_connect_fails_in_time_when_a_stream_gets_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_module, "HANDSHAKE_S", 0.3)
    pack = Join.pack
    monkeypatch.setattr(Join, "pack", lambda join: pack(replace(join, index=0)))
    with MoverPair(lambda: TcpMover(streams=2)) as pair:
        with pytest.raises(PeerUnreachable, match=pair.address):
            pair.connect()
        wait_until("the consumer's threads end", lambda: inbound_threads() == 0)


# -- moving ------------------------------------------------------------------------------------------------------------


def test_placed_comes_once_when_every_part_is_there() -> None:
    with MoverPair(TcpMover) as pair, ExitStack() as stack:
        first, second = (
            stack.enter_context(stream_client(pair, Join(ID, index, 2, part_bytes=10).pack())) for index in range(2)
        )
        assert first.recv(1) == READY
        there = region_of(100)
        pair.grants.grant("hostile", KEY, Placement(there, whole(100)))
        second.sendall(b"b" * 20)
        first.sendall(Header(Kind.PUT, 0, 100, KEY).pack() + b"a" * 50)
        wait_until("what was sent is there", lambda: int(there.memory[69]) == ord("b") and int(there.memory[49]) != 0)
        assert not pair.grants.heard
        second.sendall(b"c" * 30)
        pair.grants.wait_for(lambda: bool(pair.grants.heard), "the end of the payload")
        (heard,) = pair.grants.heard
        assert heard.error is None
        assert heard.nbytes == 100
        assert bytes(there.memory.numpy()) == b"a" * 50 + b"b" * 20 + b"c" * 30


def test_a_stream_that_counts_late_takes_nothing_back_from_an_ended_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes, seen, ended = 3000, list[int](), threading.Event()
    with MoverPair(three) as pair:
        connection = pair.connect()
        assert isinstance(connection, TcpConnection)
        each_part = connection._sending._each_part

        def counting_late(slices: Slices, step: Step, progress: Callable[[int], None] | None) -> None:
            def late_step(index: int, part: Slices, count: Callable[[int], None]) -> None:
                def late(moved: int) -> None:
                    ended.wait(10)
                    count(moved)
                    seen.append(handle.moved)

                step(index, part, late)

            each_part(slices, late_step, progress)

        monkeypatch.setattr(connection._sending, "_each_part", counting_late)
        handle = put(pair, connection, region_of(nbytes), nbytes)
        handle.wait()
        ended.set()
        wait_until("every stream has counted", lambda: len(seen) == 3)
    assert seen == [nbytes] * 3


def test_the_receiver_is_told_of_all_bytes_though_streams_overtake_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes, progress = 3000, consumer_module.Inbound._progress

    def slow_if_first(session: consumer_module.Inbound, moved: int) -> None:
        if moved < nbytes:
            time.sleep(0.2)
        progress(session, moved)

    monkeypatch.setattr(consumer_module.Inbound, "_progress", slow_if_first)
    with MoverPair(three) as pair:
        put(pair, pair.connect(), region_of(nbytes), nbytes).wait()
        (heard,) = pair.grants.heard
    assert heard.nbytes == nbytes


def lose_first(connection: TcpConnection) -> None:
    connection._wires[0].shutdown()


def lose_last(connection: TcpConnection) -> None:
    connection._wires[-1].shutdown()


@pytest.mark.parametrize("lose", [lose_first, lose_last])
def test_the_loss_of_one_idle_stream_ends_the_connection(lose: Callable[[TcpConnection], None]) -> None:
    with MoverPair(three) as pair:
        connection = pair.connect()
        assert isinstance(connection, TcpConnection)
        require_works(pair, connection)
        lose(connection)
        pair.grants.wait_for(lambda: bool(pair.grants.ended), "the end of the session")
        with pytest.raises(PeerLost, match=pair.address):
            put(pair, connection, region_of(5000), 5000).wait()
        wait_until("the consumer's threads end", lambda: inbound_threads() == 0)
        require_works(pair, pair.connect("another"), "another")


@pytest.mark.parametrize("lose", [lose_first, lose_last])
def test_the_loss_of_one_stream_in_the_middle_of_a_payload(lose: Callable[[TcpConnection], None]) -> None:
    gate, nbytes = Gate(), 64 << 20
    grants = GrantingReceiver()
    subject = Subject(lambda: TcpMover(streams=3))
    with subject.faulty_pair(grants, before_place=lambda _: gate.hold()) as pair:
        connection = pair.connect()
        assert isinstance(connection, TcpConnection)
        handle = put(pair, connection, region_of(nbytes), nbytes)
        gate.wait_reached()
        wait_until("the streams are full", lambda: handle.moved > 1 << 20)
        lose(connection)
        with pytest.raises(PeerLost, match=pair.address):
            handle.wait()
        gate.open()
        grants.wait_for(lambda: bool(grants.ended), "the end of the session")
        (heard,) = grants.heard
        assert heard.error is not None
        assert heard.nbytes < nbytes


def test_the_consumer_notices_the_loss_of_one_stream_while_another_stalls() -> None:
    with MoverPair(TcpMover) as pair, ExitStack() as stack:
        first, second = (
            stack.enter_context(stream_client(pair, Join(ID, index, 2, part_bytes=10).pack())) for index in range(2)
        )
        assert first.recv(1) == READY
        pair.grants.grant("hostile", KEY, Placement(region_of(100), whole(100)))
        first.sendall(Header(Kind.PUT, 0, 100, KEY).pack() + b"a" * 20)
        second.sendall(b"b" * 20)
        begun = time.monotonic()
        second.close()
        pair.grants.wait_for(lambda: bool(pair.grants.ended), "the end of the session")
        assert time.monotonic() - begun < 2
        (heard,) = pair.grants.heard
        assert isinstance(heard.error, PeerLost)


def test_a_refused_payload_is_thrown_away_on_every_stream() -> None:
    with MoverPair(three) as pair:
        connection, runs = pair.connect(), Runs(np.array([0]), np.array([0]), np.array([1 << 20]))
        for _ in range(3):
            with pytest.raises(TransferError, match="nothing was granted"):
                connection.put(KEY, region_of(1 << 20), runs, time.monotonic() + 10).wait()
        require_works(pair, connection)


def test_closing_leaves_no_threads_of_streams() -> None:
    before = set(threading.enumerate())
    with MoverPair(lambda: TcpMover(streams=4)) as pair:
        connection = pair.connect()
        require_works(pair, connection)
        connection.close()
        wait_until("the consumer's threads end", lambda: inbound_threads() == 0)
    assert not [thread.name for thread in threading.enumerate() if thread not in before]


def test_many_streams_and_many_connections() -> None:
    token = secrets.token_bytes(8)
    with MoverPair(lambda: TcpMover(streams=MAX_STREAMS, part_bytes=64)) as pair:
        connections = [pair.connect(f"session-{number}-{token.hex()}") for number in range(4)]
        for number, connection in enumerate(connections):
            require_works(pair, connection, f"session-{number}-{token.hex()}")
