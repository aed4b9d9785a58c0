"""What the producer's control thread does: the life of its requests and of the session that carries them."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from pdtx.cache import AllocatingBlockPool, BlockTables, CallerBlocks, CallerTables, GroupBlocks, KVCaches
from pdtx.engine.outbound import OutboundRequest, Piece, ReadySlice
from pdtx.engine.outbound_session import OutboundSession
from pdtx.engine.route import Route
from pdtx.engine.shipping import Asked, Posted, Probe
from pdtx.engine.states import OutboundState
from pdtx.engine.waking import Ended
from pdtx.errors import (
    DeadlineExceeded,
    InputError,
    PdtxError,
    PeerLost,
    ProtocolError,
    TransferAborted,
    TransferError,
    VerificationError,
)
from pdtx.plan.runs import Int64s
from pdtx.protocol import (
    Complete,
    Failure,
    Finished,
    Grant,
    LayerDone,
    Message,
    ReadReference,
    Refuse,
    Release,
)
from pdtx.text import reason_of
from pdtx.transports import TransferHandle

logger = logging.getLogger(__name__)

_UNGRANTED = (OutboundState.NEW, OutboundState.ASKED)
_UNDELIVERED = (OutboundState.ASKED, OutboundState.COMPUTING, OutboundState.SENDING)

_MAX_READING = 8
"""Pieces of reference data of one request that are read at once; a consumer asks for one after another."""


class OutboundEffects(Protocol):
    """What the control of a producer brings about. None of these blocks."""

    def send(self, message: Message) -> None:
        """Send the consumer a message. Raises ProtocolError for one that cannot be sent."""

    def ask(self, request: OutboundRequest) -> None:
        """Send the consumer a request's TransferRequest, which is encoded already."""

    def ship(self, item: Piece | Asked | Probe) -> None:
        """Plan a piece and hand it to the transport, read reference data, or look whether a connection is alive."""

    def open_session(self, old: Route | None, timeout_s: float) -> None:
        """Leave a session and open another one; on_opened() or on_not_opened() follows."""

    def ring(self) -> None:
        """Wake those who wait for an outcome or for blocks."""


