"""What the consumer's control thread does: the grant queue, the turn of the blocks, and requests' lives."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from pdtx.cache import AllocatingBlockPool, CallerBlocks, GroupBlocks, KVCaches
from pdtx.engine.arrivals import Arrivals
from pdtx.engine.control_thread import ControlThread
from pdtx.engine.describe import CacheFacts
from pdtx.engine.expectations import Expectations
from pdtx.engine.granting import GrantQueue, blocks_to_poison, granted_blocks, needs_of, needs_of_tables
from pdtx.engine.inbound import Arrived, Ask, Expectation, InboundRequest, PrefillEngine, Session
from pdtx.engine.inbound_engines import EngineTable
from pdtx.engine.landing import Door, Landing
from pdtx.engine.pulls import Pulls
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
from pdtx.protocol import Failure, Finished, Grant, Message, Part, Refuse, Release, TransferRequest
from pdtx.text import reason_of
from pdtx.tiers.prefix import Fetched

logger = logging.getLogger(__name__)


MAX_REQUESTS = 20_000
"""Requests of one producer that may be under way at once."""

_UNEXPECTED = "expect()"
"""What a request waits for before the caller, whose blocks they are, has said where it goes."""


class InboundEffects(Protocol):
    """What the control of a consumer brings about. None of these blocks."""

    def send(self, peer: bytes, message: Message) -> None:
        """Send a producer's process a message."""

    def post(self, event: Callable[[], object]) -> None:
        """Have an event of the control thread run later; from any thread."""

    def load(self, request: InboundRequest) -> bool:
        """Begin to load what this node's tiers have of a prompt; False if there are none. on_loaded() follows."""

    def scrub(self, ids: Sequence[Int64s], then: Callable[[bool], object]) -> None:
        """Fill blocks of each group with poison; then the event follows, with whether that worked."""

    def ready(self, request: InboundRequest) -> None:
        """Hand out a request of which all has arrived; of an expected one see to it that deliver() follows."""


