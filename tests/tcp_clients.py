"""Either side of a TCP connection by hand, for tests of what an honest peer would not do."""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdtx.address import parse_address
from pdtx.testing import MoverPair
from pdtx.transports.handshake import admit_producer, prove_to_consumer
from pdtx.transports.tcp_frames import DIALECT
from pdtx.transports.tcp_streams import JOIN_BYTES, READY, Join
from pdtx.transports.wire import Wire


def wait_until(condition: str, holds: Callable[[], bool], seconds: float = 3.0) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, f"not within {seconds} s: {condition}"
        time.sleep(0.01)


def inbound_threads() -> int:
    return sum(thread.name == "pdtx-tcp-inbound" for thread in threading.enumerate())


def raw_client(pair: MoverPair) -> socket.socket:
    sock = socket.create_connection(parse_address(pair.address))
    sock.settimeout(5)
    return sock


@contextmanager
def stream_client(pair: MoverPair, join: bytes, session_id: str = "hostile") -> Iterator[socket.socket]:
    """One socket that has proved its session and said which stream it is."""
    token = pair.token(session_id)
    with raw_client(pair) as sock:
        prove_to_consumer(Wire(sock, "consumer"), DIALECT, session_id, token, time.monotonic() + 5)
        sock.settimeout(5)
        sock.sendall(join)
        yield sock


@contextmanager
def proven_client(pair: MoverPair, session_id: str = "hostile") -> Iterator[socket.socket]:
    """A whole connection of one stream."""
    with stream_client(pair, Join(secrets.token_bytes(16), 0, 1).pack(), session_id) as sock:
        assert sock.recv(1) == READY
        yield sock


@contextmanager
def served_by_hand(serve: Callable[[socket.socket], None], token: bytes) -> Iterator[str]:
    """A consumer that shakes hands like an honest one, and then does what serve does; its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            sock, _ = server.accept()
            with sock:
                wire = Wire(sock, "producer")
                admit_producer(wire, DIALECT, lambda _: token, time.monotonic() + 5)
                wire.receive(JOIN_BYTES, "the name of a stream", time.monotonic() + 5)
                sock.settimeout(10)
                sock.sendall(READY)
                serve(sock)

        thread = threading.Thread(target=accept)
        thread.start()
        host, port = server.getsockname()
        yield f"{host}:{port}"
        thread.join()
