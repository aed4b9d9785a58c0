"""A mover made of an engine: sessions and grants over a control stream, bytes by the engine."""

import threading
from typing import Any, ClassVar

from pdtx.errors import InputError, PeerLost, PeerUnreachable
from pdtx.transports.base import Connection, Mover, Receiver, Region, Registration
from pdtx.transports.handshake import Dialect, prove_to_consumer
from pdtx.transports.listener import Listener
from pdtx.transports.onesided.acceptor import Inbound
from pdtx.transports.onesided.fabric import Fabric
from pdtx.transports.onesided.frames import VERSION, ControlStream
from pdtx.transports.onesided.initiator import OneSidedConnection
from pdtx.transports.onesided.joining import join
from pdtx.transports.onesided.pieces import Packer
from pdtx.transports.outbox import DeadlineWatch
from pdtx.transports.sockets import bind_local, bind_tcp, dial_local, dial_tcp, wire_to
from pdtx.transports.wire import Wire


class OneSidedMover(Mover):
    """See Mover. Subclasses give a name, and an engine to the constructor.

    within_host: the control stream is a socket that only this host's processes reach.
    advertise_host: what others connect to, needed where the address listened at is a wildcard.
    piece_bytes: of what is packed when staged.
    """

    within_host: ClassVar[bool] = False

    def __init__(self, fabric: Fabric[Any], *, advertise_host: str | None = None, piece_bytes: int = 8 << 20) -> None:
        if piece_bytes < 1:
            raise InputError(f"piece_bytes is {piece_bytes}; needs 1 or more")
        self._fabric, self._advertise_host, self._piece_bytes = fabric, advertise_host, piece_bytes
        self._dialect = Dialect(self.name, f"pdtx-{self.name}".encode()[:8].ljust(8, b"\0"), VERSION)
        self._watch = DeadlineWatch(f"pdtx-{self.name}")
        self._lock = threading.Lock()
        self._listeners = list[Listener]()
        self._connections = set[OneSidedConnection]()
        self._closed = False

    def listen(self, address: str, receiver: Receiver) -> str:
        """Accept connections, see Mover."""
        with self._lock:
            self._check_open()
            if self.within_host:
                sock, bound = bind_local(address)
            else:
                sock, bound = bind_tcp(address, advertise_host=self._advertise_host)
            make = lambda wire: Inbound(wire, self._dialect, receiver, self._fabric)  # noqa: E731
            self._listeners.append(Listener(sock, bound, self.name, make))
        return bound

    def connect(self, address: str, session_id: str, token: bytes, deadline: float) -> Connection:
        """Open a connection, see Mover. Raises also ProtocolError if the peer speaks otherwise."""
        with self._lock:
            self._check_open()
        wire = wire_to(dial_local(address, deadline) if self.within_host else dial_tcp(address, deadline), address)
        try:
            prove_to_consumer(wire, self._dialect, session_id, token, deadline)
            return self._join(wire, deadline)
        except BaseException:
            wire.close()
            raise

    def _join(self, wire: Wire, deadline: float) -> OneSidedConnection:
        stream, link = ControlStream(wire), self._fabric.link(wire.fileno())
        try:
            try:
                join(link, stream, deadline)
                _ = link.path  # some engines connect only now: not under the lock
            except PeerLost as error:
                raise PeerUnreachable(f"{error} while the {self.name} engines were joined") from None
            with self._lock:
                self._check_open()
                connection = OneSidedConnection(
                    stream, link, self._fabric.pulls, self._watch, Packer(self._piece_bytes), self._forget
                )
                self._connections.add(connection)
        except BaseException:
            link.close()
            raise
        return connection

    def register(self, region: Region) -> Registration | None:
        """Make a region reachable, see Mover."""
        return self._fabric.register(region)

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(f"this {self.name} mover is closed")

    def _forget(self, connection: OneSidedConnection) -> None:
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
        self._fabric.close()
