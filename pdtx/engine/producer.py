"""The producer: ships a request's K/V out of the prefill node's cache, layer by layer, and waits for its end."""

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from pdtx import __version__
from pdtx.cache import BlockAllocator, Blocks, PagedKVCache, record_fence
from pdtx.engine.describe import check_compatible, layout_of
from pdtx.engine.timing import Interval, TransferTimes
from pdtx.errors import (
    DeadlineExceeded,
    IncompatiblePeer,
    InputError,
    PdtxError,
    PeerLost,
    ProtocolError,
    TransferError,
    VerificationError,
)
from pdtx.layout import KVCacheLayout
from pdtx.plan import Endpoint, build_plan
from pdtx.protocol import (
    PROTOCOL_VERSION,
    CacheDescription,
    Complete,
    Failure,
    Finished,
    Grant,
    Hello,
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
from pdtx.sidechannel import Dialer, Security
from pdtx.transports import Connection, Mover, Region, TransferHandle, TransferKey

logger = logging.getLogger(__name__)


@dataclass
class OutboundRequest:
    """One request on its way out. Everything below `blocks` belongs to the producer.

    deadline: time.monotonic() by which the consumer must have finished it.
    """

    request_id: str
    token_ids: Sequence[int]
    blocks: Blocks
    deadline: float
    begun: float = field(default_factory=time.monotonic)
    computed: float = float("nan")
    first_token: int | None = None
    grant: Grant | None = None
    finished: Finished | None = None
    error: PdtxError | None = None
    waiting: list["Piece"] = field(default_factory=list)  # until the grant comes
    unsent: int = 0  # slices that are computed and not acknowledged
    nbytes: int = 0
    num_runs: int = 0
    prepare: float = 0.0
    posts: list[Interval] = field(default_factory=list)
    moves: list[Interval] = field(default_factory=list)
    released: bool = False
    completed: bool = False

    @property
    def times(self) -> TransferTimes:
        """How long the transfers took so far."""
        return TransferTimes.of(self.prepare, self.posts, self.moves, self.computed)


@dataclass(frozen=True)
class Piece:
    """A part of a request that is computed. fence: returns once the device has really written it."""

    request: OutboundRequest
    layers: range
    tokens: range
    fence: Callable[[], None]


class KVProducer:
    """The prefill node's engine: one consumer, many requests. Safe to use from several threads.

    The life of a request: begin() asks for a grant; layer_ready() as K/V are computed; computed() after the last one;
    wait() for what the consumer made of it. Blocks are given back when the consumer releases them, or
    when the request has failed and no transfer reads them any more.
    """

    def __init__(
        self, cache: PagedKVCache, description: CacheDescription, mover: Mover, *, engine_id: str | None = None
    ) -> None:
        self.cache, self.description, self.mover = cache, description, mover
        self.allocator = BlockAllocator(cache.num_blocks)
        self.engine_id = engine_id or f"prefill-{uuid.uuid4().hex[:8]}"
        self._region = Region(cache.memory)
        self._requests: dict[str, OutboundRequest] = {}
        self._changed = threading.Condition()
        self._answer: queue.SimpleQueue[Welcome | PdtxError] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[Piece | ReadReference | None] = queue.SimpleQueue()
        self._shipper: threading.Thread | None = None
        self._dialer: Dialer | None = None
        self._connection: Connection | None = None
        self._lost: PdtxError | None = None
        self.consumer: Welcome | None = None
        self._consumer_layout: KVCacheLayout | None = None

    # -- connecting -------------------------------------------------------------------------------------------------

    def connect(self, address: str, *, security: Security, timeout_s: float = 10.0) -> None:
        """Shake hands with the consumer at address and open the data connection.

        Raises PeerUnreachable, AuthenticationFailed, IncompatiblePeer, ProtocolError or DeadlineExceeded.
        """
        deadline = time.monotonic() + timeout_s
        self._dialer = Dialer(address, self._on_message, self._on_lost, security=security)
        self._dialer.connect(timeout_s)
        self._dialer.send(self._hello())
        try:
            answer = self._answer.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise DeadlineExceeded("the handshake's answer", address, timeout_s) from None
        if isinstance(answer, PdtxError):
            raise answer
        if answer.protocol != PROTOCOL_VERSION:
            raise IncompatiblePeer(
                "protocol", str(PROTOCOL_VERSION), str(answer.protocol), "run the same pdtx on both sides"
            )
        check_compatible(self.description, answer.cache)
        self._consumer_layout = layout_of(answer.cache)
        self.consumer = answer
        endpoint = next((e for e in answer.data_endpoints if e.mover == self.mover.name), None)
        if endpoint is None:
            offered = ", ".join(e.mover for e in answer.data_endpoints)
            raise IncompatiblePeer("mover", self.mover.name, offered, "choose one that both sides have")
        self._connection = self.mover.connect(endpoint.address, answer.session_id, answer.token, deadline)
        self._shipper = threading.Thread(target=self._ship, name="pdtx-shipper", daemon=True)
        self._shipper.start()

    def _hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            pdtx_version=__version__,
            engine_id=self.engine_id,
            incarnation=uuid.uuid4().hex,
            cache=self.description,
            movers=[self.mover.name],
        )

    def close(self) -> None:
        """End everything; requests that have not ended fail. Idempotent."""
        self._fail_all(PeerLost("the producer was closed"))
        if self._connection is not None:
            self._connection.close()
        if self._shipper is not None:
            self._work.put(None)
            self._shipper.join()
            self._shipper = None
        if self._dialer is not None:
            self._dialer.close()

    # -- a request's life -------------------------------------------------------------------------------------------

    def begin(
        self, request_id: str, token_ids: Sequence[int], *, max_tokens: int, timeout_s: float, ignore_eos: bool = False
    ) -> OutboundRequest:
        """Take blocks for a prompt and ask the consumer for a grant; does not wait for it.

        Raises OutOfBlocks, InputError for a request id in use, ProtocolError for a request that no message can carry,
        or what ended the session.
        """
        blocks = self.allocator.allocate(-(-len(token_ids) // self.cache.spec.block_size))
        request = OutboundRequest(request_id, token_ids, blocks, time.monotonic() + timeout_s)
        with self._changed:
            problem = self._lost or (
                InputError(f"request id {request_id!r} is in use") if request_id in self._requests else None
            )
            if problem is None:
                self._requests[request_id] = request
        if problem is not None:
            self.allocator.free(blocks)
            raise problem
        message = TransferRequest(
            request_id=request_id,
            token_ids=list(token_ids),
            max_tokens=max_tokens,
            deadline_s=timeout_s,
            ignore_eos=ignore_eos,
        )
        try:
            self._send(message)
        except ProtocolError as error:
            self.fail(request, error, tell=False)
            raise
        return request

    def layer_ready(self, request: OutboundRequest, layer: int, start: int, stop: int) -> None:
        """Ship one layer's tokens start..stop, which now lie in the cache; returns at once."""
        piece = Piece(request, range(layer, layer + 1), range(start, stop), record_fence(self.cache.device))
        with self._changed:
            if request.error is not None:
                return
            request.unsent += 1
            if request.grant is None:
                request.waiting.append(piece)
                return
        self._work.put(piece)

    def computed(self, request: OutboundRequest, first_token: int) -> None:
        """Say that all layers of all tokens were ready()ed, and what the first new token is."""
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
            detail = f"{request.nbytes} bytes shipped, {request.unsent} slices of them not acknowledged"
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

    # -- shipping: one thread plans, the mover sends -----------------------------------------------------------------

    def _ship(self) -> None:
        while (item := self._work.get()) is not None:
            try:
                if isinstance(item, ReadReference):
                    self._answer_reference(item)
                else:
                    self._post(item.request, item.layers, item.tokens, item.fence)
            except PdtxError as error:
                self._not_shipped(item, error)
            except Exception as error:
                # A device that failed must not leave the other requests without their shipper.
                logger.exception("shipping failed")
                reason = " ".join(str(error).split())
                self._not_shipped(item, TransferError(f"shipping failed: {type(error).__name__}: {reason}"))

    def _not_shipped(self, item: Piece | ReadReference, error: PdtxError) -> None:
        if isinstance(item, Piece):
            self._drop(item.request, error)
            return
        with self._changed:
            request = self._requests.get(item.request_id)
        if request is not None:
            self.fail(request, error)
        else:
            self._send(Failure(request_id=item.request_id, phase="verification", reason=str(error)[:1000]))

    def _drop(self, request: OutboundRequest, error: PdtxError) -> None:
        """Fail a request whose slice will not arrive."""
        # In this order: settled first, it would look like a request that is complete.
        self.fail(request, error)
        self._settle(request)

    def _post(self, request: OutboundRequest, layers: range, tokens: range, fence: Callable[[], None]) -> None:
        grant, layout, connection = request.grant, self._consumer_layout, self._connection
        if request.error is not None or grant is None or layout is None or connection is None:
            self._settle(request)
            return
        began = time.monotonic()
        here = Endpoint.of(self.cache.layout, request.blocks.ids)
        plan = build_plan(here, Endpoint.of(layout, grant.block_ids), tokens, layers)
        request.prepare += time.monotonic() - began
        request.num_runs += len(plan.flat)
        request.nbytes += plan.nbytes
        fence()
        key = TransferKey(request.request_id, layers.start, layers.stop, tokens.start, tokens.stop)
        handle = connection.put(key, self._region, plan.flat, request.deadline)
        handle.on_end(lambda ended: self._on_sent(request, ended))

    def _on_sent(self, request: OutboundRequest, handle: TransferHandle) -> None:
        if handle.error is not None:
            self._drop(request, handle.error)
            return
        with self._changed:
            request.posts.append((handle.posted, handle.sent))
            request.moves.append((handle.posted, handle.ended))
        key = handle.key
        notice = LayerDone(
            request_id=request.request_id,
            layer_start=key.layer_start,
            layer_stop=key.layer_stop,
            token_start=key.token_start,
            token_stop=key.token_stop,
            nbytes=handle.nbytes,
        )
        self._send(notice)
        self._settle(request)

    def _settle(self, request: OutboundRequest) -> None:
        """Count one slice as no longer on its way."""
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
            request.completed = True
        message = Complete(
            request_id=request.request_id,
            first_token=first_token,
            num_tokens=len(request.token_ids),
            nbytes=request.nbytes,
        )
        self._send(message)

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

    def wait_for_blocks(self, count: int, timeout_s: float) -> bool:
        """Wait until count blocks are free or the session has ended; whether they are."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or self.allocator.num_free >= count, timeout_s)
        return self.allocator.num_free >= count

    # -- messages, on the side channel's thread ----------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        if self._dialer is not None:
            self._dialer.send(message)

    def _on_message(self, message: Message) -> None:
        match message:
            case Welcome():
                self._answer.put(message)
            case Reject():
                self._answer.put(IncompatiblePeer(message.field, message.producer, message.consumer, message.advice))
            case ReadReference():
                self._work.put(message)
            case Grant() | Refuse() | Failure() | Release() | Finished():
                self._on_request_message(message)
            case _:
                logger.warning("ignored a %s from %s", type(message).__name__, self.peer)

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
        with self._changed:
            if request.grant is not None or request.error is not None:
                return
            request.grant = grant
            waiting, request.waiting = request.waiting, []
        for piece in waiting:
            self._work.put(piece)

    def _answer_reference(self, message: ReadReference) -> None:
        with self._changed:
            request = self._requests.get(message.request_id)
        if request is None or request.released:
            raise ProtocolError(f"request {message.request_id} is not here any more")
        if message.layer >= self.cache.num_layers or message.token_stop > len(request.token_ids):
            raise ProtocolError(f"layer {message.layer} token {message.token_stop} is beyond the request")
        block_ids = torch.as_tensor(request.blocks.ids, device=self.cache.device)
        data = self.cache.canonical(message.layer, block_ids, message.token_start, message.token_stop)
        reference = Reference(
            request_id=message.request_id,
            layer=message.layer,
            token_start=message.token_start,
            token_stop=message.token_stop,
            data=data.numpy().tobytes(),
        )
        self._send(reference)

    def _on_lost(self, reason: str) -> None:
        self._fail_all(PeerLost(f"lost {self.peer}: {reason}"))

    def _fail_all(self, error: PdtxError) -> None:
        with self._changed:
            self._lost = self._lost or error
            requests = list(self._requests.values())
            self._changed.notify_all()
        self._answer.put(error)
        for request in requests:
            self.fail(request, error, tell=False)
