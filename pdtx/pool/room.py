"""Whether a pool holds its greatest request, and how long a request it would hold."""

from collections.abc import Sequence
from dataclasses import replace

from pdtx.errors import PoolTooSmall
from pdtx.kvspec import ServingLimits
from pdtx.pool.config import KVCacheGroupSpec
from pdtx.pool.slots import blocks_per_request, bytes_per_block
from pdtx.units import ceil_div, format_bytes


def max_memory_usage_bytes(groups: Sequence[KVCacheGroupSpec], limits: ServingLimits) -> int:
    """Return the bytes that the greatest request takes: its blocks in all groups, each a whole row of slots."""
    return blocks_per_request(groups, limits) * bytes_per_block(groups) if groups else 0


def fitting_model_len(groups: Sequence[KVCacheGroupSpec], limits: ServingLimits, available: int) -> int:
    """Return the tokens, at most max_model_len, of the longest request that fits; 0 if not even one token does."""
    fits, too_long = 0, limits.max_model_len + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if max_memory_usage_bytes(groups, replace(limits, max_model_len=middle)) <= available:
            fits = middle
        else:
            too_long = middle
    return fits


def require_room(groups: Sequence[KVCacheGroupSpec], limits: ServingLimits, available: int) -> None:
    """Raise PoolTooSmall unless one request of max_model_len tokens, and one block at least, fit into available bytes.

    No group needs no room.
    """
    if not groups:
        return
    needed = max(max_memory_usage_bytes(groups, limits), bytes_per_block(groups))
    if available <= 0:
        raise PoolTooSmall(
            "no memory is left for cache blocks; give more memory (gpu_memory_utilization) or use a smaller model",
            needed=needed,
            available=available,
            fitting_model_len=0,
        )
    if needed > available:
        fitting = fitting_model_len(groups, limits, available)
        hint = f"lower max_model_len to {fitting} or" if fitting else "not even one token fits:"
        raise PoolTooSmall(
            f"one request of max_model_len {limits.max_model_len} tokens needs {format_bytes(needed)} of KV cache, "
            f"{format_bytes(available)} are available; {hint} give more memory (gpu_memory_utilization)",
            needed=needed,
            available=available,
            fitting_model_len=fitting,
        )


def fit_max_model_len(
    groups_of_workers: Sequence[Sequence[KVCacheGroupSpec]], limits: ServingLimits, available: Sequence[int]
) -> ServingLimits:
    """Return limits with max_model_len lowered to what fits on every worker. Raises PoolTooSmall if nothing does."""
    pairs = list(zip(groups_of_workers, available, strict=True))
    for groups, memory in pairs:
        require_room(groups, replace(limits, max_model_len=1), memory)
    fitting = [fitting_model_len(groups, limits, memory) for groups, memory in pairs]
    return replace(limits, max_model_len=min(fitting))


def get_max_concurrency(groups: Sequence[KVCacheGroupSpec], num_blocks: int, limits: ServingLimits) -> float:
    """Return how many requests of max_model_len tokens the pool holds at once, as vLLM reports it.

    num_blocks / ceil(sum of the groups' max_memory_usage_bytes / page of the first group). Where groups' pages differ
    (DeepSeek V4) that is more than num_blocks / blocks_per_request, which is what the pool admits. Infinite if a
    request takes no block.
    """
    usage = sum(group.kv_cache_spec.max_memory_usage_bytes(limits) for group in groups)
    if not usage:
        return float("inf")
    return num_blocks / ceil_div(usage, groups[0].kv_cache_spec.page_size_bytes)
