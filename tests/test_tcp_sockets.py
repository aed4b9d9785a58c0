"""The sockets under the TCP mover: back-pressure, idling, options, and gets that one side gives up."""

import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from pdtx.errors import DeadlineExceeded, InputError, TransferAborted
from pdtx.plan import Runs, Slices
from pdtx.testing import Gate, GrantingReceiver, MoverPair
from pdtx.testing.contract import Subject, require_works
from pdtx.transports import Placement, Region, TransferKey, TransferState
from pdtx.transports.base import MAX_NOTICE_BYTES
from pdtx.transports.tcp import TcpMover
from pdtx.transports.tcp_frames import ACK_BYTES, HEADER_BYTES, Ack, Header, Kind, Status, pack_ack
from pdtx.transports.wire import Wire
from tests.tcp_clients import proven_client, served_by_hand, wait_until

KEY = TransferKey("request", 0, 1, 0, 16)


def key(number: int) -> TransferKey:
    return TransferKey(f"request-{number}", 0, 1, 0, 16)


def region_of(nbytes: int, fill: int = 0) -> Region:
    return Region(torch.full((nbytes,), fill, dtype=torch.uint8))


def runs_of(nbytes: int) -> Runs:
    return Runs(np.array([0]), np.array([0]), np.array([nbytes]))


def slices_of(nbytes: int) -> Slices:
    return runs_of(nbytes).destination()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# -- back-pressure -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 2])
def test_a_receiver_that_does_not_read_holds_up_the_sender_and_not_the_caller(streams: int) -> None:
    """256 MiB wait in the source, not in copies; put() returns at once all the same."""
    gate, nbytes, count = Gate(), 8 << 20, 32
    grants, source, there = GrantingReceiver(), region_of(nbytes, 9), region_of(nbytes)
    subject = Subject(lambda: TcpMover(streams=streams))
    with subject.faulty_pair(grants, before_place=lambda _: gate.hold()) as pair:
        connection = pair.connect()
        before = resident_bytes()
        handles = []
        for number in range(count):
            grants.grant("session", key(number), Placement(there, slices_of(nbytes)))
            begun = time.monotonic()
            handles.append(connection.put(key(number), source, runs_of(nbytes), begun + 60))
            assert time.monotonic() - begun < 5  # and the gate opens after 30 by itself
        gate.wait_reached()
        moved = -1
        while moved != (moved := sum(handle.moved for handle in handles)):
            time.sleep(0.2)
        assert moved < 64 << 20, "more was sent than kernels buffer"
        assert resident_bytes() - before < 32 << 20
        assert handles[-1].state is TransferState.PENDING
        gate.open()
        for handle in handles:
            handle.wait()


def test_small_and_large_puts_arrive_in_the_order_of_their_calls() -> None:
    """Whatever the thread that writes them: the caller's or the writer's."""
    sizes = [64, 8 << 20, 16 << 10, 1 << 20, 5 << 20, 1, 3 << 20, 0] * 6
    source = region_of(8 << 20, 3)
    with MoverPair(lambda: TcpMover(streams=2)) as pair:
        connection, there = pair.connect(), [region_of(size) for size in sizes]
        for number, size in enumerate(sizes):
            pair.grants.grant("session", key(number), Placement(there[number], slices_of(size)))
        handles = [
            connection.put(key(number), source, runs_of(size), time.monotonic() + 30)
            for number, size in enumerate(sizes)
        ]
        for handle in handles:
            handle.wait()
        assert [placed.key for placed in pair.grants.heard] == [key(number) for number in range(len(sizes))]
        assert all(bool((region.memory == 3).all()) for region in there)


def test_many_threads_share_a_connection() -> None:
    with MoverPair(TcpMover) as pair:
        connection, source = pair.connect(), region_of(4096, 5)

        def work(first: int) -> int:
            right = 0
            for number in range(first, first + 100):
                there = region_of(4096)
                pair.grants.grant("session", key(number), Placement(there, slices_of(4096)))
                connection.put(key(number), source, runs_of(4096), time.monotonic() + 30).wait()
                right += bool((there.memory == 5).all())
            return right

        with ThreadPoolExecutor(6) as threads:
            assert sum(threads.map(work, range(0, 6000, 1000))) == 600
        assert len(pair.grants.heard) == 600


# -- idling ------------------------------------------------------------------------------------------------------------


