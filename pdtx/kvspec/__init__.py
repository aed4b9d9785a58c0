"""The KVCacheSpec family: what one page of a KV cache costs. Class and field names are vLLM's (0.22)."""

from pdtx.kvspec.attention import AttentionSpec, FullAttentionSpec
from pdtx.kvspec.base import KVCacheSpec
from pdtx.kvspec.dtypes import DTYPE_SIZES, dtype_size

__all__ = ["DTYPE_SIZES", "AttentionSpec", "FullAttentionSpec", "KVCacheSpec", "dtype_size"]
