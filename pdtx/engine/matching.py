"""Whether two caches can exchange what they hold, and which part of one belongs to which of the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pdtx.cache.verify import Naming
from pdtx.engine.describe import BufferFacts, CacheFacts
from pdtx.engine.specs import spec_fields
from pdtx.errors import IncompatiblePeer, ParallelError, PdtxError, PlanError
from pdtx.kvspec import StateSharding
from pdtx.layout import Layout
from pdtx.parallel import RankTransfer, audit_moves, transfers
from pdtx.plan import Endpoint, PlanCache, TransferPlan, build_plan
from pdtx.plan.match import positions_together
from pdtx.plan.runs import Int64s
from pdtx.protocol import GroupDescription
from pdtx.text import printable
from pdtx.transports.base import TransferKey
from pdtx.units import ceil_div

_LOCAL = ("block_size", "page_size_padded", "alignment")
"""Fields of a spec that say how a side keeps its pages and not what lies in them."""

_MOST_NAMED = 8
"""Layers that one message says to be left out."""

_MAX_MODEL = 200
"""Characters of a model's name in a message."""

_ADVICE = {"dtype": "give both sides the same --dtype; caches are shipped as they are, never converted"}


ABSENT = -1
"""Stands for a layer that the producer's process does not have, or that does not move."""


@dataclass(frozen=True)
class BufferMatch:
    """One buffer of the consumer's process and the buffer of the same name of the producer's.

    index, group: the consumer's; producer_index, producer_group: the producer's.
    layers: the producer's layer for each of the consumer's; ABSENT where nothing comes from this process.
    moves: what goes from which rank to which, of the ranks that the two processes have.
    """

    index: int
    group: int
    group_name: str
    producer_index: int
    producer_group: int
    consumer: BufferFacts
    producer: BufferFacts
    layers: tuple[int, ...]
    moves: tuple[RankTransfer, ...]

    @property
    def name(self) -> str:
        """Both sides' name of the buffer."""
        return self.consumer.name

    @cached_property
    def naming(self) -> Naming:
        """How messages call the consumer's layers and coordinates."""
        return Naming(self.name, self.group_name, self.consumer.layer_names)

    @cached_property
    def move_index(self) -> dict[tuple[int, int], int]:
        """From (source rank, destination rank) to the place in moves."""
        return {(move.src_rank, move.dst_rank): place for place, move in enumerate(self.moves)}

    @cached_property
    def together(self) -> int:
        """Positions that are sent at once, see pdtx.plan.match.positions_together."""
        return positions_together(self.producer.layout, self.consumer.layout)

    @cached_property
    def layer_index(self) -> dict[int, int]:
        """From the producer's layer to the consumer's."""
        return {theirs: ours for ours, theirs in enumerate(self.layers) if theirs != ABSENT}

    def source(self, block_ids: Int64s) -> Endpoint:
        """Return the producer's side of a plan, from its block table."""
        return Endpoint.of(self.producer.layout, block_ids)

    def source_stand_in(self, num_positions: int) -> Endpoint:
        """Return the producer's side of a plan that the consumer makes, who does not know the table."""
        return Endpoint.stand_in(self.producer.layout, num_positions)

    def destination_stand_in(self, num_positions: int) -> Endpoint:
        """Return the consumer's side of a plan that the producer makes for a get, who does not know the table."""
        layout = self.consumer.layout
        # Each position a place of its own, as in any table: no byte of a destination is written twice.
        steps = np.arange(ceil_div(num_positions, layout.block_size), dtype=np.int64)
        return Endpoint(layout, steps % layout.parts[0].layout.extent("block"), known=False)

    def destination(self, block_ids: Int64s, layout: Layout | None = None) -> Endpoint:
        """Return the consumer's side of a plan, from its block table; layout: another than its own, a fault."""
        # The stream stays what both sides have agreed on: bytes arrive as ever, and go to the wrong places.
        return Endpoint.of(layout or self.consumer.layout, block_ids, agreed=self.consumer.layout if layout else None)

    def plan(
        self,
        move: RankTransfer,
        src: Endpoint,
        dst: Endpoint,
        layers: range,
        positions: range,
        *,
        merge: bool = True,
        plans: PlanCache | None = None,
    ) -> TransferPlan:
        """Plan what a move carries of the consumer's layers at positions. Both sides call this, with the same order.

        plans: knows the shapes of earlier plans. Raises PlanError.
        """
        first = self.layers[layers.start]
        source = range(first, first + len(layers))
        build = plans.plan if plans is not None else build_plan
        return build(src, dst, positions, source, dst_layer=layers.start, merge=merge, boxes=move.boxes)

    def key(self, request_id: str, move: RankTransfer, layers: range, positions: range) -> TransferKey:
        """Return what both sides call what a move carries of the consumer's layers at positions of a request."""
        return TransferKey(
            request_id,
            layers.start,
            layers.stop,
            positions.start,
            positions.stop,
            self.index,
            move.src_rank,
            move.dst_rank,
        )

    def sends(self, layer: int, src_rank: int, dst_rank: int) -> bool:
        """Whether this producer's process sends one of the consumer's layers from one rank to another."""
        return self.layers[layer] != ABSENT and (src_rank, dst_rank) in self.move_index

    def consecutive(self, layers: range) -> bool:
        """Whether the consumer's layers lie one after another at the producer, so that one plan can carry them."""
        first = self.layers[layers.start]
        return first != ABSENT and self.layers[layers.start : layers.stop] == tuple(range(first, first + len(layers)))


