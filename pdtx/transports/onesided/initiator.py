"""The side that has connected: asks for each transfer ahead of time, and moves the bytes where the engine pushes.

Three threads: one asks, so that the answer is there by the time the transfers before are through; one moves, a transfer
after another; one reads answers.
"""

import contextlib
import time
from collections.abc import Callable

import msgspec

from pdtx.errors import InputError, PdtxError, PeerLost, ProtocolError
from pdtx.plan import Runs
from pdtx.ranges.iovec import check_within
from pdtx.transports.base import (
    MAX_NOTICE_BYTES,
    NOTICE_KEY,
    Connection,
    Path,
    Region,
    TransferHandle,
    TransferKey,
)
from pdtx.transports.crew import Crew, lost_by
from pdtx.transports.gets import GetHandle, Stopped
from pdtx.transports.handshake import bounded_id
from pdtx.transports.onesided.asked import Asked, Book, Job
from pdtx.transports.onesided.fabric import Link, Progress
from pdtx.transports.onesided.frames import (
    Ask,
    ControlStream,
    Done,
    End,
    Go,
    Message,
    Notice,
    Refused,
    failure,
    pack_key,
    pack_slices,
    refusal,
    short,
    unpack_slices,
)
from pdtx.transports.onesided.pieces import Packer
from pdtx.transports.onesided.sharing import Opened, SharedRegions
from pdtx.transports.outbox import DeadlineWatch, Outbox
from pdtx.transports.pairing import cut_stream, pair_slices

_AHEAD = 16
"""Transfers that are asked for before the one that is moving has ended."""

_MOVER = "mover"
_LATEST = 1e300
"""A deadline that can be sent, for those who have none."""
_TOO_LATE = "it ended before a byte moved"
_ROOM_S = 30.0
"""Control messages are small: a peer that makes no room for one in this time does not read any more."""


