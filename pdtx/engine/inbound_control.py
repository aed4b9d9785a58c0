"""What the consumer's control thread does: sessions, the grant queue, the turn of the blocks, and requests' lives."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from pdtx.cache import AllocatingBlockPool, CallerBlocks, GroupBlocks, KVCaches
from pdtx.engine.arrivals import Arrivals, Notice
from pdtx.engine.control_thread import ControlThread
from pdtx.engine.describe import CacheFacts
from pdtx.engine.expectations import Expectations
from pdtx.engine.granting import GrantQueue, blocks_to_poison, granted_blocks, needs_of, needs_of_tables
from pdtx.engine.inbound import Arrived, Expectation, GroupNeed, InboundRequest, Session
from pdtx.engine.inbound_sessions import SessionTable
from pdtx.engine.landing import Landing
from pdtx.engine.receiving import PayloadReceiver
from pdtx.engine.states import InboundState
from pdtx.errors import (
    DeadlineExceeded,
    InputError,
    PdtxError,
    PeerLost,
    TransferAborted,
    TransferError,
    VerificationError,
)
from pdtx.plan.runs import Int64s
from pdtx.protocol import (
    Bye,
    Complete,
    Failure,
    Finished,
    Grant,
    Hello,
    LayerDone,
    Message,
    Reference,
    Refuse,
    Release,
    TransferRequest,
)
from pdtx.text import reason_of
from pdtx.tiers.prefix import Fetched
from pdtx.transports import TransferKey

logger = logging.getLogger(__name__)


MAX_REQUESTS = 20_000
"""Requests of one producer that may be under way at once."""


_UNEXPECTED = "expect()"
"""What a request waits for before the caller, whose blocks they are, has said where it goes."""


class InboundEffects(Protocol):
    """What the control of a consumer brings about. None of these blocks."""

    def send(self, peer: bytes, message: Message) -> None:
        """Send a producer a message."""

    def post(self, event: Callable[[], object]) -> None:
        """Have an event of the control thread run later; from any thread."""

    def load(self, request: InboundRequest) -> bool:
        """Begin to load what this node's tiers have of a prompt; False if there are none. on_loaded() follows."""

    def scrub(self, ids: Sequence[Int64s], then: Callable[[bool], object]) -> None:
        """Fill blocks of each group with poison; then the event follows, with whether that worked."""

    def ready(self, request: InboundRequest) -> None:
        """Hand out a request of which all has arrived; of an expected one see to it that deliver() follows."""