@dataclass(frozen=True)
class Match:
    """Which buffer, layer and rank of a producer's process belongs to which of a consumer's.

    buffers: those that anything moves of, in the consumer's order. not_sent: layers that only the producer has, as
    "buffer BUFFER layer LAYER".
    """

    producer: CacheFacts
    consumer: CacheFacts
    buffers: tuple[BufferMatch, ...]
    not_sent: tuple[str, ...]

    @property
    def not_sent_text(self) -> str:
        """not_sent for a message, at a bearable length."""
        return some_of(self.not_sent)

    @cached_property
    def of_producer(self) -> dict[int, BufferMatch]:
        """From the producer's index of a buffer to its match; absent where the consumer has no such buffer."""
        return {match.producer_index: match for match in self.buffers}

    @cached_property
    def of_consumer(self) -> dict[int, BufferMatch]:
        """From the consumer's index of a buffer to its match; absent where the producer has no such buffer."""
        return {match.index: match for match in self.buffers}

    @property
    def moves_anything(self) -> bool:
        """Whether anything goes from one process to the other, so that they need a data connection."""
        return any(match.moves for match in self.buffers)


def some_of(names: Sequence[str]) -> str:
    """Return names for a message, at a bearable length."""
    rest = len(names) - _MOST_NAMED
    named = ", ".join(names[:_MOST_NAMED])
    return f"{named} and {rest} more" if rest > 0 else named


def match_caches(producer: CacheFacts, consumer: CacheFacts) -> Match:
    """Match the cache of a producer's process with that of a consumer's, by the names of buffers and layers.

    Layouts, block sizes that divide one another, pool sizes, tensor-parallel sizes that the heads allow and devices may
    differ: the plan bridges them. Either process may have only some of its model's ranks and layers; whether all
    processes together have everything is for pdtx.engine.coverage to say.
    Raises IncompatiblePeer, naming the first field that differs and both values.
    """
    pairs = _pairs(producer, consumer)
    # The specs first: "dtype" says more than a fingerprint that differs because of it.
    for pair in pairs:
        _check_specs(pair.producer, pair.consumer)
        _check_shardings(pair.producer, pair.consumer, one_rank=producer.tp_size == consumer.tp_size == 1)
    for pair in pairs:
        ours, theirs = producer.groups[pair.producer.group], consumer.groups[pair.consumer.group]
        _check_groups(pair.consumer.name, ours, theirs)
    mine, peers = producer.description, consumer.description
    if mine.fingerprint != peers.fingerprint:
        advice = "the models are {} and {}".format(*(printable(each.model[:_MAX_MODEL]) for each in (mine, peers)))
        raise IncompatiblePeer("fingerprint", mine.fingerprint, peers.fingerprint, advice)
    found = tuple(_match_buffer(pair, producer, consumer) for pair in pairs)
    return Match(producer, consumer, found, _not_sent(producer, found))


@dataclass(frozen=True)
class _Pair:
    """Buffers of one name with layers in common, and their indices."""

    producer_index: int
    producer: BufferFacts
    index: int
    consumer: BufferFacts
    layers: tuple[int, ...]


