"""What the producer's control thread does: the life of its requests and of the sessions that carry them."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pdtx.cache import AllocatingBlockPool, BlockTables, CallerBlocks, CallerTables, GroupBlocks, KVCaches
from pdtx.engine.offers import Offers
from pdtx.engine.outbound import OutboundRequest, ReadySlice
from pdtx.engine.outbound_leg import Leg, Piece
from pdtx.engine.outbound_session import DecodeEngine, OutboundSession
from pdtx.engine.route import Route
from pdtx.engine.shipping import Asked, Posted, Probe
from pdtx.engine.states import LegState, OutboundLife, OutboundState
from pdtx.engine.waking import Ended
from pdtx.errors import (
    DeadlineExceeded,
    InputError,
    PdtxError,
    PeerLost,
    ProtocolError,
    TransferAborted,
    TransferError,
    TransferRefused,
)
from pdtx.plan.runs import Int64s
from pdtx.protocol import Complete, Failure, Finished, LayerDone, Message
from pdtx.text import reason_of
from pdtx.transports import TransferHandle

logger = logging.getLogger(__name__)

_UNDELIVERED = (LegState.ASKED, LegState.GRANTED)


class OutboundEffects(Protocol):
    """What the control of a producer brings about. None of these blocks."""

    def send(self, session: OutboundSession, message: Message) -> None:
        """Send a process of the consumer a message. Raises ProtocolError for one that cannot be sent."""

    def ask(self, leg: Leg) -> None:
        """Send a process of the consumer a request's TransferRequest, for the leg's attempt."""

    def ship(self, item: Piece | Asked | Probe) -> None:
        """Plan a piece and hand it to the transport, read reference data, or look whether a connection is alive."""

    def open_session(self, session: OutboundSession, timeout_s: float) -> None:
        """Open a session anew; on_opened() or on_not_opened() follows."""

    def ring(self) -> None:
        """Wake those who wait for an outcome or for blocks."""

    def next_attempt(self) -> int:
        """Return another number of an attempt than any before."""


class OutboundControl:
    """The producer's requests and its sessions. Every method is an event of the control thread, and none blocks.

    resumes: whether what a lost session has not delivered goes on in another one, instead of failing.
    """

    def __init__(
        self,
        cache: KVCaches,
        pool: AllocatingBlockPool | CallerBlocks,
        effects: OutboundEffects,
        *,
        resumes: bool = False,
    ) -> None:
        self.cache, self.pool, self.effects, self.resumes = cache, pool, effects, resumes
        self.requests: dict[str, OutboundRequest] = {}  # those without an outcome
        self.draining: dict[OutboundRequest, None] = {}  # those whose blocks are still being read
        # For poll(): of callers who need it to get their blocks back, and of others once they have polled.
        self.ended = Ended[OutboundRequest](keeps=isinstance(pool, CallerBlocks))
        self.engines = list[DecodeEngine]()
        self.offers = Offers(self)
        self.over: PdtxError | None = None
        self._nowhere = OutboundSession()

    # -- sessions -----------------------------------------------------------------------------------------------------

    @property
    def session(self) -> OutboundSession:
        """The session with the first process of the first consumer; one without a route where there is none yet."""
        return self.engines[0].sessions[0] if self.engines else self._nowhere

    @property
    def sessions(self) -> list[OutboundSession]:
        """All sessions."""
        return [session for engine in self.engines for session in engine.sessions]

    def add_engine(self, engine: DecodeEngine) -> None:
        """Note a consumer, with all of whose processes there are sessions."""
        self.engines.append(engine)

    def drop_engine(self, engine: DecodeEngine) -> None:
        """Forget a consumer that is gone."""
        if engine in self.engines:
            self.engines.remove(engine)

    def drop_session(self, session: OutboundSession) -> None:
        """Forget a session that the consumer has dialled, and may dial again."""
        engine = session.engine
        if engine is not None and session in engine.sessions:
            engine.sessions.remove(session)
            if not engine.sessions and engine in self.engines:
                self.engines.remove(engine)

    def advance(self, session: OutboundSession) -> None:
        """Ask for grants of new legs, in a session that can carry them; or get such a session."""
        now = time.monotonic()
        if session.opening is not None or (session.route is None and session.lost is None):
            return
        left = session.is_broken and (not session.renews or (self.resumes and _undelivered(session)))
        if not session.new and not left:
            return
        if session.over is not None:
            self._end_legs(session.new, session.over, tell=False)
            return
        problem = session.problem(now, session.posted(session.live))
        if problem is not None:
            self._renew(session, problem, now)
        elif not session.waits(now, session.posted(leg for leg in session.live if leg.request.has_outcome)):
            for leg in list(session.new):
                self._ask(leg)

    def _renew(self, session: OutboundSession, problem: PdtxError, now: float) -> None:
        """Leave a session whose payloads cannot go on, and get another one, with a token of its own.

        What has been delivered goes on: it only needs the control channel. All else ends, or is asked for anew, before
        anything new begins, so that nothing of the old connection can be taken for the new one's.
        """
        if not session.begin_opening(problem, now):
            return
        if self.resumes:
            self._restart(session)
        else:
            lost = PeerLost(f"the data connection to {session.peer} ended: {problem}")
            self._end_legs(_undelivered(session), lost, tell=True)
        deadline = max((leg.request.deadline for leg in session.new), default=now)
        self.effects.open_session(session, max(0.0, deadline - now))

    def _restart(self, session: OutboundSession) -> None:
        """Have what was not delivered asked for anew."""
        for leg in _undelivered(session):
            leg.restart()
            leg.attempt = self.effects.next_attempt()
            session.new[leg] = None

    def on_opened(self, session: OutboundSession, route: Route, lost: PdtxError | None) -> None:
        """Go on in a new session. lost: what has ended its control channel meanwhile."""
        session.opened(route, lost)
        self.advance(session)

    def on_not_opened(self, session: OutboundSession, error: PdtxError) -> None:
        """Try again where the consumer may only be slow, or stopped for a while; else this is the end."""
        session.not_opened(error, patient=self.resumes)
        self.effects.ring()
        self.advance(session)

    def on_lost(self, session: OutboundSession, error: PdtxError) -> None:
        """A control channel ended: so do all requests that were asked for over it, but for those that are resumed."""
        session.lost = session.lost or error
        if not session.renews:
            session.close(error)
            self.drop_session(session)
        elif self.resumes:
            self._restart(session)
        asked = [leg for leg in session.live if leg.state is not LegState.NEW and not leg.request.has_outcome]
        self._end_legs(asked, error, tell=True)
        self.effects.ring()
        self.advance(session)

    def close(self, error: PdtxError) -> None:
        """End everything, for good."""
        self.over = self.over or error
        for session in self.sessions:
            session.close(error)
        for request in list(self.requests.values()):
            self.end(request, self.over, tell=False)
        self.effects.ring()

    def _end_legs(self, legs: Iterable[Leg], error: PdtxError, *, tell: bool) -> None:
        """End the requests of legs that were lost; what is offered is held on, for as long as its lease says."""
        for leg in list(legs):
            if leg.request.lease_s:
                self._drop(leg, error, tell=tell)
            else:
                self.end(leg.request, error, tell=tell)

    def _drop(self, leg: Leg, error: PdtxError, *, tell: bool) -> None:
        """Forget that a process pulls an offered request: it, or another one, may do so again."""
        request = leg.request
        if leg not in request.legs:
            return
        logger.warning("%s has not read all of request %s: %s", leg.session.peer, request.request_id, error)
        phase = request.phase
        request.legs.remove(leg)
        request.dropped.append(leg)
        leg.drop(self.effects.next_attempt())
        if tell:
            self._say_failed(leg, phase, error)
        self._return_blocks(request)

    def _say_failed(self, leg: Leg, phase: str, error: PdtxError) -> None:
        if leg.session.lost is None:
            failure = Failure(request_id=leg.request.request_id, phase=phase, reason=reason_of(error))
            self.effects.send(leg.session, failure)

    def tick(self, now: float) -> bool:
        """End requests whose deadline has passed, and go on with what waits; whether there is anything to wait for."""
        for request in [request for request in self.requests.values() if request.deadline < now]:
            self._expire(request)
        self.offers.tick(now)
        for session in self.sessions:
            self.advance(session)
        return bool(self.requests or self.draining)

    def _expire(self, request: OutboundRequest) -> None:
        # The one that is behind all others is what the request waits for.
        leg = min(request.legs, key=lambda leg: leg.state.value, default=None)
        peer = leg.session.peer if leg is not None else "any decode node"
        detail = f"{request.nbytes} bytes shipped, {request.unsent} pieces of them not acknowledged"
        if request.state is OutboundState.COMPUTING:
            detail, peer = f"{detail}; computed() was not called", "this node"
        elif leg is not None and leg.state is LegState.NEW and leg.session.attempt_error is not None:
            detail = str(leg.session.attempt_error)
        elif leg is not None and leg.posted:
            detail += f", first {next(iter(leg.posted)).key}"
        waited = round(request.deadline - request.begun, 3)
        self.end(request, DeadlineExceeded(request.phase, peer, waited, detail))

    # -- a request's life ---------------------------------------------------------------------------------------------

    def begin(self, request: OutboundRequest, places: Sequence[range], to: DecodeEngine | None = None) -> None:
        """Take blocks for a request, and ask for grants as soon as there are sessions.

        places: of each group's table that need a block. to: the consumer; None for the only one.
        Raises OutOfBlocks, InputError for a request id in use or where there is no consumer yet, or what ended the last
        session for good.
        """
        to = self._check_new(request, to)
        if isinstance(self.pool, CallerBlocks):
            raise InputError("blocks are the caller's here; give tables, one for each group")
        blocks = self.pool.allocate([len(place) for place in places])
        self._begin(request, blocks, blocks.tables(places), to)

    def begin_in(self, request: OutboundRequest, blocks: CallerTables, to: DecodeEngine | None = None) -> None:
        """Begin a request in blocks of the caller's, which are given back where it cannot be. Raises as begin()."""
        try:
            to = self._check_new(request, to)
        except PdtxError:
            self.pool.free(blocks)
            raise
        self._begin(request, blocks, tuple(own.ids for own in blocks.groups), to)

    def _begin(
        self, request: OutboundRequest, blocks: GroupBlocks, sources: tuple[Int64s, ...], to: DecodeEngine | None
    ) -> None:
        request.blocks, request.sources = blocks, sources
        self.requests[request.request_id] = request
        for session in to.sessions if to is not None else ():
            self.add_leg(request, session)
        for session in to.sessions if to is not None else ():
            self.advance(session)

    def add_leg(self, request: OutboundRequest, session: OutboundSession) -> None:
        """Note that a process of the consumer is to get its part of a request. advance() asks for it."""
        leg = Leg(request, session, attempt=request.attempt, owner=request.owner)
        request.legs.append(leg)
        session.new[leg] = None

    def _check_new(self, request: OutboundRequest, to: DecodeEngine | None) -> DecodeEngine | None:
        """Return the consumer of a new request; None for one that is offered."""
        if self.over is not None:
            raise self.over
        if request.request_id in self.requests:
            raise InputError(f"request id {request.request_id!r} is in use")
        if request.lease_s:
            return None
        if to is None and not self.engines:
            raise InputError("this producer is not connected; call connect() before begin()")
        if to is None and len(self.engines) > 1:
            names = ", ".join(engine.engine_id for engine in self.engines)
            raise InputError(f"this producer has {len(self.engines)} consumers, {names}; name one by begin(to=)")
        to = to or self.engines[0]
        if to not in self.engines:
            raise InputError(f"{to.engine_id} is no consumer of this producer")
        if to.over is not None:
            raise to.over
        return to

    def _ask(self, leg: Leg) -> None:
        session = leg.session
        del session.new[leg]
        session.live[leg] = None
        leg.route = session.route
        if leg.request.dropped:
            leg.follow(leg.request.dropped, self.effects.next_attempt(), keeps=self.resumes)
        leg.go(LegState.ASKED)
        self.effects.ask(leg)

    def on_granted(self, leg: Leg) -> None:
        """Ship what has been computed by now."""
        for ready in leg.request.ready:
            self._ship(leg, ready)
            if leg.request.has_outcome:
                return
        self._complete_if_sent(leg)

    def on_ready(self, request: OutboundRequest, ready: ReadySlice) -> None:
        """Ship what has been computed to whoever has granted, and keep it for the others."""
        if request.has_outcome:
            return
        request.ready.append(ready)
        for leg in request.legs:
            if leg.state is LegState.GRANTED:
                self._ship(leg, ready)

    def _ship(self, leg: Leg, ready: ReadySlice) -> None:
        """Hand one slice to the shipper: only positions that the consumer needs, and nothing of layers it lacks."""
        request, route = leg.request, leg.route
        match = route.match.of_producer.get(ready.buffer) if route is not None else None
        ours = match.layer_index.get(ready.layer) if match is not None else None
        if route is None or match is None or ours is None or leg.grant is None:
            return
        positions, fence = leg.sendable(match, self.cache.groups[match.producer_group], ready)
        for move in match.moves if positions else ():
            piece = Piece(leg, leg.attempt, route, match, move, range(ours, ours + 1), positions, fence)
            try:
                if leg.arrived is not None and leg.has_arrived(piece.key):
                    continue
            except ProtocolError as error:
                self.end(request, error)
                return
            leg.unsent += 1
            leg.pending += 1
            self.effects.ship(piece)

    def computed(self, request: OutboundRequest, first_token: int | None) -> None:
        """All of a request is ready; first_token: the first new one, where it is known."""
        if request.is_computed or request.has_outcome:
            return
        request.computed, request.first_token = time.monotonic(), first_token
        self.offers.start(request)
        for leg in request.legs:
            self._complete_if_sent(leg)

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
        tell: whether the consumer's processes hear of it.
        """
        if request.life is not OutboundLife.OPEN:
            return
        phase, request.error = request.phase, error
        self.requests.pop(request.request_id, None)
        self.offers.remember(request)
        self.draining[request] = None
        request.go(OutboundLife.DRAINING)
        for leg in request.legs:
            leg.stop()
            if error is not None and tell:
                self._say_failed(leg, phase, error)
        self._return_blocks(request)
        self.effects.ring()

    def abandon(self, request: OutboundRequest, error: PdtxError) -> None:
        """End a request, if it was begun at all."""
        if self.requests.get(request.request_id) is request:
            self.end(request, error)

    def cancel(self, request: OutboundRequest, reason: str) -> None:
        """End a request because the caller does not want it any more."""
        self.end(request, TransferAborted(f"request {request.request_id} was cancelled: {reason}"))

    def on_leg_done(self, leg: Leg, finished: Finished) -> None:
        """A process of the consumer has finished its part; the request ends well when all have."""
        request = leg.request
        leg.finished = finished
        leg.go(LegState.FINISHED)
        if self.offers.all_read(request) and all(each.state is LegState.FINISHED for each in request.legs):
            request.finished = merged([each.finished for each in request.legs if each.finished is not None])
            self.end(request, None)
        else:
            self._return_blocks(request)

    def on_released(self, leg: Leg) -> None:
        """A process of the consumer does not need the blocks any more."""
        leg.go(LegState.RELEASED)
        self._return_blocks(leg.request)

    def _is_released(self, request: OutboundRequest) -> bool:
        if request.life is not OutboundLife.OPEN:
            return True
        return bool(request.legs) and all(leg.released for leg in request.legs) and self.offers.all_read(request)

    def _return_blocks(self, request: OutboundRequest) -> None:
        """Return the blocks, once, when nothing reads them any more; forget a request that has ended."""
        for leg in request.all_legs:
            if (request.life is not OutboundLife.OPEN or leg not in request.legs) and not leg.unsent:
                leg.session.live.pop(leg, None)
        if request.unsent or request.reading:
            return
        if not request.returned and self._is_released(request):
            request.returned = True
            if request.blocks is not None:
                self.pool.free(request.blocks)
            self.effects.ring()
        if request.life is OutboundLife.DRAINING:
            request.go(OutboundLife.ENDED)
            self.draining.pop(request, None)
            self.ended.add(request)

    def unhold(self, blocks: GroupBlocks) -> None:
        """End one hold on each of blocks."""
        self.pool.unhold(blocks)
        self.effects.ring()

    def _complete_if_sent(self, leg: Leg) -> None:
        request = leg.request
        if leg.state is not LegState.GRANTED or not request.is_computed or leg.pending or request.has_outcome:
            return
        leg.go(LegState.COMPLETED)
        message = Complete(
            request_id=request.request_id,
            first_token=request.first_token,
            num_tokens=request.num_tokens,
            nbytes=sum(leg.delivered.values()),
        )
        self.effects.send(leg.session, message)

    # -- pieces -------------------------------------------------------------------------------------------------------

    def on_posted(self, posted: Posted) -> None:
        """A piece is at the transport."""
        leg, request = posted.piece.leg, posted.piece.request
        request.picks.add(posted.choice)
        request.prepare += posted.seconds
        leg.posted[posted.handle] = None
        if not posted.piece.is_current:
            posted.handle.cancel()
            return
        leg.num_runs += posted.num_runs
        leg.nbytes += posted.nbytes

    def on_dropped(self, piece: Piece, error: PdtxError | None) -> None:
        """A piece was not sent, or its transfer has failed."""
        leg, request = piece.leg, piece.request
        leg.unsent -= 1
        if piece.attempt == leg.attempt:
            leg.pending -= 1
            if request.has_outcome:
                pass  # what the consumer says of it tells nothing of the session
            elif self.resumes and self._is_cut(piece, error):
                self.advance(leg.session)  # it goes on in another session
            elif error is not None and request.lease_s:
                self._drop(leg, error, tell=True)
            elif error is not None:
                if type(error) is TransferError:  # the others say themselves what they are about
                    error = TransferError(f"{piece} could not be sent: {error}")
                self.end(request, error)
        self._return_blocks(request)

    def _is_cut(self, piece: Piece, error: PdtxError | None) -> bool:
        """Whether a piece's session is at its end, as this side knows, or as the consumer seems to know already."""
        if isinstance(error, TransferRefused) and not piece.leg.refused:
            piece.leg.refused = True  # the next time it is meant
            piece.route.failed = piece.route.failed or error
        return piece.route.ended is not None or piece.route.failed is not None

    def on_piece_end(self, piece: Piece, handle: TransferHandle) -> None:
        """A transfer has ended, well or not."""
        leg, request = piece.leg, piece.request
        leg.posted.pop(handle, None)
        moving = handle.posted == handle.posted
        if handle.error is not None:
            if isinstance(handle.error, DeadlineExceeded) and moving:
                self._probe(piece.route)
            self.on_dropped(piece, handle.error)
            self.advance(leg.session)
            return
        request.posts.append((handle.posted, handle.sent))
        request.moves.append((handle.posted, handle.ended))
        leg.unsent -= 1
        if not piece.is_current:
            self._return_blocks(request)
            self.advance(leg.session)
            return
        leg.pending -= 1
        leg.delivered[handle.key] = handle.nbytes
        self.effects.send(leg.session, _delivered(handle))
        self._complete_if_sent(leg)

    def _probe(self, route: Route) -> None:
        """Find out whether a connection outlives a transfer that was cut off: by a notice that comes behind it."""
        if not route.probing and route.failed is None:
            route.probing = True
            self.effects.ship(Probe(route))

    def on_probed(self, route: Route, error: PdtxError | None) -> None:
        """What was sent behind a transfer that was cut off has arrived, or has not."""
        route.probing, route.failed = False, error
        for session in self.sessions:
            if session.route is route:
                self.advance(session)

    def on_read(self, asked: Asked, error: PdtxError | None) -> None:
        """Reference data has been read and sent, or cannot be."""
        request = asked.leg.request
        asked.leg.reading -= 1
        if error is not None:
            self.end(request, error)
        self._return_blocks(request)


def _undelivered(session: OutboundSession) -> list[Leg]:
    return [leg for leg in session.live if leg.state in _UNDELIVERED and not leg.request.has_outcome]


def merged(all_finished: Sequence[Finished]) -> Finished:
    """Return what all processes of a consumer together say of a request: tokens are those of the first that has any."""
    first = next((one for one in all_finished if one.token_ids), all_finished[0])
    count: Callable[[str], int] = lambda name: sum(getattr(one, name) for one in all_finished)  # noqa: E731
    return Finished(
        request_id=first.request_id,
        token_ids=first.token_ids,
        text=first.text,
        verified=all(one.verified for one in all_finished),
        wrong=count("wrong"),
        received_bytes=count("received_bytes"),
        received_runs=count("received_runs"),
        times=first.times,
    )


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
