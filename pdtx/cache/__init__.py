"""Paged caches on torch: memory, groups and buffers, blocks, coordinate codes and verification."""

from pdtx.cache.allocator import BlockAllocator, Blocks
from pdtx.cache.block_pools import AllocatingBlockPool, BlockPool, BlockTables, CallerBlocks, CallerTables
from pdtx.cache.buffer import PagedBuffer, RankMemory
from pdtx.cache.buffer_shapes import BufferShape, ForeignBuffer
from pdtx.cache.caches import KVCaches
from pdtx.cache.codes import POISON, CoordinateCodes
from pdtx.cache.device import open_device, record_fence, torch_dtype
from pdtx.cache.foreign import Memory
from pdtx.cache.group_allocator import GroupAllocator, GroupBlocks
from pdtx.cache.groups import CacheGroup, GroupKind, group_kind
from pdtx.cache.latent import PagedLatentCache
from pdtx.cache.paged import PagedKVCache
from pdtx.cache.quantized import PagedQuantizedCache
from pdtx.cache.states import PagedStateCache
from pdtx.cache.verify import Mismatch, Verification, compare, describe_mismatch

__all__ = [
    "POISON",
    "AllocatingBlockPool",
    "BlockAllocator",
    "BlockPool",
    "BlockTables",
    "Blocks",
    "BufferShape",
    "CacheGroup",
    "CallerBlocks",
    "CallerTables",
    "CoordinateCodes",
    "ForeignBuffer",
    "GroupAllocator",
    "GroupBlocks",
    "GroupKind",
    "KVCaches",
    "Memory",
    "Mismatch",
    "PagedBuffer",
    "PagedKVCache",
    "PagedLatentCache",
    "PagedQuantizedCache",
    "PagedStateCache",
    "RankMemory",
    "Verification",
    "compare",
    "describe_mismatch",
    "group_kind",
    "open_device",
    "record_fence",
    "torch_dtype",
]
