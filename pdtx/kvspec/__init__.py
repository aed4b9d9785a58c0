"""The KVCacheSpec family: what one page of a KV cache costs. Class and field names are vLLM's (0.22)."""

from pdtx.kvspec.attention import (
    AttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    SinkFullAttentionSpec,
    TQFullAttentionSpec,
)
from pdtx.kvspec.base import KVCacheSpec
from pdtx.kvspec.dtypes import DTYPE_SIZES, dtype_size
from pdtx.kvspec.kinds import KVCacheSpecKind, get_kv_cache_spec_kind
from pdtx.kvspec.limits import MAMBA_CACHE_MODES, Growth, ServingLimits
from pdtx.kvspec.mamba import MambaSpec
from pdtx.kvspec.mla import HiddenStateCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec
from pdtx.kvspec.quant import KVQuantMode, get_kv_quant_mode, kv_cache_dtype_to_dtype
from pdtx.kvspec.sharding import Segment, StateSharding
from pdtx.kvspec.turboquant import TURBOQUANT_PRESETS, TurboQuantSlot
from pdtx.kvspec.uniform import UniformTypeKVCacheSpecs
from pdtx.kvspec.window import ChunkedLocalAttentionSpec, SlidingWindowSpec

__all__ = [
    "DTYPE_SIZES",
    "MAMBA_CACHE_MODES",
    "TURBOQUANT_PRESETS",
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "Growth",
    "HiddenStateCacheSpec",
    "KVCacheSpec",
    "KVCacheSpecKind",
    "KVQuantMode",
    "MLAAttentionSpec",
    "MambaSpec",
    "Segment",
    "ServingLimits",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "StateSharding",
    "TQFullAttentionSpec",
    "TurboQuantSlot",
    "UniformTypeKVCacheSpecs",
    "dtype_size",
    "get_kv_cache_spec_kind",
    "get_kv_quant_mode",
    "kv_cache_dtype_to_dtype",
]
