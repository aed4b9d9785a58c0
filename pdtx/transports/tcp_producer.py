"""The side of a TCP connection that has connected: one thread writes requests, one reads what comes back."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

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
from pdtx.transports.base import MAX_NOTICE_BYTES, NOTICE_KEY, Connection, Path, Region, TransferHandle, TransferKey
from pdtx.transports.bounce import Stage
from pdtx.transports.gets import GetHandle, Stopped
from pdtx.transports.iovec import check_within
from pdtx.transports.outbox import DeadlineWatch, Outbox
from pdtx.transports.tcp_frames import ACK_BYTES, Ack, Header, Kind, Status
from pdtx.transports.tcp_payload import receive_payload, send_payload
from pdtx.transports.wire import FOREVER, Wire

logger = logging.getLogger(__name__)

# An acknowledgement is a few hundred bytes: once it has begun, the rest is on its way.
_ACK_REST_S = 30.0
_JOIN_S = 1.0


@dataclass(frozen=True)
class _Job:
    """A request: what to move, for a notice what to tell, for TAKEN and DROPPED which get is meant."""

    kind: Kind
    region: Region | None = None
    slices: Slices | None = None
    staged: bool = False
    data: bytes = b""
    sequence: int = 0


class TcpConnection(Connection):
    """See Connection. wire has passed the handshake and belongs to this object from now on.

    stage_of: how a region's memory is reached, and whether to stage it; forget: called once, when nothing of the
    connection is left.
    """

    def __init__(
        self,
        wire: Wire,
        watch: DeadlineWatch,
        stage_of: Callable[[Region, bool], Stage],
        forget: Callable[["TcpConnection"], None],
    ) -> None:
        self._wire = wire
        self._stage_of = stage_of
        self._forget = forget
        self._outbox = Outbox[_Job](watch)
        self._lock = threading.Lock()
        self._unacknowledged = deque[tuple[TransferHandle, _Job]]()
        self._begun = 0
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"pdtx-tcp-{name}", daemon=True)
            for name, work in (("writer", self._write_all), ("reader", self._read_all))
        ]
        self._running = len(self._threads)
        for thread in self._threads:
            thread.start()

    @property
    def path(self) -> Path:
        """See Connection."""
        return Path("tcp", f"{self._wire.local} -> {self._wire.peer}", possible=("tcp",))

    @property
    def stages(self) -> bool:
        """See Connection."""
        return True

    def put(
        self, key: TransferKey, region: Region, runs: Runs, deadline: float, *, staged: bool = False
    ) -> TransferHandle:
        """Queue a transfer, see Connection."""
        slices = runs.source()
        check_within(slices, region.nbytes, "the source")
        handle = TransferHandle(key, slices.total, self._wire.peer, deadline)
        return self._queue(handle, _Job(Kind.PUT, region, slices, staged))

    def get(self, key: TransferKey, region: Region, runs: Runs, deadline: float) -> TransferHandle:
        """Queue a transfer, see Connection."""
        slices = runs.destination()
        check_within(slices, region.nbytes, "the destination")
        handle = GetHandle(key, slices.total, self._wire.peer, deadline)
        return self._queue(handle, _Job(Kind.GET, region, slices))

    def notify(self, data: bytes, deadline: float) -> TransferHandle:
        """Queue a notice, see Connection."""
        if len(data) > MAX_NOTICE_BYTES:
            raise InputError(f"a notice of {len(data)} bytes; at most {MAX_NOTICE_BYTES} are sent")
        handle = TransferHandle(NOTICE_KEY, len(data), self._wire.peer, deadline)
        return self._queue(handle, _Job(Kind.NOTICE, data=data))

    def _queue(self, handle: TransferHandle, job: _Job) -> TransferHandle:
        Header(job.kind, 0, handle.nbytes, handle.key).pack()  # refuse here, not in a thread, what no header can say
        self._outbox.put(handle, job)
        return handle

    def close(self) -> None:
        """End the connection, see Connection."""
        self._outbox.close()
        self._wire.shutdown()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
                if thread.is_alive():
                    logger.warning("%s to %s is stuck in a callback and left behind", thread.name, self._wire.peer)

    def _run(self, work: Callable[[], None]) -> None:
        """Run one thread's work; whatever ends it ends the connection, and the last one out gives back the socket."""
        try:
            work()
        except PdtxError as error:
            self._break(error)
        except Exception as error:
            logger.exception("the connection to %s failed", self._wire.peer)
            self._break(TransferError(f"the connection to {self._wire.peer} failed: {error}"))
        finally:
            with self._lock:
                self._running -= 1
                last = self._running == 0
            if last:
                self._wire.close()
                self._forget(self)

    def _break(self, error: PdtxError) -> None:
        lost = error if isinstance(error, PeerLost) else PeerLost(f"connection to {self._wire.peer} broke: {error}")
        self._outbox.close(lost)
        self._wire.shutdown()

    # -- the writer's thread ----------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (taken := self._outbox.next()) is not None:
            handle, job = taken
            if job.kind in (Kind.TAKEN, Kind.DROPPED):
                self._wire.send(Header(job.kind, job.sequence, handle.nbytes, handle.key).pack(), "room to confirm")
                handle.finish()
                continue
            with self._lock:
                header = Header(job.kind, self._begun, handle.nbytes, handle.key).pack()
                self._begun += 1
                # Before the first byte: the answer may come before the last one is counted.
                self._unacknowledged.append((handle, job))
            self._write(handle, job, header)

    def _write(self, handle: TransferHandle, job: _Job, header: bytes) -> None:
        sent = 0

        def progress(nbytes: int) -> None:
            nonlocal sent
            sent += nbytes
            handle.moved = sent  # never "+=": the acknowledgement may set it at the same time

        phase = f"room to send {handle.key}"
        try:
            if job.kind is Kind.PUT and job.region is not None and job.slices is not None:
                stage = self._stage_of(job.region, job.staged)
                send_payload(
                    self._wire, header, stage, job.region, job.slices, phase, handle.deadline, progress=progress
                )
            else:
                self._wire.send(header + job.data, phase, handle.deadline)
        except DeadlineExceeded as error:
            # The stream is cut in the middle of a request: nothing can follow it.
            handle.expire()
            raise PeerLost(f"{self._wire.peer} stopped reading: {error}") from None
        if job.kind is not Kind.GET:
            handle.mark_sent()

    # -- the reader's thread ----------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        expected = 0
        while True:
            self._wire.wait_for_data()
            rest = time.monotonic() + _ACK_REST_S
            ack = Ack.unpack(self._wire.receive(ACK_BYTES, "the rest of an acknowledgement", rest))
            text = self._wire.receive(ack.text_bytes, "the rest of an acknowledgement", rest).decode(errors="replace")
            with self._lock:
                if ack.sequence != expected or not self._unacknowledged:
                    raise ProtocolError(f"{self._wire.peer} acknowledged request {ack.sequence} out of turn")
                handle, job = self._unacknowledged.popleft()
            expected += 1
            if (ack.status is Status.OFFERED) is not (job.kind is Kind.GET) and ack.status in (
                Status.OFFERED,
                Status.DELIVERED,
            ):
                raise ProtocolError(f"{self._wire.peer} acknowledged a {job.kind.name} as {ack.status.name}")
            if ack.status is Status.OFFERED and isinstance(handle, GetHandle):
                self._take(handle, job, ack.sequence)
            else:
                handle.finish(_error_of(ack.status, text, handle))

    def _take(self, handle: GetHandle, job: _Job, sequence: int) -> None:
        """Receive the payload of a get, or throw it away where it has been given up."""
        received = 0

        def progress(nbytes: int) -> None:
            nonlocal received
            received += nbytes
            handle.moved = received

        phase = f"the payload of {handle.key}"
        if job.region is None or job.slices is None:
            raise TypeError("a get without a region")
        kind = Kind.TAKEN
        try:
            stage = self._stage_of(job.region, False)
            receive_payload(self._wire, stage, job.region, job.slices, phase, progress=progress, guard=handle.filling)
        except Stopped:
            self._wire.discard(handle.nbytes - received, phase)
            kind = Kind.DROPPED
        else:
            kind = Kind.TAKEN if handle.finish() else Kind.DROPPED
        self._outbox.put(TransferHandle(handle.key, 0, handle.peer, FOREVER), _Job(kind, sequence=sequence))


def _error_of(status: Status, text: str, handle: TransferHandle) -> PdtxError | None:
    if status is Status.DELIVERED:
        return None
    # A peer's text goes to terminals and logs: one line, printable.
    reason = "".join(c if c.isprintable() else " " for c in text) or "no reason given"
    if status is Status.REFUSED:
        return TransferRefused(f"{handle.peer} refused {handle.key}: {reason}")
    return TransferError(f"{handle.peer} could not take {handle.key}: {reason}")
