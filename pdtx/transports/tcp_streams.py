"""The streams of one connection: which sockets belong together, and how a payload is cut over them.

After the handshake each socket says which connection it is of, which stream, and of how many; the first one is told
when all are there. Requests and acknowledgements cross the first; a payload's parts, in order, one stream each.
"""

import itertools
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue  # noqa: TID251  # no timeouts

from pdtx.errors import DeadlineExceeded, PdtxError, PeerLost, ProtocolError, TransferError
from pdtx.plan import Slices
from pdtx.transports.base import Region
from pdtx.transports.bounce import Stager
from pdtx.transports.gets import Stopped
from pdtx.transports.pairing import cut_stream
from pdtx.transports.tcp_payload import receive_payload, send_payload
from pdtx.transports.wire import FOREVER, Guard, Wire

MAX_STREAMS = 16

PART_BYTES = 2 << 20
"""Smaller parts are not worth the hand-over between threads."""

# Cuts lie where ranges of a power of two end, so that staged parts still move in large words.
_ALIGNMENT = 64 << 10

_JOIN = struct.Struct("!4s16sBBI")
_JOIN_MAGIC = b"KVjo"
CONNECTION_ID_BYTES = 16
READY = b"!"


@dataclass(frozen=True)
class Join:
    """What a socket says of itself: stream index of count of a connection.

    part_bytes: a payload is cut into fewer parts than there are streams if they would be smaller.
    """

    connection: bytes
    index: int
    count: int
    part_bytes: int = PART_BYTES

    def pack(self) -> bytes:
        """Return JOIN_BYTES."""
        return _JOIN.pack(_JOIN_MAGIC, self.connection, self.index, self.count, self.part_bytes)

    @classmethod
    def unpack(cls, data: bytes) -> "Join":
        """Read JOIN_BYTES. Raises ProtocolError."""
        magic, connection, index, count, part_bytes = _JOIN.unpack(data)
        if magic != _JOIN_MAGIC or not 1 <= count <= MAX_STREAMS or index >= count or part_bytes < 1:
            raise ProtocolError("what should name a stream of a connection does not")
        return cls(connection, index, count, part_bytes)


JOIN_BYTES = _JOIN.size


