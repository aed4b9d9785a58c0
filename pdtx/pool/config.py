"""What is asked of a pool, and what it comes out as. Class and field names are vLLM's (0.22)."""

from dataclasses import dataclass

from pdtx.kvspec import KVCacheSpec, ServingLimits
from pdtx.kvspec.checks import require_positive, require_positive_or_none


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """How the pool is cut.

    limits: the greatest request; a block must fit it.
    block_size: tokens of a block by configuration (cache_config.block_size), which layers may have been raised above.
    num_gpu_blocks_override: number of blocks to make, whatever memory there is.
    auto_fit_max_model_len: lower limits.max_model_len to what fits (vLLM's max_model_len = -1).
    disable_hybrid_kv_cache_manager: keep all tokens in window and chunk layers, in one group with the others.
    hash_block_size: tokens hashed together where there are several groups; their greatest common divisor where None.
    hashes_blocks: whether anybody looks blocks up by hash: prefix caching, or a connector to another node.

    Raises SpecError for a number below 1.
    """

    limits: ServingLimits
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    auto_fit_max_model_len: bool = False
    disable_hybrid_kv_cache_manager: bool = False
    hash_block_size: int | None = None
    hashes_blocks: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "block_size")
        require_positive_or_none(self, "num_gpu_blocks_override", "hash_block_size")


@dataclass(frozen=True, kw_only=True)
class KVCacheGroupSpec:
    """Layers with one block table. Empty on a worker that has none of them."""

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec


@dataclass(frozen=True, kw_only=True)
class KVCacheTensor:
    """One allocation of size bytes.

    shared_by: layers that live in it, one of a group at most: a block belongs to one group at a time. May be empty,
    where no group has a layer for it.
    """

    size: int
    shared_by: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """The pool of one worker: num_blocks blocks in every tensor."""

    num_blocks: int
    kv_cache_tensors: tuple[KVCacheTensor, ...]
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """The pools of all workers.

    configs: one a worker, with the same num_blocks.
    limits: those asked for, max_model_len lowered if it was to be fitted.
    """

    configs: tuple[KVCacheConfig, ...]
    limits: ServingLimits
