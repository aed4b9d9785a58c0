"""What only TCP can meet: peers that die or stop, hostile clients, and the sockets themselves."""

import os
import resource
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from pdtx.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    InputError,
    PeerLost,
    PeerUnreachable,
    ProtocolError,
    TransferError,
)
from pdtx.plan import Runs, Slices
from pdtx.testing import Gate, GrantingReceiver, MoverPair, Scene
from pdtx.testing.contract import require_works, start
from pdtx.testing.jobs import Job
from pdtx.testing.open_receiver import HELD, STRAIGHT, key_of, runs_of
from pdtx.testing.pair import open_descriptors
from pdtx.testing.peers import PeerProcess
from pdtx.transports import Connection, Placement, Region, TransferHandle, TransferKey, TransferState
from pdtx.transports import crew as crew_module
from pdtx.transports import listener as listener_module
from pdtx.transports import tcp_consumer as consumer_module
from pdtx.transports.tcp import TcpMover
from pdtx.transports.tcp_frames import Header, Kind, pack_ack
from pdtx.transports.wire import Wire
from tests.tcp_clients import inbound_threads, proven_client, raw_client, wait_until

NBYTES = 64 << 20


def key(layer: int = 0) -> TransferKey:
    return TransferKey("request", layer, layer + 1, 0, 16)


# -- peers that die or stop: see also the contract's faults ------------------------------------------------------------


@contextmanager
def remote_connection() -> Iterator[tuple[PeerProcess, Connection, Region]]:
    token = secrets.token_bytes(32)
    mover = TcpMover()
    try:
        with PeerProcess(Job("tcp", {}, False, "127.0.0.1:0", token, NBYTES, 0)) as peer:
            connection = mover.connect(peer.said, "session", token, time.monotonic() + 10)
            yield peer, connection, Region(torch.ones(NBYTES, dtype=torch.uint8))
    finally:
        mover.close()


def put(connection: Connection, region: Region, deadline: float, layer: int = STRAIGHT) -> TransferHandle:
    return connection.put(key_of(0, NBYTES, layer), region, runs_of(0, NBYTES), deadline)


def test_a_peer_killed_in_the_middle_of_a_payload() -> None:
    with remote_connection() as (peer, connection, region):
        handles = [put(connection, region, time.monotonic() + 30, layer) for layer in (STRAIGHT, HELD, STRAIGHT)]
        handles[0].wait()
        wait_until("some of the payload is sent", lambda: handles[1].moved > 0)
        assert handles[1].moved < NBYTES, "the kill must come in the middle of a payload"
        peer.kill()
        killed = time.monotonic()
        for handle in handles[1:]:
            with pytest.raises(PeerLost, match=handle.peer):
                handle.wait()
            assert handle.state is TransferState.FAILED
        assert time.monotonic() - killed < 10  # of the 30 that the deadline leaves


@pytest.mark.parametrize(("nbytes", "phase"), [(NBYTES, "room to send"), (4096, "arrival")])
def test_a_stopped_peers_deadline_says_what_was_waited_for(nbytes: int, phase: str) -> None:
    with remote_connection() as (peer, connection, region):
        put(connection, region, time.monotonic() + 30).wait()
        peer.stop()
        begun = time.monotonic()
        handle = connection.put(key_of(0, nbytes), region, runs_of(0, nbytes), begun + 1.0)
        with pytest.raises(DeadlineExceeded, match=f"from {handle.peer}") as caught:
            handle.wait()
        assert 0.9 < handle.ended - begun < 5
        assert phase in caught.value.phase
        assert "bytes sent" in str(caught.value)


def test_late_acknowledgement_leaves_the_connection_usable() -> None:
    with remote_connection() as (peer, connection, region):
        put(connection, region, time.monotonic() + 30).wait()
        peer.stop()
        with pytest.raises(TransferError):
            connection.put(key_of(0, 4096), region, runs_of(0, 4096), time.monotonic() + 0.3).wait()
        peer.resume()
        put(connection, region, time.monotonic() + 30).wait()


# -- hostile clients ---------------------------------------------------------------------------------------------------


def test_random_bytes_are_dropped_and_others_served() -> None:
    with MoverPair(TcpMover) as pair:
        connection = pair.connect()
        for seed in range(20):
            with raw_client(pair) as sock:
                sock.sendall(np.random.default_rng(seed).bytes(4096))
                with suppress(ConnectionResetError):
                    assert sock.recv(1) == b""
        require_works(pair, connection)
        wait_until("the threads of dropped connections end", lambda: inbound_threads() == 1)


