"""The plan of a whole request: every kind of layer, every pair of ranks, before anything is sent."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from pdtx.errors import PlanError
from pdtx.kvspec import CrossAttentionSpec, KVCacheSpec, MambaSpec, StateSharding
from pdtx.layout import any_layout
from pdtx.parallel import RankTransfer, audit_moves, rank_spec, transfers, unread_ranks
from pdtx.plan.build import build_plan
from pdtx.plan.endpoint import Endpoint
from pdtx.plan.needed import needed_positions, tokens_per_vector
from pdtx.plan.runs import Int64s
from pdtx.plan.transfer import TransferPlan
from pdtx.units import ceil_div, round_up

ChooseLayout = Callable[[KVCacheSpec, str], str]
"""Names the layout preset of a layer, given its spec and its name."""


@dataclass(frozen=True, kw_only=True)
class CacheSide:
    """One node's caches.

    layers: what each layer of the whole model keeps, by name. layout_for: its preset for a kind of layer.
    fragmented: whether a request's blocks lie scattered over the pool (by seed) or one after another.
    """

    layers: Mapping[str, KVCacheSpec]
    layout_for: ChooseLayout
    tp_size: int = 1
    fragmented: bool = True
    seed: int = 0

    def kinds(self) -> dict[KVCacheSpec, list[str]]:
        """Return the names of the layers that have equal specs, which lie in one buffer."""
        found: dict[KVCacheSpec, list[str]] = {}
        for name, spec in self.layers.items():
            found.setdefault(spec, []).append(name)
        return found

    def endpoint(
        self, spec: KVCacheSpec, names: list[str], positions: range, sharding: StateSharding | None
    ) -> Endpoint:
        """Return one rank's side of a buffer, with blocks for positions and the null block before them."""
        size = 1 if isinstance(spec, MambaSpec) else spec.block_size
        first, blocks = positions.start // size, ceil_div(positions.stop, size)
        table = np.zeros(blocks, np.int64)
        table[first:] = self._block_ids(blocks - first)
        pool = 2 * (blocks - first) + 2
        preset, own = self.layout_for(spec, names[0]), rank_spec(spec, self.tp_size, sharding)
        layout = any_layout(preset, own, num_layers=len(names), num_blocks=pool)
        return Endpoint.of(layout, table)

    def _block_ids(self, count: int) -> Int64s:
        if not self.fragmented:
            return np.arange(1, count + 1, dtype=np.int64)
        # Every second block only, so that no two are neighbours: what a pool looks like that has been in use.
        ids: Int64s = np.random.default_rng(self.seed).permutation(count).astype(np.int64) * 2 + 1
        return ids


@dataclass(frozen=True)
class BufferPlan:
    """The layers of one kind: what of them moves between which ranks.

    unique_bytes: of the whole model's elements that move, each counted once. unread: source ranks that send nothing.
    """

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    positions: range
    moves: tuple[RankTransfer, ...]
    plans: tuple[TransferPlan, ...] = field(repr=False)
    unique_bytes: int
    unread: tuple[int, ...]

    @property
    def wire_bytes(self) -> int:
        """Bytes that cross the wire, copies for several ranks included."""
        return sum(plan.nbytes for plan in self.plans)

    @property
    def num_runs(self) -> int:
        """Runs of all pairs of ranks, merged if that was asked for."""
        return sum(plan.num_runs for plan in self.plans)

    @property
    def num_ranges(self) -> int:
        """Ranges of the destination, joined where they touch there, likewise."""
        return sum(plan.num_destination_ranges for plan in self.plans)


@dataclass(frozen=True)
class RequestPlan:
    """What a request of num_tokens moves. not_sent: layers that only the source has, a draft model's for example."""

    num_tokens: int
    buffers: tuple[BufferPlan, ...]
    not_sent: tuple[str, ...]

    @property
    def wire_bytes(self) -> int:
        """Bytes that cross the wire."""
        return sum(buffer.wire_bytes for buffer in self.buffers)

    @property
    def unique_bytes(self) -> int:
        """Bytes of the elements that move, each counted once."""
        return sum(buffer.unique_bytes for buffer in self.buffers)

    @property
    def amplification(self) -> float:
        """wire_bytes / unique_bytes; 1 where nothing moves."""
        return self.wire_bytes / self.unique_bytes if self.unique_bytes else 1.0

    @property
    def num_runs(self) -> int:
        """Runs in all."""
        return sum(buffer.num_runs for buffer in self.buffers)

    @property
    def num_ranges(self) -> int:
        """Ranges of the destination in all."""
        return sum(buffer.num_ranges for buffer in self.buffers)


