"""Paged KV caches on torch: memory, blocks, coordinate codes and verification."""

from pdtx.cache.allocator import BlockAllocator, Blocks
from pdtx.cache.codes import POISON, CoordinateCodes
from pdtx.cache.paged import PagedKVCache, open_device, record_fence, torch_dtype
from pdtx.cache.verify import Mismatch, Verification, compare, describe_mismatch

__all__ = [
    "POISON",
    "BlockAllocator",
    "Blocks",
    "CoordinateCodes",
    "Mismatch",
    "PagedKVCache",
    "Verification",
    "compare",
    "describe_mismatch",
    "open_device",
    "record_fence",
    "torch_dtype",
]
