"""layout and cache_of: where a model's layers lie, in memory of anybody's."""

from collections.abc import Mapping, Sequence

import torch

from pdtx.api.specs import ModelSpec
from pdtx.cache import BufferShape, ForeignBuffer, KVCaches
from pdtx.cache.foreign import AnyMemory
from pdtx.cache.model_shapes import model_shapes
from pdtx.errors import InputError
from pdtx.kvspec import KVCacheSpec, StateSharding
from pdtx.layout import AnyLayout, any_layout, parse_layouts, require_held
from pdtx.parallel import rank_spec

BufferMemory = AnyMemory | Sequence[AnyMemory]
"""Memory of a buffer: a tensor or a pdtx.Memory; of several ranks one each."""


def layout(
    name: str,
    spec: ModelSpec | KVCacheSpec,
    *,
    num_blocks: int,
    num_layers: int | None = None,
    tp_size: int = 1,
    kernel_block_size: int | None = None,
) -> AnyLayout:
    """Return where the elements of equal layers lie in one region of one tensor-parallel rank.

    name: a preset's, see docs/layouts.md. spec: of one layer of the whole model, or a model whose layers are all alike.
    num_blocks: of the pool, the null block among them. num_layers: the model's, or 1, where None.
    kernel_block_size: see pdtx.layout.make_layout.
    Raises LayoutError for an unknown name or a spec that it cannot hold, ParallelError, InputError.
    """
    sharding: StateSharding | None = None
    if isinstance(spec, ModelSpec):
        num_layers = len(spec.layers) if num_layers is None else num_layers
        sharding, spec = spec.sharding, spec.spec
    return any_layout(
        name,
        rank_spec(spec, tp_size, sharding),
        num_layers=1 if num_layers is None else num_layers,
        num_blocks=num_blocks,
        kernel_block_size=kernel_block_size,
    )


def cache_of(
    spec: ModelSpec,
    layouts: str = "flash_attn_nhd",
    *,
    num_blocks: int,
    tp_size: int = 1,
    tp_ranks: range | None = None,
    encoder_positions: int = 0,
    device: str | torch.device = "cpu",
    shared: bool = False,
    memory: BufferMemory | Mapping[str, BufferMemory] | None = None,
) -> KVCaches:
    """Return the caches of a model: a group for each behaviour of its layers, a buffer for each spec.

    layouts: a preset's name, or several with commas for several kinds of layers; an order of plain elements stands for
    that of quantized ones, too (flashinfer_hnd for triton_per_token_head_hnd). num_blocks: of each group, the null
    block among them. encoder_positions: of cross attention. tp_ranks: of tp_size those that this process has, None for
    all.
    memory: where it is allocated already, of the only buffer or of each by its name; then nothing is allocated or
    written. Otherwise device, and shared for memory that other processes of this host can map.
    For groups and buffers of your own making, see Cache.over and Cache.allocate.
    Raises LayoutError, SpecError or ParallelError for what cannot be, InputError for memory that is not there.
    """
    names = parse_layouts(layouts)
    require_held(names, spec.layers)
    groups, shapes = model_shapes(
        spec.layers,
        names,
        num_blocks=num_blocks,
        tp_size=tp_size,
        tp_ranks=tp_ranks,
        sharding=spec.sharding,
        encoder_positions=encoder_positions,
    )
    if memory is None:
        return KVCaches.allocate(groups, shapes, device=device, shared=shared)
    if shared or str(device) != "cpu":
        raise InputError("device and shared are for memory that is allocated here; leave them out beside memory")
    given = memory if isinstance(memory, Mapping) else {shape.name: memory for shape in shapes[:1]}
    buffers = [shape.name for shape in shapes]
    if set(given) != set(buffers):
        raise InputError(f"memory was given for {', '.join(given) or 'nothing'}; the buffers are {', '.join(buffers)}")
    return KVCaches.over(groups, [_over(shape, given[shape.name]) for shape in shapes])


def _over(shape: BufferShape, memory: BufferMemory) -> ForeignBuffer:
    return ForeignBuffer(
        shape.name,
        shape.group,
        shape.spec,
        shape.layout,
        shape.layer_names,
        shape.num_blocks,
        memory,
        tp_size=shape.tp_size,
        tp_rank=shape.tp_ranks.start if shape.tp_ranks is not None else 0,
        sharding=shape.sharding,
    )
