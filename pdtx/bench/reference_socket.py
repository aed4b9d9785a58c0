"""A plain blocking TCP socket: sendall() and recv_into() of a contiguous buffer, the limit of every mover over TCP."""

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable

from pdtx.address import join_address
from pdtx.bench.reference_memory import Rotating
from pdtx.errors import AuthenticationFailed, DeadlineExceeded, PdtxError, PeerLost
from pdtx.transports.handshake import Dialect, admit_producer, prove_to_consumer
from pdtx.transports.listener import HANDSHAKE_S, Listener
from pdtx.transports.sockets import bind_tcp, dial_tcp, wire_to
from pdtx.transports.wire import FOREVER, Wire

logger = logging.getLogger(__name__)

_DIALECT = Dialect("socket reference", b"pdtx-ref", 1)
_SESSION = "reference"
_ROUND_S = 600.0
"""Longest that the receiver waits for the rest of a round that has begun: the sender gives up long before."""


class SocketReceiver:
    """Takes rounds of nbytes from whoever knows the token, and answers each with a byte."""

    def __init__(self, host: str, nbytes: int, max_bytes: int | None = None) -> None:
        """Listen at host. max_bytes: of memory. Raises AddressInUse, InputError if the memory cannot be had."""
        self.token = secrets.token_bytes(32)
        self.detail = f"sendall/recv_into of {nbytes:,} bytes"
        self._buffer = Rotating(nbytes, max_bytes=max_bytes)
        sock, self.address = bind_tcp(join_address(host, 0))
        self._listener = Listener(
            sock, self.address, "reference", lambda wire: _Serving(wire, self.token, self._buffer)
        )

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._listener.close()
        self._buffer.free()


class _Serving:
    """One accepted connection, see pdtx.transports.listener.Served."""

    def __init__(self, wire: Wire, token: bytes, buffer: Rotating) -> None:
        self._wire, self._token, self._buffer = wire, token, buffer
        self.unproven = True

    def serve(self) -> None:
        """Take rounds until the peer leaves."""
        try:
            with self._wire:
                admit_producer(self._wire, _DIALECT, self._admit, time.monotonic() + HANDSHAKE_S)
                self.unproven = False
                with _plain(self._wire) as sock:
                    while True:
                        # Between rounds nothing comes for as long as the driver likes.
                        deadline = FOREVER
                        for view in self._buffer.views():
                            receive(sock, view[:1], self._wire.peer, deadline, "the next bytes of the reference")
                            deadline = min(deadline, time.monotonic() + _ROUND_S)
                            receive(sock, view[1:], self._wire.peer, deadline, "the rest of a round of the reference")
                        sock.sendall(b"!")
        except (PdtxError, OSError) as error:
            logger.info("the reference's connection to %s has ended: %s", self._wire.peer, error)

    def _admit(self, session_id: str) -> bytes:
        if session_id != _SESSION:
            raise AuthenticationFailed("no such reference")
        return self._token

    def stop(self, reason: str) -> None:
        """Make serve() return soon."""
        self.unproven = False
        self._wire.shutdown()
        logger.debug("stopped the reference's connection to %s: %s", self._wire.peer, reason)


class SocketSender:
    """Sends rounds. A round ends with the byte that confirms the last one."""

    def __init__(self, address: str, token: bytes, nbytes: int, timeout_s: float, max_bytes: int | None = None) -> None:
        """Connect. max_bytes: of memory. Raises PeerUnreachable, AuthenticationFailed, DeadlineExceeded, InputError."""
        self.detail, self._timeout_s = f"sendall/recv_into of {nbytes:,} bytes", timeout_s
        self._buffer = Rotating(nbytes, max_bytes=max_bytes)
        deadline = time.monotonic() + timeout_s
        self._wire = wire_to(dial_tcp(address, deadline), address)
        try:
            prove_to_consumer(self._wire, _DIALECT, _SESSION, token, deadline)
            self._socket = _plain(self._wire)
        except BaseException:
            self._wire.close()
            raise

    def round(self) -> float:
        """Send once; return the seconds. Raises PeerLost, DeadlineExceeded."""
        peer, deadline = self._wire.peer, time.monotonic() + self._timeout_s
        begun = time.perf_counter()
        for view in self._buffer.views():
            send(self._socket, view, peer, deadline, "room to send a round of the reference")
        receive(self._socket, memoryview(bytearray(1)), peer, deadline, "the answer to a round of the reference")
        return time.perf_counter() - begun

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()
        self._wire.close()
        self._buffer.free()


def send(sock: socket.socket, view: memoryview, peer: str, deadline: float, phase: str) -> None:
    """Send all of view. Raises PeerLost, or DeadlineExceeded at deadline (time.monotonic())."""
    _loop(sock.send, view, peer, deadline, phase)


def receive(sock: socket.socket, view: memoryview, peer: str, deadline: float, phase: str) -> None:
    """Fill view. Raises PeerLost, or DeadlineExceeded at deadline (time.monotonic())."""
    _loop(sock.recv_into, view, peer, deadline, phase)


def _loop(call: Callable[[memoryview], int], view: memoryview, peer: str, deadline: float, phase: str) -> None:
    begun = time.monotonic()
    while view:
        try:
            moved: int | None = call(view)
        except BlockingIOError:  # the kernel's time limit of a call, see Wire: a chance to look at the clock
            moved = None
        except OSError as error:
            raise PeerLost(f"connection to {peer} broke: {error.strerror or error}") from None
        if moved == 0:
            raise PeerLost(f"{peer} has closed the connection")
        view = view[moved or 0 :]
        now = time.monotonic()
        if view and now > deadline:
            raise DeadlineExceeded(phase, peer, round(now - begun, 3), f"{len(view)} bytes are left")


def _plain(wire: Wire) -> socket.socket:
    """Return a wire's socket as any program has one; to be closed for itself."""
    return socket.socket(fileno=os.dup(wire.fileno()))
