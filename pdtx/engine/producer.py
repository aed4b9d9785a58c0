"""The producer: ships a request's cache out of the prefill node, layer by layer, and waits for its end."""

import itertools
import secrets
import time
from collections.abc import Sequence

from pdtx.arguments import integer, integers, seconds
from pdtx.cache import BlockTables, CallerBlocks, CallerTables, GroupAllocator, GroupBlocks, KVCaches, record_fence
from pdtx.engine.control_thread import ControlThread
from pdtx.engine.describe import own_facts
from pdtx.engine.handshake import ProcessIdentity
from pdtx.engine.opening import SessionOpener
from pdtx.engine.outbound import OutboundRequest, ReadySlice
from pdtx.engine.outbound_control import OutboundControl
from pdtx.engine.outbound_leg import Leg, Piece
from pdtx.engine.outbound_session import DecodeEngine, OutboundSession
from pdtx.engine.producer_sessions import ProducerSessions
from pdtx.engine.registering import CacheRegistration, register_cache
from pdtx.engine.route import Route
from pdtx.engine.shipping import Asked, Item, Posted, Shipper
from pdtx.engine.waking import Bell
from pdtx.errors import DeadlineExceeded, InputError, PdtxError, PeerLost, ProtocolError, TransferAborted
from pdtx.plan import CostTable, Mode
from pdtx.protocol import (
    MAX_COUNT,
    MAX_TOKENS,
    CacheDescription,
    Finished,
    Message,
    Reference,
    Welcome,
    encode,
    request_id_of,
)
from pdtx.sidechannel import Security
from pdtx.transports import Mover, Path, TransferHandle
from pdtx.transports.base import PathKind

_GRACE_S = 5.0
"""How long after a request's deadline wait() gives the control thread to end it."""