def _pairs(producer: CacheFacts, consumer: CacheFacts) -> list[_Pair]:
    places = {buffer.name: place for place, buffer in enumerate(producer.buffers)}
    kept = {*producer.description.not_transferred, *consumer.description.not_transferred}
    found = list[_Pair]()
    for index, buffer in enumerate(consumer.buffers):
        place = places.get(buffer.name)
        if place is None:
            continue
        at = {name: layer for layer, name in enumerate(producer.buffers[place].layer_names) if name not in kept}
        layers = tuple(at.get(name, ABSENT) for name in buffer.layer_names)
        if any(layer != ABSENT for layer in layers):
            found.append(_Pair(place, producer.buffers[place], index, buffer, layers))
    return found


def _check_specs(producer: BufferFacts, consumer: BufferFacts) -> None:
    mine, theirs = spec_fields(producer.spec), spec_fields(consumer.spec)
    for name in dict.fromkeys((*mine, *theirs)):
        ours, other = mine.get(name), theirs.get(name)
        if name not in _LOCAL and ours != other:
            raise IncompatiblePeer(f"{name} of buffer {consumer.name}", str(ours), str(other), _ADVICE.get(name, ""))


def _check_shardings(producer: BufferFacts, consumer: BufferFacts, *, one_rank: bool) -> None:
    """Both must say alike how ranks share states; where each has one rank, a side may not say it."""
    ours, theirs = producer.sharding, consumer.sharding
    if ours != theirs and not (one_rank and None in (ours, theirs)):
        advice = "give both sides the StateSharding of the model's own config"
        raise IncompatiblePeer(f"sharding of buffer {consumer.name}", _sharing(ours), _sharing(theirs), advice)


def _sharing(sharding: StateSharding | None) -> str:
    """Say in words how ranks share states."""
    if sharding is None:
        return "not given"
    convs = (" | ".join(f"{s.name} {s.channels}/{s.units}" for s in segments) for segments in sharding.conv)
    return "; ".join((*convs, f"{sharding.heads} heads"))


def _check_groups(buffer: str, producer: GroupDescription, consumer: GroupDescription) -> None:
    for field in ("name", "kind", "encoder_positions"):
        ours, other = getattr(producer, field), getattr(consumer, field)
        if ours != other:
            what = f"group of buffer {buffer}" if field == "name" else f"{field} of group {consumer.name}"
            raise IncompatiblePeer(what, str(ours), str(other))
    small, large = sorted((producer.block_size, consumer.block_size))
    if large % small:
        field, advice = f"block_size of group {consumer.name}", "one must be a multiple of the other"
        raise IncompatiblePeer(field, str(producer.block_size), str(consumer.block_size), advice)


def all_moves(buffer: BufferFacts, src_tp: int, dst_tp: int) -> tuple[RankTransfer, ...]:
    """Return what moves of a layer between all ranks of both sides. Raises IncompatiblePeer where that cannot be."""
    spec, sharding = buffer.spec, buffer.sharding
    try:
        moves = transfers(spec, src_tp, dst_tp, sharding)
        audit_moves(spec, moves, src_tp, dst_tp, sharding)
    except (ParallelError, PlanError) as error:
        raise IncompatiblePeer("tp_size", str(src_tp), str(dst_tp), str(error)) from None
    return moves


def _match_buffer(pair: _Pair, producer: CacheFacts, consumer: CacheFacts) -> BufferMatch:
    theirs = pair.consumer
    moves = tuple(
        move
        for move in all_moves(theirs, producer.tp_size, consumer.tp_size)
        if move.src_rank in producer.ranks and move.dst_rank in consumer.ranks
    )
    group = consumer.groups[theirs.group].name
    match = BufferMatch(
        pair.index, theirs.group, group, pair.producer_index, pair.producer.group, theirs, pair.producer, pair.layers,
        moves,
    )  # fmt: skip
    first = next(layer for layer, held in enumerate(pair.layers) if held != ABSENT)
    try:
        for move in moves:
            here, there = match.source_stand_in(1), Endpoint.stand_in(theirs.layout, 1)
            match.plan(move, here, there, range(first, first + 1), range(1))
    except PdtxError as error:
        field = f"layout of buffer {theirs.name}"
        raise IncompatiblePeer(field, pair.producer.layout.name, theirs.layout.name, str(error)) from None
    return match


def _not_sent(producer: CacheFacts, matches: Sequence[BufferMatch]) -> tuple[str, ...]:
    """Name the producer's layers that no layer of the consumer's process is matched with."""
    matched = {match.producer_index: match.layer_index for match in matches}
    return tuple(
        f"buffer {buffer.name} layer {name}"
        for index, buffer in enumerate(producer.buffers)
        for layer, name in enumerate(buffer.layer_names)
        if layer not in matched.get(index, {})
    )
