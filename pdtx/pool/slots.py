"""How groups share memory: a block is a row of slots, and each slot is one tensor over all blocks."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from pdtx.errors import SpecError
from pdtx.kvspec import KVCacheSpec, ServingLimits, UniformTypeKVCacheSpecs
from pdtx.pool.config import KVCacheGroupSpec, KVCacheTensor
from pdtx.units import ceil_div


class Slot(NamedTuple):
    """One page of a block: its bytes, and the layers of which it may be the page, one of a group at most."""

    page_bytes: int
    shared_by: tuple[str, ...]


def layer_spec(group: KVCacheGroupSpec, layer: str) -> KVCacheSpec:
    """Return the spec of one layer of a group."""
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def block_slots(groups: Sequence[KVCacheGroupSpec]) -> tuple[Slot, ...]:
    """Return the slots of one block, in the order of vLLM's tensors.

    One group of unlike layers: a slot for each. Several such groups (DeepSeek V4): for each row as many slots as the
    first group has page sizes, shared by the layers of that size in the row. Else: slot i is shared by the i-th layer
    of every group. Raises SpecError if a worker's layers do not fit these rules.
    """
    uniform = [isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs) for group in groups]
    if all(uniform) and len(groups) == 1:
        layers = groups[0].layer_names
        return tuple(Slot(layer_spec(groups[0], layer).page_size_bytes, (layer,)) for layer in layers)
    if all(uniform):
        return _slots_by_page_size(groups)
    pages = {group.kv_cache_spec.page_size_bytes for group in groups}
    if len(pages) > 1:
        raise SpecError(f"groups need pages of one size, not {', '.join(map(str, sorted(pages)))} bytes")
    page = pages.pop()
    rows = zip_longest(*(group.layer_names for group in groups))
    return tuple(Slot(page, tuple(layer for layer in row if layer is not None)) for row in rows)


def _slots_by_page_size(groups: Sequence[KVCacheGroupSpec]) -> tuple[Slot, ...]:
    buckets = [layers_by_page_size(group) for group in groups]
    sizes = sorted(buckets[0])
    for bucket in buckets:
        for size in bucket.keys() - set(sizes):
            raise SpecError(
                f"layer {bucket[size][0]!r} has a page of {size} bytes, which no layer of the first group has "
                f"({', '.join(map(str, sizes))}); give each worker layers of every size"
            )
    rows = max(len(layers) for bucket in buckets for layers in bucket.values())
    return tuple(
        Slot(size, tuple(bucket[size][row] for bucket in buckets if row < len(bucket.get(size, ()))))
        for row in range(rows)
        for size in sizes
    )


def layers_by_page_size(group: KVCacheGroupSpec) -> dict[int, list[str]]:
    """Return the layers of a group by the bytes of their pages, in the order of their appearance."""
    bucket: dict[int, list[str]] = defaultdict(list)
    for layer in group.layer_names:
        bucket[layer_spec(group, layer).page_size_bytes].append(layer)
    return dict(bucket)


def bytes_per_block(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the bytes that one block occupies in all tensors together."""
    return sum(slot.page_bytes for slot in block_slots(groups))


def block_tensors(groups: Sequence[KVCacheGroupSpec], num_blocks: int) -> tuple[KVCacheTensor, ...]:
    """Return the tensors that hold num_blocks blocks."""
    slots = block_slots(groups)
    return tuple(KVCacheTensor(size=slot.page_bytes * num_blocks, shared_by=slot.shared_by) for slot in slots)


def blocks_per_request(groups: Sequence[KVCacheGroupSpec], limits: ServingLimits) -> int:
    """Return the blocks that the greatest request within limits takes in all groups together."""
    return sum(_group_blocks(group.kv_cache_spec, limits) for group in groups)


def _group_blocks(spec: KVCacheSpec, limits: ServingLimits) -> int:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.max_memory_usage_pages(limits)
    return ceil_div(spec.max_memory_usage_bytes(limits), spec.page_size_bytes)
