"""The groups and buffers that a model's layers make up."""

from collections.abc import Mapping

from pdtx.cache.buffer_shapes import BufferShape
from pdtx.cache.groups import CacheGroup, GroupBehaviour
from pdtx.kvspec import KVCacheSpec, MambaSpec, StateSharding
from pdtx.layout import layout_for


def model_shapes(
    layers: Mapping[str, KVCacheSpec],
    layouts: tuple[str, ...],
    *,
    num_blocks: int,
    tp_size: int = 1,
    sharding: StateSharding | None = None,
    encoder_positions: int = 0,
) -> tuple[list[CacheGroup], list[BufferShape]]:
    """Return a group for each behaviour and a buffer for each spec, for KVCaches.allocate and over.

    layers: what each layer of the whole model keeps, by name. layouts: see pdtx.layout.layout_for.
    num_blocks: of each group, the null block among them. sharding: of recurrent layers' states, needed where tp_size is
    more than 1. encoder_positions: of cross attention.
    """
    kinds = list(dict.fromkeys(GroupBehaviour.of(spec) for spec in layers.values()))
    groups = list[CacheGroup]()
    for kind in kinds:
        spec = next(spec for spec in layers.values() if GroupBehaviour.of(spec) == kind)
        # A state is position 0 of one block, whatever number of tokens it stands for.
        size = 1 if isinstance(spec, MambaSpec) else spec.block_size
        positions = encoder_positions if kind.kind == "cross" else 0
        groups.append(CacheGroup(kind.name, kind.kind, size, num_blocks, spec, positions))
    buffers = dict[tuple[KVCacheSpec, str], list[str]]()
    for name, spec in layers.items():
        buffers.setdefault((spec, layout_for(spec, name, layouts)), []).append(name)
    shapes = list[BufferShape]()
    for number, ((spec, layout), names) in enumerate(buffers.items()):
        group = GroupBehaviour.of(spec).name
        own = sharding if isinstance(spec, MambaSpec) else None
        name = f"{group}.{number}"
        shapes.append(BufferShape(name, group, spec, layout, names, num_blocks, tp_size=tp_size, sharding=own))
    return groups, shapes