class InboundControl:
    """The consumer's sessions and requests. Every method is an event of the control thread, and none blocks.

    pool: whose blocks there are: one that hands them out, or the caller's, who says by expect() where a request goes.
    align: see needs_of(). scrubs: whether blocks are filled with poison before they are granted.
    """

    def __init__(
        self,
        cache: KVCaches,
        facts: CacheFacts,
        pool: AllocatingBlockPool | CallerBlocks,
        receiver: PayloadReceiver,
        effects: InboundEffects,
        *,
        align: int,
        max_deadline_s: float,
        scrubs: bool,
    ) -> None:
        self.cache, self.pool, self.receiver, self.effects = cache, pool, receiver, effects
        self._align, self._max_deadline_s, self._scrubs = align, max_deadline_s, scrubs
        self._table = SessionTable(facts, receiver)
        self.requests: dict[tuple[bytes, str], InboundRequest] = {}  # (the session's peer, request id); not ended
        self._counts: Counter[bytes] = Counter()  # of those, by peer
        self.draining: dict[InboundRequest, None] = {}  # ended, and payloads may still be written into their blocks
        self.queue = None if isinstance(pool, CallerBlocks) else GrantQueue(cache.groups, pool)
        self.expectations = Expectations(pool)
        self.closing: PdtxError | None = None
        self.num_ended = self.num_failed = self.num_expired = 0  # ended; of those failed; of those by their deadline
        self.duplicate_notices = 0  # deliveries that were reported more than once
        self.unknown_notices = 0  # deliveries that were reported, of which nothing is here
        self.owner: ControlThread | None = None  # of new requests

    # -- sessions -----------------------------------------------------------------------------------------------------

    @property
    def sessions(self) -> dict[bytes, Session]:
        """The sessions, by their producers' side-channel addresses."""
        return self._table.sessions

    def on_hello(self, peer: bytes, hello: Hello, welcome: Callable[[Session], Message]) -> None:
        """Open a session for a producer; the one it had before has ended. Raises IncompatiblePeer or ProtocolError."""
        session = self._table.make(peer, hello)
        self._retire(peer)
        self._table.add(session)
        self.effects.send(peer, welcome(session))

    def _retire(self, peer: bytes) -> None:
        """End a peer's session because it asks for another one: nothing can come over its data connection any more.

        What has all arrived does not need it and goes on.
        """
        session = self._table.drop(peer)
        if session is not None:
            lost = PeerLost(f"{session.engine_id} opened another session")
            self.end_where(lambda request: request.session.peer == peer and not _arrived(request), lost)

    def on_lost(self, peer: bytes, reason: str) -> None:
        """A producer's control channel has ended, and with it all its requests."""
        session = self._table.drop(peer)
        if session is not None:
            lost = PeerLost(f"lost {session.engine_id}: {reason}")
            self.end_where(lambda request: request.session.peer == peer, lost)

    def on_connection_closed(self, session_id: str, reason: str) -> None:
        """Fail what a producer had under way when its data connection ended.

        What has all arrived waits for the completion, which comes over the control channel.
        """

        def is_cut(request: InboundRequest) -> bool:
            ours = request.session.session_id == session_id and request.state is InboundState.RECEIVING
            return ours and request.missing() is not None

        self.end_where(is_cut, PeerLost(f"the data connection ended: {reason}"), tell=True)

    # -- a request's life ---------------------------------------------------------------------------------------------

    def on_request(self, session: Session, ask: TransferRequest) -> None:
        """Queue a request for blocks, or refuse it."""
        needs = needs_of(self.cache.groups, ask, self._align)
        problem = self._problem(session, ask)
        if problem is None and self.queue is not None:
            problem = self.queue.impossible(needs)
        if problem is not None:
            self.effects.send(session.peer, Refuse(request_id=ask.request_id, reason=problem))
            return
        arrivals = self._arrivals(session, needs, 0)  # unless tiers have some
        deadline = time.monotonic() + min(ask.deadline_s, self._max_deadline_s)
        request = InboundRequest(session, ask, needs, Landing(arrivals), deadline, owner=self.owner)
        self.requests[session.peer, ask.request_id] = request
        self._counts[session.peer] += 1
        if self.queue is not None:
            self.queue.add(request)
            self.grant_queued()
        else:
            self.expectations.unmatched[ask.request_id] = request
            self._grant_expected(ask.request_id)

    def _problem(self, session: Session, ask: TransferRequest) -> str | None:
        """Say what is wrong with a request, if anything."""
        if self.closing is not None:
            return str(self.closing)
        if not ask.num_tokens:
            return "the prompt has no tokens"
        if (session.peer, ask.request_id) in self.requests or ask.request_id in self.expectations.unmatched:
            return f"request id {ask.request_id} is in use"
        if self._counts[session.peer] >= MAX_REQUESTS:
            return f"{MAX_REQUESTS} requests of {session.engine_id} are under way; begin more when some have ended"
        return None

    def grant_queued(self) -> None:
        """Grant blocks to waiting requests, first come first served, as long as there are enough in every group."""
        while self.closing is None and self.queue is not None and (request := self.queue.next()) is not None:
            request.go(InboundState.LOADING)
            if self._scrubs and not self.cache.owned:
                self._scrub_first(request)
            else:
                self._load(request)

    def _load(self, request: InboundRequest) -> None:
        if not self.effects.load(request):
            self._grant(request, Fetched())

    def _scrub_first(self, request: InboundRequest) -> None:
        """Fill blocks of memory that others own with poison only now that a request names them."""
        blocks = request.blocks
        if blocks is not None:
            self.pool.hold(blocks)  # whatever becomes of the request meanwhile
            ids = [own.ids for own in blocks.groups]
            self.effects.scrub(ids, partial(self._on_scrubbed_first, request, blocks))

    def _on_scrubbed_first(self, request: InboundRequest, blocks: GroupBlocks, worked: bool) -> None:
        self._put_back(self.pool.release_hold(blocks))
        if not worked:
            self.end(request, _not_scrubbed())
        if request.state is InboundState.LOADING:
            self._load(request)
        self.grant_queued()

    def on_loaded(self, request: InboundRequest, fetched: Fetched | PdtxError) -> None:
        """What the tiers have of a prompt is in its blocks; or they may still write into them, which fails it."""
        if isinstance(fetched, PdtxError):
            self.end(request, fetched)
            self.grant_queued()
        elif request.state is InboundState.LOADING:
            self._grant(request, fetched)

    def _grant(self, request: InboundRequest, fetched: Fetched) -> None:
        """Tell the producer which blocks to write, and what of the prompt it need not send."""
        request.fetched = fetched
        fewer = self._arrivals(request.session, request.needs, fetched.num_tokens) if fetched.num_tokens else None
        tables = tuple(request.granted(group) for group in range(len(self.cache.groups)))
        request.landing.open(tables, request.deadline, fewer)
        self.receiver.grant(request.session.session_id, request.request_id, request.landing)
        request.go(InboundState.RECEIVING)
        grant = Grant(
            request_id=request.request_id,
            groups=granted_blocks(request),
            deadline_s=max(0.0, request.deadline - time.monotonic()),
            cached_tokens=fetched.num_tokens,
        )
        self.effects.send(request.session.peer, grant)

    def _arrivals(self, session: Session, needs: Sequence[GroupNeed], cached_tokens: int) -> Arrivals:
        """Return what must arrive of a request whose first cached_tokens are here."""
        matches, groups = session.match.buffers, self.cache.groups
        positions = [groups[match.group].uncached(needs[match.group].positions, cached_tokens) for match in matches]
        return Arrivals(matches, positions)

    def take(self, request: InboundRequest) -> bool:
        """Hold a ready request's blocks for the decoder; False if it has ended meanwhile."""
        if request.has_ended or request.blocks is None:
            return False
        self.pool.hold(request.blocks)
        return True

    def unhold(self, blocks: GroupBlocks) -> None:
        """End one hold on each of blocks."""
        self._put_back(self.pool.release_hold(blocks))
        self.grant_queued()

    def release(self, request: InboundRequest) -> None:
        """Tell the producer that its blocks are not needed any more."""
        self.effects.send(request.session.peer, Release(request_id=request.request_id))

    def note_verified(self, request: InboundRequest) -> None:
        """Every element of a request is the producer's."""
        request.verified = True

    def finish(self, request: InboundRequest, finished: Finished) -> None:
        """End a request well, and tell the producer how."""
        if self.end(request, None):
            self.effects.send(request.session.peer, finished)
        self.grant_queued()

    def fail(self, request: InboundRequest, error: PdtxError, *, tell: bool = True) -> None:
        """End a request as failed."""
        self.end(request, error, tell=tell)
        self.grant_queued()

    def cancel(self, request: InboundRequest, reason: str) -> None:
        """End a request because this node does not want it any more."""
        self.fail(request, TransferAborted(f"request {request.request_id} was cancelled: {reason}"))

    def end_where(self, which: Callable[[InboundRequest], bool], error: PdtxError, *, tell: bool = False) -> None:
        """End all requests of a kind as failed: all of them leave the queue before any of their blocks are granted."""
        for request in [request for request in self.requests.values() if which(request)]:
            self.end(request, error, tell=tell)
        self.grant_queued()

    def end(self, request: InboundRequest, error: PdtxError | None, *, tell: bool = True) -> bool:
        """End a request; False if it had ended before. Its blocks follow when nothing can be written into them.

        Callers go on with grant_queued(): also a request that only waited may have stood before others that fit.
        """
        if request.has_ended:
            return False
        phase, request.error = self._phase(request), error
        self.num_ended += 1
        self.num_failed += error is not None
        self.num_expired += isinstance(error, DeadlineExceeded)
        self._forget(request)
        if self.queue is not None:
            self.queue.remove(request)
        self.expectations.forget(request)
        request.go(InboundState.DRAINING)
        self.draining[request] = None
        self.receiver.withdraw(request.session.session_id, request.request_id, request.landing)
        is_idle = request.landing.close(partial(self.effects.post, partial(self._on_idle, request)))
        request.references.put(error or PeerLost("the request has ended"))
        if error is not None:
            self._report(request, error, phase, tell=tell)
        if is_idle:
            self._return_blocks(request)
        return True

    def _phase(self, request: InboundRequest) -> str:
        """Return what a request waits for, for messages."""
        waits = request.state is InboundState.QUEUED
        return _UNEXPECTED if waits and self.queue is None else request.state.value

    def _forget(self, request: InboundRequest) -> None:
        peer = request.session.peer
        if self.requests.pop((peer, request.request_id), None) is not None:
            self._counts[peer] -= 1
            if not self._counts[peer]:
                del self._counts[peer]

    def _report(self, request: InboundRequest, error: PdtxError, phase: str, *, tell: bool) -> None:
        peer, extra = request.session.engine_id, {"request_id": request.request_id}
        logger.warning("request %s from %s failed: %s", request.request_id, peer, reason_of(error), extra=extra)
        if not tell:
            return
        wrong = None
        if isinstance(error, VerificationError):
            phase, wrong = "verification", error.wrong
        failure = Failure(request_id=request.request_id, phase=phase, reason=reason_of(error), wrong=wrong)
        self.effects.send(request.session.peer, failure)

    def _on_idle(self, request: InboundRequest) -> None:
        self._return_blocks(request)
        self.grant_queued()

    def _return_blocks(self, request: InboundRequest) -> None:
        """Nothing is written into an ended request's blocks any more: they return, but for those that others hold."""
        request.go(InboundState.ENDED)
        self.draining.pop(request, None)
        if request.blocks is not None:
            self._put_back(self.pool.retire(request.blocks))
        if request.expected:
            self.expectations.arrived.add(Arrived(request.request_id, request.error, request))

    def _put_back(self, ids: Sequence[Int64s]) -> None:
        """Let blocks be granted again, after they have been filled with poison where that is asked for."""
        if not any(map(len, ids)):
            return
        if self._scrubs and self.cache.owned:
            self.effects.scrub(ids, partial(self._on_scrubbed, ids))
        else:
            self.pool.put_back(ids)

    def _on_scrubbed(self, ids: Sequence[Int64s], worked: bool) -> None:
        if not worked:
            # Blocks that may hold anything must not be granted by a node that verifies.
            logger.error("%d blocks are lost to the pool: they could not be filled with poison", sum(map(len, ids)))
            return
        self.pool.put_back(ids)
        self.grant_queued()

    def tick(self, now: float) -> bool:
        """Fail requests whose deadline has passed; whether there are others."""
        late = [request for request in self.requests.values() if request.deadline < now]
        for request in late:
            detail = f"{request.received_bytes} bytes received; {request.lacking()}"
            phase, peer, waited = self._phase(request), request.session.engine_id, request.deadline - request.begun
            if phase is _UNEXPECTED:
                detail, peer = f"nothing was said here about request {request.request_id}", "the decode node"
            self.end(request, DeadlineExceeded(phase, peer, round(waited, 3), detail))
        if late:
            self.grant_queued()
        self.expectations.tick(now)
        return bool(self.requests or self.expectations.expected)

    def close(self, error: PdtxError) -> None:
        """Grant nothing more, and end every request. What is asked for later is refused."""
        self.closing = error
        self.end_where(lambda _: True, error, tell=True)
        self.expectations.drop_all(error)

    def deliver(self, request: InboundRequest, error: PdtxError | None) -> None:
        """An expected request has all arrived. error: what verification found."""
        if error is not None:
            self.fail(request, error)
        elif not request.has_ended:
            self.release(request)
            self.finish(request, _received(request))

    def expect(self, expected: Expectation) -> None:
        """Let a request in as soon as a producer asks for it.

        Raises InputError for a request id in use or a table that is too short, or why this node is closing; the blocks
        have been given back then.
        """
        try:
            self._check_expected(expected)
            self.expectations.add(expected)
        except BaseException:
            self.pool.free(expected.blocks)
            raise
        if self._scrubs:
            self.effects.scrub(blocks_to_poison(self.cache.groups, expected), partial(self._on_clean, expected))
        else:
            self._on_clean(expected, worked=True)

    def _check_expected(self, expected: Expectation) -> None:
        if self.closing is not None:
            raise self.closing
        name = expected.request_id
        if any(request.request_id == name and request.expected for request in self.requests.values()):
            raise InputError(f"request id {name!r} is in use")
        expected.needs = needs_of_tables(self.cache.groups, expected)

    def abandon(self, expected: Expectation) -> None:
        """Expect a request no more, if it is expected at all: whoever wanted that was interrupted."""
        name, error = expected.request_id, TransferAborted("it was interrupted while it was expected")
        if self.expectations.expected.get(name) is expected:
            self.expectations.drop(name, error)
        else:
            self.end_where(lambda request: request.blocks is expected.blocks, error, tell=True)

    def _on_clean(self, expected: Expectation, worked: bool) -> None:
        self.expectations.note_clean(expected, None if worked else _not_scrubbed())
        self._grant_expected(expected.request_id)

    def _grant_expected(self, request_id: str) -> None:
        """Grant a request that is both asked for and expected."""
        found = self.expectations.match(request_id)
        if found is None:
            return
        expected, request = found
        request.expected, request.blocks = True, expected.blocks
        request.tables = tuple(blocks.ids.copy() for blocks in expected.blocks.groups)
        request.deadline = min(request.deadline, expected.deadline)
        if expected.num_tokens != request.num_tokens:
            text = f"the prompt has {request.num_tokens} tokens, and {expected.num_tokens} are expected here"
            self.end(request, TransferError(text))
            return
        request.needs = expected.needs
        request.go(InboundState.LOADING)
        self._grant(request, Fetched(num_tokens=expected.cached_tokens))

    def cancel_named(self, request_id: str, reason: str) -> None:
        """End the request of a name, whether it was asked for as yet or not. Unknown ones have ended already."""
        error = TransferAborted(f"request {request_id} was cancelled: {reason}")
        self.expectations.drop(request_id, error)
        self.end_where(lambda request: request.request_id == request_id, error, tell=True)

    # -- payloads -----------------------------------------------------------------------------------------------------

    def on_payload_failed(self, session_id: str, request_id: str, landing: Landing, error: PdtxError) -> None:
        """A payload has not arrived."""
        session = self._table.of_id(session_id)
        request = self.requests.get((session.peer, request_id)) if session is not None else None
        if request is not None and request.landing is landing:
            self.fail(request, error)

    def on_payload_twice(self, key: TransferKey) -> None:
        """The transport reported the end of a payload again, which changes nothing."""
        self.duplicate_notices += 1
        logger.warning("the mover told the end of %s again", key)

    # -- messages -----------------------------------------------------------------------------------------------------

    def on_message(self, peer: bytes, message: Message) -> None:
        """A message that is no hello."""
        session = self.sessions.get(peer)
        if session is None:
            logger.warning("ignored a %s from a peer that has not said hello", type(message).__name__)
            # It may have been given up as silent while it was only slow, and take itself for connected.
            self.effects.send(peer, Bye(reason="it has no session; say hello first"))
            return
        if isinstance(message, TransferRequest):
            self.on_request(session, message)
        elif isinstance(message, LayerDone | Complete | Failure | Reference):
            self._on_request_message(session, message)
        else:
            logger.warning("ignored a %s from %s", type(message).__name__, session.engine_id)

    def _on_request_message(self, session: Session, message: LayerDone | Complete | Failure | Reference) -> None:
        request = self.requests.get((session.peer, message.request_id))
        if request is None:
            self.unknown_notices += isinstance(message, LayerDone)
            logger.info("ignored a %s for unknown request %s", type(message).__name__, message.request_id)
            return
        match message:
            case LayerDone():
                self._on_notice(request, message)
            case Reference():
                # One is asked for at a time, once all has arrived; what comes beside that is not kept: it may be of
                # an earlier request of that name.
                if request.state is InboundState.READY and request.references.empty():
                    request.references.put(message)
            case Failure():
                reason = f"{session.engine_id} failed in {reason_of(message.phase)}: {reason_of(message.reason)}"
                self.fail(request, TransferError(reason), tell=False)
            case Complete():
                self._on_complete(request, message)

    def _on_notice(self, request: InboundRequest, done: LayerDone) -> None:
        """Count a notice if it is the first one of a payload that is here; else it only counts as what it is."""
        key = TransferKey(
            done.request_id,
            done.layer_start,
            done.layer_stop,
            done.token_start,
            done.token_stop,
            done.buffer,
            done.src_rank,
            done.dst_rank,
        )
        notice = request.landing.notice(key)
        request.noticed_bytes += done.nbytes if notice is Notice.NEW else 0
        self.duplicate_notices += notice is Notice.DUPLICATE
        self.unknown_notices += notice is Notice.UNKNOWN
        if notice is not Notice.NEW:
            logger.warning("ignored a notice of %s from %s: %s", key, request.session.engine_id, notice.value)

    def _on_complete(self, request: InboundRequest, complete: Complete) -> None:
        """Accept a request only if every byte that the producer claims has been received here."""
        if request.state is not InboundState.RECEIVING:
            logger.warning("ignored a second completion of request %s", request.request_id)
            return
        missing = request.missing() or request.landing.unnoticed()
        received, noticed = request.received_bytes, request.noticed_bytes
        tokens = complete.num_tokens == request.num_tokens
        if missing is None and tokens and complete.nbytes == received == noticed:
            request.complete = complete
            request.go(InboundState.READY)
            self.effects.ready(request)
            return
        claims = (
            f"claims {complete.num_tokens} tokens and {complete.nbytes} bytes, noticed {noticed}, received {received}"
        )
        if missing is not None:
            claims = f"{missing} ({claims})"
        self.fail(
            request, TransferError(f"{request.session.engine_id} completed {request.request_id} wrongly: {claims}")
        )


def _not_scrubbed() -> TransferError:
    return TransferError("its blocks could not be filled with poison; see the log")


def _received(request: InboundRequest) -> Finished:
    """Return the message that a request which nobody decodes here has arrived."""
    return Finished(
        request_id=request.request_id,
        token_ids=[],
        text="",
        verified=request.verified,
        wrong=0,
        received_bytes=request.received_bytes,
        received_runs=request.received_runs,
        times={},
    )


def _arrived(request: InboundRequest) -> bool:
    return request.state is InboundState.READY
