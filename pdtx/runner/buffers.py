"""From what layers keep to the groups and buffers of a paged cache."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from pdtx.cache import BufferShape, CacheGroup, KVCaches, group_kind
from pdtx.errors import InputError
from pdtx.kvspec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    StateSharding,
)
from pdtx.layout import layout_for
from pdtx.runner.architecture import Architecture, AttentionFacts, CompressedFacts, LayerFacts

MOST_STATES = 65
"""Blocks of a group of states, one for each sequence, and the null block."""

_NAMES = ("full", "compressed", "window", "chunk", "state", "cross")
"""Groups by their names, in the order that all nodes have them in. The kind of "compressed" is full."""
_STATE_BLOCK = 1


@dataclass(frozen=True)
class Stored:
    """One thing that a layer keeps. what: "attention", "indexer", "states" or "cross"; base: a buffer's usual name.

    group: its name, and the number of tokens that it reaches back, by which groups of one kind are told apart.
    """

    what: str
    base: str
    group: tuple[str, int]
    spec: KVCacheSpec


@dataclass
class BufferPlan:
    """A buffer to be made: its spec, and the model's layers in it. group: index of its group; base: see Stored."""

    base: str
    name: str
    group: int
    spec: KVCacheSpec
    layers: list[int] = field(default_factory=list)

    @property
    def layer_names(self) -> list[str]:
        """What the layers are called in the buffer."""
        return [f"layers.{layer}" for layer in self.layers]


@dataclass(frozen=True)
class CachePlan:
    """The groups and buffers of a model for one block size.

    groups: with num_blocks 0. places: for each layer of the model, from what it keeps to (buffer, layer in the buffer).
    sharding: how ranks share states, None where there are none, or that is not known.
    """

    groups: tuple[CacheGroup, ...]
    buffers: tuple[BufferPlan, ...]
    places: tuple[dict[str, tuple[int, int]], ...]
    sharding: StateSharding | None = None


def plan_cache(architecture: Architecture, dtype: str, block_size: int) -> CachePlan:
    """Return the groups and buffers of a model, in an order that depends on the model alone.

    Groups: one for each behaviour (full, each window, each chunk, state, cross). Buffers: layers of one spec.
    Raises SpecError for an impossible block_size.
    """
    kept = [list(_stored(layer, dtype, block_size)) for layer in architecture.layers]
    keys = sorted({one.group for layer in kept for one in layer}, key=lambda key: (_NAMES.index(key[0]), key[1]))
    buffers, places = list[BufferPlan](), list[dict[str, tuple[int, int]]]()
    for index, layer in enumerate(kept):
        places.append({})
        for one in layer:
            at = _buffer_of(buffers, one, keys.index(one.group))
            places[-1][one.what] = (at, len(buffers[at].layers))
            buffers[at].layers.append(index)
    positions = architecture.encoder.positions if architecture.encoder else 0
    groups = tuple(
        CacheGroup(
            _group_name(keys, key),
            group_kind(next(buffer.spec for buffer in buffers if buffer.group == at)),
            _STATE_BLOCK if key[0] == "state" else block_size,
            0,
            next(buffer.spec for buffer in buffers if buffer.group == at),
            positions if key[0] == "cross" else 0,
        )
        for at, key in enumerate(keys)
    )
    return CachePlan(groups, tuple(buffers), tuple(places), architecture.sharding)


def _group_name(keys: list[tuple[str, int]], key: tuple[str, int]) -> str:
    alone = sum(kind == key[0] for kind, _ in keys) == 1
    return key[0] if alone else f"{key[0]}{key[1]}"


def _buffer_of(buffers: list[BufferPlan], one: Stored, group: int) -> int:
    """Return the index of the buffer that a layer's thing belongs to, which may be a new one."""
    for index, buffer in enumerate(buffers):
        if (buffer.base, buffer.group, buffer.spec) == (one.base, group, one.spec):
            return index
    alike = sum(buffer.base == one.base for buffer in buffers)
    buffers.append(BufferPlan(one.base, one.base if not alike else f"{one.base}_{alike + 1}", group, one.spec))
    return len(buffers) - 1


