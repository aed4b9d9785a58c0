"""From layers and memory to pools (vLLM 0.22, v1/core/kv_cache_utils.py, get_kv_cache_configs)."""

import math
from collections.abc import Mapping, Sequence

from pdtx.errors import SpecError
from pdtx.kvspec import KVCacheSpec, MambaSpec, UniformTypeKVCacheSpecs
from pdtx.pool.config import KVCacheConfig, KVCacheGroupSpec, PoolPlan, PoolSettings
from pdtx.pool.grouping import get_kv_cache_groups
from pdtx.pool.room import fit_max_model_len, require_room
from pdtx.pool.slots import block_tensors, bytes_per_block

Groups = tuple[KVCacheGroupSpec, ...]


def plan_pool(
    workers: Sequence[Mapping[str, KVCacheSpec]], available_memory: Sequence[int], settings: PoolSettings
) -> PoolPlan:
    """Return the pool of every worker.

    workers: specs of each worker's layers by name, in the model's order; pipeline stages have different layers,
    tensor-parallel ranks the same. available_memory: bytes on each worker. All get the smallest number of blocks.

    Raises SpecError if the layers cannot share a pool, PoolTooSmall if a worker's memory does not hold one request.
    """
    if not workers or len(workers) != len(available_memory):
        raise SpecError(f"give the memory of each worker: {len(workers)} workers, {len(available_memory)} sizes")
    groups = get_kv_cache_groups(_all_layers(workers), disable_hybrid=settings.disable_hybrid_kv_cache_manager)
    if not groups:
        empty = KVCacheConfig(num_blocks=1, kv_cache_tensors=(), kv_cache_groups=())  # the null block
        return PoolPlan(configs=(empty,) * len(workers), limits=settings.limits)
    own = [_on_worker(groups, index, worker) for index, worker in enumerate(workers)]
    memory = [_budget(part, given, settings) for part, given in zip(own, available_memory, strict=True)]
    limits = fit_max_model_len(own, settings.limits, memory) if settings.auto_fit_max_model_len else settings.limits
    for part, budget in zip(own, memory, strict=True):
        require_room(part, limits, budget)
    num_blocks = min(budget // bytes_per_block(part) for part, budget in zip(own, memory, strict=True))
    configs = tuple(
        KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=block_tensors(part, num_blocks), kv_cache_groups=part)
        for part in own
    )
    return PoolPlan(configs=configs, limits=limits)


def _all_layers(workers: Sequence[Mapping[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    layers: dict[str, KVCacheSpec] = {}
    for worker in workers:
        for name, spec in worker.items():
            if layers.setdefault(name, spec) != spec:
                raise SpecError(f"layer {name!r} has different specs on two workers; all ranks must agree")
    return layers


def _on_worker(groups: Groups, index: int, worker: Mapping[str, KVCacheSpec]) -> Groups:
    """Return the groups with only those layers that the worker has; a group may be left with none."""
    if not worker:
        raise SpecError(f"worker {index} has no layer with a cache, the others have; give it one or leave it out")
    return tuple(_restricted(group, worker) for group in groups)


def _restricted(group: KVCacheGroupSpec, worker: Mapping[str, KVCacheSpec]) -> KVCacheGroupSpec:
    names = tuple(name for name in group.layer_names if name in worker)
    spec = group.kv_cache_spec
    if names and isinstance(spec, UniformTypeKVCacheSpecs):
        layers = {name: spec.kv_cache_specs[name] for name in names}
        spec = UniformTypeKVCacheSpecs(block_size=spec.block_size, kv_cache_specs=layers)
    return KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec)


def _budget(groups: Groups, available: int, settings: PoolSettings) -> int:
    """Return the bytes to plan with: the memory there is, or what num_gpu_blocks_override blocks take."""
    override = settings.num_gpu_blocks_override
    return available if override is None else override * bytes_per_block(groups)


def resolve_kv_cache_block_sizes(groups: Groups, settings: PoolSettings) -> tuple[int, int]:
    """Return (scheduler_block_size, hash_block_size), in tokens.

    One group: block_size * dcp * pcp, twice. Several: the least common multiple of their block sizes; and
    hash_block_size or their greatest common divisor, if blocks are hashed and every state's block is block_size long,
    else the scheduler's once more. Raises SpecError for several groups under context parallelism, and for a
    hash_block_size that does not divide every block size.
    """
    limits = settings.limits
    ranks = limits.decode_context_parallel_size * limits.prefill_context_parallel_size
    if len(groups) <= 1:
        return settings.block_size * ranks, settings.block_size * ranks
    if ranks > 1:
        raise SpecError(f"{len(groups)} cache groups cannot be spread over {ranks} context-parallel ranks; use 1")
    sizes = [group.kv_cache_spec.block_size for group in groups]
    scheduler = math.lcm(*sizes)
    states = [group.kv_cache_spec for group in groups if isinstance(group.kv_cache_spec, MambaSpec)]
    if not settings.hashes_blocks or any(spec.block_size != settings.block_size for spec in states):
        return scheduler, scheduler
    hashed = settings.hash_block_size or math.gcd(*sizes)
    if any(size % hashed for size in sizes):
        raise SpecError(f"hash_block_size {hashed} must divide every group's block size: {', '.join(map(str, sizes))}")
    return scheduler, hashed
