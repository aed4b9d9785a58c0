"""The consumer's side of TCP: a listener, and one thread for each connection."""

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdtx.address import WILDCARDS, join_address, parse_address, resolve
from pdtx.errors import (
    AddressInUse,
    InputError,
    PdtxError,
    ProtocolError,
    TransferAborted,
    TransferRefused,
)
from pdtx.transports.base import Placement, Receiver, Region
from pdtx.transports.bounce import Stage
from pdtx.transports.iovec import check_placement
from pdtx.transports.tcp_frames import HEADER_BYTES, Header, Status, pack_ack
from pdtx.transports.tcp_handshake import admit_producer
from pdtx.transports.wire import Wire, set_buffers

logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
MAX_UNPROVEN = 64
"""Connections that have not proved their session yet; one more pushes out the oldest."""

_BACKLOG = 128
_JOIN_S = 0.8


@dataclass(frozen=True)
class ConsumerOptions:
    """What a consumer's connections have in common; see TcpMover."""

    stall_s: float
    max_payload_bytes: int
    socket_buffer_bytes: int | None
    advertise_host: str | None


def _bind(address: str, buffer_bytes: int | None) -> socket.socket:
    family, target = resolve(*parse_address(address), passive=True)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        set_buffers(sock, buffer_bytes)
        sock.bind(target)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
            raise AddressInUse(f"cannot listen at {address}: {error.strerror}") from None
        raise
    return sock


