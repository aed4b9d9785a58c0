"""Decoders that mix attention with recurrent layers: Jamba, Bamba, Nemotron-H, Qwen3-Next, Kimi-Linear."""

from collections.abc import Mapping

from pdtx.errors import ModelError
from pdtx.kvspec import KVCacheSpec
from pdtx.models.attention import attention_spec, head_dim
from pdtx.models.fields import Fields
from pdtx.models.latent import latent_spec, require_latent_dtype
from pdtx.models.options import FP8_DTYPES, PLAIN_DTYPES, CacheOptions
from pdtx.models.states import GatedDelta, KimiDelta, Mamba1, Mamba2, ShortConv, state_spec

_HYBRID_DTYPES = (*PLAIN_DTYPES, *FP8_DTYPES)  # what attention beside states is kept in
_NEMOTRON: Mapping[str, str] = {
    "M": "state", "*": "attention", "-": "none", "E": "none",
    "mamba": "state", "linear_attention": "state",
    "attention": "attention", "full_attention": "attention",
    "mlp": "none", "moe": "none",
}  # fmt: skip


def _attention(fields: Fields, options: CacheOptions, head_size: int) -> KVCacheSpec:
    options.require_dtype("attention beside recurrent layers", _HYBRID_DTYPES)
    return attention_spec(fields, options, head_size)


def jamba_states(fields: Fields) -> Mamba1:
    """Jamba's Mamba layers."""
    return Mamba1(
        inner=fields.integer("mamba_expand") * fields.integer("hidden_size"),
        state=fields.integer("mamba_d_state"),
        kernel=fields.integer("mamba_d_conv"),
    )


def jamba(fields: Fields, options: CacheOptions) -> dict[str, KVCacheSpec]:
    """Jamba: attention in layers attn_layer_offset, attn_layer_offset + attn_layer_period, ...; Mamba in the others."""
    period, offset = fields.integer("attn_layer_period"), fields.integer("attn_layer_offset", least=0)
    state = state_spec(options, jamba_states(fields), (options.model_dtype,) * 2)
    attention = _attention(fields, options, head_dim(fields))
    return {
        f"model.layers.{layer}.self_attn.attn" if layer % period == offset else f"model.layers.{layer}.mamba": (
            attention if layer % period == offset else state
        )
        for layer in range(fields.integer("num_hidden_layers"))
    }


def bamba_states(fields: Fields) -> Mamba2:
    """Bamba's Mamba layers."""
    heads, inner = fields.integer("mamba_n_heads"), fields.integer("mamba_expand") * fields.integer("hidden_size")
    automatic = fields.values.get("mamba_d_head") == "auto"
    return Mamba2(
        heads=heads,
        head_dim=inner // heads if automatic else fields.integer("mamba_d_head"),
        groups=fields.integer("mamba_n_groups"),
        state=fields.integer("mamba_d_state"),
        kernel=fields.integer("mamba_d_conv"),
    )


def bamba(fields: Fields, options: CacheOptions) -> dict[str, KVCacheSpec]:
    """Bamba: attention in attn_layer_indices, Mamba 2 in the other layers."""
    indices = set(fields.integers("attn_layer_indices"))
    count = fields.integer("num_hidden_layers")
    if beyond := sorted(index for index in indices if index >= count):
        raise ModelError(f"config field {fields.path}attn_layer_indices has {beyond[0]}, but there are {count} layers")
    state = state_spec(options, bamba_states(fields), (options.model_dtype,) * 2)
    attention = _attention(fields, options, head_dim(fields))
    return {
        f"model.layers.{layer}.self_attn.attn" if layer in indices else f"model.layers.{layer}.mamba": (
            attention if layer in indices else state
        )
        for layer in range(count)
    }


def nemotron_h_states(fields: Fields) -> Mamba2:
    """Nemotron-H's Mamba layers."""
    return Mamba2(
        heads=fields.integer("mamba_num_heads"),
        head_dim=fields.integer("mamba_head_dim"),
        groups=fields.integer("n_groups", "mamba_n_groups"),
        state=fields.integer("ssm_state_size"),
        kernel=fields.integer("conv_kernel", "mamba_d_conv"),
    )


def nemotron_h(fields: Fields, options: CacheOptions) -> dict[str, KVCacheSpec]:
    """Nemotron-H: hybrid_override_pattern has M for Mamba 2, * for attention, - and E for layers without a cache."""
    dtypes = (options.model_dtype, fields.dtype("mamba_ssm_cache_dtype"))
    state = state_spec(options, nemotron_h_states(fields), dtypes)
    attention = _attention(fields, options, fields.integer("head_dim", "attention_head_dim"))
    specs: dict[str, KVCacheSpec] = {}
    for layer, kind in enumerate(_nemotron_layers(fields)):
        if kind == "state":
            specs[f"model.layers.{layer}.mixer"] = state
        elif kind == "attention":
            specs[f"model.layers.{layer}.mixer.attn"] = attention
    return specs


