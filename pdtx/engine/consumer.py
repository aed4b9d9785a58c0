"""The consumer: grants blocks of the decode node's cache, receives into them, verifies, and hands requests over."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from pdtx.address import join_address, parse_address
from pdtx.arguments import integer, seconds
from pdtx.cache import (
    BlockTables,
    CallerBlocks,
    GroupAllocator,
    GroupBlocks,
    KVCaches,
    Verification,
    record_fence,
)
from pdtx.engine.control_thread import FLOOD, ControlThread, PeerInbox
from pdtx.engine.describe import own_facts
from pdtx.engine.dialled_producer import DialledProducer
from pdtx.engine.granting import check_cached_tokens
from pdtx.engine.handshake import ProcessIdentity, make_reject, make_welcome
from pdtx.engine.inbound import Arrived, Expectation, InboundRequest, PrefillEngine
from pdtx.engine.inbound_control import InboundControl, arrived_only
from pdtx.engine.inbound_messages import InboundMessages
from pdtx.engine.keeping import keep_request
from pdtx.engine.landing import Door
from pdtx.engine.receiving import PayloadReceiver
from pdtx.engine.registering import CacheRegistration, register_cache
from pdtx.engine.scrubbing import Scrubber
from pdtx.engine.states import InboundState
from pdtx.engine.verifier import Verifier
from pdtx.engine.waking import Mailbox
from pdtx.errors import (
    DeadlineExceeded,
    InputError,
    PdtxError,
    PeerLost,
    ProtocolError,
    TransferError,
)
from pdtx.layout import Layout
from pdtx.plan.runs import Int64s
from pdtx.protocol import (
    MAX_TOKENS,
    CacheDescription,
    DataEndpoint,
    Finished,
    Hello,
    Message,
    Welcome,
    encode,
    request_id_of,
)
from pdtx.sidechannel import END_OF_SESSION, Listener, Security
from pdtx.text import reason_of
from pdtx.tiers import Moved
from pdtx.tiers.prefix import Fetched, PrefixCache, Request
from pdtx.transports import Mover, TransferKey

logger = logging.getLogger(__name__)

_VERIFIERS = 4
"""Expected requests that are verified at once: one whose producer does not answer must not keep all others waiting."""

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
    blocks: the caller's, who says by expect() into which blocks a request goes and learns by poll() how it ended; no
    decode loop is needed then, and verification has been done by then.
    engine_id, process, processes: of an engine whose ranks, or stages of layers, are processes of their own. Each gets
    its own part of every request, and a request is complete at each when its own part is.

    connect() and pull() turn the beginning round: this side dials a producer that offers requests, and asks for one.

    Raises InputError for the description, or blocks, of another cache, or for an identity that cannot be.
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
        blocks: CallerBlocks | None = None,
        engine_id: str | None = None,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self.cache, self.description, self.mover, self.prefix = cache, description, mover, prefix
        self.verifies, self.max_deadline_s = verify, seconds("max_deadline_s", max_deadline_s)
        self.identity = ProcessIdentity.of("decode", engine_id, process, processes)
        self.engine_id = self.identity.engine_id
        if blocks is not None and prefix is not None:
            raise InputError("tiers load into blocks of this node's own pool; give prefix or blocks, not both")
        if blocks is not None:
            blocks.require_for(cache.groups)
        self.pool: GroupAllocator | CallerBlocks = blocks or GroupAllocator.of(cache.groups)
        effects = _Effects(self)
        self.receiver = PayloadReceiver(cache, effects, plan_layout)
        self.core = InboundControl(
            cache,
            own_facts(cache, description),
            self.pool,
            self.receiver,
            effects,
            align=prefix.block_tokens if prefix is not None else 1,
            max_deadline_s=self.max_deadline_s,
            scrubs=verify,
        )
        self.registration = CacheRegistration()
        self._verifier = Verifier(cache, self.pool, effects.send)
        self._verifiers = ThreadPoolExecutor(_VERIFIERS, "pdtx-verifier") if blocks is not None and verify else None
        self._ready = Mailbox[InboundRequest | None]()
        self._loaders = ThreadPoolExecutor(_LOADERS, "pdtx-loader") if prefix is not None else None
        self._listener: Listener | None = None
        self._listening = threading.Lock()
        self._inboxes: dict[bytes, PeerInbox] = {}  # of the side channel's thread
        self._endpoints: list[DataEndpoint] = []
        self._messages = InboundMessages(self.core)
        self._dialled: dict[bytes, DialledProducer] = {}
        self.control = self.core.owner = ControlThread("pdtx-consumer", self.core.tick)
        self._scrubber = Scrubber(cache)

    @property
    def allocator(self) -> GroupAllocator:
        """The pool that blocks are granted from. Raises InputError where they are the caller's."""
        if isinstance(self.pool, CallerBlocks):
            raise InputError("blocks are the caller's here; there is no allocator")
        return self.pool

    @property
    def num_ended(self) -> int:
        """Requests that have ended."""
        return self.core.num_ended

    @property
    def num_failed(self) -> int:
        """Of those, the ones that failed."""
        return self.core.num_failed

    @property
    def num_expired(self) -> int:
        """Of those, the ones whose deadline had passed."""
        return self.core.num_expired

    @property
    def duplicate_notices(self) -> int:
        """Deliveries that were reported more than once."""
        return self.core.duplicate_notices

    @property
    def unknown_notices(self) -> int:
        """Deliveries that were reported, of which nothing is here."""
        return self.core.unknown_notices

    # -- serving ------------------------------------------------------------------------------------------------------

    def listen(self, address: str, *, security: Security, data_port: int = 0) -> str:
        """Serve producers at address ("HOST:PORT"), their payloads at data_port of the same host; return the address.

        The cache is registered with the transport before. Raises AddressInUse, TransferError for memory that cannot be
        registered, or InputError: for a wildcard address if the transport has none to advertise, among others, or for a
        consumer that listens already or was closed.
        """
        self.control.require_here()
        if self.core.closing is not None:
            raise InputError(f"{self.core.closing}; make another consumer")
        if self._listener is not None:
            raise InputError(f"this consumer listens at {self._listener.endpoint} already; make another one")
        self.registration = register_cache(self.mover, self.cache)
        host, _ = parse_address(address)
        bound = self.mover.listen(join_address(host, data_port), self.receiver)
        self._endpoints = [DataEndpoint(mover=self.mover.name, address=bound)]
        with self._listening:  # a producer may say hello before this returns
            self._listener = Listener(address, self._on_message, self._on_lost, security=security)
        return self._listener.endpoint.removeprefix("tcp://")

    def close(self) -> None:
        """End every request and stop serving. Idempotent; does nothing in a process that was forked.

        Raises InputError in on_free.
        """
        if self.control.is_forked:
            return
        self.control.require_outside("close()")
        self.control.call(self.core.close, PeerLost(f"{self.engine_id} is closing"))
        self._ready.put(None)
        for workers in (self._loaders, self._verifiers):
            if workers is not None:
                workers.shutdown(wait=workers is self._verifiers, cancel_futures=True)
        self.mover.close()
        if self._listener is not None:
            self._listener.close()
        for dialled in list(self._dialled.values()):
            dialled.close()
        self.control.call(lambda: None)  # after it nothing is given to the scrubber
        self._scrubber.close()
        self.control.close()

    def next_ready(self, timeout_s: float) -> InboundRequest | None:
        """Return the next request whose cache has all arrived; None after timeout_s.

        Its blocks stay out of the pool, whatever becomes of it, until let_go(): the caller may write them.
        """
        self.control.require_here()
        try:
            request = self._ready.get(timeout_s)
        except queue.Empty:
            return None
        return request if request is not None and self.control.call(self.core.take, request) else None

    def let_go(self, request: InboundRequest) -> None:
        """Say that the caller of next_ready() will not touch the request's blocks any more."""
        self.control.require_own(request)
        if request.blocks is not None:
            self.unhold(request.blocks)

    # -- the end of a request, on the decode loop's thread ------------------------------------------------------------

    def verify(self, request: InboundRequest) -> Verification:
        """Compare every element of a ready request with its source, and look for writes beside it.

        The source is the producer's cache; of blocks that came from a tier it is what was stored there, by content
        hashes. Raises VerificationError naming the first wrong coordinate and its true source, or what ended the
        request.
        """
        self.control.require_own(request)
        found = self._verifier.verify(request)
        self.control.call(self.core.note_verified, request)
        return found

    def release(self, request: InboundRequest) -> None:
        """Tell the producer that its blocks are not needed any more."""
        self.control.require_own(request)
        self.control.post(self.core.release, request)

    def finish(self, request: InboundRequest, finished: Finished | None = None) -> None:
        """End a request well, and tell the producer how; finished: None where nothing was decoded here.

        Raises ProtocolError for what no message can carry.
        """
        self.control.require_own(request)
        finished = finished or arrived_only(request)
        encode(finished)  # before the request ends, of which the producer would not learn otherwise
        self.control.call(self.core.finish, request, finished)

    def fail(self, request: InboundRequest, error: PdtxError) -> None:
        """End a request as failed, and tell the producer why."""
        self.control.require_own(request)
        self.control.call(self.core.fail, request, error)

    def cancel(self, request: InboundRequest | str, reason: str) -> None:
        """End a request: the producer sends no more of it than is moving now, and its blocks follow that.

        request: it, or the name of one that is expected.
        """
        if isinstance(request, str):
            self.control.call(self.core.cancel_named, request, reason)
        else:
            self.control.require_own(request)
            self.control.call(self.core.cancel, request, reason)

    # -- requests whose blocks are the caller's -----------------------------------------------------------------------

    def expect(
        self,
        request_id: str,
        num_tokens: int,
        tables: BlockTables,
        *,
        cached_tokens: int = 0,
        deadline_s: float,
        source: PrefillEngine | None = None,
        generation: int | None = None,
    ) -> None:
        """Let a request of num_tokens in, into the blocks of tables, one table for each group.

        It may be called before a producer asks for the request, or after. cached_tokens: of its beginning, that are in
        the blocks already: they are not sent, and blocks that hold them are not touched. deadline_s: from now, within
        which all of it must have arrived. poll() tells how it ended.
        source, generation: to pull it from a producer that offers it, see pull(); else a producer begins it.
        Raises CacheError or InputError for tables that cannot be, InputError for a request id in use and for what a
        request cannot have.
        """
        self.control.require_here()
        if not isinstance(self.pool, CallerBlocks):
            raise InputError("this consumer has a pool of its own; give it blocks=CallerBlocks(cache.groups)")
        name, deadline = request_id_of(request_id), time.monotonic() + seconds("deadline_s", deadline_s)
        count = integer("num_tokens", num_tokens, 1, MAX_TOKENS)
        cached = integer("cached_tokens", cached_tokens, 0, count)
        check_cached_tokens(self.cache, count, cached)
        expected = Expectation(name, count, self.pool.take(tables), cached, deadline)
        expected.owner = self.control
        try:
            self.control.call(self._expect, expected, source, generation)
        except BaseException:
            # It gives the blocks back itself where it raises; a signal's handler may have raised after it was expected.
            self.control.post(self.core.abandon, expected)
            raise

    def _expect(self, expected: Expectation, source: PrefillEngine | None, generation: int | None) -> None:
        self.core.expect(expected)
        if source is not None:
            try:
                self.core.pulls.begin(source, expected.request_id, generation, expected.deadline)
            except PdtxError as error:
                expected.reported = True
                self.core.expectations.drop(expected.request_id, error)
                raise

    # -- producers that are dialled -----------------------------------------------------------------------------------

    def connect(self, addresses: str | Sequence[str], *, security: Security, timeout_s: float = 10.0) -> PrefillEngine:
        """Dial all processes of a producer that listens, so that what it offers can be pulled; return the producer.

        addresses: of its processes, each once. Payloads come to where listen() said, which must have been called.
        Raises PeerUnreachable, AuthenticationFailed, PeerLost, IncompatiblePeer or DeadlineExceeded; InputError for
        addresses that are not those of one producer's processes.
        """
        self.control.require_here()
        limit = time.monotonic() + seconds("timeout_s", timeout_s)
        named = [addresses] if isinstance(addresses, str) else list(addresses)
        if not self._endpoints:
            raise InputError("this consumer does not listen; call listen() before connect(), for the payloads")
        if not named or len(set(named)) < len(named):
            raise InputError(f"the addresses {named} are to be those of a producer's processes; give each once")
        dialled = list[DialledProducer]()
        try:
            for address in named:
                one = self._dial(address, security)
                dialled.append(one)
                one.greet(max(0.0, limit - time.monotonic()))
            return self.control.call(self._engine_of, dialled)
        except BaseException:
            for one in dialled:
                one.close()
                self._dialled.pop(one.peer, None)
            raise

    def _dial(self, address: str, security: Security) -> DialledProducer:
        one = DialledProducer(
            address, security, control=self.control, core=self.core, messages=self._messages, receiver=self.receiver,
            welcome=self._welcome,
        )  # fmt: skip
        self._dialled[one.peer] = one
        return one

    def _engine_of(self, dialled: Sequence[DialledProducer]) -> PrefillEngine:
        sessions = [self.core.sessions.get(one.peer) for one in dialled]
        engines = {self.core.engines.engine_of(session) for session in sessions if session is not None}
        if len(engines) != 1 or None in sessions or not (engine := engines.pop()).whole:
            raise InputError(
                f"{len(dialled)} addresses are not those of all processes of one producer; give the address of each"
            )
        return engine

    def pull(self, request_id: str, source: PrefillEngine, *, generation: int | None = None, deadline_s: float) -> None:
        """Ask a producer for a request that it offers, into blocks of this node's own pool.

        source: as connect() returned it. generation: of the offer; None for whichever there is. The producer's lease is
        renewed until the request has ended here. deadline_s: from now, within which all of it must have arrived.
        next_ready() hands it out as any other; poll() tells of a pull that was refused, or has failed.
        Raises InputError for a request id in use, or PeerLost for a producer of which a process is gone.
        """
        self.control.require_here()
        name, deadline = request_id_of(request_id), time.monotonic() + seconds("deadline_s", deadline_s)
        if isinstance(self.pool, CallerBlocks):
            raise InputError("blocks are the caller's here; pull by expect(source=), which says where they are")
        self.control.call(self.core.pulls.begin, source, name, generation, deadline)

    def poll(self) -> list[Arrived]:
        """Return the expected requests, and the pulls that failed, which have ended since the last call; each once.

        Nothing is written into their blocks any more; those without an error are complete, and verified where this
        consumer verifies.
        """
        self.control.call(self.core.expectations.arrived.keep)  # and what was posted before
        return self.core.expectations.arrived.take()

    def _verify_expected(self, request: InboundRequest) -> None:
        error: PdtxError | None = None
        try:
            self.verify(request)
        except PdtxError as found:
            error = found
        except Exception as found:  # whatever it is, the caller must learn of it
            logger.exception("request %s could not be verified", request.request_id)
            error = TransferError(f"verification failed: {type(found).__name__}: {reason_of(found)}")
        self.control.post(self.core.deliver, request, error)

    # -- tiers --------------------------------------------------------------------------------------------------------

    def hold(self, blocks: GroupBlocks) -> None:
        """Keep a request's blocks out of the pool, even when it ends, until unhold. Raises StaleBlocks."""
        self.pool.hold(blocks)

    def unhold(self, blocks: GroupBlocks) -> None:
        """End one hold on each of blocks."""
        self.control.post(self.core.unhold, blocks)

    def keep(self, request: InboundRequest, token_ids: Sequence[int]) -> "Future[Moved] | None":
        """Put the whole blocks of a request that is at its end into this node's tiers, in the background.

        token_ids: those that the cache holds, of prompt and answer. Returns None where nothing is kept. Raises
        TierNotReady for a request that has not all arrived, or was not verified where this node verifies; TierError for
        tokens that are not the request's, or have no keys.
        """
        self.control.require_own(request)
        if self.prefix is None:
            return None
        fence = record_fence(self.cache.device)
        return keep_request(self.prefix, request, token_ids, holder=self, verifies=self.verifies, fence=fence)

    def _load(self, request: InboundRequest) -> None:
        """Load what the tiers have of a prompt, on a thread of its own. No failure is the end of the request."""
        prefix, blocks = self.prefix, request.blocks
        if prefix is None or blocks is None or request.state is not InboundState.LOADING:
            return
        fetched: Fetched | PdtxError = Fetched()
        try:
            prompt = Request(prefix.keys(request.ask.token_ids), request.tables, blocks, self)
            fetched = prefix.fetch(prompt, request.num_tokens, request.deadline, resume=False, checked=self.verifies)
        except DeadlineExceeded as error:
            fetched = error  # something may still be written into the blocks
        except Exception:
            logger.exception("nothing of request %s is loaded from a tier", request.request_id)
        self.control.post(self.core.on_loaded, request, fetched)

    # -- on the side channel's thread ---------------------------------------------------------------------------------

    def _on_lost(self, peer: bytes, reason: str) -> None:
        self._inboxes.pop(peer, None)
        self.control.post(self._messages.on_lost, peer, reason, departed=reason == f"closed: {END_OF_SESSION}")

    def _on_message(self, peer: bytes, message: Message) -> None:
        inbox = self._inboxes.setdefault(peer, PeerInbox())
        if inbox.take():
            self.control.post(self._handle, inbox, peer, message)
        elif self._listener is not None:
            self._listener.give_up(peer, FLOOD)

    def _handle(self, inbox: PeerInbox, peer: bytes, message: Message) -> None:
        inbox.done()
        if isinstance(message, Hello):
            self._on_hello(peer, message)
        else:
            self._messages.on_message(peer, message)

    def _on_hello(self, peer: bytes, hello: Hello) -> None:
        with self._listening:  # listen() holds it until the listener is known
            listener = self._listener
        if listener is None:
            return
        try:
            self._messages.on_hello(peer, hello, lambda session: self._welcome(session.session_id, session.token))
        except ProtocolError as error:
            logger.warning("refused %s: %s", hello.engine_id, reason_of(error))
            listener.send(peer, make_reject(error))

    def _welcome(self, session_id: str, token: bytes) -> Welcome:
        return make_welcome(
            self.identity,
            self.description,
            session_id,
            token,
            self._endpoints,
            lease_s=self.max_deadline_s,
            verifies=self.verifies,
        )