class InboundControl:
    """The consumer's requests. Every method is an event of the control thread, and none blocks.

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
        self.engines = EngineTable(facts, receiver)
        self.requests: dict[tuple[PrefillEngine, str], InboundRequest] = {}  # not ended
        self._counts: Counter[PrefillEngine] = Counter()  # of those
        self.draining: dict[InboundRequest, None] = {}  # ended, and payloads may still be written into their blocks
        self.queue = None if isinstance(pool, CallerBlocks) else GrantQueue(cache.groups, pool)
        self.expectations = Expectations(pool)
        self.pulls = Pulls(self)
        self.closing: PdtxError | None = None
        self.num_ended = self.num_failed = self.num_expired = 0  # ended; of those failed; of those by their deadline
        self.duplicate_notices = 0  # deliveries that were reported more than once
        self.unknown_notices = 0  # deliveries that were reported, of which nothing is here
        self.owner: ControlThread | None = None  # of new requests

    @property
    def sessions(self) -> dict[bytes, Session]:
        """The sessions, by the side-channel addresses of their producers' processes."""
        return self.engines.sessions

    # -- a request's life ---------------------------------------------------------------------------------------------

    def on_request(self, session: Session, ask: TransferRequest) -> None:
        """Queue a request for blocks, let another process join it, go on with it in another session, or refuse it."""
        engine = self.engines.engine_of(session)
        request = self.requests.get((engine, ask.request_id))
        earlier = request.asks.get(session.process) if request is not None else None
        failed = engine.failed.refusal(ask.request_id, session.process)
        if failed is not None:
            self._refuse(session, ask, failed)
        elif request is None:
            self._begin(session, engine, ask)
        elif earlier is None:
            self._join(request, session, ask)
        elif earlier.suspended:
            self._resume(request, earlier, session, ask)
        else:
            self._refuse(session, ask, f"request id {ask.request_id} is in use")

    def _refuse(self, session: Session, ask: TransferRequest, reason: str) -> None:
        self.effects.send(session.peer, Refuse(request_id=ask.request_id, reason=reason, attempt=ask.attempt))

    def _begin(self, session: Session, engine: PrefillEngine, ask: TransferRequest) -> None:
        needs = needs_of(self.cache.groups, ask, self._align)
        problem = self._problem(engine, ask)
        if problem is None and self.queue is not None:
            problem = self.queue.impossible(needs)
        if problem is not None:
            self._refuse(session, ask, problem)
            return
        deadline = time.monotonic() + min(ask.deadline_s, self._max_deadline_s)
        landing = Landing(self._arrivals(engine, [need.positions for need in needs], 0))  # unless tiers have some
        asks = {session.process: Ask(session, ask.attempt)}
        request = InboundRequest(engine, ask, needs, landing, deadline, asks, owner=self.owner)
        self.requests[engine, ask.request_id] = request
        self._counts[engine] += 1
        self.pulls.on_asked(request)
        if self.queue is not None:
            self.queue.add(request)
            self.grant_queued()
        else:
            self.expectations.unmatched[ask.request_id] = request
            self._grant_expected(ask.request_id)

    def _problem(self, engine: PrefillEngine, ask: TransferRequest) -> str | None:
        """Say what is wrong with a request, if anything."""
        if self.closing is not None:
            return str(self.closing)
        if not ask.num_tokens:
            return "the prompt has no tokens"
        if ask.request_id in self.expectations.unmatched:
            return f"request id {ask.request_id} is in use"
        if self._counts[engine] >= MAX_REQUESTS:
            return f"{MAX_REQUESTS} requests of {engine.engine_id} are under way; begin more when some have ended"
        return None

    def _join(self, request: InboundRequest, session: Session, ask: TransferRequest) -> None:
        """Let another process of the producer send its part of a request."""
        joined = request.asks[session.process] = Ask(session, ask.attempt)
        if ask.num_tokens != request.num_tokens:
            text = f"its processes disagree: the prompt has {request.num_tokens} and {ask.num_tokens} tokens"
            self.fail(request, TransferError(text))
            return
        request.deadline = min(request.deadline, time.monotonic() + ask.deadline_s)
        if request.state is InboundState.RECEIVING:
            self._say_granted(request, joined, [])

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
        """Tell the producer's processes which blocks to write, and what of the prompt they need not send."""
        request.fetched = fetched
        positions = [need.positions for need in request.needs]
        fewer = self._arrivals(request.engine, positions, fetched.num_tokens) if fetched.num_tokens else None
        tables = tuple(request.granted(group) for group in range(len(self.cache.groups)))
        request.landing.open(tables, request.deadline, fewer)
        request.go(InboundState.RECEIVING)
        for ask in list(request.heard()):
            self._say_granted(request, ask, [])

    def _say_granted(self, request: InboundRequest, ask: Ask, arrived: list[Part]) -> None:
        session = ask.session
        ask.door = Door(request.landing, session.match)
        self.receiver.grant(session.session_id, request.request_id, ask.door)
        grant = Grant(
            request_id=request.request_id,
            groups=granted_blocks(request),
            deadline_s=max(0.0, request.deadline - time.monotonic()),
            cached_tokens=request.fetched.num_tokens,
            attempt=ask.attempt,
            arrived=arrived,
        )
        self.effects.send(session.peer, grant)

    def _arrivals(self, engine: PrefillEngine, needed: Sequence[range], cached_tokens: int) -> Arrivals:
        """Return what must arrive of a request whose first cached_tokens are here. needed: positions of each group."""
        groups, expected = self.cache.groups, engine.expected
        positions = [groups[one.group].uncached(needed[one.group], cached_tokens) for one in expected]
        return Arrivals(expected, positions)

    # -- a session that is lost, and its successor --------------------------------------------------------------------

    def suspend(self, session: Session) -> None:
        """Let nothing more of a session in: its process may ask for what has not all arrived in another one."""
        for request in list(self.requests.values()):
            ask = request.ask_of(session)
            if ask is not None and request.state is not InboundState.READY:
                ask.suspended = True
                if ask.door is not None:
                    self.receiver.withdraw(session.session_id, request.request_id, ask.door)

    def _resume(self, request: InboundRequest, ask: Ask, session: Session, again: TransferRequest) -> None:
        """Go on in another session, once nothing of the one before is being written any more."""
        before, ask.session, ask.attempt, ask.complete, ask.suspended = (
            ask.session, session, again.attempt, None, False,
        )  # fmt: skip
        door, ask.door = ask.door, None
        logger.info("request %s goes on in a new session of %s", request.request_id, session.name)
        if again.num_tokens != request.num_tokens:
            self.fail(request, TransferError(f"it had {request.num_tokens} tokens, and has {again.num_tokens} now"))
        elif door is not None:
            go_on = partial(self._go_on, request, ask, again.attempt, before)
            if door.close(partial(self.effects.post, go_on)):
                go_on()

    def _go_on(self, request: InboundRequest, ask: Ask, attempt: int, before: Session) -> None:
        if request.state is InboundState.RECEIVING and ask.attempt == attempt and not ask.suspended:
            self._say_granted(request, ask, request.landing.keep_noticed(before.match))

    # -- towards its end ----------------------------------------------------------------------------------------------

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
        for ask in request.heard():
            self.effects.send(ask.session.peer, Release(request_id=request.request_id, attempt=ask.attempt))

    def note_verified(self, request: InboundRequest) -> None:
        """Every element of a request is the producer's."""
        request.verified = True

    def finish(self, request: InboundRequest, finished: Finished) -> None:
        """End a request well, and tell the producer how."""
        asks = list(request.heard())
        if self.end(request, None):
            for place, ask in enumerate(asks):
                self.effects.send(ask.session.peer, _for_process(finished, ask, first=place == 0))
        self.grant_queued()

    def fail(self, request: InboundRequest, error: PdtxError, *, but: Session | None = None, tell: bool = True) -> None:
        """End a request as failed. tell: whether its producer's processes hear of it; but: the one that knows it."""
        self.end(request, error, but=but, tell=tell)
        self.grant_queued()

    def cancel(self, request: InboundRequest, reason: str) -> None:
        """End a request because this node does not want it any more."""
        self.fail(request, TransferAborted(f"request {request.request_id} was cancelled: {reason}"))

    def end_all(
        self, requests: Iterable[InboundRequest], error: PdtxError, *, but: Session | None = None, tell: bool = True
    ) -> None:
        """End requests as failed: all of them leave the queue before any of their blocks are granted."""
        for request in list(requests):
            self.end(request, error, but=but, tell=tell)
        self.grant_queued()

    def end(
        self, request: InboundRequest, error: PdtxError | None, *, but: Session | None = None, tell: bool = True
    ) -> bool:
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
        for ask in request.asks.values():
            if ask.door is not None:
                self.receiver.withdraw(ask.session.session_id, request.request_id, ask.door)
        is_idle = request.landing.close(partial(self.effects.post, partial(self._on_idle, request)))
        request.references.put(error or PeerLost("the request has ended"))
        if error is not None:
            self._report(request, error, phase, but=but, tell=tell)
        if is_idle:
            self._return_blocks(request)
        return True

    def _phase(self, request: InboundRequest) -> str:
        """Return what a request waits for, for messages."""
        waits = request.state is InboundState.QUEUED
        return _UNEXPECTED if waits and self.queue is None else request.state.value

    def _forget(self, request: InboundRequest) -> None:
        engine = request.engine
        if self.requests.pop((engine, request.request_id), None) is not None:
            self._counts[engine] -= 1
            if not self._counts[engine]:
                del self._counts[engine]
            self.forget_idle(engine)

    def forget_idle(self, engine: PrefillEngine) -> None:
        """Forget a producer that is not there any more, unless it may come back for something."""
        if not self._counts[engine] and not self.pulls.waits_for(engine):
            self.engines.forget(engine)

    def _report(
        self, request: InboundRequest, error: PdtxError, phase: str, *, but: Session | None, tell: bool
    ) -> None:
        engine, extra, reason = request.engine, {"request_id": request.request_id}, reason_of(error)
        logger.warning("request %s from %s failed: %s", request.request_id, request.sender, reason, extra=extra)
        wrong = None
        if isinstance(error, VerificationError):
            phase, wrong = "verification", error.wrong
        silent = set(range(engine.processes)) - set(request.asks)
        if silent and engine.members:
            over = f"it has failed in {phase}: {reason}"
            if request.pulled:
                engine.failed.add_pulled(request.request_id, silent, over)
            else:
                engine.failed.add(request.request_id, request.deadline, over)
        for ask in request.heard():
            if tell and ask.session is not but:
                failure = Failure(
                    request_id=request.request_id, phase=phase, reason=reason, wrong=wrong, attempt=ask.attempt
                )
                self.effects.send(ask.session.peer, failure)

    def _on_idle(self, request: InboundRequest) -> None:
        self._return_blocks(request)
        self.grant_queued()

    def _return_blocks(self, request: InboundRequest) -> None:
        """Nothing is written into an ended request's blocks any more: they return, but for those that others hold."""
        request.go(InboundState.ENDED)
        self.draining.pop(request, None)
        if request.blocks is not None:
            self._put_back(self.pool.retire(request.blocks))
        if request.expected or (request.pulled and request.error is not None):
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
            phase, peer, waited = self._phase(request), request.sender, request.deadline - request.begun
            if phase is _UNEXPECTED:
                detail, peer = f"nothing was said here about request {request.request_id}", "the decode node"
            self.end(request, DeadlineExceeded(phase, peer, round(waited, 3), detail))
        if late:
            self.grant_queued()
        self.expectations.tick(now)
        self.pulls.tick(now)
        return bool(self.requests or self.expectations.expected or self.pulls.pending)

    def close(self, error: PdtxError) -> None:
        """Grant nothing more, and end every request. What is asked for later is refused."""
        self.closing = error
        self.end_all(self.requests.values(), error)
        self.expectations.drop_all(error)
        self.pulls.drop_all(error)

    # -- requests whose blocks are the caller's -----------------------------------------------------------------------

    def deliver(self, request: InboundRequest, error: PdtxError | None) -> None:
        """An expected request has all arrived. error: what verification found."""
        if error is not None:
            self.fail(request, error)
        elif not request.has_ended:
            self.release(request)
            self.finish(request, arrived_only(request))

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
            self.end_all([one for one in self.requests.values() if one.blocks is expected.blocks], error)

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
        self.pulls.drop(request_id, error)
        self.expectations.drop(request_id, error)
        self.end_all([one for one in self.requests.values() if one.request_id == request_id], error)


def _not_scrubbed() -> TransferError:
    return TransferError("its blocks could not be filled with poison; see the log")


def arrived_only(request: InboundRequest) -> Finished:
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


def _for_process(finished: Finished, ask: Ask, *, first: bool) -> Finished:
    """Return what one process hears of a request's end: the bytes that it has sent, and the runs for the first one."""
    sent = ask.complete.nbytes if ask.complete is not None else 0
    return Finished(
        request_id=finished.request_id,
        token_ids=finished.token_ids,
        text=finished.text,
        verified=finished.verified,
        wrong=finished.wrong if first else 0,
        received_bytes=min(sent, finished.received_bytes),
        received_runs=finished.received_runs if first else 0,
        times=finished.times,
        attempt=ask.attempt,
    )