class OneSidedConnection(Connection):
    """See Connection. stream and link have been joined and belong to this object from now on.

    pulls: see Fabric. forget: called once, when nothing of the connection is left.
    """

    def __init__(
        self,
        stream: ControlStream,
        link: Link[object],
        pulls: bool,
        watch: DeadlineWatch,
        packer: Packer,
        forget: Callable[["OneSidedConnection"], None],
    ) -> None:
        self._stream, self._link, self._pulls, self._forget = stream, link, pulls, forget
        self._peer = stream.wire.peer
        self._outbox = Outbox[Job](watch)
        self._book = Book(pulls)
        self._packer = packer
        self._shared = SharedRegions(link, stream)
        self._opened = Opened(link, stream)
        works = ("asker", self._ask_all), (_MOVER, self._move_all), ("answers", self._read_all)
        self._crew = Crew("onesided", self._peer, works, broken=self._break, left=self._left, gone=self._gone)
        self._crew.start()

    @property
    def path(self) -> Path:
        """See Connection."""
        return self._link.path

    @property
    def stages(self) -> bool:
        """See Connection: what is pulled is copied once, straight from where it lies."""
        return not self._pulls

    @property
    def ended(self) -> PdtxError | None:
        """See Connection."""
        return self._outbox.ended

    def put(
        self, key: TransferKey, region: Region, runs: Runs, deadline: float, *, staged: bool = False
    ) -> TransferHandle:
        """Queue a transfer, see Connection."""
        slices = runs.source()
        check_within(slices, region.nbytes, "the source")
        return self._queue(key, Job(region, slices, staged=staged and self.stages), slices.total, deadline)

    def get(self, key: TransferKey, region: Region, runs: Runs, deadline: float) -> TransferHandle:
        """Queue a transfer, see Connection."""
        slices = runs.destination()
        check_within(slices, region.nbytes, "the destination")
        return self._queue(key, Job(region, slices, is_get=True), slices.total, deadline)

    def notify(self, data: bytes, deadline: float) -> TransferHandle:
        """Queue a notice, see Connection."""
        if len(data) > MAX_NOTICE_BYTES:
            raise InputError(f"a notice of {len(data)} bytes; at most {MAX_NOTICE_BYTES} are sent")
        return self._queue(NOTICE_KEY, Job(data=data), len(data), deadline)

    def _queue(self, key: TransferKey, job: Job, nbytes: int, deadline: float) -> TransferHandle:
        bounded_id(key.request_id, "request id")
        if min(pack_key(key)[1:]) < 0 or key.layer_start > key.layer_stop or key.token_start > key.token_stop:
            raise InputError(f"{key} has ranges that end before they start")
        handle = (GetHandle if job.is_get else TransferHandle)(key, nbytes, self._peer, deadline)
        self._outbox.put(handle, job)
        return handle

    def close(self) -> None:
        """End the connection, see Connection."""
        # In this order: _end() says why.
        self._end()
        self._outbox.close()
        self._crew.join()

    # -- the end of everything ----------------------------------------------------------------------------------------

    def _left(self, thread: str) -> None:
        if thread == _MOVER:
            # Not before: as long as the stream is there, the peer knows that its memory may be written.
            self._stream.wire.shutdown()

    def _gone(self) -> None:
        self._packer.close()
        self._opened.close()
        self._link.close()
        self._stream.wire.close()
        self._forget(self)

    def _break(self, lost: PeerLost) -> None:
        if self._end():
            self._outbox.close(lost)

    def _end(self) -> bool:
        """Make all threads stop; False if they have been told before."""
        with self._book.changed:
            first, self._book.closed = not self._book.closed, True
            self._book.changed.notify_all()
        if self._pulls:
            # Before any transfer ends, and its source changes: what the peer is reading counts for nothing now.
            self._stream.wire.shutdown()
        self._link.interrupt()
        return first

    # -- the asker's thread -------------------------------------------------------------------------------------------

    def _ask_all(self) -> None:
        sequence = 0
        while (taken := self._outbox.take()) is not None:
            asked = Asked(sequence, *taken)
            if not self._wait_for_window():
                return
            if asked.handle.state.final:
                continue  # cancelled, or late: the peer never hears of it
            self._book_in(asked)
            sequence += 1
            # A notice says that what was put before it is there: the mover sends it, in its turn.
            if asked.job.region is not None:
                self._send(self._question(asked, asked.job.region))

    def _wait_for_window(self) -> bool:
        """Wait for room for one more that is asked for; False when the connection is closed."""
        book = self._book
        with book.changed:
            book.changed.wait_for(lambda: book.closed or len(book.asked) < _AHEAD)
            return not book.closed

    def _book_in(self, asked: Asked) -> None:
        """Enter a transfer that is to be asked for."""
        book = self._book
        with book.changed:
            book.asked.append(asked)
            if book.asked[0] is asked and book.may_begin(asked):
                book.begin(asked)
            book.unanswered[asked.sequence] = asked
            book.changed.notify_all()

    def _question(self, asked: Asked, region: Region) -> Ask:
        job, handle = asked.job, asked.handle
        ask = Ask(asked.sequence, job.is_get, pack_key(handle.key), handle.nbytes)
        if self._pulls and not job.is_get:
            number = self._shared.number(region)
            return msgspec.structs.replace(ask, region=number, ranges=pack_slices(job.slices))
        return ask

    def _send(self, message: Message) -> None:
        self._stream.send(message, time.monotonic() + _ROOM_S)

    def _send_last(self, asked: Asked, message: Message) -> None:
        """Send a transfer's end, or a notice; Done may come from now on."""
        with self._book.changed:
            asked.over = True
        self._send(message)

    # -- the mover's thread -------------------------------------------------------------------------------------------

    def _move_all(self) -> None:
        while (asked := self._next()) is not None:
            if asked.job.region is None:
                self._tell(asked)
            elif not self._wait_for_answer(asked):
                return
            if isinstance(asked.answer, Go):
                self._move(asked, asked.answer, asked.job.region)
            self._book_out()

    def _tell(self, asked: Asked) -> None:
        """Send a notice, unless it was cancelled."""
        if asked.begun:
            self._send_last(asked, Notice(asked.sequence, asked.job.data))
            asked.handle.mark_sent()
            return
        with self._book.changed:
            del self._book.unanswered[asked.sequence]

    def _next(self) -> Asked | None:
        """Wait for the next transfer that was asked for; None when the connection is closed."""
        book = self._book
        with book.changed:
            book.changed.wait_for(lambda: book.closed or (book.asked and book.may_begin(book.asked[0])))
            if book.closed:
                return None
            book.begin(book.asked[0])
            return book.asked[0]

    def _wait_for_answer(self, asked: Asked) -> bool:
        """Wait for the answer to a transfer; False when the connection is closed."""
        book = self._book
        with book.changed:
            book.changed.wait_for(lambda: book.closed or asked.answer is not None)
            return not book.closed

    def _book_out(self) -> None:
        """Take the transfer that was moved off the window."""
        with self._book.changed:
            self._book.asked.popleft()
            self._book.changed.notify_all()

    def _move(self, asked: Asked, go: Go, region: Region | None) -> None:
        handle = asked.handle
        if not asked.begun or handle.state.final or region is None:
            # Cancelled, or its deadline came while the peer made up its mind: the source may be gone.
            self._send_last(asked, End(asked.sequence, 0, _TOO_LATE))
            return
        try:
            if asked.job.is_get or not self._pulls:
                self._carry_out(asked, go, region)
        except Stopped:
            self._send_last(asked, End(asked.sequence, 0, _TOO_LATE))
            return
        except PdtxError as error:
            # Stopped because the connection ends: what ended it ends the transfer, too, and says more.
            if not self._book.closed:
                self._shut(error)
                handle.finish(error)
            self._send_last(asked, End(asked.sequence, min(handle.moved, handle.nbytes), short(error)))
            raise
        handle.mark_sent()
        self._send_last(
            asked, End(asked.sequence, handle.nbytes, good_for_s=min(handle.deadline, _LATEST) - asked.answered_at)
        )

    def _shut(self, error: PdtxError) -> None:
        """Say what ends the connection before a transfer ends by it: who waits for that may try again at once."""
        if not self._book.closed:
            self._outbox.shut(lost_by(error, self._peer))

    def _carry_out(self, asked: Asked, go: Go, region: Region) -> None:
        """Move a transfer's bytes. Raises what ends the connection."""
        handle, job = asked.handle, asked.job
        there = unpack_slices(go.ranges, self._peer)
        remote, nbytes = self._opened.region(go.region)
        check_within(there, nbytes, "the peer's memory")

        def moved(count: int) -> None:
            handle.note_moved(handle.moved + count)

        def stopped() -> bool:
            ending = handle.ending if isinstance(handle, GetHandle) else handle.state.final
            return self._book.closed or ending

        progress = Progress(moved, stopped, Progress.tag_of(asked.sequence))
        if isinstance(handle, GetHandle):
            with handle.filling():
                try:
                    self._link.read(remote, region, pair_slices(there, job.slices), handle.deadline, progress)
                except PdtxError as error:
                    self._shut(error)  # here: a get that has been given up ends on the way out
                    raise
        elif not job.staged:
            self._link.write(region, remote, pair_slices(job.slices, there), handle.deadline, progress)
        else:
            position = 0
            with contextlib.closing(self._packer.pack(region, job.slices)) as pieces:
                for buffer, packed in pieces:
                    stop = position + packed.total
                    runs = pair_slices(packed, cut_stream(there, position, stop))
                    last = progress if stop == handle.nbytes else Progress(moved, stopped, b"")
                    self._link.write(buffer, remote, runs, handle.deadline, last)
                    position = stop

    # -- the reader's thread ------------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        while True:
            self._stream.wire.wait_for_data()
            message = self._stream.receive(time.monotonic() + _ROOM_S)
            if self._opened.accept(message, time.monotonic() + _ROOM_S):
                continue
            if not isinstance(message, Go | Refused | Done):
                raise ProtocolError(f"{self._peer} sent a {type(message).__name__}, which only this side may")
            self._take(message)

    def _take(self, message: Go | Refused | Done) -> None:
        book = self._book
        with book.changed:
            asked = book.unanswered.get(message.sequence)
            done = isinstance(message, Done)
            # First Go or Refused; Done only after the end, so that it says something about what has moved.
            in_turn = asked is not None and (asked.over if done else asked.answer is None and not asked.over)
            if asked is None or not in_turn:
                raise ProtocolError(f"{self._peer} answered transfer {message.sequence} out of turn")
            if not isinstance(message, Done):
                asked.answer, asked.answered_at = message, time.monotonic()
                book.changed.notify_all()
            if not isinstance(message, Go):
                book.answered(asked)
        if isinstance(message, Done) and message.error is None and message.nbytes != asked.handle.nbytes:
            raise ProtocolError(f"{self._peer} took {message.nbytes} of {asked.handle.nbytes} bytes and calls it done")
        handle = asked.handle
        if isinstance(message, Refused):
            handle.finish(refusal(message.text, handle))
        elif isinstance(message, Done):
            handle.finish(failure(message.error, handle) if message.error is not None else None)