def test_silent_and_slow_clients_are_dropped_while_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    with MoverPair(TcpMover) as pair, ExitStack() as stack:
        connection = pair.connect()
        monkeypatch.setattr(consumer_module, "HANDSHAKE_S", 0.5)
        silent, half, slow = (stack.enter_context(raw_client(pair)) for _ in range(3))
        half.sendall(b"pdtx-tcp\0\1")
        begun = time.monotonic()
        require_works(pair, connection)
        while time.monotonic() - begun < 10.0:
            try:
                slow.sendall(b"p")
            except OSError:
                break
            time.sleep(0.1)
        assert time.monotonic() - begun < 8.0, "a client that sends a byte now and then kept its connection"
        for sock in (silent, half):
            assert sock.recv(1) == b""
        wait_until("only the producer is left", lambda: inbound_threads() == 1)


def test_a_crowd_of_silent_clients_neither_grows_nor_shuts_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MAX_UNPROVEN", 8)
    with MoverPair(TcpMover) as pair:
        crowd = [raw_client(pair) for _ in range(40)]
        try:
            require_works(pair, pair.connect())
            wait_until("the oldest silent clients are pushed out", lambda: inbound_threads() <= 9)
        finally:
            for sock in crowd:
                sock.close()


@pytest.mark.parametrize(
    "frame",
    [
        Header(Kind.PUT, 0, 1 << 62, key()).pack(),
        Header(Kind.PUT, 7, 16, key()).pack(),
        b"KVpt" + b"\xff" * (len(Header(Kind.PUT, 0, 0, key()).pack()) - 4),
        b"KVxx" + Header(Kind.PUT, 0, 16, key()).pack()[4:],
        b"nonsense" * 64,
    ],
    ids=["giant", "out of turn", "malformed", "wrong magic", "no header"],
)
def test_bad_frames_end_only_their_own_connection(frame: bytes) -> None:
    with MoverPair(TcpMover) as pair:
        connection = pair.connect()
        with proven_client(pair) as sock:
            sock.sendall(frame)
            with suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        pair.grants.wait_for(lambda: bool(pair.grants.ended), "the end of the hostile session")
        assert not pair.grants.heard
        require_works(pair, connection)


def test_payload_that_stalls_is_given_up() -> None:
    with MoverPair(lambda: TcpMover(stall_s=0.3)) as pair:
        region = Region(torch.zeros(64, dtype=torch.uint8))
        pair.grants.grant("hostile", key(), Placement(region, Slices(np.array([0]), np.array([64]))))
        with proven_client(pair) as sock:
            sock.sendall(Header(Kind.PUT, 0, 64, key()).pack() + b"x" * 10)
            pair.grants.wait_for(lambda: bool(pair.grants.heard), "the end of a stalled payload", 10.0)
            assert sock.recv(1) == b""
        (heard,) = pair.grants.heard
        assert isinstance(heard.error, DeadlineExceeded)
        assert heard.nbytes == 10
        assert "payload of request" in str(heard.error)


def test_payload_that_trickles_ends_at_the_grants_deadline() -> None:
    with MoverPair(TcpMover) as pair:
        region = Region(torch.zeros(4096, dtype=torch.uint8))
        slices = Slices(np.array([0]), np.array([4096]))
        pair.grants.grant("hostile", key(), Placement(region, slices, deadline=time.monotonic() + 0.5))
        with proven_client(pair) as sock:
            sock.sendall(Header(Kind.PUT, 0, 4096, key()).pack())
            begun = time.monotonic()
            while not pair.grants.heard and time.monotonic() - begun < 10:
                try:
                    sock.sendall(b"x")
                except OSError:
                    break
                time.sleep(0.02)
        pair.grants.wait_for(lambda: bool(pair.grants.heard), "the end of a trickling payload")
        assert time.monotonic() - begun < 8
        assert isinstance(pair.grants.heard[0].error, DeadlineExceeded)


def test_producer_that_leaves_mid_payload_is_heard_of() -> None:
    with MoverPair(TcpMover) as pair:
        region = Region(torch.zeros(64, dtype=torch.uint8))
        pair.grants.grant("hostile", key(), Placement(region, Slices(np.array([0]), np.array([64]))))
        with proven_client(pair) as sock:
            sock.sendall(Header(Kind.PUT, 0, 64, key()).pack() + b"x" * 10)
        pair.grants.wait_for(lambda: bool(pair.grants.ended), "the end of the session")
        (heard,) = pair.grants.heard
        assert isinstance(heard.error, PeerLost)
        assert heard.nbytes == 10


