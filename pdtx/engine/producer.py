"""The producer: ships a request's cache out of the prefill node, layer by layer, and waits for its end."""

import logging
import threading
import time
import uuid
from collections.abc import Sequence

import numpy as np
import torch

from pdtx.cache import GroupAllocator, GroupBlocks, KVCaches, record_fence
from pdtx.engine.control import ControlChannel
from pdtx.engine.describe import facts_of
from pdtx.engine.handshake import choose_endpoint, make_hello, match_welcome
from pdtx.engine.outbound import OutboundRequest, Piece
from pdtx.engine.path import check_path
from pdtx.engine.picking import ModePicker
from pdtx.engine.registering import CacheRegistration, register_cache
from pdtx.engine.route import Route
from pdtx.engine.shipping import Shipper
from pdtx.errors import (
    DeadlineExceeded,
    IncompatiblePeer,
    InputError,
    PdtxError,
    PeerLost,
    PeerSilent,
    ProtocolError,
    TransferAborted,
    TransferError,
    VerificationError,
)
from pdtx.plan import CostTable, Mode
from pdtx.protocol import (
    CacheDescription,
    Complete,
    Failure,
    Finished,
    Grant,
    LayerDone,
    Message,
    ReadReference,
    Reference,
    Refuse,
    Reject,
    Release,
    TransferRequest,
    Welcome,
)
from pdtx.sidechannel import Security
from pdtx.transports import Connection, Mover, Path, TransferHandle, TransferKey
from pdtx.transports.base import PathKind

logger = logging.getLogger(__name__)

_ATTEMPT_S = 2.0
"""How long one attempt at a new session may take, before another one is made."""

_PAUSE_S = 0.05