def cut(nbytes: int, streams: int, part_bytes: int) -> list[int]:
    """Return the edges of a payload's parts, at most one a stream; both sides come to the same."""
    parts = min(streams, max(1, nbytes // part_bytes))
    step = _ALIGNMENT if part_bytes >= _ALIGNMENT else 1
    return [nbytes * part // parts // step * step for part in range(parts)] + [nbytes]


@dataclass
class _Latch:
    """Parts under way in other threads, and the first error of any."""

    left: int
    error: Exception | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def end(self, error: Exception | None = None) -> None:
        with self.changed:
            self.error = self.error or error
            self.left -= 1
            self.changed.notify_all()

    def wait(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.left == 0)
        if self.error is not None:
            raise self.error


class Lanes:
    """Moves payloads one way over the wires of a connection. run() and all that calls it: from one thread at a time.

    Somebody must be in work(i) for each wire but the first.
    """

    def __init__(self, wires: Sequence[Wire], part_bytes: int, make_stager: Callable[[], Stager]) -> None:
        self.wires, self._part_bytes = wires, part_bytes
        self._stagers = [make_stager() for _ in wires]
        self._jobs: list[SimpleQueue[Callable[[], None] | None]] = [SimpleQueue() for _ in wires]
        self._lock = threading.Lock()
        self._closed = False

    def work(self, index: int) -> None:
        """Serve wire index until close()."""
        while (job := self._jobs[index].get()) is not None:
            job()

    def cuts(self, nbytes: int) -> bool:
        """Whether a payload of nbytes moves in more than one part."""
        return len(self.wires) > 1 and len(self._edges(nbytes)) > 2

    def _edges(self, nbytes: int) -> list[int]:
        return cut(nbytes, len(self.wires), self._part_bytes)

    def close(self) -> None:
        """Make work() return, after what is under way. Idempotent."""
        with self._lock:
            self._closed = True
            for jobs in self._jobs:
                jobs.put(None)

    def shutdown(self) -> None:
        """End the connection: whoever waits on one of its wires wakes up. Idempotent."""
        for wire in self.wires:
            wire.shutdown()

    def send(
        self,
        head: bytes,
        region: Region,
        slices: Slices,
        phase: str,
        *,
        staged: bool | None = None,
        deadline: float = FOREVER,
        stall_s: float = FOREVER,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Send head and a payload; progress is told how many bytes of the payload have gone so far."""

        def step(index: int, part: Slices, count: Callable[[int], None]) -> None:
            stage = self._stagers[index].choose(region, part, staged)
            before = b"" if index else head
            send_payload(self.wires[index], before, stage, region, part, phase, deadline, stall_s, count)

        self._each_part(slices, step, progress)

    def receive(
        self,
        region: Region,
        slices: Slices,
        phase: str,
        *,
        deadline: float = FOREVER,
        stall_s: float = FOREVER,
        progress: Callable[[int], None] | None = None,
        guard: Guard | None = None,
    ) -> bool:
        """Receive a payload, see receive_payload; False if guard() stopped it, and the rest was thrown away."""
        whole = [True] * len(self.wires)

        def step(index: int, part: Slices, count: Callable[[int], None]) -> None:
            received = 0

            def counted(nbytes: int) -> None:
                nonlocal received
                received += nbytes
                count(nbytes)

            stage, wire = self._stagers[index].choose(region, part), self.wires[index]
            try:
                receive_payload(wire, stage, region, part, phase, deadline, stall_s, counted, guard)
            except Stopped:
                whole[index] = False
                wire.discard(part.total - received, phase, stall_s)

        self._each_part(slices, step, progress)
        return all(whole)

    def discard(self, nbytes: int, phase: str, stall_s: float) -> None:
        """Receive a payload of nbytes and throw it away."""
        edges = self._edges(nbytes)
        parts = [stop - start for start, stop in itertools.pairwise(edges)]
        self._run(lambda index: self.wires[index].discard(parts[index], phase, stall_s), len(parts))

    def _each_part(
        self,
        slices: Slices,
        step: Callable[[int, Slices, Callable[[int], None]], None],
        progress: Callable[[int], None] | None,
    ) -> None:
        """Carry out step(stream, part, count) for each part; count adds to what progress is told of all."""
        edges = self._edges(slices.total)
        moved, telling = 0, threading.Lock()

        def count(nbytes: int) -> None:
            nonlocal moved
            with telling:  # streams overtake one another, and what progress is told must only grow
                moved += nbytes
                if progress is not None:
                    progress(moved)

        if len(edges) == 2:
            step(0, slices, count)
            return
        parts = [cut_stream(slices, start, stop) for start, stop in itertools.pairwise(edges)]
        self._run(lambda index: step(index, parts[index], count), len(parts))

    def _run(self, step: Callable[[int], None], count: int) -> None:
        """Carry out step(0) here and the others in the threads that work; returns when all have ended.

        Raises the first error of any; all wires are shut down then.
        """
        latch = _Latch(count)

        def guarded(index: int) -> None:
            try:
                step(index)
            except Exception as error:  # noqa: BLE001 - raised again by the thread that waits
                latch.end(error)
                self.shutdown()
            else:
                latch.end()

        with self._lock:
            if self._closed:
                raise PeerLost(f"the connection to {self.wires[0].peer} has ended")
            for index in range(1, count):
                self._jobs[index].put(lambda index=index: guarded(index))  # type: ignore[misc]
        guarded(0)
        latch.wait()


class Group:
    """The sockets of one connection that is coming about on the listening side."""

    def __init__(self, first: Join) -> None:
        self._first = first
        self._wires: list[Wire | None] = [None] * first.count
        self._changed = threading.Condition()
        self._error: PdtxError | None = None
        self.lanes: Lanes | None = None

    def add(self, join: Join, wire: Wire, make_stager: Callable[[], Stager]) -> bool:
        """Enter a socket; True if it was the last one. Raises ProtocolError if it does not fit."""
        with self._changed:
            if replace(join, index=0) != replace(self._first, index=0) or self._error is not None:
                raise ProtocolError(f"{wire.peer} sent a stream that does not belong to the others")
            if self._wires[join.index] is not None:
                raise ProtocolError(f"{wire.peer} sent stream {join.index} twice")
            self._wires[join.index] = wire
            wires = [wire for wire in self._wires if wire is not None]
            if len(wires) < join.count:
                return False
            self.lanes = Lanes(wires, join.part_bytes, make_stager)
            self._changed.notify_all()
            return True

    def fail(self, error: PdtxError) -> None:
        """Give up, unless all are there."""
        with self._changed:
            if self.lanes is None:
                self._error = self._error or error
                self._changed.notify_all()

    def wait(self, peer: str, deadline: float) -> Lanes:
        """Wait for all sockets. Raises what ended the wait."""
        begun = time.monotonic()
        with self._changed:
            left = max(0.0, deadline - begun)
            self._changed.wait_for(lambda: self.lanes is not None or self._error is not None, left)
            there = sum(wire is not None for wire in self._wires)
            if self.lanes is None and self._error is None:
                progress = f"{there} of {len(self._wires)} are there"
                waited = round(time.monotonic() - begun, 3)
                self._error = DeadlineExceeded("the other streams of a connection", peer, waited, progress)
                self._changed.notify_all()
            if self.lanes is None:
                raise self._error or TransferError("a connection did not come about")
            return self.lanes


class Gathering:
    """The connections of a listening mover that lack streams, by session and connection."""

    def __init__(self, make_stager: Callable[[], Stager]) -> None:
        self._make_stager = make_stager
        self._groups = dict[tuple[str, bytes], Group]()
        self._lock = threading.Lock()

    def enter(self, session_id: str, join: Join, wire: Wire) -> Group:
        """Return the group that a socket belongs to; leave() it at the end. Raises ProtocolError."""
        key = session_id, join.connection
        with self._lock:
            group = self._groups.setdefault(key, Group(join))
            if group.add(join, wire, self._make_stager):
                del self._groups[key]
        return group

    def leave(self, session_id: str, join: Join, group: Group) -> None:
        """Forget a group that has failed."""
        with self._lock:
            if self._groups.get((session_id, join.connection)) is group:
                del self._groups[session_id, join.connection]