def _stored(layer: LayerFacts, dtype: str, block_size: int) -> Iterator[Stored]:
    """Yield what a layer keeps."""
    if layer.attention is not None:
        yield _attention(layer.attention, dtype, block_size)
    if layer.indexer is not None:
        spec = MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=layer.indexer, dtype=dtype)
        yield Stored("indexer", "indexer", ("full", 0), spec)
    if layer.states is not None:
        states = MambaSpec(block_size=_STATE_BLOCK, shapes=layer.states.shapes, dtypes=layer.states.dtypes)
        yield Stored("states", "state", ("state", 0), states)
    for one in layer.compressed:
        yield from _compressed(one, dtype, block_size)
    if (cross := layer.cross) is not None:
        encoder = CrossAttentionSpec(
            block_size=block_size, num_kv_heads=cross.num_kv_heads, head_size=cross.key, dtype=dtype
        )
        yield Stored("cross", "cross", ("cross", 0), encoder)


def _compressed(facts: CompressedFacts, dtype: str, block_size: int) -> Iterator[Stored]:
    """Yield a compressor's entries, and what it keeps of tokens until they are compressed."""
    entries = MLAAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=facts.entry, dtype=dtype, compress_ratio=facts.ratio
    )
    inputs = SlidingWindowMLASpec(
        block_size=block_size, num_kv_heads=1, head_size=2 * facts.inputs, dtype=dtype, sliding_window=facts.window
    )
    base = "indexer" if facts.name == "indexer" else "compressed"
    yield Stored(f"{facts.name} entries", base, ("compressed", facts.ratio), entries)
    yield Stored(f"{facts.name} inputs", f"{base}_inputs", ("window", facts.window), inputs)


def _attention(facts: AttentionFacts, dtype: str, block_size: int) -> Stored:
    heads, key, value = facts.num_kv_heads, facts.key, facts.value
    if facts.latent and facts.window is not None:
        shared = SlidingWindowMLASpec(
            block_size=block_size, num_kv_heads=1, head_size=key, dtype=dtype, sliding_window=facts.window
        )
        return Stored("attention", "window", ("window", facts.window), shared)
    if facts.latent:
        latent = MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=key + value, dtype=dtype)
        return Stored("attention", "latent", ("full", 0), latent)
    if facts.window is not None:
        window = SlidingWindowSpec(
            block_size=block_size,
            num_kv_heads=heads,
            head_size=key,
            head_size_v=value,
            dtype=dtype,
            sliding_window=facts.window,
        )
        return Stored("attention", "window", ("window", facts.window), window)
    if facts.chunk is not None:
        chunk = ChunkedLocalAttentionSpec(
            block_size=block_size, num_kv_heads=heads, head_size=key, dtype=dtype, attention_chunk_size=facts.chunk
        )
        return Stored("attention", "chunk", ("chunk", facts.chunk), chunk)
    full = FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=key, head_size_v=value, dtype=dtype)
    return Stored("attention", "full", ("full", 0), full)


def make_caches(
    plan: CachePlan,
    layouts: tuple[str, ...],
    num_blocks: int,
    tp_size: int,
    device: torch.device,
    *,
    shared: bool = False,
) -> KVCaches:
    """Allocate a plan's buffers.

    layouts: see pdtx.layout.layout_for. num_blocks: of each group; a group of states gets MOST_STATES at most.
    shared: see PagedBuffer.

    Raises InputError for what tensor parallelism cannot have, and whatever the buffers raise.
    """
    if tp_size > 1 and plan.sharding is None and any(group.kind == "state" for group in plan.groups):
        raise InputError(
            f"tensor parallel size {tp_size}: how ranks share the states of this model's recurrent layers is not "
            "known; use --tp 1"
        )
    groups = [
        replace(group, num_blocks=min(num_blocks, MOST_STATES) if group.kind == "state" else num_blocks)
        for group in plan.groups
    ]
    shapes = [_shape(one, layouts, groups[one.group], tp_size, plan.sharding) for one in plan.buffers]
    return KVCaches.allocate(groups, shapes, device=device, shared=shared)


def _shape(
    one: BufferPlan, layouts: tuple[str, ...], group: CacheGroup, tp_size: int, sharding: StateSharding | None
) -> BufferShape:
    # The indexer's keys here are vectors like the latent ones: its own presets are for vectors with their scales.
    layout = layout_for(one.spec, one.layer_names[0], layouts)
    own = sharding if isinstance(one.spec, MambaSpec) else None
    return BufferShape(
        one.name, group.name, one.spec, layout, one.layer_names, group.num_blocks, tp_size=tp_size, sharding=own
    )
