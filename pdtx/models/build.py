"""Which rule is for which model_type, and the one way in: layer_specs."""

from collections.abc import Callable, Mapping
from typing import Any

from pdtx.errors import ModelError
from pdtx.kvspec import KVCacheSpec, StateSharding
from pdtx.models import attention, deepseek_v4, encoder, hybrid, latent
from pdtx.models.fields import Fields
from pdtx.models.options import CacheOptions
from pdtx.models.states import States

Rule = Callable[[Fields, CacheOptions], dict[str, KVCacheSpec]]

_RULES: Mapping[str, Rule] = {
    "llama": attention.plain,
    "mistral": attention.plain,
    "mixtral": attention.plain,
    "qwen2": attention.qwen,
    "qwen2_moe": attention.qwen,
    "qwen3": attention.qwen,
    "qwen3_moe": attention.qwen,
    "gemma2": attention.gemma2,
    "gemma3": attention.gemma3,
    "gemma3_text": attention.gemma3,
    "gpt_oss": attention.gpt_oss,
    "llama4": attention.llama4,
    "llama4_text": attention.llama4,
    "deepseek_v2": latent.deepseek,
    "deepseek_v3": latent.deepseek,
    "deepseek_v32": latent.deepseek_v32,
    "deepseek_v4": deepseek_v4.deepseek_v4,
    "jamba": hybrid.jamba,
    "bamba": hybrid.bamba,
    "nemotron_h": hybrid.nemotron_h,
    "qwen3_next": hybrid.qwen3_next,
    "kimi_linear": hybrid.kimi_linear,
    "whisper": encoder.whisper,
    "bert": encoder.encoder_only,
    "roberta": encoder.encoder_only,
    "xlm-roberta": encoder.encoder_only,
}
_STATES: Mapping[str, Callable[[Fields], States]] = {
    "jamba": hybrid.jamba_states,
    "bamba": hybrid.bamba_states,
    "nemotron_h": hybrid.nemotron_h_states,
    "qwen3_next": hybrid.qwen3_next_states,
    "kimi_linear": hybrid.kimi_linear_states,
    "falcon_h1": hybrid.falcon_h1_states,
    "lfm2": hybrid.lfm2_states,
}
_NESTED = frozenset({"gemma3", "llama4"})  # the language model is described in text_config
MODEL_TYPES = tuple(_RULES)
"""Every model_type that there is a rule for."""


def layer_specs(
    config: Mapping[str, Any],
    *,
    block_size: int = 16,
    kv_cache_dtype: str = "auto",
    tensor_parallel_size: int = 1,
    max_model_len: int | None = None,
) -> dict[str, KVCacheSpec]:
    """Return what each layer keeps on one rank, by name, in the order of layers; {} for an encoder.

    config: a Hugging Face config.json. kv_cache_dtype: one of KV_CACHE_DTYPES; "auto" is the model's own dtype.
    max_model_len: tokens in one block of a recurrent layer's state; the model's own greatest length where None.

    Attention and states come with pages of their own sizes; pdtx.pool.align_hybrid_block_size makes them one.
    Raises ModelError for an unknown model_type or kv_cache_dtype, a field that is missing, ranks that heads cannot be
    divided over; SpecError for sizes that cannot be.
    """
    fields, rule = _fields(config)
    options = CacheOptions(
        root=Fields(config),
        text=fields,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
        max_model_len=max_model_len,
    )
    return rule(fields, options)


def state_sharding(config: Mapping[str, Any]) -> StateSharding | None:
    """Return how ranks share the states of a model's recurrent layers; None if it has none.

    Of Falcon-H1 and LFM2, too, which layer_specs has no rule for. Raises ModelError as layer_specs does.
    """
    states = _STATES.get(Fields(config).text("model_type"))
    if states is not None:
        return states(Fields(config)).sharding
    _fields(config)
    return None


def context_length(config: Mapping[str, Any]) -> int:
    """Return the tokens of the longest request that the model is made for. Raises ModelError if it does not say."""
    fields, _ = _fields(config)
    return fields.integer("max_position_embeddings", "max_target_positions", "model_max_length")


def _fields(config: Mapping[str, Any]) -> tuple[Fields, Rule]:
    root = Fields(config)
    model_type = root.text("model_type")
    if model_type not in _RULES:
        raise ModelError(
            f"there is no rule for what model_type {model_type!r} keeps in its layers; known: {', '.join(MODEL_TYPES)}"
        )
    return root.section("text_config") if model_type in _NESTED else root, _RULES[model_type]
