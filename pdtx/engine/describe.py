"""What a node tells its peer about its cache, and what is made of a description that a peer has sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pdtx.arguments import shown
from pdtx.engine.specs import sharding_fields, sharding_of, spec_fields, spec_of
from pdtx.errors import InputError, PdtxError, ProtocolError
from pdtx.kvspec import KVCacheSpec, MambaSpec, StateSharding
from pdtx.layout import AnyLayout, Layout, any_layout
from pdtx.parallel import rank_spec, require_sharding
from pdtx.protocol import BufferDescription, CacheDescription, GroupDescription

if TYPE_CHECKING:
    from pdtx.cache import KVCaches, PagedBuffer


@dataclass(frozen=True)
class BufferFacts:
    """A buffer as its description makes it. spec: of one layer of the whole model; layout: of one rank.

    sharding: how ranks share states; None where there are none, or one rank that does not say it.
    """

    name: str
    group: int
    spec: KVCacheSpec
    layer_names: Sequence[str]
    layout: AnyLayout
    sharding: StateSharding | None = None

    @property
    def num_layers(self) -> int:
        """Layers of it that the process has."""
        return len(self.layer_names)


@dataclass(frozen=True)
class CacheFacts:
    """A node's cache as its description makes it."""

    description: CacheDescription
    buffers: tuple[BufferFacts, ...]

    @property
    def groups(self) -> Sequence[GroupDescription]:
        """The groups, in the order in which buffers name them."""
        return self.description.groups

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks of the model."""
        return self.description.tp_size

    @property
    def ranks(self) -> range:
        """Those of them that this process has."""
        return self.description.ranks


def describe_cache(
    cache: "KVCaches", *, model: str, fingerprint: str, not_transferred: Sequence[str] = ()
) -> CacheDescription:
    """Return the description that the handshake carries. fingerprint: of the model's config and weights.

    not_transferred: names of layers that do not move, whichever side has them: a draft model's, for example.
    """
    groups = [
        GroupDescription(
            name=group.name,
            kind=group.kind,
            block_size=group.block_size,
            num_blocks=group.num_blocks,
            encoder_positions=group.encoder_positions,
        )
        for group in cache.groups
    ]
    return CacheDescription(
        model=model,
        fingerprint=fingerprint,
        device=str(cache.device),
        groups=groups,
        buffers=[_describe_buffer(buffer, cache.groups[buffer.group].name) for buffer in cache.buffers],
        tp_size=cache.tp_size,
        first_rank=cache.tp_ranks.start,
        num_ranks=len(cache.tp_ranks),
        not_transferred=list(not_transferred),
    )


def _describe_buffer(buffer: "PagedBuffer", group: str) -> BufferDescription:
    layout: Layout = buffer.layout
    split = layout.blocks_per_manager_block > 1
    return BufferDescription(
        name=buffer.name,
        group=group,
        spec=spec_fields(buffer.spec),
        layer_names=list(buffer.layer_names),
        layout=layout.name,
        size_bytes=layout.size_bytes,
        kernel_block_size=layout.block_size if split else None,
        sharding=sharding_fields(buffer.sharding),
    )


def own_facts(cache: "KVCaches", description: CacheDescription) -> CacheFacts:
    """Return the facts of a node's own cache. Raises InputError for the description of another cache."""
    kept = description.not_transferred
    own = describe_cache(cache, model=description.model, fingerprint=description.fingerprint, not_transferred=kept)
    own = msgspec.structs.replace(own, device=description.device)  # a text, for people
    found = _difference(msgspec.to_builtins(description), msgspec.to_builtins(own), "")
    if found is not None:
        where, given, meant = found
        raise InputError(
            f"the description is not this cache's: {where} is {shown(given)}, the cache has {shown(meant)}; give "
            "describe_cache(cache, ...)"
        )
    return facts_of(description, whose="this node's")


def _difference(given: object, meant: object, where: str) -> tuple[str, object, object] | None:
    """Return where two descriptions differ first, and what each has there."""
    if isinstance(given, dict) and isinstance(meant, dict):
        parts = [(f"{where}.{name}".lstrip("."), given.get(name), meant.get(name)) for name in {**meant, **given}]
    elif isinstance(given, list) and isinstance(meant, list) and len(given) == len(meant):
        parts = [(f"{where}[{at}]", *pair) for at, pair in enumerate(zip(given, meant, strict=True))]
    else:
        return None if given == meant else (where, given, meant)
    differences = (_difference(ours, theirs, at) for at, ours, theirs in parts)
    return next((found for found in differences if found is not None), None)


def facts_of(description: CacheDescription, *, whose: str = "the peer's") -> CacheFacts:
    """Rebuild a node's specs and layouts from its description: by their names, with no stride of a peer's.

    whose: for messages. Raises ProtocolError if they cannot be, or come to another size than the description says.
    """
    groups = [group.name for group in description.groups]
    facts = list[BufferFacts]()
    for wire in description.buffers:
        at = groups.index(wire.group)
        group = description.groups[at]
        try:
            facts.append(_buffer_facts(wire, at, group, description.tp_size))
        except PdtxError as error:
            raise ProtocolError(f"{whose} buffer {wire.name} cannot be: {error}") from error
    return CacheFacts(description, tuple(facts))


def _buffer_facts(wire: BufferDescription, at: int, group: GroupDescription, tp_size: int) -> BufferFacts:
    spec = spec_of(wire.spec)
    if group.kind != "state" and spec.block_size != group.block_size:
        raise ProtocolError(f"its blocks hold {spec.block_size} tokens, those of group {group.name} {group.block_size}")
    sharding = _sharding(wire, spec)
    layout = any_layout(
        wire.layout,
        rank_spec(spec, tp_size, sharding),
        num_layers=len(wire.layer_names),
        num_blocks=group.num_blocks,
        kernel_block_size=wire.kernel_block_size,
    )
    if layout.size_bytes != wire.size_bytes:
        raise ProtocolError(
            f"layout {layout.name} comes to {layout.size_bytes} bytes here and to {wire.size_bytes} there; "
            "run the same pdtx on both sides"
        )
    layout.require_movable()
    return BufferFacts(wire.name, at, spec, wire.layer_names, layout, sharding)


def _sharding(wire: BufferDescription, spec: KVCacheSpec) -> StateSharding | None:
    """Return how ranks share a buffer's states. Raises ProtocolError or ParallelError if that does not fit its spec."""
    sharding = sharding_of(wire.sharding)
    if sharding is None:
        return None
    if not isinstance(spec, MambaSpec):
        raise ProtocolError("it says how ranks share states, and keeps none")
    return require_sharding(spec, sharding)
