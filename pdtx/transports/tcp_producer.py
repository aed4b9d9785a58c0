"""The producer's side of a TCP connection: one thread writes payloads, one reads their acknowledgements."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pdtx.errors import DeadlineExceeded, PdtxError, PeerLost, ProtocolError, TransferError, TransferRefused
from pdtx.plan import Runs, Slices
from pdtx.transports.base import Connection, Region, TransferHandle, TransferKey
from pdtx.transports.bounce import Stage
from pdtx.transports.iovec import Iovecs, check_within, range_of
from pdtx.transports.outbox import DeadlineWatch, Outbox
from pdtx.transports.tcp_frames import ACK_BYTES, Ack, Header, Status
from pdtx.transports.wire import Wire

logger = logging.getLogger(__name__)

# An acknowledgement is a few hundred bytes: once it has begun, the rest is on its way.
_ACK_REST_S = 30.0
_JOIN_S = 1.0


@dataclass(frozen=True)
class _Payload:
    """What a transfer reads."""

    region: Region
    slices: Slices


class TcpConnection(Connection):
    """See Connection. wire has passed the handshake and belongs to this object from now on.

    stage_of: how a region's memory is reached; forget: called once, when nothing of the connection is left.
    """

    def __init__(
        self,
        wire: Wire,
        watch: DeadlineWatch,
        stage_of: Callable[[Region], Stage],
        forget: Callable[["TcpConnection"], None],
    ) -> None:
        self._wire = wire
        self._stage_of = stage_of
        self._forget = forget
        self._outbox = Outbox[_Payload](watch)
        self._lock = threading.Lock()
        self._unacknowledged = deque[TransferHandle]()
        self._begun = 0
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"pdtx-tcp-{name}", daemon=True)
            for name, work in (("writer", self._write_all), ("acks", self._read_acks))
        ]
        self._running = len(self._threads)
        for thread in self._threads:
            thread.start()

    def put(self, key: TransferKey, region: Region, runs: Runs, deadline: float) -> TransferHandle:
        """Queue a transfer, see Connection."""
        slices = runs.source()
        check_within(slices, region.nbytes, "the source")
        Header(0, slices.total, key).pack()  # refuse here, not in the writer's thread, what no header can say
        handle = TransferHandle(key, slices.total, self._wire.peer, deadline)
        self._outbox.put(handle, _Payload(region, slices))
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
        while (job := self._outbox.next()) is not None:
            handle, payload = job
            with self._lock:
                header = Header(self._begun, handle.nbytes, handle.key).pack()
                self._begun += 1
                # Before the first byte: the answer may come before the last one is counted.
                self._unacknowledged.append(handle)
            self._write(handle, payload, header)

    def _write(self, handle: TransferHandle, payload: _Payload, header: bytes) -> None:
        moved = -len(header)

        def progress(nbytes: int) -> None:
            nonlocal moved
            moved += nbytes
            handle.moved = max(0, moved)

        head = np.frombuffer(header, np.uint8)
        waiting: list[Iovecs] = [range_of(head.ctypes.data, len(head))]
        phase = f"room to send {handle.key}"
        try:
            with contextlib.closing(self._stage_of(payload.region).gather(payload.region, payload.slices)) as gathered:
                for vectors in gathered:
                    # The header travels with the first bytes: one system call and one packet less.
                    self._wire.send_vectors(np.concatenate((*waiting, vectors)), phase, handle.deadline, progress)
                    waiting.clear()
            if waiting:
                self._wire.send_vectors(waiting[0], phase, handle.deadline, progress)
        except DeadlineExceeded as error:
            # The stream is cut in the middle of a payload: nothing can follow it.
            handle.expire()
            raise PeerLost(f"{self._wire.peer} stopped reading: {error}") from None
        handle.mark_sent()

    # -- the reader's thread ----------------------------------------------------------------------------------------

    def _read_acks(self) -> None:
        expected = 0
        while True:
            self._wire.wait_for_data()
            rest = time.monotonic() + _ACK_REST_S
            ack = Ack.unpack(self._wire.receive(ACK_BYTES, "the rest of an acknowledgement", rest))
            text = self._wire.receive(ack.text_bytes, "the rest of an acknowledgement", rest).decode(errors="replace")
            with self._lock:
                if ack.sequence != expected or not self._unacknowledged:
                    raise ProtocolError(f"{self._wire.peer} acknowledged payload {ack.sequence} out of turn")
                handle = self._unacknowledged.popleft()
            expected += 1
            handle.finish(_error_of(ack.status, text, handle))


def _error_of(status: Status, text: str, handle: TransferHandle) -> PdtxError | None:
    if status is Status.DELIVERED:
        return None
    # A peer's text goes to terminals and logs: one line, printable.
    reason = "".join(c if c.isprintable() else " " for c in text) or "no reason given"
    if status is Status.REFUSED:
        return TransferRefused(f"{handle.peer} refused {handle.key}: {reason}")
    return TransferError(f"{handle.peer} could not take {handle.key}: {reason}")