def plan_request(
    src: CacheSide,
    dst: CacheSide,
    num_tokens: int,
    *,
    cached_tokens: int = 0,
    encoder_positions: int | None = None,
    sharding: StateSharding | None = None,
    whole_blocks: bool = False,
    merge: bool = True,
) -> RequestPlan:
    """Plan a request's transfer: its needed positions, without those that the destination has already.

    cached_tokens: a prefix that the destination holds; with all num_tokens only states, what cross
    attention keeps, and the notice move.
    whole_blocks: round out to the larger of both sides' blocks, as connectors do that know blocks only.
    encoder_positions: of cross attention. sharding: of recurrent states, see pdtx.parallel.rank_spec.

    Layers are matched by name. Raises PlanError for a layer that the source lacks or keeps differently, naming the
    field and both values, and what build_plan raises.
    """
    if num_tokens < 1 or not 0 <= cached_tokens <= num_tokens:
        raise PlanError(f"{cached_tokens} cached tokens are not a part of a request of {num_tokens} tokens")
    buffers = list[BufferPlan]()
    for spec, names in dst.kinds().items():
        source = _source_spec(src, names, spec)
        needed = needed_positions(spec, num_tokens, encoder_positions)
        # What is not counted in tokens is not a part of a prefix of tokens.
        held = 0 if isinstance(spec, MambaSpec | CrossAttentionSpec) else cached_tokens
        held = held // tokens_per_vector(spec) * tokens_per_vector(spec)
        positions = range(min(max(needed.start, held), needed.stop), needed.stop)
        if whole_blocks and positions and not isinstance(spec, MambaSpec):
            unit = max(source.block_size, spec.block_size)
            positions = range(positions.start // unit * unit, round_up(positions.stop, unit))
        moves = transfers(spec, src.tp_size, dst.tp_size, sharding)
        audit_moves(spec, moves, src.tp_size, dst.tp_size, sharding)
        here = src.endpoint(source, names, positions, sharding)
        there = dst.endpoint(spec, names, positions, sharding)
        plans = tuple(build_plan(here, there, positions, merge=merge, boxes=move.boxes) for move in moves)
        unique = len(names) * _payload(spec, len(positions))
        unread = tuple(unread_ranks(moves, src.tp_size))
        buffers.append(BufferPlan(tuple(names), spec, positions, moves, plans, unique, unread))
    return RequestPlan(num_tokens, tuple(buffers), tuple(name for name in src.layers if name not in dst.layers))


def _payload(spec: KVCacheSpec, positions: int) -> int:
    """Bytes of so many positions of one layer of the whole model."""
    return positions * spec.unpadded_page_size_bytes // (1 if isinstance(spec, MambaSpec) else spec.block_size)


def _source_spec(src: CacheSide, names: list[str], spec: KVCacheSpec) -> KVCacheSpec:
    """Return what the source keeps of layers that the destination keeps as spec."""
    missing = next((name for name in names if name not in src.layers), None)
    if missing is not None:
        raise PlanError(f"layer {missing} is the destination's, but the source has no such layer")
    specs = {src.layers[name] for name in names}
    if len(specs) > 1:
        raise PlanError(f"layers {names[0]}, ... are of one kind at the destination, of {len(specs)} at the source")
    source = specs.pop()
    _check_kind(names[0], type(source).__name__, type(spec).__name__, "kind")
    for what, theirs in vars(spec).items():
        if what not in ("block_size", "page_size_padded"):
            _check_kind(names[0], getattr(source, what), theirs, what)
    return source


def _check_kind(layer: str, ours: object, theirs: object, what: str) -> None:
    if ours != theirs:
        raise PlanError(f"{what} of layer {layer} differs: source {ours}, destination {theirs}")
