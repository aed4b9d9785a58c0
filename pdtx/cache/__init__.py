"""Paged caches on torch: memory, groups and buffers, blocks, coordinate codes and verification."""

from pdtx.cache.allocator import BlockAllocator, Blocks
from pdtx.cache.buffer import PagedBuffer, RankMemory
from pdtx.cache.caches import CacheGroup, GroupKind, KVCaches, group_kind
from pdtx.cache.codes import POISON, CoordinateCodes
from pdtx.cache.device import open_device, record_fence, torch_dtype
from pdtx.cache.group_allocator import GroupAllocator, GroupBlocks
from pdtx.cache.latent import PagedLatentCache
from pdtx.cache.paged import PagedKVCache
from pdtx.cache.states import PagedStateCache
from pdtx.cache.verify import Mismatch, Verification, compare, describe_mismatch

__all__ = [
    "POISON",
    "BlockAllocator",
    "Blocks",
    "CacheGroup",
    "CoordinateCodes",
    "GroupAllocator",
    "GroupBlocks",
    "GroupKind",
    "KVCaches",
    "Mismatch",
    "PagedBuffer",
    "PagedKVCache",
    "PagedLatentCache",
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
