"""Decoders with keys and values for every token, or for a window: Llama, Mistral, Qwen, Gemma, gpt-oss, Llama 4."""

from collections.abc import Mapping
from dataclasses import replace

from pdtx.errors import ModelError
from pdtx.kvspec import (
    TURBOQUANT_PRESETS,
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    TQFullAttentionSpec,
    TurboQuantSlot,
)
from pdtx.models.fields import Fields
from pdtx.models.options import FP8_DTYPES, PLAIN_DTYPES, SCALED_DTYPES, CacheOptions

_OUTER_LAYERS = 2  # TurboQuant leaves so many layers at either end as they are, as vLLM has it
_DENSE = (*PLAIN_DTYPES, *FP8_DTYPES, *SCALED_DTYPES)
_KINDS: Mapping[str, str] = {"full_attention": "full", "sliding_attention": "window", "chunked_attention": "chunk"}


def attention_spec(fields: Fields, options: CacheOptions, head_size: int, kind: str = "full") -> AttentionSpec:
    """Return the spec of one layer with num_key_value_heads heads of head_size.

    kind: "full", "window" (of sliding_window tokens) or "chunk" (of attention_chunk_size tokens).
    """
    options.require_dtype("a layer with keys and values", (*_DENSE, *TURBOQUANT_PRESETS))
    block_size, dtype, mode = options.block_size, options.cache_dtype, options.quant_mode
    heads = options.kv_heads(fields.integer("num_key_value_heads"))
    if kind != "full":
        options.require_dtype("a layer with a window or chunk", _DENSE)
    if kind == "window":
        return SlidingWindowSpec(
            block_size=block_size,
            num_kv_heads=heads,
            head_size=head_size,
            dtype=dtype,
            kv_quant_mode=mode,
            sliding_window=fields.integer("sliding_window"),
        )
    if kind == "chunk":
        return ChunkedLocalAttentionSpec(
            block_size=block_size,
            num_kv_heads=heads,
            head_size=head_size,
            dtype=dtype,
            kv_quant_mode=mode,
            attention_chunk_size=fields.integer("attention_chunk_size"),
        )
    if options.kv_cache_dtype in TURBOQUANT_PRESETS:
        slot = TurboQuantSlot(preset=options.kv_cache_dtype, head_size=head_size).slot_bytes_aligned
        return TQFullAttentionSpec(
            block_size=block_size, num_kv_heads=heads, head_size=head_size, dtype=dtype, tq_slot_size=slot
        )
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=heads, head_size=head_size, dtype=dtype, kv_quant_mode=mode
    )


def head_dim(fields: Fields) -> int:
    """Return head_dim, or else hidden_size / num_attention_heads, where a model's own default is that.

    Raises ModelError if it is no whole number.
    """
    if fields.has("head_dim"):
        return fields.integer("head_dim")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden % heads:
        raise ModelError(f"{fields.path}head_dim is missing and hidden_size {hidden} is no multiple of {heads} heads")
    return hidden // heads