class KVProducer:
    """The prefill node's engine, or one of its processes: many requests, to one consumer or several.

    Safe to use from several threads.

    mode: how pieces move; auto picks for each by costs, of transports on this machine.
    blocks: the caller's, whose block tables begin() and extend() take; None for a pool of the producer's own.
    engine_id, process, processes: of an engine whose ranks, or stages of layers, are processes of their own. Each then
    begins every request, under the same request id.
    resumes: whether what a lost connection or consumer has not received goes on in another session, until the request's
    deadline; only pieces that have not arrived are sent again.

    The life of a request: begin() asks for a grant; layer_ready() as each layer is computed; computed() after the last
    one; wait(), or poll(), for what the consumer made of it. Blocks are given back when the consumer releases them, or
    when the request has ended and no transfer reads them any more. offer() instead of begin() holds them for a consumer
    that pulls.

    Raises InputError for the description, or blocks, of another cache, or for an identity that cannot be.
    """

    def __init__(
        self,
        cache: KVCaches,
        description: CacheDescription,
        mover: Mover,
        *,
        engine_id: str | None = None,
        process: int = 0,
        processes: int = 1,
        mode: Mode = Mode.AUTO,
        costs: CostTable | None = None,
        blocks: CallerBlocks | None = None,
        resumes: bool = False,
    ) -> None:
        self.cache, self.description, self.mover = cache, description, mover
        self.registration = CacheRegistration()
        if blocks is not None:
            blocks.require_for(cache.groups)
        self.pool: GroupAllocator | CallerBlocks = blocks or GroupAllocator.of(cache.groups)
        self.identity = ProcessIdentity.of("prefill", engine_id, process, processes)
        self.engine_id = self.identity.engine_id
        facts = own_facts(cache, description)
        opener = self._opener = SessionOpener(
            self.identity, cache, facts, mover, mode=mode, costs=costs or CostTable({}), resumes=resumes
        )
        self._bell = Bell()
        self._attempts = itertools.count(1)
        effects = _Effects(self)
        self.core = OutboundControl(cache, self.pool, effects, resumes=resumes)
        self.control = ControlThread("pdtx-producer", self.core.tick)
        self._sessions = ProducerSessions(self.core, self.control, opener)
        self._shipper = Shipper(cache, effects)

    # -- connecting ---------------------------------------------------------------------------------------------------

    @property
    def consumer(self) -> Welcome | None:
        """What the first consumer's first process said last when hands were shaken; None before connect()."""
        route = self.core.session.route
        return route.welcome if route is not None else None

    @property
    def peer(self) -> str:
        """The first consumer's name, for messages."""
        return self.core.session.peer

    @property
    def not_sent(self) -> tuple[str, ...]:
        """Layers of this cache that stay here, as neither side wants them moved; empty before connect()."""
        matches = [route.match for engine in self.core.engines[:1] for route in engine.routes]
        return tuple(
            name for name in (matches[0].not_sent if matches else ()) if all(name in m.not_sent for m in matches)
        )

    @property
    def path(self) -> Path | None:
        """What carries the payload, as found after connect(); None before, or where nothing moves from here."""
        routes = [route for engine in self.core.engines for route in engine.routes]
        return next((route.connection.path for route in routes if route.carries), None)

    @property
    def expired(self) -> int:
        """Offers that nobody has read within their leases."""
        return self.core.offers.expired

    @property
    def late_reads(self) -> int:
        """Pulls that were refused because the offer's lease had ended, or it had been pulled before."""
        return self.core.offers.late_reads

    @property
    def unknown_reads(self) -> int:
        """Pulls that were refused because nothing was offered by that name, or only in another generation."""
        return self.core.offers.unknown_reads

    def connect(
        self,
        addresses: str | Sequence[str],
        *,
        security: Security,
        timeout_s: float = 10.0,
        require: PathKind | None = None,
    ) -> DecodeEngine:
        """Register the cache, shake hands with all processes of a consumer, and open the data connections.

        addresses: of its processes, each once; or that of its only one. A producer can be connected to several
        consumers, of which begin(to=) names one. require: what must carry the payload.
        Raises WrongTransport if something else would, before any payload; PeerUnreachable, AuthenticationFailed,
        IncompatiblePeer, ProtocolError or DeadlineExceeded; TransferError for a cache that cannot be registered;
        InputError if it is to be staged by a transport that cannot, for addresses that are not those of one consumer's
        processes, or for a producer that was closed.
        """
        timeout_s = seconds("timeout_s", timeout_s)
        named = [addresses] if isinstance(addresses, str) else list(addresses)
        self._require_open()
        if not named or len(set(named)) < len(named):
            raise InputError(f"the addresses {named} are to be those of a consumer's processes; give each once")
        self.registration = register_cache(self.mover, self.cache)
        self._opener.require = require
        engine = self._sessions.connect(named, security, timeout_s)
        try:
            self._require_open()
        except InputError:  # close() may have looked for something to close before this was there
            self._sessions.close()
            raise
        return engine

    def listen(self, address: str, *, security: Security, require: PathKind | None = None) -> str:
        """Register the cache, and serve consumers that pull what is offered; return the address ("HOST:PORT").

        Raises AddressInUse, TransferError for memory that cannot be registered, or InputError for an address that needs
        keys, or a producer that listens already or was closed.
        """
        self._require_open()
        self.registration = register_cache(self.mover, self.cache)
        self._opener.require = require
        return self._sessions.listen(address, security)

    def _require_open(self) -> None:
        self.control.require_here()
        if self.core.over is not None:
            raise InputError(f"{self.core.over}; make another producer")

    def stop(self) -> None:
        """Let requests that have not ended fail, and all that begin from now on; close() releases what they used.

        Returns at once, and needs no other thread: a signal's handler may call it, whatever it interrupts. Does nothing
        in a process that was forked.
        """
        if self.control.is_forked:
            return
        self.control.post(self.core.close, PeerLost("the producer was closed"))

    def close(self) -> None:
        """End everything; requests that have not ended fail. Idempotent; does nothing in a process that was forked.

        Raises InputError in on_free.
        """
        if self.control.is_forked:
            return
        self.control.require_outside("close()")
        self.control.call(self.core.close, PeerLost("the producer was closed"))
        self._sessions.close()
        self._shipper.close()
        self.control.close()

    # -- a request's life ---------------------------------------------------------------------------------------------

    def begin(
        self,
        request_id: str,
        token_ids: Sequence[int] = (),
        *,
        max_tokens: int = 0,
        timeout_s: float,
        ignore_eos: bool = False,
        num_tokens: int | None = None,
        tables: BlockTables | None = None,
        to: DecodeEngine | None = None,
    ) -> OutboundRequest:
        """Take blocks for a prompt and ask the consumer for a grant; waits neither for it nor for a session.

        num_tokens: of the prompt, where token_ids are not named; a consumer's tiers need those. max_tokens: that the
        consumer is to generate; 0 where it decides by itself. timeout_s: within which the consumer must have finished.
        tables: a block table for each group, where blocks are the caller's; they may grow by extend().
        to: the consumer, as connect() returned it, where there are several.
        Raises OutOfBlocks; InputError for what a request cannot have, a request id in use, or before connect();
        CacheError for tables that cannot be, ProtocolError for a request that no message can carry, or what ended the
        last session for good.
        """
        request = self._request(request_id, token_ids, num_tokens, max_tokens, timeout_s, ignore_eos=ignore_eos)
        return self._start(request, tables, to)

    def offer(
        self,
        request_id: str,
        token_ids: Sequence[int] = (),
        *,
        lease_s: float,
        max_tokens: int = 0,
        timeout_s: float = 600.0,
        ignore_eos: bool = False,
        num_tokens: int | None = None,
        tables: BlockTables | None = None,
        generation: int | None = None,
    ) -> OutboundRequest:
        """Take blocks for a prompt, and hold them for a consumer that pulls the request.

        It goes on as with begin(): layer_ready(), computed(), wait() or poll(). From computed() on the blocks are held
        for lease_s, and for as long again from each time that the consumer says that it still wants them; then they are
        given back, and the request has failed with LeaseExpired. timeout_s: within which all of it must have ended.
        generation: names this offer, so that a consumer that names another one does not get it; drawn where None. The
        processes of one producer are given the same one.
        Raises as begin().
        """
        lease_s = seconds("lease_s", lease_s)
        if not lease_s:
            raise InputError("lease_s is 0; give the seconds that the offer is held for")
        request = self._request(request_id, token_ids, num_tokens, max_tokens, timeout_s, ignore_eos=ignore_eos)
        request.lease_s = lease_s
        request.generation = (
            secrets.randbits(62) if generation is None else integer("generation", generation, 0, MAX_COUNT)
        )
        return self._start(request, tables, None)

    def _request(
        self,
        request_id: str,
        token_ids: Sequence[int],
        num_tokens: int | None,
        max_tokens: int,
        timeout_s: float,
        *,
        ignore_eos: bool,
    ) -> OutboundRequest:
        self.control.require_here()
        request_id = request_id_of(request_id)
        tokens = integers("token_ids", token_ids, 0, MAX_COUNT)
        count = len(tokens) if num_tokens is None else integer("num_tokens", num_tokens, 0, MAX_TOKENS)
        if len(tokens) not in (0, count):
            raise InputError(f"request {request_id}: {len(tokens)} token_ids, and num_tokens is {count}")
        return OutboundRequest(
            request_id,
            count,
            time.monotonic() + seconds("timeout_s", timeout_s),
            token_ids=tokens,
            max_tokens=integer("max_tokens", max_tokens, 0, MAX_TOKENS),
            ignore_eos=bool(ignore_eos),
            attempt=next(self._attempts),
            device=self.cache.device,
        )

    def _start(self, request: OutboundRequest, tables: BlockTables | None, to: DecodeEngine | None) -> OutboundRequest:
        request.encode_ask()  # before blocks are taken, which nobody would give back if it raised
        if isinstance(self.pool, CallerBlocks):
            if tables is None:
                raise InputError("blocks are the caller's here; give tables, one for each group")
            return self._begin(request, self.pool.take(tables), [], to)
        if tables is not None:
            raise InputError("this producer has a pool of its own; give it blocks=CallerBlocks(cache.groups)")
        return self._begin(request, None, [group.table_blocks(request.num_tokens) for group in self.cache.groups], to)

    def _begin(
        self, request: OutboundRequest, blocks: CallerTables | None, places: Sequence[range], to: DecodeEngine | None
    ) -> OutboundRequest:
        request.owner = self.control
        try:
            if blocks is not None:
                self.control.call(self.core.begin_in, request, blocks, to)
            else:
                self.control.call(self.core.begin, request, places, to)
        except BaseException:
            # A signal's handler may have raised after it was begun.
            self.control.post(self.core.abandon, request, TransferAborted("it was interrupted while it was begun"))
            raise
        return request

    def blocks_needed(self, num_tokens: int) -> list[int]:
        """Return how many blocks a prompt of num_tokens takes of each group."""
        return [len(group.table_blocks(num_tokens)) for group in self.cache.groups]

    def extend(self, request: OutboundRequest, tables: BlockTables) -> None:
        """Give a request longer block tables, one for each group, as chunked prefill takes more blocks.

        What is layer_ready() later may lie in them. A request that has ended takes no notice. Raises CacheError for
        tables that do not go on from the present ones, InputError where blocks are not the caller's.
        """
        self.control.require_own(request)
        self.control.call(self.core.extend, request, tables)

    def layer_ready(self, request: OutboundRequest, buffer: int, layer: int, start: int, stop: int) -> None:
        """Ship what tokens start..stop have made of one layer of a buffer, which now lies in the cache.

        buffer: the index in cache.buffers; layer: in that buffer. Returns at once. Ships nothing for a layer that the
        consumer does not have, and only positions that it needs. Raises InputError for what the cache does not have.
        """
        self.control.require_own(request)
        buffer, layer, start, stop = (
            integer(name, value, -MAX_COUNT, MAX_COUNT)
            for name, value in (("buffer", buffer), ("layer", layer), ("start", start), ("stop", stop))
        )
        self._check_slice(request, buffer, layer, start, stop)
        ready = ReadySlice(buffer, layer, start, stop, record_fence(self.cache.device))
        self.control.post(self.core.on_ready, request, ready)

    def _check_slice(self, request: OutboundRequest, buffer: int, layer: int, start: int, stop: int) -> None:
        buffers = self.cache.buffers
        if not 0 <= buffer < len(buffers):
            what = f"buffer {buffer}; this cache has {len(buffers)}: {', '.join(each.name for each in buffers)}"
        elif not 0 <= layer < buffers[buffer].num_layers:
            what = f"layer {layer}; buffer {buffers[buffer].name} has {buffers[buffer].num_layers}"
        elif not 0 <= start <= stop <= request.num_tokens:
            what = f"tokens {start}..{stop}; the prompt has {request.num_tokens}"
        else:
            return
        raise InputError(f"request {request.request_id}: layer_ready() of {what}")

    def prefix_ready(self, request: OutboundRequest, num_tokens: int) -> None:
        """Ship the first num_tokens of a prompt, of which all lies in the cache without having been computed."""
        for index, buffer in enumerate(self.cache.buffers):
            for layer in range(buffer.num_layers):
                self.layer_ready(request, index, layer, 0, num_tokens)

    def computed(self, request: OutboundRequest, first_token: int | None = None) -> None:
        """Say that all layers of all tokens were layer_ready(), and what the first new token is, if it is known.

        Raises InputError for what is no token.
        """
        self.control.require_own(request)
        if first_token is not None:
            first_token = integer(f"request {request.request_id}: first_token", first_token, 0, MAX_COUNT)
        self.control.post(self.core.computed, request, first_token)

    def cancel(self, request: OutboundRequest, reason: str) -> None:
        """End a request: what is queued and not begun never crosses; its blocks follow when the last transfer ends."""
        self.control.require_own(request)
        self.control.call(self.core.cancel, request, reason)

    def fail(self, request: OutboundRequest, error: PdtxError) -> None:
        """End a request as failed: tell the consumer, and give its blocks back once nothing reads them."""
        self.control.require_own(request)
        self.control.call(self.core.end, request, error)

    def wait(self, request: OutboundRequest) -> Finished:
        """Wait until the consumer has finished the request, at most to its deadline.

        Raises what made it fail; the error names the phase it was in.
        """
        self.control.require_own(request)
        self.control.require_outside("wait()")
        self._bell.wait_for(lambda: request.has_outcome, request.deadline + _GRACE_S - time.monotonic())
        if request.error is not None:
            raise request.error
        if request.finished is None:
            error = DeadlineExceeded(request.phase, self.peer, round(time.monotonic() - request.begun, 3))
            self.fail(request, error)
            raise error
        return request.finished

    def poll(self) -> list[OutboundRequest]:
        """Return requests that have ended since the last call, and whose blocks nothing reads any more.

        Each of them once: error says why it failed, finished how it ended well. With a pool of the producer's own,
        those that ended before the first call are not among them.
        """
        self.control.call(self.core.ended.keep)  # and what was posted before
        return self.core.ended.take()

    # -- blocks -------------------------------------------------------------------------------------------------------

    @property
    def allocator(self) -> GroupAllocator:
        """The pool that blocks are taken from. Raises InputError where they are the caller's."""
        if isinstance(self.pool, CallerBlocks):
            raise InputError("blocks are the caller's here; there is no allocator")
        return self.pool

    def hold(self, blocks: GroupBlocks) -> None:
        """Keep a request's blocks out of the pool, even when it ends, until unhold. Raises StaleBlocks."""
        self.pool.hold(blocks)

    def unhold(self, blocks: GroupBlocks) -> None:
        """End one hold on each of blocks."""
        self.control.post(self.core.unhold, blocks)

    def wait_for_blocks(self, counts: Sequence[int], timeout_s: float) -> bool:
        """Wait until so many blocks of each group are free, or no session will be had any more; whether they are."""
        self.control.require_here()
        self._bell.wait_for(lambda: self._is_over or self.allocator.fits(counts), timeout_s)
        return self.allocator.fits(counts)

    @property
    def _is_over(self) -> bool:
        """Whether no session will be had any more."""
        engines = self.core.engines
        return self.core.over is not None or (bool(engines) and all(engine.over is not None for engine in engines))