class KVProducer:
    """The prefill node's engine: one consumer, many requests. Safe to use from several threads.

    mode: how pieces move; auto picks for each by costs, of movers on this machine.

    The life of a request: begin() asks for a grant; layer_ready() as each layer is computed; computed() after the last
    one; wait() for what the consumer made of it. Blocks are given back when the consumer releases them, or
    when the request has failed and no transfer reads them any more.
    """

    def __init__(
        self,
        cache: KVCaches,
        description: CacheDescription,
        mover: Mover,
        *,
        engine_id: str | None = None,
        mode: Mode = Mode.AUTO,
        costs: CostTable | None = None,
    ) -> None:
        self.cache, self.description, self.mover = cache, description, mover
        self.mode, self._costs = mode, costs or CostTable({})
        self.registration = CacheRegistration()
        self.allocator = GroupAllocator({group.name: group.num_blocks for group in cache.groups})
        self.engine_id = engine_id or f"prefill-{uuid.uuid4().hex[:8]}"
        self._requests: dict[str, OutboundRequest] = {}
        self._changed = threading.Condition()
        self._channel: ControlChannel | None = None
        self._require: PathKind | None = None
        self._route: Route | None = None
        self._sessions = threading.Lock()  # held while one is made, and while a request is begun in it
        self._lost: PdtxError | None = None  # what ended the session, until there is another one
        self._over: PdtxError | None = None  # why there will not be another one
        self.consumer: Welcome | None = None

    @property
    def not_sent(self) -> tuple[str, ...]:
        """Layers of this cache that the consumer does not have, so that they stay here; empty before connect()."""
        return self._route.match.not_sent if self._route is not None else ()

    # -- connecting -------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """What carries the payload, as found after connect(); None before."""
        return self._route.connection.path if self._route is not None else None

    def connect(
        self, address: str, *, security: Security, timeout_s: float = 10.0, require: PathKind | None = None
    ) -> None:
        """Register the cache, shake hands with the consumer at address, and open the data connection.

        require: what must carry the payload. Raises WrongTransport if something else would, before any payload;
        PeerUnreachable, AuthenticationFailed, IncompatiblePeer, ProtocolError or DeadlineExceeded; TransferError for a
        cache that cannot be registered, InputError if it is to be staged by a mover that cannot.
        """
        self.registration = register_cache(self.mover, self.cache)
        self._require = require
        self._channel = ControlChannel(address, security, self._on_message, self._on_lost)
        with self._sessions:
            self._route = self._open(self._channel, timeout_s)

    def _open(self, channel: ControlChannel, timeout_s: float) -> Route:
        """Shake hands for a session of its own, and open its data connection. Raises as connect() does."""
        deadline = time.monotonic() + timeout_s
        answer = channel.greet(make_hello(self.engine_id, self.description, self.mover.name), timeout_s)
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"{channel.address} answered with a {type(answer).__name__}")
        match = match_welcome(answer, facts_of(self.description, whose="this node's"))
        self.consumer = answer
        if match.not_sent:
            logger.warning("%s does not have %s: not sent", self.peer, match.not_sent_text)
        endpoint = choose_endpoint(answer, self.mover.name)
        connection = self.mover.connect(endpoint.address, answer.session_id, answer.token, deadline)
        try:
            check_path(connection.path, self.peer, self._require)
            shipper = Shipper(self.cache, match, connection, self, self._modes(connection))
        except BaseException:
            connection.close()
            raise
        return Route(match, connection, shipper)

    def _ensure_session(self, deadline: float) -> None:
        """Make another session where the last one was lost, or its data connection. Called by who has _sessions.

        Raises what stands in the way; whatever does so for good is raised from then on.
        """
        if self._over is not None:
            raise self._over
        problem = self._lost or (self._route.ended() if self._route is not None else None)
        if problem is not None and self._channel is not None:
            self._renew(self._channel, problem, deadline)

    def _renew(self, channel: ControlChannel, problem: PdtxError, deadline: float) -> None:
        """Leave a session whose payloads cannot go on, and get another one, with a token of its own.

        What has arrived goes on: it only needs the control channel. All else has ended before anything new begins, so
        that nothing of the old connection can be taken for the new one's.
        """
        begun, old = time.monotonic(), self._route
        logger.warning("cannot go on with %s as before: %s", self.peer, problem)
        with self._changed:  # or one of them could be completed before it fails
            for request in [request for request in self._requests.values() if not request.completed]:
                self.fail(request, PeerLost(f"the data connection to {self.peer} ended: {problem}"))
        if old is not None:
            old.connection.close()
        while True:
            try:
                route = self._open(channel, min(_ATTEMPT_S, max(0.0, deadline - time.monotonic())))
                with self._changed:
                    self._route = route
                    self._lost = channel.lost  # whatever was said of an earlier channel, until it was dialled anew
                break
            except (PeerSilent, PeerLost, DeadlineExceeded) as error:
                # It may be slow, or stopped for a while.
                self._lost = error
                if self._over is not None:  # closed meanwhile
                    raise self._over from None
                if time.monotonic() + _PAUSE_S > deadline:
                    waited = round(time.monotonic() - begun, 3)
                    raise DeadlineExceeded("a new session", self.peer, waited, str(error)) from None
                time.sleep(_PAUSE_S)
            except PdtxError as error:
                self._over = self._lost = PeerLost(f"{problem}; a new session with {self.peer} cannot be had: {error}")
                raise self._over from None
        if old is not None:
            old.shipper.close()
        logger.warning("a new session with %s is open", self.peer)

    def _modes(self, connection: Connection) -> ModePicker:
        if self.mode is Mode.STAGED and not connection.stages:
            raise InputError(f"mover {self.mover.name} cannot stage here; choose mode direct or auto, or another mover")
        device, mover = self.cache.device.type, self.mover.name
        return ModePicker(self.mode, stages=connection.stages, mover=mover, device=device, table=self._costs)

    def close(self) -> None:
        """End everything; requests that have not ended fail. Idempotent."""
        self._over = self._over or PeerLost("the producer was closed")
        self._fail_all(self._over)
        with self._sessions:
            if self._route is not None:
                self._route.close()
            if self._channel is not None:
                self._channel.close()

    # -- a request's life -------------------------------------------------------------------------------------------

    def begin(
        self, request_id: str, token_ids: Sequence[int], *, max_tokens: int, timeout_s: float, ignore_eos: bool = False
    ) -> OutboundRequest:
        """Take blocks for a prompt and ask the consumer for a grant; does not wait for it.

        Raises OutOfBlocks, InputError for a request id in use, ProtocolError for a request that no message can carry,
        or what ended the session.
        """
        request = self._take_blocks(request_id, token_ids, time.monotonic() + timeout_s)
        try:
            with self._sessions:
                self._ensure_session(request.deadline)
                self._ask(request, max_tokens, ignore_eos=ignore_eos)
        except BaseException:
            if self.find(request_id) is request:  # a signal's handler has raised, after it was asked for
                self.fail(request, TransferAborted("it was interrupted while it was begun"))
            elif request.error is None:
                self.allocator.free(request.blocks)
            raise
        return request

    def _ask(self, request: OutboundRequest, max_tokens: int, *, ignore_eos: bool) -> None:
        request_id = request.request_id
        with self._changed:
            problem = (
                self._over
                or self._lost
                or (InputError(f"request id {request_id!r} is in use") if request_id in self._requests else None)
            )
            if problem is not None:
                raise problem
            self._requests[request_id] = request
        message = TransferRequest(
            request_id=request_id,
            token_ids=list(request.token_ids),
            max_tokens=max_tokens,
            deadline_s=max(0.0, request.deadline - time.monotonic()),
            ignore_eos=ignore_eos,
        )
        try:
            self._send(message)
        except ProtocolError as error:
            self.fail(request, error, tell=False)
            raise

    def blocks_needed(self, num_tokens: int) -> list[int]:
        """Return how many blocks a prompt of num_tokens takes of each group."""
        return [len(group.table_blocks(num_tokens)) for group in self.cache.groups]

    def _take_blocks(self, request_id: str, token_ids: Sequence[int], deadline: float) -> OutboundRequest:
        """Take blocks in every group, and make the block tables. Raises OutOfBlocks, taking none."""
        places = [group.table_blocks(len(token_ids)) for group in self.cache.groups]
        blocks = self.allocator.allocate([len(place) for place in places])
        sources = blocks.tables(places)
        tables = tuple(torch.as_tensor(source, device=self.cache.device) for source in sources)
        return OutboundRequest(request_id, token_ids, blocks, tables, deadline, sources)

    def layer_ready(self, request: OutboundRequest, buffer: int, layer: int, start: int, stop: int) -> None:
        """Ship what tokens start..stop have made of one layer of a buffer, which now lies in the cache.

        Returns at once. Ships nothing for a layer that the consumer does not have, and only positions that it needs.
        """
        route = self._route
        match = route.match.of_producer.get(buffer) if route is not None else None
        ours = match.layer_index.get(layer) if match is not None else None
        if route is None or match is None or ours is None:
            return
        positions = self.cache.groups[match.producer_group].ready(request.num_tokens, start, stop)
        if not positions:
            return
        fence = record_fence(self.cache.device)
        layers = range(ours, ours + 1)
        pieces = [Piece(request, match, move, layers, positions, fence) for move in match.moves]
        with self._changed:
            if request.error is not None:
                return
            if request.grant is not None:
                pieces = self._lacking(pieces, request.grant)
            request.unsent += len(pieces)
            if request.grant is None:
                request.waiting += pieces
                return
        for piece in pieces:
            route.shipper.put(piece)

    def _lacking(self, pieces: Sequence[Piece], grant: Grant) -> list[Piece]:
        """Return the pieces, or parts of them, that the consumer does not have."""
        groups = self.cache.groups
        parts = [piece.uncached(groups[piece.match.producer_group], grant.cached_tokens) for piece in pieces]
        return [part for part in parts if part is not None]

    def prefix_ready(self, request: OutboundRequest, num_tokens: int) -> None:
        """Ship the first num_tokens of a prompt, of which all lies in the cache without having been computed."""
        for index, buffer in enumerate(self.cache.buffers):
            for layer in range(buffer.num_layers):
                self.layer_ready(request, index, layer, 0, num_tokens)

    def computed(self, request: OutboundRequest, first_token: int) -> None:
        """Say that all layers of all tokens were layer_ready(), and what the first new token is."""
        with self._changed:
            request.computed, request.first_token = time.monotonic(), first_token
        self._complete_if_sent(request)

    def wait(self, request: OutboundRequest) -> Finished:
        """Wait until the consumer has finished the request, at most to its deadline.

        Raises what made it fail; the error names the phase it was in.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: request.finished is not None or request.error is not None, request.deadline - time.monotonic()
            )
            error, finished = request.error, request.finished
        if error is not None:
            raise error
        if finished is None:
            detail = f"{request.nbytes} bytes shipped, {request.unsent} pieces of them not acknowledged"
            with self._changed:
                first = next(iter(request.sending), None)
            if first is not None:
                detail += f", first {first}"
            waited = round(request.deadline - request.begun, 3)
            error = DeadlineExceeded(self._phase(request), self.peer, waited, detail)
            self.fail(request, error)
            raise error
        return finished

    def fail(self, request: OutboundRequest, error: PdtxError, *, tell: bool = True) -> None:
        """End a request as failed: tell the consumer, and give its blocks back once nothing reads them."""
        with self._changed:
            if request.error is not None or request.finished is not None:
                return
            request.error = error
            if request.sending and self._route is not None:
                # Its transfers have the same deadline, and what cuts them off may come to it a little later.
                self._route.note_cut()
            request.unsent -= len(request.waiting)
            request.waiting.clear()
            self._changed.notify_all()
        if tell and self._lost is None:
            self._send(Failure(request_id=request.request_id, phase=self._phase(request), reason=str(error)[:1000]))
        self._give_back(request)

    @property
    def peer(self) -> str:
        """The consumer's name, for messages."""
        return self.consumer.engine_id if self.consumer is not None else "the decode node"

    def _phase(self, request: OutboundRequest) -> str:
        if request.grant is None:
            return "a grant of blocks"
        if request.first_token is None:
            return "prefill"
        return "the transfer" if not request.completed else "verification and decoding"

    # -- what the shipper tells, on its thread and the mover's --------------------------------------------------------

    def find(self, request_id: str) -> OutboundRequest | None:
        """See ShippingEvents."""
        with self._changed:
            return self._requests.get(request_id)

    def on_read(self, answer: Reference) -> None:
        """See ShippingEvents."""
        self._send(answer)

    def on_not_answered(self, ask: ReadReference, error: PdtxError) -> None:
        """See ShippingEvents."""
        request = self.find(ask.request_id)
        if request is not None:
            self.fail(request, error)
        else:
            self._send(Failure(request_id=ask.request_id, phase="verification", reason=str(error)[:1000]))

    def on_sending(self, request: OutboundRequest, key: TransferKey) -> None:
        """See ShippingEvents."""
        with self._changed:
            request.sending[key] = None

    def on_dropped(self, piece: Piece, error: PdtxError | None) -> None:
        """See ShippingEvents."""
        request = piece.request
        with self._changed:
            request.sending.pop(piece.key, None)
        if error is not None:
            if type(error) is TransferError:  # the others say themselves what they are about
                error = TransferError(f"{piece} could not be sent: {error}")
            # In this order: settled first, it would look like a request that is complete.
            self.fail(request, error)
        self._settle(request)

    def on_sent(self, piece: Piece, handle: TransferHandle) -> None:
        """See ShippingEvents."""
        request = piece.request
        with self._changed:
            request.sending.pop(handle.key, None)
        if handle.error is not None:
            route = self._route
            if route is not None and isinstance(handle.error, DeadlineExceeded) and handle.posted == handle.posted:
                route.note_cut()
            self.on_dropped(piece, handle.error)
            return
        with self._changed:
            request.posts.append((handle.posted, handle.sent))
            request.moves.append((handle.posted, handle.ended))
        key = handle.key
        notice = LayerDone(
            request_id=request.request_id,
            buffer=key.buffer,
            src_rank=key.src_rank,
            dst_rank=key.dst_rank,
            layer_start=key.layer_start,
            layer_stop=key.layer_stop,
            token_start=key.token_start,
            token_stop=key.token_stop,
            nbytes=handle.nbytes,
        )
        self._send(notice)
        self._settle(request)

    def _settle(self, request: OutboundRequest) -> None:
        """Count one piece as no longer on its way."""
        with self._changed:
            request.unsent -= 1
        if request.error is not None or request.finished is not None:
            self._give_back(request)
        else:
            self._complete_if_sent(request)

    def _complete_if_sent(self, request: OutboundRequest) -> None:
        with self._changed:
            first_token = request.first_token
            if first_token is None or request.unsent or request.completed or request.error is not None:
                return
            if request.grant is None:  # all may be cached at the consumer, so that nothing waits for the grant
                return
            request.completed = True
            message = Complete(
                request_id=request.request_id,
                first_token=first_token,
                num_tokens=request.num_tokens,
                nbytes=request.nbytes,
            )
            self._send(message)  # under the lock, or the hello of another session could go before it

    def _give_back(self, request: OutboundRequest) -> None:
        """Return the blocks to the pool, once, when no transfer can read them any more; forget what has ended."""
        with self._changed:
            if request.finished is not None or request.error is not None:
                self._requests.pop(request.request_id, None)
            if request.released or request.unsent:
                return
            request.released = True
        self.allocator.free(request.blocks)
        with self._changed:
            self._changed.notify_all()

    def hold(self, blocks: GroupBlocks) -> None:
        """Keep a request's blocks out of the pool, even when it ends, until unhold. Raises StaleBlocks."""
        self.allocator.hold(blocks)

    def unhold(self, blocks: GroupBlocks) -> None:
        """End one hold on each of blocks."""
        self.allocator.unhold(blocks)
        with self._changed:
            self._changed.notify_all()

    def wait_for_blocks(self, counts: Sequence[int], timeout_s: float) -> bool:
        """Wait until so many blocks of each group are free, or no session will be had any more; whether they are."""

        def over() -> bool:
            return self._over is not None or self.allocator.fits(counts)

        with self._changed:
            self._changed.wait_for(over, timeout_s)
        return self.allocator.fits(counts)

    # -- messages, on the side channel's thread ----------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _on_message(self, message: Message) -> None:
        match message:
            case Welcome():
                self._answer(message)
            case Reject():
                self._answer(IncompatiblePeer(message.field, message.producer, message.consumer, message.advice))
            case ReadReference():
                with self._changed:  # or the shipper may be closed before it is put
                    if self._route is not None:
                        self._route.shipper.put(message)
            case Grant() | Refuse() | Failure() | Release() | Finished():
                self._on_request_message(message)
            case _:
                logger.warning("ignored a %s from %s", type(message).__name__, self.peer)

    def _answer(self, answer: Welcome | PdtxError) -> None:
        if self._channel is not None:
            self._channel.answer(answer)

    def _on_request_message(self, message: Grant | Refuse | Failure | Release | Finished) -> None:
        with self._changed:
            request = self._requests.get(message.request_id)
        if request is None:
            logger.warning("ignored a %s for unknown request %s", type(message).__name__, message.request_id)
            return
        match message:
            case Grant():
                self._on_grant(request, message)
            case Refuse():
                self.fail(
                    request, TransferError(f"{self.peer} refused {message.request_id}: {message.reason}"), tell=False
                )
            case Failure():
                self.fail(request, self._told(message), tell=False)
            case Release():
                if request.completed:
                    self._give_back(request)
            case Finished():
                with self._changed:
                    request.finished = message
                    self._changed.notify_all()
                self._give_back(request)

    def _told(self, failure: Failure) -> PdtxError:
        """Return the consumer's failure as an error of this side."""
        text = f"{self.peer} failed in {failure.phase}: {failure.reason}"
        return TransferError(text) if failure.wrong is None else VerificationError(text, failure.wrong)

    def _on_grant(self, request: OutboundRequest, grant: Grant) -> None:
        """Let go what waits for the grant. Which blocks it names is checked by the plan, as everything is."""
        route = self._route
        if route is None:
            return
        groups = route.match.consumer.groups
        if len(grant.groups) != len(groups):
            text = f"{self.peer} granted blocks of {len(grant.groups)} groups and has {len(groups)}"
            self.fail(request, ProtocolError(text))
            return
        if grant.cached_tokens > request.num_tokens:
            text = f"{self.peer} claims {grant.cached_tokens} cached tokens of a prompt of {request.num_tokens}"
            self.fail(request, ProtocolError(text))
            return
        destinations = tuple(np.asarray(group.block_ids, dtype=np.int64) for group in grant.groups)
        with self._changed:
            if request.grant is not None or request.error is not None:
                return
            request.grant, request.destinations = grant, destinations
            held_back = len(request.waiting)
            waiting, request.waiting = self._lacking(request.waiting, grant), []
            request.unsent += len(waiting) - held_back
        for piece in waiting:
            route.shipper.put(piece)
        self._complete_if_sent(request)

    def _on_lost(self, reason: str) -> None:
        self._fail_all(PeerLost(f"lost {self.peer}: {reason}"))

    def _fail_all(self, error: PdtxError) -> None:
        with self._changed:
            self._lost = self._lost or error
            requests = list(self._requests.values())
            self._changed.notify_all()
        for request in requests:
            self.fail(request, error, tell=False)