def _nemotron_layers(fields: Fields) -> list[str]:
    if fields.has("layers_block_type"):
        listed = fields.values["layers_block_type"]
        return fields.one_of_each("layers_block_type", len(listed) if isinstance(listed, list) else 0, _NEMOTRON)
    pattern = Fields({"hybrid_override_pattern": list(fields.text("hybrid_override_pattern"))}, fields.path)
    return pattern.one_of_each("hybrid_override_pattern", fields.integer("num_hidden_layers"), _NEMOTRON)


def qwen3_next_states(fields: Fields) -> GatedDelta:
    """Qwen3-Next's gated delta nets."""
    return GatedDelta(
        key_heads=fields.integer("linear_num_key_heads"),
        value_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        kernel=fields.integer("linear_conv_kernel_dim"),
    )


def qwen3_next(fields: Fields, options: CacheOptions) -> dict[str, KVCacheSpec]:
    """Qwen3-Next: every full_attention_interval-th layer has attention, the others a gated delta net in float32."""
    count = fields.integer("num_hidden_layers")
    if fields.has("layer_types"):
        known = {"full_attention": "attention", "linear_attention": "state"}
        kinds = fields.one_of_each("layer_types", count, known)
    else:
        interval = fields.integer("full_attention_interval")
        kinds = ["state" if layer % interval else "attention" for layer in range(1, count + 1)]
    state = state_spec(options, qwen3_next_states(fields), (options.model_dtype, "float32"))
    attention = _attention(fields, options, fields.integer("head_dim"))
    return {
        f"model.layers.{layer}.linear_attn" if kind == "state" else f"model.layers.{layer}.self_attn.attn": (
            state if kind == "state" else attention
        )
        for layer, kind in enumerate(kinds)
    }


def falcon_h1_states(fields: Fields) -> Mamba2:
    """The Mamba half of Falcon-H1's layers."""
    heads = fields.integer("mamba_n_heads")
    expanded = fields.integer("mamba_expand") * fields.integer("hidden_size")
    inner = fields.integer_or("mamba_d_ssm", expanded)
    return Mamba2(
        heads=heads,
        head_dim=inner // heads,
        groups=fields.integer("mamba_n_groups"),
        state=fields.integer("mamba_d_state"),
        kernel=fields.integer("mamba_d_conv"),
    )


def lfm2_states(fields: Fields) -> ShortConv:
    """LFM2's short convolutions."""
    return ShortConv(inner=fields.integer("hidden_size"), kernel=fields.integer("conv_L_cache"))


def kimi_linear_states(fields: Fields) -> KimiDelta:
    """Kimi-Linear's delta attention; of transformers' own config, too, which has the section's fields beside others."""
    if not fields.has("linear_attn_config"):
        return KimiDelta(
            heads=fields.integer("linear_num_heads"),
            head_dim=fields.integer("linear_head_dim"),
            kernel=fields.integer("linear_conv_kernel_dim"),
        )
    linear = fields.section("linear_attn_config")
    return KimiDelta(
        heads=linear.integer("num_heads"),
        head_dim=linear.integer("head_dim"),
        kernel=linear.integer("short_conv_kernel_size"),
    )


def kimi_linear(fields: Fields, options: CacheOptions) -> dict[str, KVCacheSpec]:
    """Kimi-Linear: latent attention, or delta attention in the layers that linear_attn_config names, from 1 on."""
    require_latent_dtype(options)
    linear = fields.section("linear_attn_config")
    recurrent, latent_layers = set(linear.integers("kda_layers")), set(linear.integers("full_attn_layers"))
    numbers = range(1, fields.integer("num_hidden_layers") + 1)
    if recurrent & latent_layers or recurrent | latent_layers != set(numbers):
        raise ModelError(
            f"{linear.path}kda_layers and full_attn_layers must name each of layers 1 to {len(numbers)} once"
        )
    state = state_spec(options, kimi_linear_states(fields), (*(options.model_dtype,) * 3, "float32"))
    latent = latent_spec(fields, options)
    return {
        f"model.layers.{number - 1}.self_attn" + ("" if number in recurrent else ".attn"): (
            state if number in recurrent else latent
        )
        for number in numbers
    }
