"""What a buffer is to be, before there is one: in memory to be allocated, or in memory that others have."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from pdtx.cache.buffer import PagedBuffer
from pdtx.cache.foreign import AnyMemory, memories
from pdtx.cache.latent import PagedLatentCache
from pdtx.cache.paged import PagedKVCache
from pdtx.cache.quantized import PagedQuantizedCache
from pdtx.cache.states import PagedStateCache
from pdtx.errors import LayoutError
from pdtx.kvspec import KVCacheSpec, MambaSpec, MLAAttentionSpec, SlidingWindowMLASpec, StateSharding, dtype_size
from pdtx.layout import RECORD_ORDERS, AnyLayout, any_layout, preset_name
from pdtx.parallel import rank_spec


@dataclass(frozen=True)
class BufferShape:
    """Layers of one spec in one layout. num_blocks, spec: as in PagedBuffer; group: the name of its group.

    spec: of one layer of the whole model, with all its KV heads. layout: a preset's name, see pdtx.layout.
    tp_size: tensor-parallel ranks that share the model's heads. tp_ranks: those that this process has, None for all.
    sharding: how ranks share states, see PagedBuffer.
    kernel_block_size: see pdtx.layout.make_layout.
    """

    name: str
    group: str
    spec: KVCacheSpec
    layout: str
    layer_names: Sequence[str]
    num_blocks: int
    tp_size: int = field(default=1, kw_only=True)
    tp_ranks: range | None = field(default=None, kw_only=True)
    sharding: StateSharding | None = field(default=None, kw_only=True)
    kernel_block_size: int | None = field(default=None, kw_only=True)

    def rank_layout(self) -> AnyLayout:
        """Return where one rank's elements lie. Raises LayoutError, SpecError or ParallelError."""
        return any_layout(
            self.layout,
            rank_spec(self.spec, self.tp_size, self.sharding),
            num_layers=len(self.layer_names),
            num_blocks=self.num_blocks,
            kernel_block_size=self.kernel_block_size,
        )


@dataclass(frozen=True)
class ForeignBuffer(BufferShape):
    """A buffer in memory that others have allocated.

    memory: a contiguous tensor of any dtype and device, or a Memory (by address, or a storage); of several ranks in
    this process one each, in their order; as many as the process has. offset: byte of each memory at which the
    layout begins.
    layer_stride, block_stride: bytes from one layer and from one of num_blocks blocks to the next, as the memory's
    owner has them. They are held against the layout's, never used; None where the owner has no such number.
    tp_rank: the rank of the first memory.
    """

    memory: AnyMemory | Sequence[AnyMemory] = field(repr=False)
    layer_stride: int | None = None
    block_stride: int | None = None
    offset: int = 0
    tp_rank: int = 0


def buffer_class(spec: KVCacheSpec, layout: str) -> type[PagedBuffer]:
    """Return the class of a buffer of a spec in a preset. Raises LayoutError for an unknown preset."""
    if isinstance(spec, MambaSpec):
        return PagedStateCache
    if preset_name(layout) not in RECORD_ORDERS:
        return PagedKVCache
    return PagedLatentCache if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec) else PagedQuantizedCache


def make_buffer(
    shape: BufferShape,
    device: str | torch.device = "cpu",
    *,
    shared: bool = False,
    memories: Sequence[torch.Tensor] | None = None,
) -> PagedBuffer:
    """Return a buffer in memory of its own, or in memories; see PagedBuffer."""
    return buffer_class(shape.spec, shape.layout)(
        shape.spec,
        layout=shape.layout,
        num_layers=len(shape.layer_names),
        num_blocks=shape.num_blocks,
        device=device,
        name=shape.name,
        layer_names=shape.layer_names,
        tp_size=shape.tp_size,
        tp_ranks=shape.tp_ranks,
        sharding=shape.sharding,
        kernel_block_size=shape.kernel_block_size,
        shared=shared,
        memories=memories,
    )


def buffer_over(foreign: ForeignBuffer) -> PagedBuffer:
    """Return a buffer over others' memory, of which no byte is written. Raises LayoutError, see KVCaches.over."""
    layout, what = foreign.rank_layout(), f"buffer {foreign.name}"
    _check_strides(what, layout, foreign)
    given = memories(foreign.memory)
    held = range(foreign.tp_rank, foreign.tp_rank + len(given))
    if held.start < 0 or held.stop > foreign.tp_size or foreign.tp_ranks not in (None, held):
        raise LayoutError(
            f"{what}: {len(given)} memories from rank {foreign.tp_rank} on were given and tp_size is "
            f"{foreign.tp_size}; a cache has one for each rank of this process"
        )
    if len({memory.bytes.device for memory in given}) > 1:
        raise LayoutError(f"{what}: its memories are on different devices; all ranks of a process need the same")
    parts = [
        memory.part(
            foreign.offset,
            layout.size_bytes,
            _padding(layout),
            _alignment(layout, foreign.spec),
            f"{what} ({layout.name})",
        )
        for memory in given
    ]
    return make_buffer(replace(foreign, tp_ranks=held), memories=parts)


def _check_strides(what: str, layout: AnyLayout, foreign: ForeignBuffer) -> None:
    """Raise LayoutError unless the owner's strides are the layout's, on every axis that has a second step."""
    steps = layout.parts[0].layout
    blocks = steps.stride("block") * layout.blocks_per_manager_block
    for axis, extent, ours, theirs in (
        ("layer", len(foreign.layer_names), steps.stride("layer"), foreign.layer_stride),
        ("block", foreign.num_blocks, blocks, foreign.block_stride),
    ):
        if theirs is not None and theirs != ours and extent > 1:
            raise LayoutError(
                f"{what}: from {axis} to {axis} its owner has {theirs} bytes, layout {layout.name} has {ours}; "
                "name the layout that the memory has, or the spec that its pages follow"
            )


def _padding(layout: AnyLayout) -> int:
    """Bytes behind the last element: what the last page is padded with."""
    return layout.size_bytes - max(part.offset + part.layout.end for part in layout.parts)


def _alignment(layout: AnyLayout, spec: KVCacheSpec) -> int:
    """Bytes that the memory's start must be a multiple of: the widest element's."""
    names = spec.dtypes if isinstance(spec, MambaSpec) else (getattr(spec, "dtype", "uint8"),)
    return max(*(part.layout.itemsize for part in layout.parts), *map(dtype_size, names))
