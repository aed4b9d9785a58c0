"""Decoders with multi-head latent attention: DeepSeek V2, V3 and V3.2."""

from collections.abc import Collection
from dataclasses import replace

from pdtx.kvspec import KVCacheSpec, MLAAttentionSpec
from pdtx.models.fields import Fields
from pdtx.models.options import FP8_DTYPES, PLAIN_DTYPES, CacheOptions
from pdtx.units import ceil_div

RECORD_DTYPES = (*FP8_DTYPES, "fp8_ds_mla")
"""What is kept as DeepSeek's own records."""
_SCALE_GROUP, _SCALE_BYTES = 128, 4  # the indexer's FP8 keys: one float32 for 128 channels


def latent_spec(fields: Fields, options: CacheOptions) -> MLAAttentionSpec:
    """Return the spec of one layer: kv_lora_rank + qk_rope_head_dim elements a token, the same on every rank."""
    return MLAAttentionSpec(
        block_size=options.block_size,
        num_kv_heads=1,
        head_size=fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim"),
        dtype=options.cache_dtype,
        cache_dtype_str=options.kv_cache_dtype,
    )


def require_latent_dtype(options: CacheOptions) -> None:
    """Raise ModelError for a kv_cache_dtype that latent vectors without an indexer are not kept in."""
    options.require_dtype("latent attention", (*PLAIN_DTYPES, *FP8_DTYPES))


def as_records(whose: str, options: CacheOptions, known: Collection[str]) -> CacheOptions:
    """Return options with "fp8_ds_mla" for every fp8, which sparse latent attention keeps in no other way.

    Raises ModelError for a kv_cache_dtype that is not known.
    """
    options.require_dtype(whose, known)
    return replace(options, kv_cache_dtype="fp8_ds_mla") if options.kv_cache_dtype in RECORD_DTYPES else options


def indexer_bytes(fields: Fields) -> int:
    """Return the bytes of an indexer's key: index_head_dim in FP8, and a float32 for each 128 of them."""
    channels = fields.integer("index_head_dim")
    return channels + ceil_div(channels, _SCALE_GROUP) * _SCALE_BYTES


def deepseek(fields: Fields, options: CacheOptions) -> dict[str, KVCacheSpec]:
    """DeepSeek V2 and V3; where the config has index_topk, as V3.2."""
    if fields.has("index_topk"):
        return deepseek_v32(fields, options)
    require_latent_dtype(options)
    spec = latent_spec(fields, options)
    layers = range(fields.integer("num_hidden_layers"))
    return {f"model.layers.{layer}.self_attn.attn": spec for layer in layers}


def deepseek_v32(fields: Fields, options: CacheOptions) -> dict[str, KVCacheSpec]:
    """DeepSeek V3.2: latent vectors and the indexer's keys beside them. Every fp8 is fp8_ds_mla, as in vLLM."""
    latent = latent_spec(fields, as_records("DeepSeek V3.2", options, (*PLAIN_DTYPES, *RECORD_DTYPES)))
    indexer = MLAAttentionSpec(
        block_size=options.block_size, num_kv_heads=1, head_size=indexer_bytes(fields), dtype="uint8"
    )
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(fields.integer("num_hidden_layers")):
        specs[f"model.layers.{layer}.self_attn.attn"] = latent
        specs[f"model.layers.{layer}.self_attn.indexer.k_cache"] = indexer
    return specs