def test_a_producer_without_the_token_is_refused_by_the_consumer() -> None:
    with MoverPair(TcpMover) as pair, raw_client(pair) as sock:
        pair.grants.add_session("guarded", secrets.token_bytes(32))
        sock.sendall(struct.pack("!8sH32sH128s", b"pdtx-tcp", 2, b"n" * 32, 7, b"guarded"))
        assert len(sock.recv(67, socket.MSG_WAITALL)) == 67
        sock.sendall(b"p" * 32)
        assert sock.recv(1) == b"\4", "a wrong proof was not refused"
        assert sock.recv(1) == b""
        assert not pair.grants.ended


def test_an_impostor_learns_no_proof() -> None:
    mover, heard = TcpMover(), list[bytes]()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(172, socket.MSG_WAITALL)
                sock.sendall(struct.pack("!BH32s32s", 1, 2, b"n" * 32, b"p" * 32) + b"\3")
                with suppress(ConnectionResetError):
                    heard.append(sock.recv(32))

        thread = threading.Thread(target=serve)
        thread.start()
        host, port = server.getsockname()
        with pytest.raises(AuthenticationFailed, match=f"{host}:{port}"):
            mover.connect(f"{host}:{port}", "session", b"t" * 32, time.monotonic() + 5)
        thread.join()
    mover.close()
    assert heard in ([], [b""]), "the producer proved itself to a peer that had not"


@pytest.mark.parametrize("answer", [b"", b"\0" * 67, b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9])
def test_something_else_at_the_address_is_a_clear_error(answer: bytes) -> None:
    mover = TcpMover()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        host, port = server.getsockname()
        with pytest.raises((PeerUnreachable, ProtocolError), match=f"{host}:{port}"):
            mover.connect(f"{host}:{port}", "session", b"t" * 32, time.monotonic() + 5)
        thread.join()
    mover.close()


def test_peer_that_never_answers_ends_at_the_deadline() -> None:
    mover = TcpMover()
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="the answer to the greeting"):
            mover.connect(f"{host}:{port}", "session", b"t" * 32, begun + 0.3)
        assert 0.2 < time.monotonic() - begun < 5
    mover.close()


def test_acknowledgements_out_of_turn_end_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_module, "pack_ack", lambda sequence, *rest: pack_ack(sequence + 1, *rest))
    with MoverPair(TcpMover) as pair:
        connection, scene = pair.connect(), Scene()
        handle = start(pair, connection, scene, scene.plan())
        with pytest.raises(PeerLost, match="out of turn"):
            handle.wait()


# -- life --------------------------------------------------------------------------------------------------------------


def test_the_token_never_crosses_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = bytearray()
    send = Wire.send

    def recording(wire: Wire, data: bytes, *rest: object) -> None:
        sent.extend(data)
        send(wire, data, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Wire, "send", recording)
    monkeypatch.setattr(secrets, "token_bytes", lambda n: b"\x5a" * n)
    with MoverPair(TcpMover) as pair:
        token = os.urandom(32)
        pair.grants.add_session("session", token)
        pair.producer.connect(pair.address, "session", token, time.monotonic() + 5)
    assert len(sent) > 200
    assert token not in sent


def test_idle_connection_still_works() -> None:
    with MoverPair(lambda: TcpMover(stall_s=0.5)) as pair:
        connection = pair.connect()
        require_works(pair, connection)
        time.sleep(2.5)
        require_works(pair, connection)


