"""The side that has listened: places what it is asked for, and moves the bytes where the engine pulls."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pdtx.errors import (
    DeadlineExceeded,
    PdtxError,
    ProtocolError,
    TransferAborted,
    TransferRefused,
)
from pdtx.plan import Runs, Slices
from pdtx.ranges.iovec import check_within
from pdtx.transports.base import Placement, Receiver, TransferKey
from pdtx.transports.handshake import Dialect, admit_producer
from pdtx.transports.listener import HANDSHAKE_S
from pdtx.transports.onesided.fabric import Fabric, Link, Progress
from pdtx.transports.onesided.frames import (
    Ask,
    ControlStream,
    Done,
    End,
    Go,
    Message,
    Notice,
    Refused,
    pack_slices,
    short,
    told,
    unpack_key,
    unpack_slices,
)
from pdtx.transports.onesided.joining import join
from pdtx.transports.onesided.puller import Puller
from pdtx.transports.onesided.sharing import Opened, SharedRegions
from pdtx.transports.pairing import pair_slices
from pdtx.transports.wire import Wire

logger = logging.getLogger(__name__)

_TICK_S = 0.2
_REST_S = 30.0
_STOP_S = 0.4
"""What a peer that is writing gets to stop when this side closes: it hangs up when it has."""

_MAX_OPEN = 1024
"""Transfers that a peer may have asked for and not ended."""


@dataclass
class _Open:
    """A transfer that is placed and has not ended.

    For engines that pull: region is the initiator's, runs lead from it to the placement; ending: it is being pulled, or
    will be next. since: time.monotonic() before the initiator was told to go.
    """

    key: TransferKey
    is_get: bool
    nbytes: int
    placement: Placement
    region: int | None
    runs: Runs | None = None
    ending: bool = False
    since: float = field(default_factory=time.monotonic)


class Inbound:
    """One accepted connection. Owns wire."""

    def __init__(self, wire: Wire, dialect: Dialect, receiver: Receiver, fabric: Fabric[Any]) -> None:
        self._wire, self._dialect, self._receiver, self._fabric = wire, dialect, receiver, fabric
        self._stream = ControlStream(wire)
        self._stopped: str | None = None
        self._proven = False

    @property
    def unproven(self) -> bool:
        """Whether it still has to prove its session, and has not been told to stop."""
        return not self._proven and self._stopped is None

    def stop(self, reason: str) -> None:
        """Make serve() return soon."""
        self._stopped = self._stopped or reason
        if self._proven:
            # Not both ways: when the peer hangs up tells when it has stopped writing.
            self._wire.finish_sending()
        else:
            self._wire.shutdown()

    def serve(self) -> None:
        """Shake hands, then answer to the end of the connection."""
        with self._wire:
            deadline = time.monotonic() + HANDSHAKE_S
            try:
                session_id = admit_producer(self._wire, self._dialect, self._receiver.admit, deadline)
                self._proven = True
                link = self._fabric.link(self._wire.fileno())
            except PdtxError as error:
                logger.warning("refused a connection from %s: %s", self._wire.peer, self._stopped or error)
                return
            reason = "it failed"
            serving = Serving(session_id, self._receiver, self._stream, link, self._fabric.pulls)
            try:
                join(link, self._stream, deadline)
                serving.run(lambda: self._stopped is not None)
            except PdtxError as error:
                reason = str(error)
            finally:
                # First tell the peer, at once: the receiver may take its time.
                self._wire.finish_sending()
                if serving.is_written_to and not link.revoke():
                    self._wait_for_writer()
                self._wire.shutdown()
                serving.stop_pulling()
                # Only with the link gone can nobody write into what was placed.
                link.close()
                serving.abandon(TransferAborted(self._stopped or reason))
                self._receiver.closed(session_id, self._stopped or reason)

    def _wait_for_writer(self) -> None:
        """Wait until a peer that cannot be cut off has hung up, which it does when it has stopped writing, or is gone.

        However long that takes: the memory stays taken. Only a consumer that closes does not wait for ever.
        """
        while self._stopped is None:
            if self._wire.wait_for_hang_up(_TICK_S):
                return
        if not self._wire.wait_for_hang_up(_STOP_S):
            logger.warning("%s does not hang up: it may still write into what it was granted", self._wire.peer)


class Serving:
    """One session's transfers. One thread does it all, but for the copies of engines that pull, which have another."""

    def __init__(
        self, session_id: str, receiver: Receiver, stream: ControlStream, link: Link[object], pulls: bool
    ) -> None:
        self._session_id, self._receiver, self._stream, self._link = session_id, receiver, stream, link
        self._pulls, self._peer = pulls, stream.wire.peer
        self._shared = SharedRegions(link, stream)
        self._opened = Opened(link, stream)
        self._puller = Puller(stream.wire.shutdown)
        self._open = dict[int, _Open]()
        self._last = dict[type[Message], int]()
        self._warned = False

    def run(self, is_stopped: Callable[[], bool]) -> None:
        """Answer until the connection ends, or is_stopped at the next tick. Raises what ended it."""
        while not is_stopped():
            self._check_deadlines()
            if not self._link.wait_readable(self._stream.wire.fileno(), _TICK_S):
                continue
            rest = time.monotonic() + _REST_S
            message = self._stream.receive(rest)
            if not self._opened.accept(message, rest):
                self._answer(message)

    @property
    def is_written_to(self) -> bool:
        """Whether the peer may be writing into what was placed."""
        return not self._pulls and any(not transfer.is_get for transfer in self._open.values())

    def abandon(self, error: PdtxError) -> None:
        """Tell the receiver that nothing more comes of what is open; the link is closed and nothing is pulled."""
        for transfer in list(self._open.values()):
            self._heard(transfer, 0, error)
        self._open.clear()
        self._opened.close()

    def _send(self, message: Message) -> None:
        self._stream.send(message, time.monotonic() + _REST_S)

    def _answer(self, message: Message) -> None:
        match message:
            case Ask():
                self._count(message)
                self._send(self._place(message))
            case End():
                self._end(message)
            case Notice():
                self._count(message)
                self._in_order(lambda: self._send(Done(message.sequence, len(message.data), self._tell(message.data))))
            case _:
                raise ProtocolError(f"{self._peer} sent a {type(message).__name__}, which only this side may")

    def _count(self, message: Ask | Notice) -> None:
        """Raise ProtocolError unless sequences rise. Notices may be overtaken by what is asked for ahead."""
        last = self._last.get(type(message), -1)
        if not last < message.sequence <= max(self._last.values(), default=-1) + _MAX_OPEN:
            raise ProtocolError(f"{self._peer} sent transfer {message.sequence} out of turn")
        self._last[type(message)] = message.sequence

    # -- the beginning of a transfer ----------------------------------------------------------------------------------

    def _place(self, ask: Ask) -> Message:
        key = unpack_key(ask.key, self._peer)
        if len(self._open) >= _MAX_OPEN:
            raise ProtocolError(f"{self._peer} has asked for {_MAX_OPEN} transfers without ending one")
        source: Slices | None = None
        if self._pulls and not ask.is_get:
            source = unpack_slices(ask.ranges, self._peer)
            check_within(source, self._opened.region(ask.region)[1], "the peer's memory")
        call = self._receiver.offer if ask.is_get else self._receiver.place
        try:
            placement = call(self._session_id, key)
        except PdtxError as refusal:
            return Refused(ask.sequence, short(refusal))
        except Exception:
            logger.exception("the receiver failed to place %s", key)
            return Refused(ask.sequence, "the consumer failed to place it; its log says why")
        transfer = _Open(key, ask.is_get, ask.nbytes, placement, ask.region)
        try:
            placement.check(ask.nbytes)
            if source is not None:
                if source.total != ask.nbytes:
                    raise TransferRefused(f"the source has {source.total} bytes, the payload {ask.nbytes}")
                transfer.runs = pair_slices(source, placement.slices)
            go = Go(ask.sequence)
            if ask.is_get or not self._pulls:
                number = self._shared.number(placement.region)
                go = Go(ask.sequence, number, pack_slices(placement.slices))
        except PdtxError as error:
            self._heard(transfer, 0, error)
            return Refused(ask.sequence, short(error))
        self._open[ask.sequence] = transfer
        return go

    # -- its end ------------------------------------------------------------------------------------------------------

    def _end(self, end: End) -> None:
        transfer = self._open.get(end.sequence)
        if transfer is None or transfer.ending:
            raise ProtocolError(f"{self._peer} ended transfer {end.sequence}, which is not open")
        if end.error is not None:
            self._close(end.sequence, end.nbytes, TransferAborted(f"{transfer.key}: {told(end.error)}"))
            self._send(Done(end.sequence, end.nbytes, end.error))
            return
        if end.nbytes != transfer.nbytes:
            raise ProtocolError(f"{self._peer} ended {transfer.key} with {end.nbytes} of {transfer.nbytes} bytes")
        if transfer.runs is None:
            self._finish(end, transfer)
            return
        transfer.ending = True
        self._puller.do(lambda: self._finish(end, transfer))

    def _in_order(self, work: Callable[[], None]) -> None:
        """Do work once what has been pulled before it is here."""
        if self._pulls:
            self._puller.do(work)
        else:
            work()

    def stop_pulling(self) -> None:
        """Return once nothing is copied any more; the connection has ended."""
        self._puller.close()

    def _finish(self, end: End, transfer: _Open) -> None:
        """Get or await the bytes of a transfer, and tell both sides what came of it."""
        moved = 0

        def count(nbytes: int) -> None:
            nonlocal moved
            moved += nbytes

        try:
            if transfer.runs is not None:
                stopped = self._stream.wire.hung_up
                progress = Progress(count, lambda: self._puller.closing or stopped(), b"")
                self._pull(transfer, transfer.runs, progress, transfer.since + end.good_for_s)
            elif not transfer.is_get:
                self._link.confirm(Progress.tag_of(end.sequence), transfer.placement.deadline)
        except PdtxError as error:
            self._close(end.sequence, moved, error)
            self._send(Done(end.sequence, moved, short(error)))
        else:
            self._send(Done(end.sequence, end.nbytes, self._close(end.sequence, end.nbytes, None)))

    def _pull(self, transfer: _Open, runs: Runs, progress: Progress, source_good_until: float) -> None:
        placement = transfer.placement
        remote, _ = self._opened.region(transfer.region)
        begun, deadline = time.monotonic(), min(placement.deadline, source_good_until)
        self._link.read(remote, placement.region, runs, deadline, progress)
        # Who has given the transfer up may have changed the source while it was read.
        if progress.stopped:
            raise TransferAborted(f"{transfer.key}: the producer has gone")
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"the payload of {transfer.key}", self._peer, round(max(0.0, deadline - begun), 3))

    def _close(self, sequence: int, nbytes: int, error: PdtxError | None) -> str | None:
        """Take a transfer off the book and tell the receiver; return what went wrong in it."""
        return self._heard(self._open.pop(sequence), nbytes, error)

    def _heard(self, transfer: _Open, nbytes: int, error: PdtxError | None) -> str | None:
        call = self._receiver.offered if transfer.is_get else self._receiver.placed
        try:
            call(self._session_id, transfer.key, nbytes, error)
        except PdtxError as failure:
            return short(failure)
        except Exception:
            logger.exception("the receiver failed to take %s", transfer.key)
            return "the consumer failed to take it; its log says why"
        return None

    def _tell(self, data: bytes) -> str | None:
        try:
            self._receiver.notified(self._session_id, data)
        except PdtxError as failure:
            return short(failure)
        except Exception:
            logger.exception("the receiver failed to take a notice")
            return "the consumer failed to take it; its log says why"
        return None

    def _check_deadlines(self) -> None:
        """Cut off a peer that moves bytes past the deadline of their placement.

        Where the engine cannot, the memory stays granted until the peer says that it has ended, or is gone: to hand it
        out to others while somebody may still write there would be worse.
        """
        now = time.monotonic()
        # What is being pulled sees to its deadline itself, and is taken off this book meanwhile.
        late = next(
            (each for each in tuple(self._open.values()) if each.placement.deadline < now and not each.ending), None
        )
        if late is None:
            return
        # Where each side pulls nobody writes here but this thread: the connection's end is enough.
        if self._pulls or self._link.revoke():
            raise DeadlineExceeded(f"the payload of {late.key}", self._peer, 0.0, "cut off")
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s has not ended %s by its deadline and cannot be cut off: memory stays taken", self._peer, late.key
            )
