"""The groups and buffers that a model's layers make up."""

from collections.abc import Collection, Mapping

from pdtx.cache.buffer_shapes import BufferShape
from pdtx.cache.groups import CacheGroup, GroupBehaviour
from pdtx.errors import InputError
from pdtx.kvspec import KVCacheSpec, MambaSpec, StateSharding
from pdtx.layout import layout_for


def model_shapes(
    layers: Mapping[str, KVCacheSpec],
    layouts: tuple[str, ...],
    *,
    num_blocks: int,
    tp_size: int = 1,
    tp_ranks: range | None = None,
    sharding: StateSharding | None = None,
    encoder_positions: int = 0,
    held: Collection[str] | None = None,
) -> tuple[list[CacheGroup], list[BufferShape]]:
    """Return a group for each behaviour and a buffer for each spec, for KVCaches.allocate and over.

    layers: what each layer of the whole model keeps, by name. layouts: see pdtx.layout.layout_for.
    num_blocks: of each group, the null block among them. encoder_positions: of cross attention.
    sharding: of recurrent layers' states, needed where tp_size is more than 1.
    tp_size, tp_ranks: see BufferShape. held: names of the layers that this process has, as a stage of a pipeline has;
    None for all. What is made is named as for the whole model, so that stages and whole models match.

    Raises InputError for a held name that is no layer, or if there is none.
    """
    unknown = next((name for name in held or () if name not in layers), None)
    if unknown is not None or (held is not None and not held):
        raise InputError(f"layer {unknown!r} is none of the model's; a stage has one of its layers at least")
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
        group, own = GroupBehaviour.of(spec).name, [name for name in names if held is None or name in held]
        if own:
            name = f"{group}.{number}"
            shares = sharding if isinstance(spec, MambaSpec) else None
            shape = BufferShape(
                name, group, spec, layout, own, num_blocks, tp_size=tp_size, tp_ranks=tp_ranks, sharding=shares
            )
            shapes.append(shape)
    used = {shape.group for shape in shapes}
    return [group for group in groups if group.name in used], shapes