# The number is 30,000: PDTX_TRANSFERS=30000.
TRANSFERS = int(os.environ.get("PDTX_TRANSFERS", "6000"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_thousands_of_transfers_leave_nothing_behind() -> None:
    region = Region(torch.zeros(64, dtype=torch.uint8))
    runs = Runs(np.array([0]), np.array([0]), np.array([64]))

    def move(count: int) -> None:
        keys = [TransferKey("request", 0, 1, token, token + 1) for token in range(100)]
        for number in range(count // 100):
            for each in keys:
                grant = pair.grants.grant_get if number % 4 == 3 else pair.grants.grant
                grant("session", each, Placement(region, runs.destination()))
            begin = connection.get if number % 4 == 3 else connection.put
            for handle in [begin(each, region, runs, time.monotonic() + 30) for each in keys]:
                handle.wait()
            pair.grants.wait_for(lambda: len(pair.grants.heard) + len(pair.grants.given) == 100, "all ends")
            pair.grants.heard.clear()
            pair.grants.given.clear()

    with MoverPair(TcpMover) as pair:
        connection = pair.connect()
        move(1000)
        descriptors, threads, resident = open_descriptors(), threading.active_count(), resident_bytes()
        move(TRANSFERS)
        assert open_descriptors() == descriptors
        assert threading.active_count() == threads
        grown = resident_bytes() - resident
        assert grown < 4 << 20, f"{TRANSFERS} transfers have left {grown} bytes"


def test_connections_come_and_go_without_growth() -> None:
    with MoverPair(TcpMover) as pair:
        require_works(pair, pair.connect())
        descriptors, threads = open_descriptors(), threading.active_count()
        for number in range(50):
            pair.connect(f"session-{number}").close()
        wait_until("descriptors return", lambda: open_descriptors() == descriptors)
        wait_until("threads return", lambda: threading.active_count() == threads)


def test_close_is_prompt_with_an_idle_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (listener_module, crew_module):  # what a thread that is not woken costs
        monkeypatch.setattr(module, "_JOIN_S", 10.0)
    pair = MoverPair(TcpMover)
    for number in range(4):
        pair.connect(f"session-{number}")
    begun = time.monotonic()
    pair.close()
    assert time.monotonic() - begun < 5
    pair.close()


def test_a_consumer_that_closes_leaves_no_thread_to_idle_producers() -> None:
    with MoverPair(TcpMover) as pair:
        for number in range(4):
            pair.connect(f"session-{number}")
        pair.consumer.close()
        assert inbound_threads() == 0


def test_close_leaves_a_stuck_receiver_behind_in_time() -> None:
    gate = Gate()

    class Stuck(GrantingReceiver):
        def place(self, session_id: str, key: TransferKey) -> Placement:
            gate.hold()
            return super().place(session_id, key)

    grants = Stuck()
    with MoverPair(TcpMover, receiver=grants, grants=grants) as pair:
        connection, scene = pair.connect(), Scene()
        start(pair, connection, scene, scene.plan())
        gate.wait_reached()
        begun = time.monotonic()
        pair.close()
        assert time.monotonic() - begun < 10  # and the gate opens after 30 by itself
        gate.open()
    wait_until("the receiver's thread ends", lambda: inbound_threads() == 0)


def test_a_signal_in_the_middle_of_a_request_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer would take whatever follows for the rest of it."""

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    region = Region(torch.zeros(64, dtype=torch.uint8))
    runs = Runs(np.array([0]), np.array([0]), np.array([64]))
    with MoverPair(TcpMover) as pair:
        connection = pair.connect()
        monkeypatch.setattr(Wire, "send_at_once", interrupted)
        with pytest.raises(KeyboardInterrupt):
            connection.put(key(), region, runs, time.monotonic() + 10)
        assert isinstance(connection.ended, PeerLost)
        with pytest.raises(PeerLost, match="KeyboardInterrupt in the middle of a request"):
            connection.put(key(), region, runs, time.monotonic() + 10).wait()


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1", "127.0.0.1:99999", "::1:5", ":5", "no such host:1"])
def test_bad_addresses_are_input_errors(address: str) -> None:
    mover = TcpMover()
    with pytest.raises(InputError):
        mover.listen(address, GrantingReceiver())
    mover.close()


def test_a_wildcard_is_not_advertised() -> None:
    mover = TcpMover()
    with pytest.raises(InputError, match="advertise"):
        mover.listen("0.0.0.0:0", GrantingReceiver())
    mover.close()
    mover = TcpMover(advertise_host="node7")
    assert mover.listen("0.0.0.0:0", GrantingReceiver()).startswith("node7:")
    mover.close()


def test_request_id_that_is_too_long_is_refused_at_put() -> None:
    with MoverPair(TcpMover) as pair:
        connection = pair.connect()
        region = Region(torch.zeros(64, dtype=torch.uint8))
        runs = Runs(np.array([0]), np.array([0]), np.array([64]))
        with pytest.raises(InputError, match="129 bytes"):
            connection.put(TransferKey("r" * 129, 0, 1, 0, 1), region, runs, time.monotonic() + 1)


def test_another_version_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with MoverPair(TcpMover) as pair, raw_client(pair) as sock:
        sock.sendall(struct.pack("!8sH32sH128s", b"pdtx-tcp", 9, b"", 0, b""))
        status, version = struct.unpack("!BH", sock.recv(67)[:3])
        assert (status, version) == (2, 2)
