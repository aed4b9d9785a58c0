"""What a model keeps per token and layer, found out from transformers and the model itself; never guessed."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from pdtx.errors import ModelError

# Kind of layer by the class that transformers' own cache would use for it. A kind that is run needs a class in
# pdtx.runner.paged.LAYER_CLASSES; all others are refused by these names.
_KINDS = {
    "DynamicLayer": "full_attention",
    "DynamicSlidingWindowLayer": "sliding_attention",
    "DynamicIndexedLayer": "indexed_attention",
    "LinearAttentionLayer": "linear_attention (Mamba-like states)",
    "LinearAttentionAndFullAttentionLayer": "hybrid (attention and Mamba-like states)",
    "DummyLayer": "without a KV cache of its own",
}
_MLA_FIELD = "kv_lora_rank"
# These rescale the rotary angles with the length of the sequence, so keys of one token differ with what followed it.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True)
class Architecture:
    """The facts about a model that its paged cache depends on.

    layer_kinds: one name a layer. num_kv_heads, head_size, head_size_v: K is (num_kv_heads, head_size) a token and
    layer, V (num_kv_heads, head_size_v). max_model_len: tokens of prompt and answer together.
    cache_argument: name of the argument of the model's forward that takes the cache.
    """

    layer_kinds: tuple[str, ...]
    num_kv_heads: int
    head_size: int
    head_size_v: int
    max_model_len: int
    vocab_size: int
    cache_argument: str


def check_config(config: Any, name: str) -> tuple[str, ...]:  # noqa: ANN401 - transformers is not typed
    """Return the kind of each layer, for a model that can be run; needs the config only, no weights.

    Raises ModelError naming the model type and what about it is not supported.
    """
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise _refusal(name, config, "it is an encoder-decoder model, whose cross attention has a cache of its own")
    if getattr(text, _MLA_FIELD, None) is not None:
        raise _refusal(name, config, f"its layers are MLA ({_MLA_FIELD} {getattr(text, _MLA_FIELD)})")
    kinds = _layer_kinds(text)
    for layer, kind in enumerate(kinds):
        if kind != "full_attention":
            window = getattr(text, "sliding_window", None) if kind == "sliding_attention" else None
            detail = f" (window {window})" if window is not None else ""
            raise _refusal(name, config, f"layer {layer} is {kind}{detail}")
    scaling = _rope_types(getattr(text, "rope_parameters", None)) & _LENGTH_DEPENDENT_ROPE
    if scaling:
        raise _refusal(name, config, f"its rope type {min(scaling)!r} changes cached keys with the sequence's length")
    return kinds


def inspect_model(model: Any, name: str) -> Architecture:  # noqa: ANN401 - transformers is not typed
    """Return the facts about a loaded model; one token is computed to see what its layers really store.

    Raises ModelError for a model that cannot be run, see check_config.
    """
    config = model.config
    kinds = check_config(config, name)
    text = config.get_text_config(decoder=True)
    max_model_len = getattr(text, "max_position_embeddings", None)
    if not isinstance(max_model_len, int):
        raise _refusal(name, config, "its config has no max_position_embeddings to tell how long a sequence may be")
    argument = _cache_argument(model, name)
    num_kv_heads, head_size, head_size_v = _stored_shape(model, text, name, argument)
    return Architecture(kinds, num_kv_heads, head_size, head_size_v, max_model_len, text.vocab_size, argument)


def _refusal(name: str, config: Any, reason: str) -> ModelError:  # noqa: ANN401 - transformers is not typed
    return ModelError(
        f"model {name!r} (model_type {config.model_type!r}) cannot be run yet: {reason}; "
        "only decoder models whose layers are all full attention are supported, e.g. llama, qwen2, qwen3"
    )


def _layer_kinds(text: Any) -> tuple[str, ...]:  # noqa: ANN401 - transformers is not typed
    """Ask transformers' own cache which kind of layer it would make for each layer of the config."""
    from transformers import DynamicCache

    names = [type(layer).__name__ for layer in DynamicCache(config=text).layers]
    return tuple(_KINDS.get(name, name) for name in names)


def _rope_types(parameters: Any) -> set[str]:  # noqa: ANN401 - from a JSON file
    """Collect the rope types, which some configs give once and some per kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    nested = [_rope_types(value) for value in parameters.values() if isinstance(value, dict)]
    return set().union({str(parameters.get("rope_type"))}, *nested)


def _cache_argument(model: Any, name: str) -> str:  # noqa: ANN401 - transformers is not typed
    """Return the name under which the model takes a cache: it was renamed between releases of transformers."""
    parameters = inspect.signature(model.forward).parameters
    for argument in ("cache", "past_key_values"):
        if argument in parameters:
            return argument
    raise _refusal(name, model.config, "it does not take a KV cache")


def _stored_shape(model: Any, text: Any, name: str, argument: str) -> tuple[int, int, int]:  # noqa: ANN401
    """Compute one token with transformers' cache and return KV heads, key channels and value channels of its layers."""
    from transformers import DynamicCache

    probe = DynamicCache(config=text)
    with torch.inference_mode():
        model(
            input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device), use_cache=True, **{argument: probe}
        )
    shapes = set()
    for layer, stored in enumerate(probe.layers):
        if stored.keys is None or stored.values is None:
            raise _refusal(name, model.config, f"layer {layer} stores no keys and values")
        shapes.add((tuple(stored.keys.shape), tuple(stored.values.shape)))
    if len(shapes) != 1:
        raise _refusal(name, model.config, f"its layers store K and V of different shapes, {sorted(shapes)}")
    (_, heads, tokens, channels), (_, heads_v, tokens_v, channels_v) = shapes.pop()
    if (heads, tokens, tokens_v) != (heads_v, 1, 1):
        raise _refusal(name, model.config, f"K has {heads} heads and V {heads_v}, of {tokens} and {tokens_v} tokens")
    return heads, channels, channels_v
