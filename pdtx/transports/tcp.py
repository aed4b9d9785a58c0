"""The TCP mover: scatter/gather straight between paged caches over plain sockets.

The consumer's own plan decides where bytes go; no address crosses the wire. Both sides prove the session's token, but
payloads are neither encrypted nor signed: use it inside a network that is trusted to carry them.
"""

import threading
from typing import ClassVar

from pdtx.errors import InputError, PeerUnreachable
from pdtx.transports.base import Connection, Mover, Receiver, Region
from pdtx.transports.bounce import BounceStage, DirectStage, Stage
from pdtx.transports.handshake import prove_to_consumer
from pdtx.transports.listener import Listener
from pdtx.transports.outbox import DeadlineWatch
from pdtx.transports.sockets import bind_tcp, dial_tcp
from pdtx.transports.tcp_consumer import ConsumerOptions, Inbound
from pdtx.transports.tcp_frames import DIALECT
from pdtx.transports.tcp_producer import TcpConnection
from pdtx.transports.wire import Wire


class TcpMover(Mover):
    """See Mover.

    socket_buffer_bytes: fixed kernel buffers; default: they grow by themselves.
    stall_s: seconds without a byte after which a consumer gives up a payload and its connection.
    max_payload_bytes: a consumer ends the connection of whoever announces more in one payload.
    advertise_host: what others connect to, needed where the address listened at is a wildcard.
    bounce: go through host buffers of bounce_bytes even where system calls reach the memory.
    """

    name: ClassVar[str] = "tcp"

    def __init__(
        self,
        *,
        socket_buffer_bytes: int | None = None,
        stall_s: float = 30.0,
        max_payload_bytes: int = 1 << 40,
        advertise_host: str | None = None,
        bounce: bool = False,
        bounce_bytes: int = 8 << 20,
    ) -> None:
        if stall_s <= 0 or max_payload_bytes < 0 or bounce_bytes < 1:
            raise InputError(
                "the TCP mover needs stall_s above 0, max_payload_bytes of 0 and bounce_bytes of 1 or more"
            )
        self._options = ConsumerOptions(stall_s, max_payload_bytes)
        self._buffer_bytes, self._advertise_host = socket_buffer_bytes, advertise_host
        self._bounce, self._bounce_bytes = bounce, bounce_bytes
        self._watch = DeadlineWatch("pdtx-tcp")
        self._lock = threading.Lock()
        self._listeners = list[Listener]()
        self._connections = set[TcpConnection]()
        self._closed = False

    def _stage_of(self, region: Region, staged: bool) -> Stage:
        bounce = staged or self._bounce or not region.on_cpu
        return BounceStage(self._bounce_bytes) if bounce else DirectStage()

    def listen(self, address: str, receiver: Receiver) -> str:
        """Accept connections, see Mover."""
        with self._lock:
            self._check_open()
            sock, bound = bind_tcp(address, buffer_bytes=self._buffer_bytes, advertise_host=self._advertise_host)
            make = lambda wire: Inbound(wire, receiver, self._options, self._stage_of, self._watch)  # noqa: E731
            self._listeners.append(Listener(sock, bound, self.name, make))
        return bound

    def connect(self, address: str, session_id: str, token: bytes, deadline: float) -> Connection:
        """Open a connection, see Mover. Raises also ProtocolError if the peer is of another version."""
        sock = dial_tcp(address, deadline, buffer_bytes=self._buffer_bytes)
        try:
            wire = Wire(sock, address)
        except OSError as error:  # gone again before it could be tuned
            sock.close()
            raise PeerUnreachable(f"connection to {address} broke: {error.strerror or error}") from None
        try:
            prove_to_consumer(wire, DIALECT, session_id, token, deadline)
            with self._lock:
                self._check_open()
                connection = TcpConnection(wire, self._watch, self._stage_of, self._forget)
                self._connections.add(connection)
        except BaseException:
            wire.close()
            raise
        return connection

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("this TCP mover is closed")

    def _forget(self, connection: TcpConnection) -> None:
        with self._lock:
            self._connections.discard(connection)

    def close(self) -> None:
        """Stop listening and end all connections, see Mover."""
        with self._lock:
            self._closed = True
            connections, listeners = list(self._connections), list(self._listeners)
        for connection in connections:
            connection.close()
        for listener in listeners:
            listener.close()
        self._watch.close()
