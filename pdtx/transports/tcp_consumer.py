"""The side of a TCP connection that has listened: one thread serves request after request."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdtx.errors import (
    PdtxError,
    ProtocolError,
    TransferAborted,
    TransferError,
    TransferRefused,
)
from pdtx.transports.base import MAX_NOTICE_BYTES, Placement, Receiver, TransferHandle, TransferKey
from pdtx.transports.handshake import admit_producer
from pdtx.transports.listener import HANDSHAKE_S
from pdtx.transports.outbox import DeadlineWatch
from pdtx.transports.tcp_frames import DIALECT, HEADER_BYTES, Header, Kind, Status, pack_ack
from pdtx.transports.tcp_streams import JOIN_BYTES, READY, Gathering, Group, Join, Lanes
from pdtx.transports.wire import Wire

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConsumerOptions:
    """What a consumer's connections have in common; see TcpMover."""

    stall_s: float
    max_payload_bytes: int


class Inbound:
    """One accepted socket: a connection, or another one's stream. Owns wire.

    gathering: the connections of this address that lack streams.
    """

    def __init__(
        self, wire: Wire, receiver: Receiver, options: ConsumerOptions, gathering: Gathering, watch: DeadlineWatch
    ) -> None:
        self._wire, self._receiver, self._options = wire, receiver, options
        self._gathering, self._watch = gathering, watch
        self._group: Group | None = None
        self._stopped: str | None = None
        self._moved = 0
        self._proven = False
        self._session_id = ""
        self._offered = dict[int, TransferHandle]()  # gets whose payload has been sent, by sequence, until we hear

    @property
    def unproven(self) -> bool:
        """Whether it still has to prove its session, and has not been told to stop."""
        return not self._proven and self._stopped is None

    def stop(self, reason: str) -> None:
        """Make serve() return soon."""
        self._stopped = self._stopped or reason
        self._wire.shutdown()
        if self._group is not None:
            self._group.fail(TransferAborted(reason))

    def serve(self) -> None:
        """Shake hands, then serve requests, or move parts for another socket's thread, until the connection ends."""
        with self._wire:
            try:
                join, lanes = self._come_about()
            except PdtxError as error:
                logger.warning("refused a connection from %s: %s", self._wire.peer, self._stopped or error)
                return
            if join.index:
                lanes.work(join.index)
            else:
                self._lead(lanes)

    def _come_about(self) -> tuple[Join, Lanes]:
        """Shake hands and wait until the connection has all of its streams. Raises PdtxError."""
        deadline = time.monotonic() + HANDSHAKE_S
        self._session_id = admit_producer(self._wire, DIALECT, self._receiver.admit, deadline)
        self._proven = True
        join = Join.unpack(self._wire.receive(JOIN_BYTES, "the name of a stream", deadline))
        self._group = group = self._gathering.enter(self._session_id, join, self._wire)
        try:
            if self._stopped is not None:
                group.fail(TransferAborted(self._stopped))
            lanes = group.wait(self._wire.peer, deadline)
        except PdtxError:
            self._gathering.leave(self._session_id, join, group)
            raise
        return join, lanes

    def _lead(self, lanes: Lanes) -> None:
        reason = "it failed"
        try:
            self._wire.send(READY, "room to say that all streams are there", time.monotonic() + HANDSHAKE_S)
            self._serve_all(lanes)
        except PdtxError as error:
            reason = str(error)
        finally:
            # First for the peer, at once: the receiver may take its time.
            lanes.shutdown()
            lanes.close()
            for handle in list(self._offered.values()):
                handle.finish(TransferError(f"{handle.key} may not have arrived: {self._stopped or reason}"))
            self._receiver.closed(self._session_id, self._stopped or reason)

    def _serve_all(self, lanes: Lanes) -> None:
        sequence = 0
        while True:
            self._wire.wait_for_data(lanes.wires[1:])
            header = self._next_header()
            if header.kind in (Kind.TAKEN, Kind.DROPPED):
                self._confirmed(header)
                continue
            if header.sequence != sequence:
                raise ProtocolError(f"{self._wire.peer} sent request {header.sequence} out of turn")
            sequence += 1
            if header.kind is Kind.GET:
                self._give(lanes, header)
                continue
            status, text = self._take(lanes, header) if header.kind is Kind.PUT else self._hear(header)
            self._acknowledge(header, status, text)

    def _next_header(self) -> Header:
        rest = time.monotonic() + self._options.stall_s
        header = Header.unpack(self._wire.receive(HEADER_BYTES, "the rest of a request's header", rest))
        limit = MAX_NOTICE_BYTES if header.kind is Kind.NOTICE else self._options.max_payload_bytes
        if header.nbytes > limit:
            raise ProtocolError(
                f"{self._wire.peer} announced a {header.kind.name.lower()} of {header.nbytes} bytes, "
                f"above the limit of {limit}"
            )
        return header

    def _acknowledge(self, header: Header, status: Status, text: str) -> None:
        room = time.monotonic() + self._options.stall_s
        self._wire.send(pack_ack(header.sequence, status, text), "room to send an acknowledgement", room)

    def _placement(
        self,
        header: Header,
        ask: Callable[[str, TransferKey], Placement],
        tell: Callable[[str, TransferKey, int, PdtxError | None], None],
    ) -> Placement:
        """Ask the receiver where a payload goes or comes from, and check that it fits there. Raises PdtxError."""
        try:
            placement = ask(self._session_id, header.key)
        except PdtxError:
            raise
        except Exception as error:
            logger.exception("the receiver failed at the request for %s", header.key)
            raise TransferRefused("it failed at this request; its log says why") from error
        try:
            placement.check(header.nbytes)
        except PdtxError as error:
            self._tell(tell, header.key, 0, error)
            raise
        return placement

    def _tell(
        self,
        tell: Callable[[str, TransferKey, int, PdtxError | None], None],
        key: TransferKey,
        nbytes: int,
        error: PdtxError | None,
    ) -> str | None:
        """Tell the receiver of an end; return what went wrong in it."""
        try:
            tell(self._session_id, key, nbytes, error)
        except PdtxError as failure:
            return str(failure)
        except Exception:
            logger.exception("the receiver failed at the end of %s", key)
            return "it failed at the end; its log says why"
        return None

    def _progress(self, nbytes: int) -> None:
        self._moved = nbytes

    def _failure(self, header: Header, error: Exception) -> PdtxError:
        """Return what to tell the receiver of a transfer that was cut off by error."""
        if self._stopped is not None:
            return TransferAborted(f"{header.key}: {self._stopped}")
        return error if isinstance(error, PdtxError) else TransferError(f"{header.key} cannot be moved: {error}")

    # -- puts and notices ---------------------------------------------------------------------------------------------

    def _take(self, lanes: Lanes, header: Header) -> tuple[Status, str]:
        """Receive one payload; return what to acknowledge. Raises what ends the connection."""
        stall_s = self._options.stall_s
        try:
            placement = self._placement(header, self._receiver.place, self._receiver.placed)
        except PdtxError as refusal:
            lanes.discard(header.nbytes, f"the rest of {header.key}, refused", stall_s)
            return Status.REFUSED, str(refusal)
        self._moved = 0
        try:
            lanes.receive(
                placement.region,
                placement.slices,
                f"the payload of {header.key}",
                deadline=placement.deadline,
                stall_s=stall_s,
                progress=self._progress,
            )
        except Exception as error:
            reason = self._failure(header, error)
            self._tell(self._receiver.placed, header.key, self._moved, reason)
            raise reason from error
        failure = self._tell(self._receiver.placed, header.key, self._moved, None)
        return (Status.DELIVERED, "") if failure is None else (Status.FAILED, failure)

    def _hear(self, header: Header) -> tuple[Status, str]:
        rest = time.monotonic() + self._options.stall_s
        data = self._wire.receive(header.nbytes, "the rest of a notice", rest)
        try:
            self._receiver.notified(self._session_id, data)
        except PdtxError as failure:
            return Status.FAILED, str(failure)
        except Exception:
            logger.exception("the receiver failed to hear a notice")
            return Status.FAILED, "it failed at the notice; its log says why"
        return Status.DELIVERED, ""

    # -- gets -----------------------------------------------------------------------------------------------------

    def _give(self, lanes: Lanes, header: Header) -> None:
        """Send the payload of a get, or the refusal. Raises what ends the connection."""
        try:
            placement = self._placement(header, self._receiver.offer, self._receiver.offered)
        except PdtxError as refusal:
            self._acknowledge(header, Status.REFUSED, str(refusal))
            return
        self._moved = 0
        head = pack_ack(header.sequence, Status.OFFERED)
        deadline = placement.deadline
        try:
            lanes.send(
                head,
                placement.region,
                placement.slices,
                f"room to send {header.key}",
                deadline=deadline,
                stall_s=self._options.stall_s,
                progress=self._progress,
            )
        except Exception as error:
            reason = self._failure(header, error)
            self._tell(self._receiver.offered, header.key, self._moved, reason)
            raise reason from error
        handle = TransferHandle(header.key, header.nbytes, self._wire.peer, deadline)
        handle.post()
        handle.mark_sent()
        self._offered[header.sequence] = handle
        handle.on_end(self._tell_offered)
        self._watch.add(handle)

    def _tell_offered(self, handle: TransferHandle) -> None:
        self._tell(self._receiver.offered, handle.key, handle.nbytes, handle.error)

    def _confirmed(self, header: Header) -> None:
        """End a get whose payload has been sent, unless its deadline has."""
        handle = self._offered.pop(header.sequence, None)
        if handle is None:
            raise ProtocolError(f"{self._wire.peer} confirmed request {header.sequence}, which it did not get")
        dropped = TransferAborted(f"{handle.peer} gave {handle.key} up before it had arrived")
        handle.finish(None if header.kind is Kind.TAKEN else dropped)
