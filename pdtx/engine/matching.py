"""Whether two caches can exchange what they hold, and which part of one belongs to which of the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pdtx.cache.verify import Naming
from pdtx.engine.describe import BufferFacts, CacheFacts, facts_of
from pdtx.engine.specs import spec_fields
from pdtx.errors import IncompatiblePeer, ParallelError, PdtxError
from pdtx.kvspec import StateSharding
from pdtx.layout import Layout
from pdtx.parallel import RankTransfer, transfers
from pdtx.plan import Endpoint, PlanCache, TransferPlan, build_plan
from pdtx.plan.runs import Int64s
from pdtx.protocol import CacheDescription, GroupDescription
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


@dataclass(frozen=True)
class BufferMatch:
    """One buffer of the consumer and the producer's of the same name.

    index, group: the consumer's; producer_index, producer_group: the producer's.
    layers: the producer's layer for each of the consumer's.
    moves: what goes from which rank to which.
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
    def layer_index(self) -> dict[int, int]:
        """From the producer's layer to the consumer's."""
        return {theirs: ours for ours, theirs in enumerate(self.layers)}

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

    def consecutive(self, layers: range) -> bool:
        """Whether the consumer's layers lie one after another at the producer, so that one plan can carry them."""
        return self.layers[layers.start : layers.stop] == tuple(
            range(self.layers[layers.start], self.layers[layers.start] + len(layers))
        )


@dataclass(frozen=True)
class Match:
    """Which buffer, layer and rank of a producer belongs to which of a consumer.

    buffers: in the consumer's order. not_sent: layers that only the producer has, as "buffer BUFFER layer LAYER".
    """

    producer: CacheFacts
    consumer: CacheFacts
    buffers: tuple[BufferMatch, ...]
    not_sent: tuple[str, ...]

    @property
    def not_sent_text(self) -> str:
        """not_sent for a message, at a bearable length."""
        rest = len(self.not_sent) - _MOST_NAMED
        named = ", ".join(self.not_sent[:_MOST_NAMED])
        return f"{named} and {rest} more" if rest > 0 else named

    @cached_property
    def of_producer(self) -> dict[int, BufferMatch]:
        """From the producer's index of a buffer to its match; absent where the consumer has no such buffer."""
        return {match.producer_index: match for match in self.buffers}


def check_compatible(producer: CacheDescription, consumer: CacheDescription) -> None:
    """Raise IncompatiblePeer or ProtocolError unless the caches can exchange what they hold, see match_caches."""
    match_caches(facts_of(producer), facts_of(consumer))


def match_caches(producer: CacheFacts, consumer: CacheFacts) -> Match:
    """Match two caches by the names of buffers and layers.

    Layouts, block sizes that divide one another, pool sizes, tensor-parallel sizes that the heads allow and devices may
    differ: the plan bridges them. The producer may have buffers and layers that the consumer lacks.
    Raises IncompatiblePeer, naming the first field that differs and both values.
    """
    theirs = {buffer.name: place for place, buffer in enumerate(producer.buffers)}
    pairs = list[tuple[BufferFacts, BufferFacts]]()
    for buffer in consumer.buffers:
        if buffer.name not in theirs:
            raise IncompatiblePeer(f"buffer {buffer.name}", "absent", "present", "run the same model on both sides")
        pairs.append((producer.buffers[theirs[buffer.name]], buffer))
    # The specs first: "dtype" says more than a fingerprint that differs because of it.
    for ours, other in pairs:
        _check_specs(ours, other)
        _check_shardings(ours, other, one_rank=producer.tp_size == consumer.tp_size == 1)
    for ours, other in pairs:
        _check_groups(other.name, producer.groups[ours.group], consumer.groups[other.group])
        _check_layers(ours, other)
    mine, peers = producer.description, consumer.description
    if mine.fingerprint != peers.fingerprint:
        advice = "the models are {} and {}".format(*(printable(each.model[:_MAX_MODEL]) for each in (mine, peers)))
        raise IncompatiblePeer("fingerprint", mine.fingerprint, peers.fingerprint, advice)
    tp_sizes = producer.tp_size, consumer.tp_size
    found = tuple(
        _match_buffer(index, theirs[other.name], ours, other, consumer.groups[other.group].name, tp_sizes)
        for index, (ours, other) in enumerate(pairs)
    )
    return Match(producer, consumer, found, _not_sent(producer, found))


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


def _check_layers(producer: BufferFacts, consumer: BufferFacts) -> None:
    held = set(producer.layer_names)
    lacking = next((name for name in consumer.layer_names if name not in held), None)
    if lacking is not None:
        raise IncompatiblePeer(
            f"layer {lacking} of buffer {consumer.name}", "absent", "present", "run the same model on both sides"
        )


def _match_buffer(
    index: int,
    producer_index: int,
    producer: BufferFacts,
    consumer: BufferFacts,
    group_name: str,
    tp_sizes: tuple[int, int],
) -> BufferMatch:
    try:
        moves = transfers(consumer.spec, *tp_sizes, consumer.sharding)
    except ParallelError as error:
        raise IncompatiblePeer("tp_size", str(tp_sizes[0]), str(tp_sizes[1]), str(error)) from None
    place = {name: at for at, name in enumerate(producer.layer_names)}
    layers = tuple(place[name] for name in consumer.layer_names)
    match = BufferMatch(
        index, consumer.group, group_name, producer_index, producer.group, consumer, producer, layers, moves
    )
    try:
        for move in moves:
            match.plan(move, match.source_stand_in(1), Endpoint.stand_in(consumer.layout, 1), range(1), range(1))
    except PdtxError as error:
        field = f"layout of buffer {consumer.name}"
        raise IncompatiblePeer(field, producer.layout.name, consumer.layout.name, str(error)) from None
    return match


def _not_sent(producer: CacheFacts, matches: Sequence[BufferMatch]) -> tuple[str, ...]:
    """Name the producer's layers that no consumer's layer is matched with."""
    matched = {match.producer_index: match.layer_index for match in matches}
    return tuple(
        f"buffer {buffer.name} layer {name}"
        for index, buffer in enumerate(producer.buffers)
        for layer, name in enumerate(buffer.layer_names)
        if layer not in matched.get(index, {})
    )
