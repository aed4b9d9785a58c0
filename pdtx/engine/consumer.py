"""The consumer: grants blocks of the decode node's cache, receives into them, verifies, and hands requests over."""

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from pdtx.address import join_address, parse_address
from pdtx.cache import GroupAllocator, GroupBlocks, KVCaches, Verification, record_fence
from pdtx.engine.arrivals import Arrivals, Notice
from pdtx.engine.describe import facts_of
from pdtx.engine.granting import GrantQueue, granted_blocks, needs_of
from pdtx.engine.handshake import make_reject, make_welcome, open_session
from pdtx.engine.inbound import InboundRequest, InboundState, Session
from pdtx.engine.keeping import keep_request
from pdtx.engine.receiving import PayloadReceiver
from pdtx.engine.registering import CacheRegistration, register_cache
from pdtx.engine.verifier import Verifier
from pdtx.errors import (
    DeadlineExceeded,
    PdtxError,
    PeerLost,
    ProtocolError,
    TransferError,
    VerificationError,
)
from pdtx.layout import Layout
from pdtx.protocol import (
    Bye,
    CacheDescription,
    Complete,
    DataEndpoint,
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
from pdtx.sidechannel import Listener, Security
from pdtx.tiers import Moved
from pdtx.tiers.prefix import Fetched, PrefixCache, Request
from pdtx.transports import Mover, TransferKey

logger = logging.getLogger(__name__)

_LOADERS = 2
"""Requests that are loaded from tiers at once."""


class KVConsumer:
    """The decode node's engine: many producers, many requests. Safe to use from several threads.

    The life of a request: a producer asks; blocks are granted when enough are free; payloads are placed by this side's
    own plan; next_ready() hands the request out when all of it has arrived; verify() compares it with the producer's
    cache; finish() or fail() ends it. Blocks return to the pool when no payload can still be written into them.

    verify: whether memory is poisoned between uses, which verify() relies on.
    prefix: this node's tiers. What they have of a prompt is loaded before it is granted, and not sent.
    plan_layout: the layout to plan the first buffer with instead of its own: a deliberate fault, for tests.
    """

    def __init__(
        self,
        cache: KVCaches,
        description: CacheDescription,
        mover: Mover,
        *,
        verify: bool,
        max_deadline_s: float = 600.0,
        plan_layout: Layout | None = None,
        prefix: PrefixCache | None = None,
    ) -> None:
        self.cache, self.description, self.mover, self.prefix = cache, description, mover, prefix
        self.verifies, self.max_deadline_s = verify, max_deadline_s
        self.engine_id = f"decode-{uuid.uuid4().hex[:8]}"
        pools = {group.name: group.num_blocks for group in cache.groups}
        self.allocator = GroupAllocator(pools, cache.poison if verify else None)
        self._facts = facts_of(description, whose="this node's")
        self._lock = threading.RLock()
        self.receiver = PayloadReceiver(cache, self.allocator, self, self._lock, plan_layout)
        self._verifier = Verifier(cache, self.allocator, self._send)
        self._sessions: dict[str, Session] = {}
        self._requests: dict[tuple[bytes, str], InboundRequest] = {}  # (the session's peer, request id)
        self._queue = GrantQueue(cache.groups, self.allocator)
        self._ready: queue.Queue[InboundRequest | None] = queue.Queue()
        self._closing = threading.Event()
        self._reaper = threading.Thread(target=self._reap, name="pdtx-reaper", daemon=True)
        self._loaders = ThreadPoolExecutor(_LOADERS, "pdtx-loader") if prefix is not None else None
        self.registration = CacheRegistration()
        self.num_ended = 0
        self.num_failed = 0  # of those
        self.num_expired = 0  # of those, by their deadline
        self.duplicate_notices = 0  # deliveries that were told more than once
        self.unknown_notices = 0  # deliveries that were told, of which nothing is here
        self._listener: Listener | None = None
        self._endpoints: list[DataEndpoint] = []

    # -- serving ----------------------------------------------------------------------------------------------------

    def listen(self, address: str, *, security: Security, data_port: int = 0) -> str:
        """Serve producers at address ("HOST:PORT"), their payloads at data_port of the same host; return the address.

        The cache is registered with the mover before. Raises AddressInUse, TransferError for memory that cannot be
        registered, or InputError, for a wildcard address among others if the mover has none to advertise.
        """
        self.registration = register_cache(self.mover, self.cache)
        host, _ = parse_address(address)
        bound = self.mover.listen(join_address(host, data_port), self.receiver)
        self._endpoints = [DataEndpoint(mover=self.mover.name, address=bound)]
        with self._lock:  # a producer may say hello before this returns
            self._listener = Listener(address, self._on_message, self._on_lost, security=security)
        self._reaper.start()
        return self._listener.endpoint.removeprefix("tcp://")

    def close(self) -> None:
        """End every request and stop serving. Idempotent."""
        self._closing.set()
        closing = PeerLost(f"{self.engine_id} is closing")
        self.fail_where(lambda _: True, closing)
        self._ready.put(None)
        if self._reaper.is_alive():
            self._reaper.join()
        if self._loaders is not None:
            with self._lock:  # under which it is given work
                self._loaders.shutdown(wait=False, cancel_futures=True)
        self.mover.close()
        if self._listener is not None:
            self._listener.close()
        self.fail_where(lambda _: True, closing, tell=False)  # what was asked for meanwhile

    def next_ready(self, timeout_s: float) -> InboundRequest | None:
        """Return the next request whose cache has all arrived; None after timeout_s.

        Its blocks stay out of the pool, whatever becomes of it, until let_go(): the caller may write them.
        """
        try:
            request = self._ready.get(timeout=timeout_s) if timeout_s > 0 else self._ready.get_nowait()
        except queue.Empty:
            return None
        with self._lock:
            if request is None or request.blocks is None or request.error is not None:
                return None
            self.allocator.hold(request.blocks)
        return request

    def let_go(self, request: InboundRequest) -> None:
        """Say that the caller of next_ready() will not touch the request's blocks any more."""
        if request.blocks is not None:
            self.allocator.unhold(request.blocks)
            self.grant_queued()

    # -- the end of a request, on the decode loop's thread -------------------------------------------------------------

    def verify(self, request: InboundRequest) -> Verification:
        """Compare every element of a ready request with its source, and look for writes beside it.

        The source is the producer's cache; of blocks that came from a tier it is what was stored there, by content
        hashes. Raises VerificationError naming the first wrong coordinate and its true source, or what ended the
        request.
        """
        found = self._verifier.verify(request)
        request.verified = True
        return found

    def release(self, request: InboundRequest) -> None:
        """Tell the producer that its blocks are not needed any more."""
        self._send(request.session, Release(request_id=request.request_id))

    def finish(self, request: InboundRequest, finished: Finished) -> None:
        """End a request well, and tell the producer what came of it."""
        if self._end(request, None):
            self._send(request.session, finished)

    def fail(self, request: InboundRequest, error: PdtxError, *, tell: bool = True) -> None:
        """End a request as failed; the producer is told unless it said so itself."""
        phase = request.state.value
        if self._end(request, error):
            extra = {"request_id": request.request_id}
            logger.warning(
                "request %s from %s failed: %s", request.request_id, request.session.engine_id, error, extra=extra
            )
            if tell:
                wrong = None
                if isinstance(error, VerificationError):
                    phase, wrong = "verification", error.wrong
                reason = str(error)[:1000]
                failure = Failure(request_id=request.request_id, phase=phase, reason=reason, wrong=wrong)
                self._send(request.session, failure)

    def _end(self, request: InboundRequest, error: PdtxError | None) -> bool:
        """Take a request out and give its blocks back; False if it had ended before."""
        with self._lock:
            if request.state is InboundState.ENDED:
                return False
            request.state, request.error = InboundState.ENDED, error
            self.num_ended += 1
            self.num_failed += error is not None
            self.num_expired += isinstance(error, DeadlineExceeded)
            self._requests.pop((request.session.peer, request.request_id), None)
            self._queue.remove(request)
            blocks = request.blocks
        request.references.put(error or PeerLost("the request has ended"))
        if blocks is not None:
            self.allocator.free(blocks)
        # Also for one that only waited: it may have stood before others that fit.
        self.grant_queued()
        return True

    def session(self, session_id: str) -> Session | None:
        """Return a session, if there is one. Called under the lock."""
        return self._sessions.get(session_id)

    def request(self, session_id: str, request_id: str) -> InboundRequest | None:
        """Return a request that has not ended, if there is one. Called under the lock."""
        session = self._sessions.get(session_id)
        request = self._requests.get((session.peer, request_id)) if session is not None else None
        # A peer's earlier sessions have no say in what was granted to this one, nor the other way round.
        return request if request is not None and request.session is session else None

    def _fail_session(self, session: Session, error: PdtxError) -> None:
        self.fail_where(lambda request: request.session is session, error, tell=False)

    def fail_where(self, which: Callable[[InboundRequest], bool], error: PdtxError, *, tell: bool = True) -> None:
        """End all requests of a kind as failed."""
        with self._lock:
            requests = [request for request in self._requests.values() if which(request)]
        for request in requests:
            self.fail(request, error, tell=tell)

    def _reap(self) -> None:
        """Fail requests whose deadline has passed."""
        while not self._closing.wait(0.1):
            now = time.monotonic()
            with self._lock:
                late = [request for request in self._requests.values() if request.deadline < now]
            for request in late:
                with self._lock:  # payloads may arrive while we look
                    lacking = request.lacking()
                detail = f"{request.received_bytes} bytes received; {lacking}"
                waited = round(request.deadline - request.begun, 3)
                self.fail(request, DeadlineExceeded(request.state.value, request.session.engine_id, waited, detail))

    # -- messages, on the side channel's thread ------------------------------------------------------------------------

    def _send(self, session: Session, message: Message) -> None:
        if self._listener is not None:
            self._listener.send(session.peer, message)

    def _on_lost(self, peer: bytes, reason: str) -> None:
        with self._lock:
            gone = [session for session in self._sessions.values() if session.peer == peer]
            for session in gone:
                del self._sessions[session.session_id]
        for session in gone:
            lost = PeerLost(f"lost {session.engine_id}: {reason}")
            self._fail_session(session, lost)

    def _on_message(self, peer: bytes, message: Message) -> None:
        if isinstance(message, Hello):
            self._on_hello(peer, message)
            return
        with self._lock:
            session = next((session for session in self._sessions.values() if session.peer == peer), None)
        if session is None:
            logger.warning("ignored a %s from a peer that has not said hello", type(message).__name__)
            if self._listener is not None:
                # It may have been given up as silent while it was only slow, and take itself for connected.
                self._listener.send(peer, Bye(reason="it has no session; say hello first"))
            return
        if isinstance(message, TransferRequest):
            self._on_request(session, message)
        elif isinstance(message, LayerDone | Complete | Failure | Reference):
            self._on_request_message(session, message)
        else:
            logger.warning("ignored a %s from %s", type(message).__name__, session.engine_id)

    def _on_hello(self, peer: bytes, hello: Hello) -> None:
        with self._lock:  # listen() holds it until the listener is known
            listener = self._listener
        if listener is None:
            return
        try:
            session = open_session(peer, hello, self._facts)
        except ProtocolError as error:
            logger.warning("refused %s: %s", hello.engine_id, error)
            listener.send(peer, make_reject(error))
            return
        self._retire(peer)
        if session.match.not_sent:
            logger.warning("%s has %s, not sent here", session.engine_id, session.match.not_sent_text)
        with self._lock:
            self._sessions[session.session_id] = session
        welcome = make_welcome(
            session, self.engine_id, self._endpoints, lease_s=self.max_deadline_s, verifies=self.verifies
        )
        listener.send(peer, welcome)

    def _retire(self, peer: bytes) -> None:
        """End a peer's session because it asks for another one: nothing can come over its data connection any more.

        What has all arrived does not need it and goes on.
        """
        with self._lock:
            old = [session for session in self._sessions.values() if session.peer == peer]
            for session in old:
                del self._sessions[session.session_id]
        for session in old:
            lost = PeerLost(f"{session.engine_id} opened another session")
            self.fail_where(
                lambda request, of=session: request.session is of and request.state is not InboundState.READY,  # type: ignore[misc]
                lost,
                tell=False,
            )

    def _on_request(self, session: Session, ask: TransferRequest) -> None:
        align = self.prefix.block_tokens if self.prefix is not None else 1
        problem, needs = self._problem(session, ask), needs_of(self.cache.groups, ask, align)
        problem = problem or self._queue.impossible(needs)
        if problem is not None:
            self._send(session, Refuse(request_id=ask.request_id, reason=problem))
            return
        matches = session.match.buffers
        arrivals = Arrivals(matches, [needs[match.group].positions for match in matches])  # unless tiers have some
        deadline = time.monotonic() + min(ask.deadline_s, self.max_deadline_s)
        request = InboundRequest(session, ask, needs, arrivals, deadline)
        with self._lock:
            self._requests[session.peer, ask.request_id] = request
            self._queue.add(request)
        self.grant_queued()

    def _problem(self, session: Session, ask: TransferRequest) -> str | None:
        """Say what is wrong with a request, if anything."""
        if not ask.token_ids:
            return "the prompt has no tokens"
        if (session.peer, ask.request_id) in self._requests:
            return f"request id {ask.request_id} is in use"
        return None

    def grant_queued(self) -> None:
        """Grant blocks to waiting requests, first come first served, as long as there are enough in every group."""
        while True:
            with self._lock:
                request = self._queue.next()
                if request is None:
                    return
                loaders = self._loaders if not self._closing.is_set() else None
                if loaders is not None:
                    request.state = InboundState.LOADING
                    loaders.submit(self._load, request)
                    continue
            self._grant(request, Fetched())

    def _load(self, request: InboundRequest) -> None:
        """Load what the tiers have of a prompt, on a thread of its own, and grant the rest. No failure is the end."""
        prefix, blocks = self.prefix, request.blocks
        if prefix is None or blocks is None or request.state is not InboundState.LOADING:
            return
        fetched = Fetched()
        try:
            prompt = Request(prefix.keys(request.ask.token_ids), request.tables, blocks, self)
            fetched = prefix.fetch(prompt, request.num_tokens, request.deadline, resume=False, checked=self.verifies)
        except DeadlineExceeded as error:
            self.fail(request, error)  # something may still be written into the blocks
            return
        except Exception:
            logger.exception("nothing of request %s is loaded from a tier", request.request_id)
        self._grant(request, fetched)

    def _grant(self, request: InboundRequest, fetched: Fetched) -> None:
        """Tell the producer which blocks to write, and what of the prompt it need not send."""
        with self._lock:
            if request.state is InboundState.ENDED:
                return
            if fetched.num_tokens:
                request.fetched, request.arrivals = fetched, self._expected(request, fetched.num_tokens)
            request.state = InboundState.RECEIVING
            grant = Grant(
                request_id=request.request_id,
                groups=granted_blocks(request),
                deadline_s=max(0.0, request.deadline - time.monotonic()),
                cached_tokens=fetched.num_tokens,
            )
        self._send(request.session, grant)

    def _expected(self, request: InboundRequest, cached_tokens: int) -> Arrivals:
        """Return what must arrive of a request whose first cached_tokens are here."""
        matches, groups = request.session.match.buffers, self.cache.groups
        positions = [
            groups[match.group].uncached(request.needs[match.group].positions, cached_tokens) for match in matches
        ]
        return Arrivals(matches, positions)

    def hold(self, blocks: GroupBlocks) -> None:
        """Keep a request's blocks out of the pool, even when it ends, until unhold. Raises StaleBlocks."""
        self.allocator.hold(blocks)

    def unhold(self, blocks: GroupBlocks) -> None:
        """End one hold on each of blocks."""
        self.allocator.unhold(blocks)
        self.grant_queued()

    def keep(self, request: InboundRequest, token_ids: Sequence[int]) -> "Future[Moved] | None":
        """Put the whole blocks of a request that is at its end into this node's tiers, in the background.

        token_ids: those that the cache holds, of prompt and answer. Returns None where nothing is kept. Raises
        TierNotReady for a request that has not all arrived, or was not verified where this node verifies; TierError for
        tokens that are not the request's, or have no keys.
        """
        if self.prefix is None:
            return None
        fence = record_fence(self.cache.device)
        return keep_request(self.prefix, request, token_ids, holder=self, verifies=self.verifies, fence=fence)

    def _on_request_message(self, session: Session, message: LayerDone | Complete | Failure | Reference) -> None:
        with self._lock:
            request = self._requests.get((session.peer, message.request_id))
        if request is None:
            self.unknown_notices += isinstance(message, LayerDone)
            logger.info("ignored a %s for unknown request %s", type(message).__name__, message.request_id)
            return
        match message:
            case LayerDone():
                self._on_notice(request, message)
            case Reference():
                # One is asked for at a time; what comes beside that is not kept.
                if request.references.empty():
                    request.references.put(message)
            case Failure():
                reason = f"{session.engine_id} failed in {message.phase}: {message.reason}"
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
        with self._lock:
            notice = request.arrivals.notice(key)
            request.noticed_bytes += done.nbytes if notice is Notice.NEW else 0
            self.duplicate_notices += notice is Notice.DUPLICATE
            self.unknown_notices += notice is Notice.UNKNOWN
        if notice is not Notice.NEW:
            logger.warning("ignored a notice of %s from %s: %s", key, request.session.engine_id, notice.value)

    def _on_complete(self, request: InboundRequest, complete: Complete) -> None:
        """Accept a request only if every byte that the producer claims has been received here."""
        with self._lock:
            missing = request.missing() or request.arrivals.unnoticed()
            received, noticed = request.received_bytes, request.noticed_bytes
            if request.state is not InboundState.RECEIVING:
                logger.warning("ignored a second completion of request %s", request.request_id)
                return
            tokens = complete.num_tokens == request.num_tokens
            if missing is None and tokens and complete.nbytes == received == noticed:
                request.complete, request.state = complete, InboundState.READY
                self._ready.put(request)
                return
        claims = (
            f"claims {complete.num_tokens} tokens and {complete.nbytes} bytes, noticed {noticed}, received {received}"
        )
        if missing is not None:
            claims = f"{missing} ({claims})"
        self.fail(
            request, TransferError(f"{request.session.engine_id} completed {request.request_id} wrongly: {claims}")
        )
