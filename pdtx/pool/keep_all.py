"""Windows and chunks without the hybrid manager: kept like full attention, the window on record."""

from collections.abc import Mapping

from pdtx.kvspec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)


def keep_all_tokens(layers: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Return the layers with full attention in place of windows and chunks; unchanged where none has full attention.

    Latent windows take the block_size of the first layer with full attention. As vLLM 0.22's
    unify_hybrid_kv_cache_specs, except that chunks keep their kv_quant_mode (it drops it, and with it their scales).
    """
    full = next((spec for spec in layers.values() if isinstance(spec, FullAttentionSpec)), None)
    if full is None:
        return dict(layers)
    return {name: _keeping_all(spec, full.block_size) for name, spec in layers.items()}


def _keeping_all(spec: KVCacheSpec, block_size: int) -> KVCacheSpec:
    match spec:
        case SlidingWindowMLASpec():
            return _latent(spec, block_size)
        case SlidingWindowSpec():
            return _full(spec, head_size_v=spec.head_size_v, sliding_window=spec.sliding_window)
        case ChunkedLocalAttentionSpec():
            return _full(spec, attention_chunk_size=spec.attention_chunk_size)
        case _:
            return spec


def _full(
    spec: AttentionSpec,
    *,
    head_size_v: int = 0,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=head_size_v,
        dtype=spec.dtype,
        kv_quant_mode=spec.kv_quant_mode,
        page_size_padded=spec.page_size_padded,
        sliding_window=sliding_window,
        attention_chunk_size=attention_chunk_size,
    )


def _latent(spec: SlidingWindowMLASpec, block_size: int) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
        page_size_padded=None if spec.alignment else spec.page_size_padded,
        cache_dtype_str=spec.cache_dtype_str,
        alignment=spec.alignment,
        compress_ratio=spec.compress_ratio,
        model_version=spec.model_version,
    )
