"""The side of a link that posts: it plans the pieces of an iteration, gives them to the mover, and waits."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pdtx.bench.station_pieces import Piece, Planner
from pdtx.bench.work import LinkMoved
from pdtx.engine.picking import ModePicker
from pdtx.errors import DeadlineExceeded, PdtxError, TransferAborted, TransferError
from pdtx.plan import Mode
from pdtx.results.model import Case, Transfer
from pdtx.transports import Connection, Region, TransferHandle

_GRACE_S = 5.0
"""Seconds after its deadline by which a link must have told how it ended."""

RegionOf = Callable[[Piece], Region]


@dataclass(frozen=True)
class _Posted:
    """A piece under way. ready: seconds since the link began."""

    piece: Piece
    handle: TransferHandle
    ready: float
    staged: bool


class PostingLink:
    """One link as the side that posts has it.

    region: this side's memory that a piece lies in, or goes to. picker: of how each piece moves over the connection.
    """

    def __init__(
        self,
        number: int,
        case: Case,
        pieces: Sequence[Piece],
        planner: Planner,
        region: RegionOf,
        connection: Connection,
        picker: ModePicker,
    ) -> None:
        self.number, self.connection = number, connection
        self._case, self._pieces, self._planner, self._region, self._picker = case, pieces, planner, region, picker
        self._lock = threading.Lock()
        self._stopped: str | None = None
        self._under_way = list[_Posted]()
        self._stopping = threading.Event()

    def stop(self, reason: str) -> None:
        """Make move() end soon, as aborted, now and ever after."""
        with self._lock:
            self._stopped, under_way = self._stopped or reason, list(self._under_way)
        self._stopping.set()
        for posted in under_way:
            posted.handle.abort(reason)

    def _note_end(self, handle: TransferHandle) -> None:
        """Wake who waits before it posts more: nothing more is worth posting."""
        if handle.error is not None:
            self._stopping.set()

    def _check(self) -> None:
        """Raise what has ended a transfer, or TransferAborted, if the link has been stopped by either."""
        if not self._stopping.is_set():
            return
        failed = next((posted.handle.error for posted in self._under_way if posted.handle.error is not None), None)
        raise failed or TransferAborted(f"link {self.number} is not used any more: {self._stopped}")

    def move(self, iteration: int, deadline: float) -> LinkMoved:
        """Move everything once. Raises what ended the first transfer that failed; none is under way then."""
        with self._lock:
            self._under_way = []
        self._check()
        begun = time.monotonic()
        try:
            prepare_s, post_s = self._post_all(iteration, begun, deadline)
            # They end in order: waiting for the last one first wakes this thread once, not once for each.
            for posted in reversed(self._under_way):
                posted.handle.wait()
        except BaseException:
            self._give_up()
            raise
        ended = time.monotonic()
        return self._told(begun, ended, prepare_s, post_s)

    def _give_up(self) -> None:
        """End what is under way; what has broken is not used again."""
        self.stop("a transfer of an iteration has failed")
        self.connection.close()
        for posted in self._under_way:
            with contextlib.suppress(PdtxError):  # known; but a get may be writing a moment longer
                posted.handle.wait()

    def _post_all(self, iteration: int, begun: float, deadline: float) -> tuple[float, float]:
        """Post all pieces; return the seconds of planning, and of posting."""
        prepare_s, post_s, open_ = 0.0, 0.0, deque[TransferHandle]()
        compute_s, depth, pushes = self._case.layer_compute_s, self._case.depth, self._case.op == "push"
        for piece in self._pieces:
            ready = (piece.step + 1) * compute_s if compute_s > 0 else 0.0
            self._wait_until(begun + ready, deadline)
            if depth and len(open_) >= depth:
                open_.popleft().wait()
            before = time.monotonic()
            plan = self._planner.pushed(piece) if pushes else self._planner.arriving(piece)
            staged = pushes and self._picker.pick(plan).mode is Mode.STAGED
            key, region = piece.key(iteration), self._region(piece)
            planned = time.monotonic()
            if pushes:
                handle = self.connection.put(key, region, plan.to_move, deadline, staged=staged)
            else:
                handle = self.connection.get(key, region, plan.to_move, deadline)
            post_s += time.monotonic() - planned
            prepare_s += planned - before
            open_.append(handle)
            self._add(_Posted(piece, handle, ready, staged))
        return prepare_s, post_s

    def _add(self, posted: _Posted) -> None:
        with self._lock:
            self._under_way.append(posted)
        posted.handle.on_end(self._note_end)
        self._check()

    def _wait_until(self, at: float, deadline: float) -> None:
        """Let the emulated computation take its time. Raises DeadlineExceeded, TransferAborted."""
        begun = time.monotonic()
        if at > begun:
            self._stopping.wait(max(0.0, min(at, deadline) - begun))
            self._check()
        if at > deadline:
            waited = round(time.monotonic() - begun, 3)
            raise DeadlineExceeded("the emulated computation", f"link {self.number}", waited)

    def _told(self, begun: float, ended: float, prepare_s: float, post_s: float) -> LinkMoved:
        handles = [posted.handle for posted in self._under_way]
        first = min((handle.posted for handle in handles), default=ended)
        last = max((handle.ended for handle in handles), default=ended)
        return LinkMoved(
            link=self.number,
            begun=begun,
            ended=ended,
            prepare_s=prepare_s,
            post_s=post_s,
            move_s=last - first,
            claimed_bytes=sum(handle.nbytes for handle in handles),
            posts=1,
            transfers=tuple(self._transfer(posted, begun) for posted in self._under_way),
        )

    def _transfer(self, posted: _Posted, begun: float) -> Transfer:
        piece, handle = posted.piece, posted.handle
        return Transfer(
            link=self.number,
            request=piece.request,
            buffer=piece.match.index,
            layer_start=piece.layers.start,
            layer_stop=piece.layers.stop,
            src_rank=piece.move.src_rank,
            dst_rank=piece.move.dst_rank,
            nbytes=handle.nbytes,
            ready=posted.ready,
            posted=handle.posted - begun,
            sent=handle.sent - begun,
            ended=handle.ended - begun,
            staged=posted.staged,
        )


def move_all(links: Sequence[PostingLink], iteration: int, start_at: float, deadline: float) -> list[LinkMoved]:
    """Move over all links at once, from time.monotonic() == start_at on; return what each says.

    Raises what ended the first one that failed; the others are stopped, and none is under way then.
    """
    if len(links) == 1:
        _sleep_until(start_at)
        return [links[0].move(iteration, deadline)]
    found: list[LinkMoved | None] = [None] * len(links)
    errors, changed = list[PdtxError](), threading.Condition()
    open_ = len(links)

    def run(place: int) -> None:
        nonlocal open_
        error: PdtxError | None = None
        try:
            _sleep_until(start_at)
            found[place] = links[place].move(iteration, deadline)
        except PdtxError as problem:
            error = problem
        except Exception as problem:  # noqa: BLE001  # must not be lost with its thread
            error = TransferError(f"link {links[place].number}: {type(problem).__name__}: {problem}")
        with changed:
            errors.extend([error] if error is not None else [])
            open_ -= 1
            changed.notify()

    threads = [
        threading.Thread(target=run, args=(place,), name=f"pdtx-link-{link.number}", daemon=True)
        for place, link in enumerate(links)
    ]
    try:
        for thread in threads:
            thread.start()
        with changed:
            changed.wait_for(lambda: errors or not open_, max(0.0, deadline - time.monotonic()) + _GRACE_S)
    finally:
        if open_:
            _stop(links, "its iteration was given up, because another link failed or the wait for it ended")
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]
    return [moved for moved in found if moved is not None]


def _stop(links: Iterable[PostingLink], reason: str) -> None:
    for link in links:
        link.stop(reason)


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))
