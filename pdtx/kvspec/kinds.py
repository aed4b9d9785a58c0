"""The name of a spec's kind, as vLLM's KV events carry it."""

from enum import StrEnum

from pdtx.kvspec.attention import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    SinkFullAttentionSpec,
)
from pdtx.kvspec.base import KVCacheSpec
from pdtx.kvspec.mamba import MambaSpec
from pdtx.kvspec.mla import MLAAttentionSpec, SlidingWindowMLASpec
from pdtx.kvspec.uniform import UniformTypeKVCacheSpecs
from pdtx.kvspec.window import ChunkedLocalAttentionSpec, SlidingWindowSpec


class KVCacheSpecKind(StrEnum):
    """The kinds of vLLM 0.22."""

    FULL_ATTENTION = "full_attention"
    MLA_ATTENTION = "mla_attention"
    SINK_FULL_ATTENTION = "sink_full_attention"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    CHUNKED_LOCAL_ATTENTION = "chunked_local_attention"
    ENCODER_ONLY_ATTENTION = "encoder_only_attention"
    CROSS_ATTENTION = "cross_attention"
    MAMBA = "mamba"
    UNKNOWN = "unknown"


_KINDS: dict[type, KVCacheSpecKind] = {
    FullAttentionSpec: KVCacheSpecKind.FULL_ATTENTION,
    MLAAttentionSpec: KVCacheSpecKind.MLA_ATTENTION,
    SinkFullAttentionSpec: KVCacheSpecKind.SINK_FULL_ATTENTION,
    SlidingWindowSpec: KVCacheSpecKind.SLIDING_WINDOW,
    SlidingWindowMLASpec: KVCacheSpecKind.SLIDING_WINDOW_MLA,
    ChunkedLocalAttentionSpec: KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION,
    EncoderOnlyAttentionSpec: KVCacheSpecKind.ENCODER_ONLY_ATTENTION,
    CrossAttentionSpec: KVCacheSpecKind.CROSS_ATTENTION,
    MambaSpec: KVCacheSpecKind.MAMBA,
}


def get_kv_cache_spec_kind(spec: KVCacheSpec) -> KVCacheSpecKind:
    """Return the kind of a spec: that of its nearest ancestor that has one; UNKNOWN for layers of several kinds."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        kinds = {get_kv_cache_spec_kind(layer) for layer in spec.kv_cache_specs.values()}
        return kinds.pop() if len(kinds) == 1 else KVCacheSpecKind.UNKNOWN
    return next((_KINDS[cls] for cls in type(spec).__mro__ if cls in _KINDS), KVCacheSpecKind.UNKNOWN)