class _Effects:
    """What the control of a producer brings about, and the events that come of it."""

    def __init__(self, producer: KVProducer) -> None:
        self._of = producer

    # -- OutboundEffects, on the control thread -----------------------------------------------------------------------

    def send(self, session: OutboundSession, message: Message) -> None:
        """See OutboundEffects."""
        if session.channel is not None:
            session.channel.send(message)

    def ask(self, leg: Leg) -> None:
        """See OutboundEffects."""
        request = leg.request
        first = leg.attempt == request.attempt
        # The consumer has the prompt's tokens already when it is asked again.
        data = request.encoded_ask if first else encode(request.ask(leg.attempt, ()))
        if leg.session.channel is not None:
            leg.session.channel.send(data)

    def next_attempt(self) -> int:
        """See OutboundEffects."""
        return next(self._of._attempts)

    def ship(self, item: Item) -> None:
        """See OutboundEffects."""
        self._of._shipper.put(item)

    def open_session(self, session: OutboundSession, timeout_s: float) -> None:
        """See OutboundEffects."""
        self._of._sessions.reopen(session, timeout_s)

    def ring(self) -> None:
        """See OutboundEffects."""
        self._of._bell.ring()

    # -- ShippingEvents, on the shipper's thread and the transport's --------------------------------------------------

    def on_posted(self, posted: Posted) -> None:
        """See ShippingEvents."""
        of = self._of
        of.control.post(of.core.on_posted, posted)
        posted.handle.on_end(lambda handle: self._on_end(posted.piece, handle))

    def _on_end(self, piece: Piece, handle: TransferHandle) -> None:
        self._of.control.post(self._of.core.on_piece_end, piece, handle)

    def on_dropped(self, piece: Piece, error: PdtxError | None) -> None:
        """See ShippingEvents."""
        self._of.control.post(self._of.core.on_dropped, piece, error)

    def on_read(self, asked: Asked, answer: Reference | PdtxError) -> None:
        """See ShippingEvents."""
        data, error = b"", answer if isinstance(answer, PdtxError) else None
        if isinstance(answer, Reference):
            try:
                data = encode(answer)  # here, for it takes as long as the piece is great
            except ProtocolError as failure:
                error = failure
        # In this order: the blocks are not read any more, and the answer may end the request at once.
        self._of.control.post(self._of.core.on_read, asked, error)
        channel = asked.leg.session.channel
        if error is None and channel is not None:
            channel.send(data)

    def on_probed(self, route: Route, error: PdtxError | None) -> None:
        """See ShippingEvents."""
        self._of.control.post(self._of.core.on_probed, route, error)