def test_dead_hosts_are_noticed_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On both sides of a connection, and on every stream."""
    wires = list[Wire]()
    init = Wire.__init__

    def noting(wire: Wire, *of: object) -> None:
        init(wire, *of)  # type: ignore[arg-type]
        wires.append(wire)

    monkeypatch.setattr(Wire, "__init__", noting)
    tcp = socket.IPPROTO_TCP
    with MoverPair(lambda: TcpMover(streams=2)) as pair:
        require_works(pair, pair.connect())
        assert len(wires) == 4
        for wire in wires:
            with socket.socket(fileno=os.dup(wire.fileno())) as sock:
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
                idle, every, count = (sock.getsockopt(tcp, option) for option in options)
                assert idle + every * count <= 60
                assert 60_000 <= sock.getsockopt(tcp, socket.TCP_USER_TIMEOUT) <= 300_000
                assert sock.getsockopt(tcp, socket.TCP_NODELAY) == 1


@pytest.mark.matrix
@pytest.mark.timeout(150)
@pytest.mark.parametrize("streams", [1, 2])
def test_a_connection_survives_more_than_a_minute_of_silence(streams: int) -> None:
    with MoverPair(lambda: TcpMover(streams=streams)) as pair:
        connection = pair.connect()
        require_works(pair, connection)
        time.sleep(65)
        require_works(pair, connection)


# -- gets that are given up --------------------------------------------------------------------------------------------


def test_a_get_given_up_in_the_middle_leaves_the_connection_usable() -> None:
    """Not a byte is written after its deadline; the rest of its payload is thrown away, and the peer is told."""
    nbytes, late, told = 1 << 20, threading.Event(), list[Kind]()

    def serve(sock: socket.socket) -> None:
        sock.recv(HEADER_BYTES, socket.MSG_WAITALL)
        sock.sendall(pack_ack(0, Status.OFFERED) + b"\1" * (nbytes // 2))
        assert late.wait(10)
        sock.sendall(b"\2" * (nbytes // 2))
        told.append(Header.unpack(sock.recv(HEADER_BYTES, socket.MSG_WAITALL)).kind)
        sock.recv(HEADER_BYTES, socket.MSG_WAITALL)
        sock.sendall(pack_ack(1, Status.OFFERED) + b"\3" * 100)
        told.append(Header.unpack(sock.recv(HEADER_BYTES, socket.MSG_WAITALL)).kind)

    mover = TcpMover()
    try:
        with served_by_hand(serve, b"t" * 32) as address:
            connection = mover.connect(address, "session", b"t" * 32, time.monotonic() + 5)
            region = region_of(nbytes)
            given_up = connection.get(key(0), region, runs_of(nbytes), time.monotonic() + 2.0)
            wait_until("half of it is there", lambda: given_up.moved == nbytes // 2)
            with pytest.raises(DeadlineExceeded, match=f"{nbytes // 2} of {nbytes} bytes received"):
                given_up.wait()
            region.memory.zero_()  # it is ours again
            late.set()
            wait_until("the peer is told", lambda: len(told) == 1)
            other = region_of(100)
            connection.get(key(1), other, runs_of(100), time.monotonic() + 5).wait()
            wait_until("the peer is told of the second", lambda: len(told) == 2)
            assert not region.memory.any()
            assert (other.memory == 3).all()
            assert told == [Kind.DROPPED, Kind.TAKEN]
    finally:
        mover.close()


def test_an_offer_that_nobody_confirms_is_withdrawn_at_its_deadline() -> None:
    with MoverPair(TcpMover) as pair, proven_client(pair) as sock:
        begun = time.monotonic()
        there = Placement(region_of(64, 8), slices_of(64), deadline=begun + 1.5)
        pair.grants.grant_get("hostile", KEY, there)
        sock.sendall(Header(Kind.GET, 0, 64, KEY).pack())
        assert Ack.unpack(sock.recv(ACK_BYTES, socket.MSG_WAITALL)).status is Status.OFFERED
        assert sock.recv(64, socket.MSG_WAITALL) == b"\x08" * 64
        assert not pair.grants.given
        pair.grants.wait_for(lambda: bool(pair.grants.given), "the end of the offer", 10.0)
        assert 1.45 < time.monotonic() - begun < 10
        assert isinstance(pair.grants.given[0].error, DeadlineExceeded)
        sock.sendall(Header(Kind.TAKEN, 0, 64, KEY).pack())
        require_works(pair, pair.connect())
        assert len([placed for placed in pair.grants.given if placed.key == KEY]) == 1


def test_a_get_that_the_peer_drops_is_heard_of_as_such() -> None:
    with MoverPair(TcpMover) as pair, proven_client(pair) as sock:
        pair.grants.grant_get("hostile", KEY, Placement(region_of(64), slices_of(64)))
        sock.sendall(Header(Kind.GET, 0, 64, KEY).pack() + Header(Kind.DROPPED, 0, 64, KEY).pack())
        pair.grants.wait_for(lambda: bool(pair.grants.given), "the end of the offer")
        assert isinstance(pair.grants.given[0].error, TransferAborted)


@pytest.mark.parametrize("kind", [Kind.TAKEN, Kind.DROPPED])
def test_confirming_what_was_never_got_ends_the_connection(kind: Kind) -> None:
    with MoverPair(TcpMover) as pair, proven_client(pair) as sock:
        sock.sendall(Header(kind, 0, 64, KEY).pack())
        assert sock.recv(1) == b""
        assert not pair.grants.given


@pytest.mark.parametrize("status", [Status.DELIVERED, Status.OFFERED])
def test_an_acknowledgement_of_the_wrong_kind_ends_the_connection(status: Status) -> None:
    def serve(sock: socket.socket) -> None:
        sock.recv(HEADER_BYTES, socket.MSG_WAITALL)
        sock.sendall(pack_ack(0, status))
        sock.recv(1)

    mover = TcpMover()
    try:
        with served_by_hand(serve, b"t" * 32) as address:
            connection = mover.connect(address, "session", b"t" * 32, time.monotonic() + 5)
            begin = connection.put if status is Status.OFFERED else connection.get
            with pytest.raises(Exception, match=f"acknowledged a .* as {status.name}"):
                begin(KEY, region_of(0), runs_of(0), time.monotonic() + 5).wait()
            connection.close()
    finally:
        mover.close()


def test_a_notice_above_the_limit_ends_the_connection() -> None:
    with MoverPair(TcpMover) as pair, proven_client(pair) as sock:
        sock.sendall(Header(Kind.NOTICE, 0, MAX_NOTICE_BYTES + 1, KEY).pack())
        assert sock.recv(1) == b""
        assert not pair.grants.notices


def test_keys_and_notices_that_no_header_holds() -> None:
    with MoverPair(TcpMover) as pair:
        connection = pair.connect()
        bad = TransferKey("request", 0, 1 << 40, 0, 1)
        for begin in (connection.put, connection.get):
            with pytest.raises(InputError, match="no header holds"):
                begin(bad, region_of(1), runs_of(1), time.monotonic() + 1)
        require_works(pair, connection)
