"""The producer's shipper: one thread plans what has been computed and hands it to the transport."""

import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import Protocol

import torch

from pdtx.cache import KVCaches
from pdtx.engine.matching import ABSENT
from pdtx.engine.outbound_leg import Leg, Piece
from pdtx.engine.registering import regions_of
from pdtx.engine.route import Route
from pdtx.errors import PdtxError, ProtocolError, TransferError
from pdtx.plan import Choice, Mode, PlanCache
from pdtx.protocol import ReadReference, Reference
from pdtx.text import reason_of
from pdtx.transports import TransferHandle

logger = logging.getLogger(__name__)

PROBE_S = 2.0
"""How long a connection may take to show that it is alive."""


@dataclass(frozen=True)
class Posted:
    """A piece that the transport has. seconds: of planning and handing over."""

    piece: Piece
    handle: TransferHandle
    choice: Choice
    num_runs: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Asked:
    """Reference data that the consumer wants to compare with; the request's blocks stay until it has been answered."""

    leg: Leg
    route: Route
    ask: ReadReference


@dataclass(frozen=True)
class Probe:
    """A notice over a connection, behind a transfer that was cut off."""

    route: Route


Item = Piece | Asked | Probe


class ShippingEvents(Protocol):
    """What a shipper reports, from its own thread: post what is to be done about it."""

    def on_posted(self, posted: Posted) -> None:
        """Learn that a piece is at the transport; its end is reported by its handle."""

    def on_dropped(self, piece: Piece, error: PdtxError | None) -> None:
        """Learn that a piece will not be sent: because of error, or because its request has ended or begun anew."""

    def on_read(self, asked: Asked, answer: Reference | PdtxError) -> None:
        """Take reference data for the consumer, or why it cannot be given."""

    def on_probed(self, route: Route, error: PdtxError | None) -> None:
        """Learn whether a connection is alive."""


class Shipper:
    """Ships pieces and reads reference data, in the order in which they were put. It lives as long as its producer."""

    def __init__(self, cache: KVCaches, events: ShippingEvents) -> None:
        self._cache, self._events = cache, events
        self._regions, self._plans = regions_of(cache), PlanCache()
        self._work: queue.SimpleQueue[Item | None] = queue.SimpleQueue()  # noqa: TID251  # no timeouts
        self._thread = threading.Thread(target=self._run, name="pdtx-shipper", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Ship a piece of a granted request, read reference data, or probe a connection; returns at once."""
        self._work.put(item)

    def close(self) -> None:
        """Stop after what was put so far; nothing may be put later. Idempotent."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            try:
                self._do(item)
            except PdtxError as error:
                self._failed(item, error)
            except Exception as error:
                # A device that failed must not leave the other requests without their shipper.
                logger.exception("shipping failed")
                self._failed(item, TransferError(f"shipping failed: {type(error).__name__}: {reason_of(error)}"))

    def _do(self, item: Item) -> None:
        if isinstance(item, Asked):
            self._events.on_read(item, self._read(item))
        elif isinstance(item, Probe):
            self._probe(item.route)
        elif not item.is_current:
            self._events.on_dropped(item, None)
        else:
            self._events.on_posted(self._post(item))

    def _failed(self, item: Item, error: PdtxError) -> None:
        if isinstance(item, Piece):
            self._events.on_dropped(item, error)
        elif isinstance(item, Asked):
            self._events.on_read(item, error)
        else:
            self._events.on_probed(item.route, error)

    def _probe(self, route: Route) -> None:
        handle = route.connection.notify(b"", time.monotonic() + PROBE_S)
        handle.on_end(lambda ended: self._events.on_probed(route, ended.error))

    def _post(self, piece: Piece) -> Posted:
        began = time.monotonic()
        request, match, move = piece.request, piece.match, piece.move
        here = match.source(request.sources[match.producer_group])
        there = match.destination(piece.leg.destinations[match.group])
        plan = match.plan(move, here, there, piece.layers, piece.positions, plans=self._plans)
        choice = piece.route.modes.pick(plan)
        planned = time.monotonic() - began
        piece.fence()
        began = time.monotonic()
        region = self._regions[match.producer_index][move.src_rank]
        staged = choice.mode is Mode.STAGED
        handle = piece.route.connection.put(piece.key, region, plan.to_move, request.deadline, staged=staged)
        seconds = planned + time.monotonic() - began
        return Posted(piece, handle, choice, plan.num_runs, plan.nbytes, seconds)

    def _read(self, asked: Asked) -> Reference:
        """Read what the consumer wants to compare with. Raises ProtocolError if it is not a part of the request."""
        ask, request = asked.ask, asked.leg.request
        match = asked.route.match.of_consumer.get(ask.buffer)
        layer = match.layers[ask.layer] if match is not None and ask.layer < len(match.layers) else ABSENT
        move = match.move_index.get((ask.src_rank, ask.dst_rank)) if match is not None else None
        if match is None or layer == ABSENT or move is None:
            raise ProtocolError(
                f"buffer {ask.buffer} layer {ask.layer} from rank {ask.src_rank} to rank {ask.dst_rank} is not one "
                "that is sent"
            )
        moved = self._cache.groups[match.producer_group].positions(request.num_tokens)
        if not moved.start <= ask.token_start < ask.token_stop <= moved.stop:
            raise ProtocolError(
                f"layer {ask.layer} positions {ask.token_start}..{ask.token_stop} of buffer {match.name} "
                "are beyond the request"
            )
        buffer = self._cache.buffers[match.producer_index]
        table = torch.tensor(request.sources[match.producer_group], device=buffer.device)
        theirs, places = asked.route.match.consumer.tp_size, (ask.token_start, ask.token_stop)
        rows = buffer.common_rows(ask.src_rank, ask.dst_rank, theirs, layer, table, *places)
        return Reference(
            request_id=ask.request_id,
            buffer=ask.buffer,
            layer=ask.layer,
            token_start=ask.token_start,
            token_stop=ask.token_stop,
            src_rank=ask.src_rank,
            dst_rank=ask.dst_rank,
            data=rows.numpy().tobytes(),
        )
