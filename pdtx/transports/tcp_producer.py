"""The side of a TCP connection that has connected: requests are written, and one thread reads what comes back.

A small request is written by the thread that makes it, as far as that goes without waiting: waking another thread
would take longer. Its header goes first, so that the peer wakes up and finds the place while this side finds the bytes.
All else is left to the writer's thread. Whoever writes has the turn.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from pdtx.errors import (
    DeadlineExceeded,
    InputError,
    PdtxError,
    PeerLost,
    ProtocolError,
    TransferError,
    TransferRefused,
)
from pdtx.plan import Runs, Slices
from pdtx.ranges.iovec import IovecCursor, check_within
from pdtx.text import printable
from pdtx.transports.base import MAX_NOTICE_BYTES, NOTICE_KEY, Connection, Path, Region, TransferHandle, TransferKey
from pdtx.transports.bounce import Stager
from pdtx.transports.crew import Crew, lost_by
from pdtx.transports.gets import GetHandle
from pdtx.transports.outbox import DeadlineWatch, Outbox
from pdtx.transports.tcp_frames import ACK_BYTES, Ack, Header, Kind, Status, number
from pdtx.transports.tcp_payload import straight
from pdtx.transports.tcp_streams import Lanes
from pdtx.transports.window import SendWindow
from pdtx.transports.wire import FOREVER, Wire

# An acknowledgement is a few hundred bytes: once it has begun, the rest is on its way.
_ACK_REST_S = 30.0

_AT_ONCE_BYTES = 4 << 20
"""What is written by the thread that asks for it: about as much as a socket has room for."""

_HEADER_FIRST_BYTES = 256 << 10
"""From here on a payload takes longer than a system call and a packet of its own for the header."""


_NOTHING = Region(torch.empty(0, dtype=torch.uint8))
_NO_RUNS = Runs(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
_NO_SLICES = _NO_RUNS.source()


@dataclass(frozen=True)
class _Job:
    """A request: its header, and what to move. at_once: it may be written by the thread that makes it.

    data: what follows the header of a notice. header: for all but TAKEN and DROPPED without its number.
    """

    kind: Kind
    header: bytearray
    region: Region = _NOTHING
    runs: Runs = _NO_RUNS
    staged: bool = False
    data: bytes = b""
    at_once: bool = True

    @cached_property
    def slices(self) -> Slices:
        """The ranges of region; not known before they are needed, for that can be done while the peer is busy."""
        return self.runs.destination() if self.kind is Kind.GET else self.runs.source()


@dataclass(frozen=True)
class _Begun:
    """A request that has been begun by the thread that made it, and is to be finished by the writer's.

    cursor: None if not a byte has been written. head: memory that the cursor reads first.
    """

    handle: TransferHandle
    job: _Job
    cursor: IovecCursor | None = None
    head: bytes = b""

    def note_progress(self) -> None:
        """Tell the handle how many bytes of its payload have gone."""
        if self.cursor is not None and self.job.kind is Kind.PUT:
            self.handle.note_moved(self.cursor.done - len(self.head))


class TcpConnection(Connection):
    """See Connection. wires have passed the handshake and belong to this object from now on.

    make_stager: chooses how payloads are reached, one for each stream and direction. forget: called once, when nothing
    of the connection is left.
    """

    def __init__(
        self,
        wires: Sequence[Wire],
        part_bytes: int,
        watch: DeadlineWatch,
        make_stager: Callable[[], Stager],
        forget: Callable[["TcpConnection"], None],
    ) -> None:
        self._wires, self._wire = wires, wires[0]
        self._stager = make_stager()
        self._sending, self._receiving = (Lanes(wires, part_bytes, make_stager) for _ in range(2))
        self._forget = forget
        self._window = SendWindow(self._wire.round_trip_s)
        self._outbox = Outbox[_Job](watch, self._window)
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._rest: _Begun | None = None  # changed by whoever has the turn
        self._unacknowledged = deque[tuple[TransferHandle, _Job, int]]()  # with what the window returned for it
        self._begun = 0
        works = [("writer", self._write_all), ("reader", self._read_all)]
        works += [
            (f"{name}-{index}", lambda lanes=lanes, index=index: lanes.work(index))  # type: ignore[misc]
            for name, lanes in (("writer", self._sending), ("reader", self._receiving))
            for index in range(1, len(wires))
        ]
        self._crew = Crew("tcp", self._wire.peer, works, broken=self._break, gone=self._gone)
        self._crew.start()

    @property
    def path(self) -> Path:
        """See Connection."""
        streams = f", {len(self._wires)} streams" if len(self._wires) > 1 else ""
        return Path("tcp", f"{self._wire.local} -> {self._wire.peer}{streams}", possible=("tcp",))

    @property
    def stages(self) -> bool:
        """See Connection."""
        return True

    @property
    def ended(self) -> PdtxError | None:
        """See Connection."""
        return self._outbox.ended

    def put(
        self, key: TransferKey, region: Region, runs: Runs, deadline: float, *, staged: bool = False
    ) -> TransferHandle:
        """Queue a transfer, see Connection."""
        check_within(Slices(runs.src, runs.nbytes), region.nbytes, "the source")
        nbytes = runs.total
        alone = nbytes <= _AT_ONCE_BYTES and not self._sending.cuts(nbytes)
        at_once = alone and self._stager.is_straight(region, staged=staged)
        header = _header(Kind.PUT, key, nbytes)
        handle = TransferHandle(key, nbytes, self._wire.peer, deadline)
        return self._queue(handle, _Job(Kind.PUT, header, region, runs, staged, at_once=at_once))

    def get(self, key: TransferKey, region: Region, runs: Runs, deadline: float) -> TransferHandle:
        """Queue a transfer, see Connection."""
        check_within(Slices(runs.dst, runs.nbytes), region.nbytes, "the destination")
        header = _header(Kind.GET, key, runs.total)
        handle = GetHandle(key, runs.total, self._wire.peer, deadline)
        return self._queue(handle, _Job(Kind.GET, header, region, runs))

    def notify(self, data: bytes, deadline: float) -> TransferHandle:
        """Queue a notice, see Connection."""
        if len(data) > MAX_NOTICE_BYTES:
            raise InputError(f"a notice of {len(data)} bytes; at most {MAX_NOTICE_BYTES} are sent")
        header = _header(Kind.NOTICE, NOTICE_KEY, len(data))
        handle = TransferHandle(NOTICE_KEY, len(data), self._wire.peer, deadline)
        return self._queue(handle, _Job(Kind.NOTICE, header, data=data))

    def _queue(self, handle: TransferHandle, job: _Job) -> TransferHandle:
        self._outbox.put(handle, job, wake=not job.at_once)
        if job.at_once:
            self._write_at_once()
        return handle

    def close(self) -> None:
        """End the connection, see Connection."""
        self._outbox.close()
        self._end()
        self._crew.join()

    def _end(self) -> None:
        for lanes in (self._sending, self._receiving):
            lanes.shutdown()
            lanes.close()

    def _gone(self) -> None:
        # A thread that is not ours may be writing still, without waiting.
        with self._turn:
            for wire in self._wires:
                wire.close()
        self._forget(self)

    def _break(self, lost: PeerLost) -> None:
        self._outbox.close(lost)
        self._end()

    # -- whoever has the turn to write --------------------------------------------------------------------------------

    def _write_at_once(self) -> None:
        """Write the next request as far as that goes without waiting; the writer's thread does the rest."""
        if not self._turn.acquire(blocking=False):
            self._outbox.wake()  # who has the turn may have looked at the queue for the last time
            return
        try:
            if self._rest is None and (taken := self._outbox.next_now()) is not None:
                self._rest = self._begin_to_write(*taken)
        except PdtxError as error:
            self._break(lost_by(error, self._wire.peer))
        except BaseException as error:
            # A signal, perhaps, in the middle of a request: nothing can follow it.
            self._break(lost_by(TransferError(f"{type(error).__name__} in the middle of a request"), self._wire.peer))
            raise
        finally:
            left = self._rest is not None
            self._turn.release()
        if left or self._outbox.waiting:
            self._outbox.wake()

    def _begin_to_write(self, handle: TransferHandle, job: _Job) -> _Begun | None:
        """Write what there is room for; return what is left to do."""
        if not job.at_once:
            return _Begun(handle, job)
        self._count(handle, job)
        head = bytes(job.header) + job.data
        if handle.nbytes >= _HEADER_FIRST_BYTES:
            head = head[self._wire.send_some(head) :]
        payload = job.slices if job.kind is Kind.PUT else _NO_SLICES
        begun = _Begun(handle, job, straight(head, job.region, payload), head)
        if begun.cursor is not None and not self._wire.send_at_once(begun.cursor):
            begun.note_progress()
            return begun
        self._sent(handle, job)
        return None

    def _count(self, handle: TransferHandle, job: _Job) -> None:
        """Number a request. Before its first byte: the answer may come before the last one is counted."""
        if job.kind in (Kind.TAKEN, Kind.DROPPED):
            return
        with self._lock:
            number(job.header, self._begun)
            self._begun += 1
            self._unacknowledged.append((handle, job, self._window.begin(handle.nbytes)))

    def _sent(self, handle: TransferHandle, job: _Job) -> None:
        if job.kind in (Kind.TAKEN, Kind.DROPPED):
            handle.finish()
        elif job.kind is not Kind.GET:
            handle.mark_sent()

    def _write_all(self) -> None:
        """The writer's thread."""
        while self._outbox.wait():
            with self._turn:
                begun, self._rest = self._rest, None
                if begun is not None:
                    self._write(begun)
                while (taken := self._outbox.next_now()) is not None:
                    self._write(_Begun(*taken))

    def _write(self, begun: _Begun) -> None:
        """Write a request, or what is left of it, and wait for room."""
        handle, job = begun.handle, begun.job
        phase = f"room to send {handle.key}"
        try:
            if begun.cursor is not None:
                self._wire.send_vectors(begun.cursor, phase, handle.deadline, progress=lambda _: begun.note_progress())
            else:
                self._count(handle, job)
                self._write_whole(handle, job, phase)
        except DeadlineExceeded as error:
            # The stream is cut in the middle of a request: nothing can follow it.
            handle.expire()
            raise PeerLost(f"{self._wire.peer} stopped reading: {error}") from None
        self._sent(handle, job)

    def _write_whole(self, handle: TransferHandle, job: _Job, phase: str) -> None:
        head = bytes(job.header) + job.data
        if job.kind is Kind.PUT:
            self._sending.send(
                head,
                job.region,
                job.slices,
                phase,
                staged=job.staged,
                deadline=handle.deadline,
                progress=handle.note_moved,
            )
        else:
            self._wire.send(head, phase, handle.deadline)

    # -- the reader's thread ----------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        expected = 0
        while True:
            self._wire.wait_for_data(self._wires[1:])
            rest = time.monotonic() + _ACK_REST_S
            ack = Ack.unpack(self._wire.receive(ACK_BYTES, "the rest of an acknowledgement", rest))
            text = self._wire.receive(ack.text_bytes, "the rest of an acknowledgement", rest).decode(errors="replace")
            with self._lock:
                if ack.sequence != expected or not self._unacknowledged:
                    raise ProtocolError(f"{self._wire.peer} acknowledged request {ack.sequence} out of turn")
                handle, job, arrived_before = self._unacknowledged.popleft()
            expected += 1
            good = Status.OFFERED if job.kind is Kind.GET else Status.DELIVERED
            if ack.status in (Status.OFFERED, Status.DELIVERED) and ack.status is not good:
                raise ProtocolError(f"{self._wire.peer} acknowledged a {job.kind.name} as {ack.status.name}")
            if isinstance(handle, GetHandle) and ack.status is Status.OFFERED:
                self._take(handle, job, ack.sequence)
            else:
                handle.finish(_error_of(ack.status, text, handle))
            if self._window.end(handle.nbytes, handle.posted, arrived_before):
                self._outbox.wake()

    def _take(self, handle: GetHandle, job: _Job, sequence: int) -> None:
        """Receive the payload of a get, or throw it away where it has been given up."""
        phase = f"the payload of {handle.key}"
        whole = self._receiving.receive(job.region, job.slices, phase, progress=handle.note_moved, guard=handle.filling)
        kind = Kind.TAKEN if whole and handle.finish() else Kind.DROPPED
        header = _header(kind, handle.key, handle.nbytes)
        number(header, sequence)
        self._queue(TransferHandle(handle.key, 0, handle.peer, FOREVER), _Job(kind, header))


def _header(kind: Kind, key: TransferKey, nbytes: int) -> bytearray:
    """Pack a header. Raises InputError, here and not in a thread, for what no header can say."""
    return bytearray(Header(kind, 0, nbytes, key).pack())


def _error_of(status: Status, text: str, handle: TransferHandle) -> PdtxError | None:
    if status is Status.DELIVERED:
        return None
    # A peer's text goes to terminals and logs: one line, printable.
    reason = printable(text, " ") or "no reason given"
    if status is Status.REFUSED:
        return TransferRefused(f"{handle.peer} refused {handle.key}: {reason}")
    return TransferError(f"{handle.peer} could not take {handle.key}: {reason}")
