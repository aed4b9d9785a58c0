"""The producer's shipper: one thread plans what has been computed and hands it to the mover."""

import contextlib
import logging
import queue
import threading
import time
from typing import Protocol

from pdtx.cache import KVCaches
from pdtx.engine.matching import Match
from pdtx.engine.outbound import OutboundRequest, Piece
from pdtx.engine.picking import ModePicker
from pdtx.engine.registering import regions_of as regions_of
from pdtx.errors import PdtxError, ProtocolError, TransferAborted, TransferError
from pdtx.plan import Mode, PlanCache
from pdtx.protocol import ReadReference, Reference
from pdtx.transports import Connection, TransferHandle, TransferKey

logger = logging.getLogger(__name__)


class ShippingEvents(Protocol):
    """What a shipper tells the producer, from its own thread and the mover's."""

    def on_sending(self, request: OutboundRequest, key: TransferKey) -> None:
        """Learn that a piece is handed to the mover."""

    def on_sent(self, piece: Piece, handle: TransferHandle) -> None:
        """Learn that a piece has ended, well or not."""

    def on_dropped(self, piece: Piece, error: PdtxError | None) -> None:
        """Learn that a piece will not be sent: because of error, or because its request has ended before."""

    def find(self, request_id: str) -> OutboundRequest | None:
        """Return a request that has not ended."""

    def on_read(self, answer: Reference) -> None:
        """Take reference data for the consumer. Raises ProtocolError if it cannot be sent."""

    def on_not_answered(self, ask: ReadReference, error: PdtxError) -> None:
        """Learn that reference data cannot be given."""


class Shipper:
    """Ships pieces and reads reference data, in the order of the puts. modes: picks how each piece moves."""

    def __init__(
        self, cache: KVCaches, match: Match, connection: Connection, events: ShippingEvents, modes: ModePicker
    ) -> None:
        self._cache, self._match, self._connection, self._events = cache, match, connection, events
        self._regions, self._modes, self._plans = regions_of(cache), modes, PlanCache()
        self._work: queue.SimpleQueue[Piece | ReadReference | None] = queue.SimpleQueue()  # noqa: TID251  # no timeouts
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pdtx-shipper", daemon=True)
        self._thread.start()

    def put(self, item: Piece | ReadReference) -> None:
        """Ship a piece of a request that is granted, or read what the consumer asks for; returns at once."""
        self._work.put(item)
        if self._closed:
            self._drop_rest()

    def close(self) -> None:
        """Stop after what was put so far. What comes later is dropped. Idempotent."""
        self._work.put(None)
        self._thread.join()
        self._closed = True
        self._drop_rest()

    def _drop_rest(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (item := self._work.get_nowait()) is not None:
                    self._not_shipped(item, TransferAborted("the session in which it was to be shipped has ended"))

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            try:
                if isinstance(item, ReadReference):
                    self._events.on_read(self._read(item))
                else:
                    self._post(item)
            except PdtxError as error:
                self._not_shipped(item, error)
            except Exception as error:
                # A device that failed must not leave the other requests without their shipper.
                logger.exception("shipping failed")
                reason = " ".join(str(error).split())
                self._not_shipped(item, TransferError(f"shipping failed: {type(error).__name__}: {reason}"))

    def _not_shipped(self, item: Piece | ReadReference, error: PdtxError) -> None:
        if isinstance(item, Piece):
            self._events.on_dropped(item, error)
        else:
            self._events.on_not_answered(item, error)

    def _post(self, piece: Piece) -> None:
        request, match, move = piece.request, piece.match, piece.move
        if request.error is not None or request.grant is None:
            self._events.on_dropped(piece, None)
            return
        began = time.monotonic()
        here = match.source(request.sources[match.producer_group])
        there = match.destination(request.destinations[match.group])
        plan = match.plan(move, here, there, piece.layers, piece.positions, plans=self._plans)
        choice = self._modes.pick(plan)
        request.picks.add(choice)
        request.num_runs += plan.num_runs
        request.nbytes += plan.nbytes
        request.prepare += time.monotonic() - began
        piece.fence()
        key = piece.key
        region = self._regions[match.producer_index][move.src_rank]
        began = time.monotonic()
        self._events.on_sending(request, key)
        handle = self._connection.put(
            key, region, plan.to_move, request.deadline, staged=choice.mode is Mode.STAGED
        )  # fmt: skip
        request.prepare += time.monotonic() - began
        handle.on_end(lambda ended: self._events.on_sent(piece, ended))

    def _read(self, ask: ReadReference) -> Reference:
        """Read what the consumer wants to compare with. Raises ProtocolError if it is not a part of the request."""
        request = self._events.find(ask.request_id)
        if request is None or request.released:
            raise ProtocolError(f"request {ask.request_id} is not here any more")
        matches = self._match.buffers
        if ask.buffer >= len(matches) or ask.layer >= len(matches[ask.buffer].layers):
            raise ProtocolError(f"buffer {ask.buffer} layer {ask.layer} is not one that is sent")
        match = matches[ask.buffer]
        moved = self._cache.groups[match.producer_group].positions(request.num_tokens)
        if not moved.start <= ask.token_start < ask.token_stop <= moved.stop:
            raise ProtocolError(
                f"layer {ask.layer} positions {ask.token_start}..{ask.token_stop} of buffer {match.name} "
                "are beyond the request"
            )
        buffer = self._cache.buffers[match.producer_index]
        table = request.tables[match.producer_group]
        rows = buffer.canonical(match.layers[ask.layer], table, ask.token_start, ask.token_stop)
        return Reference(
            request_id=ask.request_id,
            buffer=ask.buffer,
            layer=ask.layer,
            token_start=ask.token_start,
            token_stop=ask.token_stop,
            data=rows.numpy().tobytes(),
        )
