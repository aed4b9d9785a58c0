"""A plain TCP socket on loopback: the limit of every mover over TCP."""

import socket
import time
from collections.abc import Sequence

from benchmarks.peers.base import CacheMemory, PairPeer, Workload
from benchmarks.peers.child import Child
from pdtx.bench.turns import MOVES_A_ROUND
from pdtx.transports.wire import tune

_PATIENCE_S = 60.0


class _End(CacheMemory):
    """A contiguous buffer at one end of a connection, with the socket options of pdtx's own."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._view = memoryview(self.tensor.numpy())  # type: ignore[arg-type]  # numpy's stubs leave the protocol out
        self._listener: socket.socket | None = None

    def listen(self) -> tuple[str, int]:
        self._listener = socket.create_server(("127.0.0.1", 0))
        host, port = self._listener.getsockname()
        return host, port

    def accept(self) -> None:
        if self._listener is not None:
            self._socket, _ = self._listener.accept()
            tune(self._socket)

    def connect(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, timeout=_PATIENCE_S)
        self._socket.settimeout(None)  # the caller's patience ends the process; a time-out here costs a poll() a call
        tune(self._socket)

    def send(self, *, back: bool) -> float:
        """Send the buffer and wait for a byte, or for the buffer back; return the seconds."""
        self._receive(memoryview(bytearray(1)))
        begun = time.perf_counter()
        self._socket.sendall(self._view)
        self._receive(self._view if back else memoryview(bytearray(1)))
        return time.perf_counter() - begun

    def receive(self, *, back: bool) -> None:
        self._socket.sendall(b"r")
        self._receive(self._view)
        self._socket.sendall(self._view if back else b"!")

    def _receive(self, view: memoryview) -> None:
        while view:
            moved = self._socket.recv_into(view)
            if moved == 0:
                raise ConnectionError("the other end has closed")
            view = view[moved:]


class BulkSocket(PairPeer[_End]):
    """sendall and recv_into of one contiguous buffer; a round ends with a byte that confirms the last one."""

    _back = False

    def __init__(self, nbytes: int = 256 << 20, *, repeat: int = MOVES_A_ROUND) -> None:
        super().__init__("plain socket", f"sendall/recv_into of {nbytes} bytes", Workload.bulk(nbytes), repeat=repeat)

    def children(self) -> Sequence[Child[_End]]:
        """See PairPeer."""
        return [Child({}, _End, self.workload) for _ in range(2)]

    def connect(self, source: Child[_End], destination: Child[_End]) -> None:
        """See PairPeer."""
        source.call(_End.connect, destination.call(_End.listen))
        destination.call(_End.accept)

    def move(self, source: Child[_End], destination: Child[_End]) -> float:
        """See PairPeer."""
        receiving = destination.begin(_End.receive, back=self._back)
        seconds = source.call(_End.send, back=self._back)
        receiving.result()
        return seconds


class SocketPingPong(BulkSocket):
    """The same bytes there and back; a move takes half of that."""

    _back = True

    def __init__(self, nbytes: int = 2 << 20, *, repeat: int = MOVES_A_ROUND) -> None:
        super().__init__(nbytes, repeat=repeat)
        self.name, self.detail = "socket ping-pong", f"half of {nbytes} bytes there and back"

    def move(self, source: Child[_End], destination: Child[_End]) -> float:
        """See PairPeer."""
        return super().move(source, destination) / 2