class _Effects:
    """What the control of a consumer brings about, and the events that come of it."""

    def __init__(self, consumer: KVConsumer) -> None:
        self._of = consumer

    # -- InboundEffects, on the control thread ------------------------------------------------------------------------

    def send(self, peer: bytes, message: Message) -> None:
        """See InboundEffects."""
        dialled = self._of._dialled.get(peer)
        if dialled is not None:
            dialled.channel.send(message)
        elif self._of._listener is not None:
            self._of._listener.send(peer, message)

    def post(self, event: Callable[[], object]) -> None:
        """See InboundEffects."""
        self._of.control.post(event)

    def load(self, request: InboundRequest) -> bool:
        """See InboundEffects."""
        if self._of._loaders is None or not request.ask.token_ids:
            return False
        self._of._loaders.submit(self._of._load, request)
        return True

    def scrub(self, ids: Sequence[Int64s], then: Callable[[bool], object]) -> None:
        """See InboundEffects."""
        self._of._scrubber.scrub(ids, lambda worked: self._of.control.post(then, worked))

    def ready(self, request: InboundRequest) -> None:
        """See InboundEffects."""
        of = self._of
        if not request.expected:
            of._ready.put(request)
        elif of._verifiers is not None:
            of._verifiers.submit(of._verify_expected, request)
        else:
            of.control.post(of.core.deliver, request, None)

    # -- ReceivingEvents, on the transport's threads ------------------------------------------------------------------

    def on_payload_failed(self, session_id: str, request_id: str, door: Door, error: PdtxError) -> None:
        """See ReceivingEvents."""
        self._of.control.post(self._of._messages.on_payload_failed, session_id, request_id, door, error)

    def on_payload_twice(self, key: TransferKey) -> None:
        """See ReceivingEvents."""
        self._of.control.post(self._of._messages.on_payload_twice, key)

    def on_connection_closed(self, session_id: str, reason: str) -> None:
        """See ReceivingEvents."""
        self._of.control.post(self._of._messages.on_connection_closed, session_id, reason)