class TcpListener:
    """Accepts connections until closed.

    Raises AddressInUse, or InputError for an address that nobody could connect to.
    """

    def __init__(
        self, address: str, receiver: Receiver, options: ConsumerOptions, stage_of: Callable[[Region], Stage]
    ) -> None:
        self._receiver, self._options, self._stage_of = receiver, options, stage_of
        self._sock = _bind(address, options.socket_buffer_bytes)
        host, port = self._sock.getsockname()[:2]
        if host in WILDCARDS and options.advertise_host is None:
            self._sock.close()
            raise InputError(f"{address} is every address of this host; give one to advertise, or listen at one")
        self.address = join_address(options.advertise_host or host, port)
        self._lock = threading.Lock()
        self._closing = False
        self._inbound = dict[Inbound, threading.Thread]()
        self._thread = threading.Thread(target=self._accept, name="pdtx-tcp-listen", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with self._sock:
            while not self._closing:
                try:
                    sock, address = self._sock.accept()
                except OSError as error:
                    if self._closing or error.errno in (errno.EBADF, errno.EINVAL):
                        return
                    # Out of descriptors, or a peer that left in the queue: no reason to stop serving the others.
                    logger.warning("cannot accept a connection at %s: %s", self.address, error)
                    time.sleep(0.05)
                    continue
                try:
                    self._serve(Wire(sock, join_address(*address[:2])))
                except (OSError, RuntimeError) as error:
                    # The peer has gone already, or no thread can be had for it.
                    logger.warning("cannot serve a connection at %s: %s", self.address, error)
                    sock.close()

    def _serve(self, wire: Wire) -> None:
        inbound = Inbound(wire, self._receiver, self._options, self._stage_of)
        thread = threading.Thread(target=self._run, args=(inbound,), name="pdtx-tcp-inbound", daemon=True)
        with self._lock:
            unproven = [other for other in self._inbound if other.unproven]
            if len(unproven) >= MAX_UNPROVEN:
                unproven[0].stop("pushed out by newer connections")
            if self._closing:
                wire.close()
                return
            thread.start()
            self._inbound[inbound] = thread

    def _run(self, inbound: "Inbound") -> None:
        try:
            inbound.serve()
        except Exception:
            logger.exception("a connection at %s failed", self.address)
        finally:
            with self._lock:
                self._inbound.pop(inbound)

    def close(self) -> None:
        """Stop accepting, end all connections. Idempotent."""
        with self._lock:
            self._closing = True
            inbound = dict(self._inbound)
        with contextlib.suppress(OSError):  # closed before
            self._sock.shutdown(socket.SHUT_RDWR)
        for connection in inbound:
            connection.stop("the consumer closed")
        limit = time.monotonic() + _JOIN_S
        for thread in (self._thread, *inbound.values()):
            if thread is not threading.current_thread():
                thread.join(max(0.0, limit - time.monotonic()))
                if thread.is_alive():
                    logger.warning("%s at %s is stuck in its receiver and left behind", thread.name, self.address)


class Inbound:
    """One accepted connection. Owns wire."""

    def __init__(
        self, wire: Wire, receiver: Receiver, options: ConsumerOptions, stage_of: Callable[[Region], Stage]
    ) -> None:
        self._wire, self._receiver, self._options, self._stage_of = wire, receiver, options, stage_of
        self._stopped: str | None = None
        self._moved = 0
        self._proven = False

    @property
    def unproven(self) -> bool:
        """Whether it still has to prove its session, and has not been told to stop."""
        return not self._proven and self._stopped is None

    def stop(self, reason: str) -> None:
        """Make serve() return soon."""
        self._stopped = self._stopped or reason
        self._wire.shutdown()

    def serve(self) -> None:
        """Shake hands, then receive payloads until the connection ends."""
        with self._wire:
            try:
                deadline = time.monotonic() + HANDSHAKE_S
                session_id = admit_producer(self._wire, self._receiver.admit, deadline)
            except PdtxError as error:
                logger.warning("refused a connection from %s: %s", self._wire.peer, self._stopped or error)
                return
            self._proven = True
            reason = "it failed"
            try:
                self._receive_all(session_id)
            except PdtxError as error:
                reason = str(error)
            finally:
                # First for the producer, at once: the receiver may take its time.
                self._wire.shutdown()
                self._receiver.closed(session_id, self._stopped or reason)

    def _receive_all(self, session_id: str) -> None:
        sequence = 0
        while True:
            self._wire.wait_for_data()
            rest = time.monotonic() + self._options.stall_s
            header = Header.unpack(self._wire.receive(HEADER_BYTES, "the rest of a payload's header", rest))
            if header.sequence != sequence:
                raise ProtocolError(f"{self._wire.peer} sent payload {header.sequence} out of turn")
            if header.nbytes > self._options.max_payload_bytes:
                raise ProtocolError(
                    f"{self._wire.peer} announced a payload of {header.nbytes} bytes, "
                    f"above the limit of {self._options.max_payload_bytes}"
                )
            sequence += 1
            status, text = self._receive(session_id, header)
            room = time.monotonic() + self._options.stall_s
            self._wire.send(pack_ack(header.sequence, status, text), "room to send an acknowledgement", room)

    def _receive(self, session_id: str, header: Header) -> tuple[Status, str]:
        """Receive one payload; return what to acknowledge. Raises what ends the connection."""
        try:
            placement = self._place(session_id, header)
        except PdtxError as refusal:
            self._wire.discard(header.nbytes, f"the rest of {header.key}, refused", self._options.stall_s)
            return Status.REFUSED, str(refusal)
        self._moved = 0
        try:
            self._fill(placement, header)
        except PdtxError as error:
            reason = error if self._stopped is None else TransferAborted(f"{header.key}: {self._stopped}")
            self._placed(session_id, header, reason)
            raise
        failure = self._placed(session_id, header, None)
        return (Status.DELIVERED, "") if failure is None else (Status.FAILED, failure)

    def _place(self, session_id: str, header: Header) -> Placement:
        """Ask the receiver where a payload goes, and check that it fits there. Raises PdtxError."""
        try:
            placement = self._receiver.place(session_id, header.key)
        except PdtxError:
            raise
        except Exception as error:
            logger.exception("the receiver failed to place %s", header.key)
            raise TransferRefused("the consumer failed to place it; its log says why") from error
        try:
            check_placement(placement, header.nbytes)
        except PdtxError as error:
            self._moved = 0
            self._placed(session_id, header, error)
            raise
        return placement

    def _fill(self, placement: Placement, header: Header) -> None:
        def progress(nbytes: int) -> None:
            self._moved += nbytes

        phase, stall_s = f"the payload of {header.key}", self._options.stall_s
        stage = self._stage_of(placement.region)
        with contextlib.closing(stage.scatter(placement.region, placement.slices)) as room:
            for vectors in room:
                self._wire.receive_vectors(vectors, phase, placement.deadline, stall_s, progress)

    def _placed(self, session_id: str, header: Header, error: PdtxError | None) -> str | None:
        """Tell the receiver; return what went wrong in it."""
        try:
            self._receiver.placed(session_id, header.key, self._moved, error)
        except PdtxError as failure:
            return str(failure)
        except Exception:
            logger.exception("the receiver failed to take %s", header.key)
            return "the consumer failed to take it; its log says why"
        return None
