"""The pool: how many blocks a worker's memory makes, and which layers share them (vLLM 0.22's rules)."""

from pdtx.pool.align import align_hybrid_block_size
from pdtx.pool.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, PoolPlan, PoolSettings
from pdtx.pool.grouping import get_kv_cache_groups
from pdtx.pool.memory import DeviceMemory, available_kv_cache_memory
from pdtx.pool.plan import plan_pool, resolve_kv_cache_block_sizes
from pdtx.pool.room import fitting_model_len, get_max_concurrency, max_memory_usage_bytes
from pdtx.pool.slots import blocks_per_request, bytes_per_block

__all__ = [
    "DeviceMemory",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheTensor",
    "PoolPlan",
    "PoolSettings",
    "align_hybrid_block_size",
    "available_kv_cache_memory",
    "blocks_per_request",
    "bytes_per_block",
    "fitting_model_len",
    "get_kv_cache_groups",
    "get_max_concurrency",
    "max_memory_usage_bytes",
    "plan_pool",
    "resolve_kv_cache_block_sizes",
]