def _specs(
    fields: Fields, options: CacheOptions, kinds: list[str], name: str, *, head_size: int | None = None
) -> dict[str, KVCacheSpec]:
    """Return a spec for each of kinds; head_size is the config's head_dim where None, as most models need it."""
    size = fields.integer("head_dim") if head_size is None else head_size
    made = {kind: attention_spec(fields, options, size, kind) for kind in dict.fromkeys(kinds)}
    specs: dict[str, KVCacheSpec] = {f"{name.format(layer)}.attn": made[kind] for layer, kind in enumerate(kinds)}
    if options.kv_cache_dtype in TURBOQUANT_PRESETS:
        unpacked = attention_spec(fields, replace(options, kv_cache_dtype="auto"), size)
        outer = min(_OUTER_LAYERS, len(kinds) // 2)
        specs |= dict.fromkeys([*list(specs)[:outer], *list(specs)[len(kinds) - outer :]], unpacked)
    return specs


def _listed(fields: Fields) -> list[str] | None:
    """Return what layer_types says of each layer, or None where the config has no such list."""
    if not fields.has("layer_types"):
        return None
    return fields.one_of_each("layer_types", fields.integer("num_hidden_layers"), _KINDS)


def _every(fields: Fields, period: int, usual: str) -> list[str]:
    """Return "full" for every period-th layer and `usual` for the others."""
    layers = range(1, fields.integer("num_hidden_layers") + 1)
    return ["full" if layer % period == 0 else usual for layer in layers]


def plain(fields: Fields, options: CacheOptions) -> dict[str, KVCacheSpec]:
    """Llama and Mistral: what layer_types says, or else a window in all layers if there is a sliding_window."""
    usual = "window" if fields.has("sliding_window") else "full"
    kinds = _listed(fields) or [usual] * fields.integer("num_hidden_layers")
    return _specs(fields, options, kinds, "model.layers.{}.self_attn", head_size=head_dim(fields))


def qwen(fields: Fields, options: CacheOptions) -> dict[str, KVCacheSpec]:
    """Qwen 2 and 3: what layer_types says, or else full attention; their sliding_window counts only if it is used.

    Raises ModelError for windows in some layers only (max_window_layers) that layer_types does not name.
    """
    kinds = _listed(fields)
    if kinds is None and fields.has("sliding_window") and fields.flag("use_sliding_window"):
        raise ModelError(f"{fields.path}use_sliding_window is set: say in layer_types which layers have the window")
    kinds = kinds or ["full"] * fields.integer("num_hidden_layers")
    size = head_dim(fields) if fields.text("model_type").startswith("qwen2") else None
    return _specs(fields, options, kinds, "model.layers.{}.self_attn", head_size=size)


def gemma2(fields: Fields, options: CacheOptions) -> dict[str, KVCacheSpec]:
    """Gemma 2: windows in layers 0, 2, 4, ..., unless layer_types says otherwise."""
    return _specs(fields, options, _listed(fields) or _every(fields, 2, "window"), "model.layers.{}.self_attn")


def gemma3(fields: Fields, options: CacheOptions) -> dict[str, KVCacheSpec]:
    """Gemma 3: every sixth layer (sliding_window_pattern) is full, the others have a window."""
    if fields.flag("use_bidirectional_attention", default=False):
        raise ModelError(
            f"{fields.path}use_bidirectional_attention makes an encoder of Gemma 3; there is no rule for it"
        )
    kinds = _listed(fields) or _every(fields, fields.integer_or("sliding_window_pattern", 6), "window")
    return _specs(fields, options, kinds, f"{_prefix(fields)}.layers.{{}}.self_attn")


def gpt_oss(fields: Fields, options: CacheOptions) -> dict[str, KVCacheSpec]:
    """gpt-oss: windows in layers 0, 2, 4, ...; its sinks are weights, not tokens, and need no cache."""
    return _specs(fields, options, _listed(fields) or _every(fields, 2, "window"), "model.layers.{}.attn")


def llama4(fields: Fields, options: CacheOptions) -> dict[str, KVCacheSpec]:
    """Llama 4: layers without rotary positions (every fourth) are full, the others attend within chunks."""
    usual = "chunk" if fields.has("attention_chunk_size") else "full"
    kinds = _listed(fields)
    if kinds is None and fields.values.get("no_rope_layers"):
        known = {0: "full", 1: usual}  # 1: the layer has rotary positions
        kinds = fields.one_of_each("no_rope_layers", fields.integer("num_hidden_layers"), known)
    if kinds is None:
        kinds = _every(fields, fields.integer_or("no_rope_layer_interval", 4), usual)
    return _specs(fields, options, kinds, f"{_prefix(fields)}.layers.{{}}.self_attn")


def _prefix(fields: Fields) -> str:
    return "language_model.model" if fields.path else "model"
