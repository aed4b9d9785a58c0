"""DeepSeek V4: a window of latent vectors in every layer, compressed ones and their compressors' states in most."""

from collections.abc import Mapping

from pdtx.errors import ModelError
from pdtx.kvspec import KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec
from pdtx.kvspec.mla import V4_ALIGNMENT
from pdtx.models.fields import Fields
from pdtx.models.latent import RECORD_DTYPES, as_records, indexer_bytes
from pdtx.models.options import CacheOptions

_DTYPE, _VERSION = "fp8_ds_mla", "deepseek_v4"
_BLOCK_SIZE = 256
_WINDOW_BLOCK_SIZE = 64
_STATE_BLOCK_SIZES = {4: 4, 128: 8}
_WINDOWS_IN_STATE = {4: 2, 128: 1}  # a compressor of 4 tokens overlaps with the one before
_RATIOS: Mapping[int, str] = {0: "0", 1: "0", 4: "4", 128: "128"}
_LAYER_TYPES: Mapping[str, str] = {
    "sliding_attention": "0",
    "compressed_sparse_attention": "4",
    "heavily_compressed_attention": "128",
}


def deepseek_v4(fields: Fields, options: CacheOptions) -> dict[str, KVCacheSpec]:
    """Return the caches of every layer, by its compress ratio: 0 (window only), 4 (with an indexer) or 128.

    Raises ModelError for a kv_cache_dtype that is no fp8 (vLLM has no other either), and for a block_size other than
    256, for which vLLM's own sizes are not known.
    """
    as_records("DeepSeek V4", options, RECORD_DTYPES)
    if options.block_size != _BLOCK_SIZE:
        raise ModelError(f"DeepSeek V4 keeps its caches in blocks of {_BLOCK_SIZE} tokens; block_size must be that")
    specs: dict[str, KVCacheSpec] = {}
    for layer, ratio in enumerate(_compress_ratios(fields)):
        specs |= {f"model.layers.{layer}.attn.{name}": spec for name, spec in _layer(fields, ratio).items()}
    return specs


def _compress_ratios(fields: Fields) -> list[int]:
    count = fields.integer("num_hidden_layers")
    if not fields.has("compress_ratios") and fields.has("layer_types"):
        return [int(ratio) for ratio in fields.one_of_each("layer_types", count, _LAYER_TYPES)]
    return [int(ratio) for ratio in fields.one_of_each("compress_ratios", count, _RATIOS)]


def _layer(fields: Fields, ratio: int) -> dict[str, KVCacheSpec]:
    head_size = fields.integer("head_dim")
    window = SlidingWindowMLASpec(
        block_size=_WINDOW_BLOCK_SIZE,
        num_kv_heads=1,
        head_size=head_size,
        dtype="uint8",
        sliding_window=fields.integer("sliding_window"),
        cache_dtype_str=_DTYPE,
        alignment=V4_ALIGNMENT,
        model_version=_VERSION,
    )
    if not ratio:
        return {"swa_cache": window}
    specs = {
        "mla": _compressed(head_size, ratio, cache_dtype_str=_DTYPE, model_version=_VERSION),
        "swa_cache": window,
        "compressor.state_cache": _state(head_size, ratio),
    }
    if ratio == 4:
        specs["indexer.k_cache"] = _compressed(indexer_bytes(fields), ratio)
        specs["indexer.compressor.state_cache"] = _state(fields.integer("index_head_dim"), ratio)
    return specs


def _compressed(
    head_size: int, ratio: int, *, cache_dtype_str: str | None = None, model_version: str | None = None
) -> KVCacheSpec:
    return MLAAttentionSpec(
        block_size=_BLOCK_SIZE,
        num_kv_heads=1,
        head_size=head_size,
        dtype="uint8",
        cache_dtype_str=cache_dtype_str,
        alignment=V4_ALIGNMENT,
        compress_ratio=ratio,
        model_version=model_version,
    )


def _state(head_size: int, ratio: int) -> KVCacheSpec:
    """What a compressor remembers of the tokens it has not compressed yet: vectors and their scores, in float32."""
    windows = _WINDOWS_IN_STATE[ratio]
    return SlidingWindowMLASpec(
        block_size=_STATE_BLOCK_SIZES[ratio],
        num_kv_heads=1,
        head_size=2 * windows * head_size,
        dtype="float32",
        sliding_window=windows * ratio,
        alignment=V4_ALIGNMENT,
    )
