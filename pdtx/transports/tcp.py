"""The TCP mover: scatter/gather straight between paged caches over plain sockets.

The consumer's own plan decides where bytes go; no address crosses the wire. Both sides prove the session's token, but
payloads are neither encrypted nor signed: use it inside a network that is trusted to carry them.
"""

import secrets
import threading
from typing import ClassVar

from pdtx.errors import InputError, PeerLost, PeerUnreachable, ProtocolError
from pdtx.transports.base import Connection, Mover, Receiver
from pdtx.transports.bounce import BOUNCE_BYTES, Stager
from pdtx.transports.handshake import prove_to_consumer
from pdtx.transports.listener import Listener
from pdtx.transports.outbox import DeadlineWatch
from pdtx.transports.sockets import bind_tcp, dial_tcp, wire_to
from pdtx.transports.tcp_consumer import ConsumerOptions, Inbound
from pdtx.transports.tcp_frames import DIALECT
from pdtx.transports.tcp_producer import TcpConnection
from pdtx.transports.tcp_streams import CONNECTION_ID_BYTES, MAX_STREAMS, PART_BYTES, READY, Gathering, Join
from pdtx.transports.wire import Wire


class TcpMover(Mover):
    """See Mover.

    socket_buffer_bytes: fixed kernel buffers; default: they grow by themselves.
    stall_s: seconds without a byte after which a consumer gives up a payload and its connection.
    max_payload_bytes: a consumer ends the connection of whoever announces more in one payload.
    advertise_host: what others connect to, needed where the address listened at is a wildcard.
    bounce: go through host buffers of bounce_bytes even where system calls reach the memory.
    streams: sockets of one connection, over which a payload's parts move side by side, none smaller than part_bytes;
    the side that connects chooses.
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
        bounce_bytes: int = BOUNCE_BYTES,
        streams: int = 1,
        part_bytes: int = PART_BYTES,
    ) -> None:
        if stall_s <= 0 or max_payload_bytes < 0 or bounce_bytes < 1:
            raise InputError(
                "the TCP mover needs stall_s above 0, max_payload_bytes of 0 and bounce_bytes of 1 or more"
            )
        if not 1 <= streams <= MAX_STREAMS or not 1 <= part_bytes < 1 << 32:
            limits = f"1 to {MAX_STREAMS} streams and part_bytes of 1 to {(1 << 32) - 1}"
            raise InputError(f"the TCP mover has {limits}, not {streams} and {part_bytes}")
        self._streams, self._part_bytes = streams, part_bytes
        self._options = ConsumerOptions(stall_s, max_payload_bytes)
        self._buffer_bytes, self._advertise_host = socket_buffer_bytes, advertise_host
        self._bounce, self._bounce_bytes = bounce, bounce_bytes
        self._watch = DeadlineWatch("pdtx-tcp")
        self._lock = threading.Lock()
        self._listeners = list[Listener]()
        self._connections = set[TcpConnection]()
        self._closed = False

    def _make_stager(self) -> Stager:
        return Stager(self._bounce, self._bounce_bytes)

    def listen(self, address: str, receiver: Receiver) -> str:
        """Accept connections, see Mover."""
        with self._lock:
            self._check_open()
            sock, bound = bind_tcp(address, buffer_bytes=self._buffer_bytes, advertise_host=self._advertise_host)
            gathering = Gathering(self._make_stager)
            make = lambda wire: Inbound(wire, receiver, self._options, gathering, self._watch)  # noqa: E731
            self._listeners.append(Listener(sock, bound, self.name, make))
        return bound

    def connect(self, address: str, session_id: str, token: bytes, deadline: float) -> Connection:
        """Open a connection, see Mover. Raises also ProtocolError if the peer is of another version."""
        wires = list[Wire]()
        try:
            connection_id = secrets.token_bytes(CONNECTION_ID_BYTES)
            for index in range(self._streams):
                sock = dial_tcp(address, deadline, buffer_bytes=self._buffer_bytes)
                wires.append(wire_to(sock, address))
                prove_to_consumer(wires[-1], DIALECT, session_id, token, deadline)
                _join(wires[-1], Join(connection_id, index, self._streams, self._part_bytes), deadline)
            _wait_until_ready(wires[0], deadline)
            with self._lock:
                self._check_open()
                connection = TcpConnection(wires, self._part_bytes, self._watch, self._make_stager, self._forget)
                self._connections.add(connection)
        except BaseException:
            for wire in wires:
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


def _join(wire: Wire, join: Join, deadline: float) -> None:
    try:
        wire.send(join.pack(), "room to name a stream", deadline)
    except PeerLost as error:
        raise PeerUnreachable(f"{error} before it was ready") from None


def _wait_until_ready(wire: Wire, deadline: float) -> None:
    """Wait until the peer has all streams of a connection."""
    try:
        word = wire.receive(len(READY), "the word that all streams are there", deadline)
    except PeerLost as error:
        raise PeerUnreachable(f"{error} before it was ready") from None
    if word != READY:
        raise ProtocolError(f"{wire.peer} is no pdtx TCP mover")