class OutboundControl:
    """The producer's requests and their session. Every method is an event of the control thread, and none blocks."""

    def __init__(self, cache: KVCaches, pool: AllocatingBlockPool | CallerBlocks, effects: OutboundEffects) -> None:
        self.cache, self.pool, self.effects = cache, pool, effects
        self.requests: dict[str, OutboundRequest] = {}  # those without an outcome
        self.draining: dict[OutboundRequest, None] = {}  # those whose blocks are still being read
        # For poll(): of callers who need it to get their blocks back, and of others once they have polled.
        self.ended = Ended[OutboundRequest](keeps=isinstance(pool, CallerBlocks))
        self.session = OutboundSession()

    # -- the session --------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Ask for grants of new requests, in a session that can carry them; or get such a session."""
        fresh = [request for request in self.requests.values() if request.state is OutboundState.NEW]
        session, now = self.session, time.monotonic()
        if not fresh or session.opening is not None:
            return
        if session.over is not None:
            self._end_all(fresh, session.over, tell=False)
            return
        problem = session.problem(now, _posted([*self.requests.values(), *self.draining]))
        if problem is not None:
            self._renew(problem, fresh, now)
        elif not session.waits(now, _posted(self.draining)):
            for request in fresh:
                self._ask(request)

    def _renew(self, problem: PdtxError, fresh: Sequence[OutboundRequest], now: float) -> None:
        """Leave a session whose payloads cannot go on, and get another one, with a token of its own.

        What has been delivered goes on: it only needs the control channel. All else ends before anything new begins, so
        that nothing of the old connection can be taken for the new one's.
        """
        session = self.session
        if session.begin_opening(problem, now):
            cut = [request for request in self.requests.values() if request.state in _UNDELIVERED]
            self._end_all(cut, PeerLost(f"the data connection to {session.peer} ended: {problem}"), tell=True)
            self.effects.open_session(session.route, max(0.0, max(request.deadline for request in fresh) - now))

    def on_opened(self, route: Route, lost: PdtxError | None) -> None:
        """Go on in a new session. lost: what has ended its control channel meanwhile."""
        self.session.opened(route, lost)
        self.advance()

    def on_not_opened(self, error: PdtxError) -> None:
        """Try again where the consumer may only be slow, or stopped for a while; else this is the end."""
        self.session.not_opened(error)
        self.effects.ring()
        self.advance()

    def on_lost(self, error: PdtxError) -> None:
        """The control channel ended: so do all requests that were asked for."""
        self.session.lost = self.session.lost or error
        asked = [request for request in self.requests.values() if request.state is not OutboundState.NEW]
        self._end_all(asked, error, tell=False)
        self.effects.ring()
        self.advance()

    def close(self, error: PdtxError) -> None:
        """End everything, for good."""
        self._end_all(list(self.requests.values()), self.session.close(error), tell=False)
        self.effects.ring()

    def _end_all(self, requests: Sequence[OutboundRequest], error: PdtxError, *, tell: bool) -> None:
        for request in requests:
            self.end(request, error, tell=tell)

    def tick(self, now: float) -> bool:
        """End requests whose deadline has passed, and go on with what waits; whether there is anything to wait for."""
        for request in [request for request in self.requests.values() if request.deadline < now]:
            self._expire(request)
        self.advance()
        return bool(self.requests or self.draining)

    def _expire(self, request: OutboundRequest) -> None:
        detail, peer = (
            f"{request.nbytes} bytes shipped, {request.unsent} pieces of them not acknowledged",
            self.session.peer,
        )
        if request.state is OutboundState.COMPUTING:
            detail, peer = f"{detail}; computed() was not called", "this node"
        if request.state is OutboundState.NEW and self.session.attempt_error is not None:
            detail = str(self.session.attempt_error)
        elif request.posted:
            detail += f", first {next(iter(request.posted))}"
        waited = round(request.deadline - request.begun, 3)
        self.end(request, DeadlineExceeded(request.phase, peer, waited, detail))

    # -- a request's life ---------------------------------------------------------------------------------------------

    def begin(self, request: OutboundRequest, places: Sequence[range]) -> None:
        """Take blocks for a request, and ask for a grant as soon as there is a session.

        places: of each group's table that need a block. Raises OutOfBlocks, InputError for a request id in use or
        where there was no session yet, or what ended the last session for good.
        """
        self._check_new(request)
        if isinstance(self.pool, CallerBlocks):
            raise InputError("blocks are the caller's here; give tables, one for each group")
        blocks = self.pool.allocate([len(place) for place in places])
        self._begin(request, blocks, blocks.tables(places))

    def begin_in(self, request: OutboundRequest, blocks: CallerTables) -> None:
        """Begin a request in blocks of the caller's, which are given back where it cannot be. Raises as begin()."""
        try:
            self._check_new(request)
        except PdtxError:
            self.pool.free(blocks)
            raise
        self._begin(request, blocks, tuple(own.ids for own in blocks.groups))

    def _begin(self, request: OutboundRequest, blocks: GroupBlocks, sources: tuple[Int64s, ...]) -> None:
        request.blocks, request.sources = blocks, sources
        self.requests[request.request_id] = request
        self.advance()

    def _check_new(self, request: OutboundRequest) -> None:
        if self.session.over is not None:
            raise self.session.over
        if self.session.route is None:
            raise InputError("this producer is not connected; call connect() before begin()")
        if request.request_id in self.requests:
            raise InputError(f"request id {request.request_id!r} is in use")

    def _ask(self, request: OutboundRequest) -> None:
        request.go(OutboundState.ASKED)
        self.effects.ask(request)
        request.encoded_ask = b""

    def on_grant(self, request: OutboundRequest, grant: Grant) -> None:
        """Ship what waits for the grant. Which blocks it names is checked by the plan, as everything is."""
        route = self.session.route
        if route is None or request.state is not OutboundState.ASKED:
            return
        groups = route.match.consumer.groups
        problem = None
        if len(grant.groups) != len(groups):
            problem = f"{self.session.peer} granted blocks of {len(grant.groups)} groups and has {len(groups)}"
        elif grant.cached_tokens > request.num_tokens:
            problem = (
                f"{self.session.peer} claims {grant.cached_tokens} cached tokens of a prompt of {request.num_tokens}"
            )
        if problem is not None:
            self.end(request, ProtocolError(problem))
            return
        request.destinations = tuple(np.asarray(group.block_ids, dtype=np.int64) for group in grant.groups)
        request.grant = grant
        request.go(OutboundState.COMPUTING)
        waiting, request.waiting = request.waiting, []
        for ready in waiting:
            self._ship(request, route, ready)
        if request.is_computed:
            request.go(OutboundState.SENDING)
            self._complete_if_sent(request)

    def on_ready(self, request: OutboundRequest, ready: ReadySlice) -> None:
        """Ship what has been computed, or keep it until the grant comes."""
        if request.state in _UNGRANTED:
            request.waiting.append(ready)
        elif request.state in (OutboundState.COMPUTING, OutboundState.SENDING) and self.session.route is not None:
            self._ship(request, self.session.route, ready)

    def _ship(self, request: OutboundRequest, route: Route, ready: ReadySlice) -> None:
        """Hand one slice to the shipper: only positions that the consumer needs, and nothing of layers it lacks."""
        match = route.match.of_producer.get(ready.buffer)
        ours = match.layer_index.get(ready.layer) if match is not None else None
        if match is None or ours is None or request.grant is None:
            return
        group = self.cache.groups[match.producer_group]
        computed = group.ready(request.num_tokens, ready.start, ready.stop)
        positions = group.uncached(computed, request.grant.cached_tokens)
        if not positions:
            return
        for move in match.moves:
            request.unsent += 1
            self.effects.ship(Piece(request, route, match, move, range(ours, ours + 1), positions, ready.fence))

    def computed(self, request: OutboundRequest, first_token: int | None) -> None:
        """All of a request is ready; first_token: the first new one, where it is known."""
        if request.is_computed or request.has_outcome:
            return
        request.computed, request.first_token = time.monotonic(), first_token
        if request.state is OutboundState.COMPUTING:
            request.go(OutboundState.SENDING)
            self._complete_if_sent(request)

    def extend(self, request: OutboundRequest, tables: BlockTables) -> None:
        """Go on with longer block tables. Raises CacheError, or InputError where blocks are not the caller's."""
        if not isinstance(self.pool, CallerBlocks):
            raise InputError("the blocks of a producer with a pool of its own do not grow")
        if not request.has_outcome:
            request.blocks = blocks = self.pool.extend(request.own_blocks, tables)
            request.sources = tuple(own.ids for own in blocks.groups)

    def end(self, request: OutboundRequest, error: PdtxError | None, *, tell: bool = True) -> None:
        """End a request: error says why it failed; None where `finished` has been set. Its blocks follow.

        What the transport has not begun never crosses; what is moving runs to its end, or its deadline.
        """
        if request.state in (OutboundState.DRAINING, OutboundState.ENDED):
            return
        phase, request.error = request.phase, error
        request.waiting = []
        self.requests.pop(request.request_id, None)
        self.draining[request] = None
        request.go(OutboundState.DRAINING)
        for handle in list(request.posted.values()):
            handle.cancel()
        if error is not None and tell and self.session.lost is None:
            self.effects.send(Failure(request_id=request.request_id, phase=phase, reason=reason_of(error)))
        self._return_blocks(request)
        self.effects.ring()

    def abandon(self, request: OutboundRequest, error: PdtxError) -> None:
        """End a request, if it was begun at all."""
        if self.requests.get(request.request_id) is request:
            self.end(request, error)

    def cancel(self, request: OutboundRequest, reason: str) -> None:
        """End a request because the caller does not want it any more."""
        self.end(request, TransferAborted(f"request {request.request_id} was cancelled: {reason}"))

    def _return_blocks(self, request: OutboundRequest) -> None:
        """Return the blocks, once, when nothing reads them any more; forget a request that has ended."""
        if request.unsent or request.reading:
            return
        if not request.returned and request.state in (OutboundState.RELEASED, OutboundState.DRAINING):
            request.returned = True
            if request.blocks is not None:
                self.pool.free(request.blocks)
            self.effects.ring()
        if request.state is OutboundState.DRAINING:
            request.go(OutboundState.ENDED)
            self.draining.pop(request, None)
            self.ended.add(request)

    def unhold(self, blocks: GroupBlocks) -> None:
        """End one hold on each of blocks."""
        self.pool.unhold(blocks)
        self.effects.ring()

    def _complete_if_sent(self, request: OutboundRequest) -> None:
        if request.state is not OutboundState.SENDING or request.unsent:
            return
        request.go(OutboundState.COMPLETED)
        message = Complete(
            request_id=request.request_id,
            first_token=request.first_token,
            num_tokens=request.num_tokens,
            nbytes=request.nbytes,
        )
        self.effects.send(message)

    # -- pieces -------------------------------------------------------------------------------------------------------

    def on_posted(self, posted: Posted) -> None:
        """A piece is at the transport."""
        request = posted.piece.request
        request.picks.add(posted.choice)
        request.num_runs += posted.num_runs
        request.nbytes += posted.nbytes
        request.prepare += posted.seconds
        request.posted[posted.handle.key] = posted.handle
        if request.has_outcome:
            posted.handle.cancel()

    def on_dropped(self, piece: Piece, error: PdtxError | None) -> None:
        """A piece was not sent, or its transfer has failed."""
        request = piece.request
        if error is not None:
            if type(error) is TransferError:  # the others say themselves what they are about
                error = TransferError(f"{piece} could not be sent: {error}")
            self.end(request, error)
        request.unsent -= 1
        self._return_blocks(request)

    def on_piece_end(self, piece: Piece, handle: TransferHandle) -> None:
        """A transfer has ended, well or not."""
        request = piece.request
        request.posted.pop(handle.key, None)
        moving = handle.posted == handle.posted
        if handle.error is not None:
            if isinstance(handle.error, DeadlineExceeded) and moving:
                self._probe(piece.route)
            self.on_dropped(piece, handle.error)
            self.advance()
            return
        request.posts.append((handle.posted, handle.sent))
        request.moves.append((handle.posted, handle.ended))
        request.unsent -= 1
        if request.has_outcome:
            self._return_blocks(request)
            self.advance()
            return
        self.effects.send(_delivered(handle))
        self._complete_if_sent(request)

    def _probe(self, route: Route) -> None:
        """Find out whether a connection outlives a transfer that was cut off: by a notice that comes behind it."""
        if not route.probing and route.failed is None:
            route.probing = True
            self.effects.ship(Probe(route))

    def on_probed(self, route: Route, error: PdtxError | None) -> None:
        """What was sent behind a transfer that was cut off has arrived, or has not."""
        route.probing, route.failed = False, error
        self.advance()

    # -- messages -----------------------------------------------------------------------------------------------------

    def on_message(self, message: Message) -> None:
        """A message that is no answer to a hello."""
        if not isinstance(message, Grant | Refuse | Failure | Release | Finished | ReadReference):
            logger.warning("ignored a %s from %s", type(message).__name__, self.session.peer)
            return
        request = self.requests.get(message.request_id)
        if request is None:
            self._on_unknown(message)
            return
        match message:
            case Grant():
                self.on_grant(request, message)
            case Refuse():
                text = f"{self.session.peer} refused {message.request_id}: {reason_of(message.reason)}"
                self.end(request, TransferError(text))
            case Failure():
                # It may be about an earlier request of that name; the consumer must not wait for this one then.
                self.end(request, self._consumers(message))
            case Release():
                if request.state is OutboundState.COMPLETED:
                    request.go(OutboundState.RELEASED)
                    self._return_blocks(request)
            case Finished():
                self._on_finished(request, message)
            case ReadReference():
                self._on_read_reference(request, message)

    def _on_finished(self, request: OutboundRequest, finished: Finished) -> None:
        if not request.completed:
            # It may be about an earlier request of that name: this one has not all been delivered.
            text = f"{self.session.peer} finished request {request.request_id} before all of it was delivered"
            self.end(request, ProtocolError(text))
            return
        request.finished = finished
        self.end(request, None)

    def _on_unknown(self, message: Grant | Refuse | Failure | Release | Finished | ReadReference) -> None:
        if isinstance(message, ReadReference):
            reason = f"request {message.request_id} is not here any more"
            self.effects.send(Failure(request_id=message.request_id, phase="verification", reason=reason))
        else:
            logger.warning("ignored a %s for unknown request %s", type(message).__name__, message.request_id)

    def _on_read_reference(self, request: OutboundRequest, ask: ReadReference) -> None:
        if self.session.route is None or request.state is not OutboundState.COMPLETED:
            what = (
                "is not here any more" if request.returned else "is not complete, and there is nothing to compare yet"
            )
            self.end(request, ProtocolError(f"request {request.request_id} {what}"))
            return
        if request.reading >= _MAX_READING:
            text = f"{self.session.peer} asked for {request.reading + 1} pieces of reference data at once"
            self.end(request, ProtocolError(f"{text}; at most {_MAX_READING} of a request"))
            return
        request.reading += 1
        self.effects.ship(Asked(request, self.session.route, ask))

    def on_read(self, asked: Asked, error: PdtxError | None) -> None:
        """Reference data has been read and sent, or cannot be."""
        request = asked.request
        request.reading -= 1
        if error is not None:
            self.end(request, error)
        self._return_blocks(request)

    def _consumers(self, failure: Failure) -> PdtxError:
        """Return the consumer's failure as an error of this side."""
        text = f"{self.session.peer} failed in {reason_of(failure.phase)}: {reason_of(failure.reason)}"
        return TransferError(text) if failure.wrong is None else VerificationError(text, failure.wrong)


def _posted(requests: Iterable[OutboundRequest]) -> Iterator[TransferHandle]:
    """What the transport has of requests."""
    return (handle for request in requests for handle in request.posted.values())


def _delivered(handle: TransferHandle) -> LayerDone:
    key = handle.key
    return LayerDone(
        request_id=key.request_id,
        buffer=key.buffer,
        src_rank=key.src_rank,
        dst_rank=key.dst_rank,
        layer_start=key.layer_start,
        layer_stop=key.layer_stop,
        token_start=key.token_start,
        token_stop=key.token_stop,
        nbytes=handle.nbytes,
    )
