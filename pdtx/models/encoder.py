"""Models with an encoder: Whisper, whose decoder also keeps the encoder's output, and BERT, which keeps nothing."""

from pdtx.errors import ModelError
from pdtx.kvspec import CrossAttentionSpec, FullAttentionSpec, KVCacheSpec
from pdtx.models.fields import Fields
from pdtx.models.options import FP8_DTYPES, PLAIN_DTYPES, CacheOptions


def whisper(fields: Fields, options: CacheOptions) -> dict[str, KVCacheSpec]:
    """Whisper: self attention and cross attention in each of decoder_layers; the encoder keeps nothing."""
    options.require_dtype("a decoder with cross attention", (*PLAIN_DTYPES, *FP8_DTYPES))
    width, heads = fields.integer("d_model"), fields.integer("decoder_attention_heads")
    if width % heads:
        raise ModelError(f"{fields.path}d_model {width} is no multiple of decoder_attention_heads {heads}")
    own, dtype, mode = options.kv_heads(heads, "decoder_attention_heads"), options.cache_dtype, options.quant_mode
    itself = FullAttentionSpec(
        block_size=options.block_size, num_kv_heads=own, head_size=width // heads, dtype=dtype, kv_quant_mode=mode
    )
    cross = CrossAttentionSpec(
        block_size=options.block_size, num_kv_heads=own, head_size=width // heads, dtype=dtype, kv_quant_mode=mode
    )
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(fields.integer("decoder_layers")):
        specs[f"model.decoder.layers.{layer}.self_attn.attn"] = itself
        specs[f"model.decoder.layers.{layer}.encoder_attn.attn"] = cross
    return specs


def encoder_only(fields: Fields, options: CacheOptions) -> dict[str, KVCacheSpec]:
    """BERT and its like: no layer keeps anything between steps."""
    fields.integer("num_hidden_layers")
    if fields.flag("is_decoder", default=False):
        raise ModelError(f"{fields.path}is_decoder makes a decoder of an encoder; there is no rule for that")
    return {}
