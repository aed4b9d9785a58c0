"""What a model keeps in each of its layers, found out from transformers and the model itself; never guessed."""

import inspect
from dataclasses import dataclass
from typing import Any

from pdtx.errors import ModelError
from pdtx.kvspec import StateSharding

# transformers' own classes of cache layers: what each keeps, and whether a paged counterpart exists.
SUPPORTED_LAYERS = frozenset({
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "DynamicIndexedLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "DummyLayer",
    "DeepseekV4HCACache",
    "DeepseekV4CSACache",
})  # fmt: skip
# These rescale the rotary angles with the length of the sequence, so keys of one token differ with what followed it.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_UNBOUNDED = 1 << 20
"""Tokens of a sequence, where neither the config nor any layer sets a limit: a model of states alone."""


@dataclass(frozen=True)
class AttentionFacts:
    """What an attention layer keeps for a token: num_kv_heads keys of key channels and values of value channels.

    latent: the two are MLA's one latent vector and its part with position, of a single head; with value 0 channels
    one vector that is key and value.
    window, chunk: tokens that the layer attends to, where it forgets the others.
    """

    num_kv_heads: int
    key: int
    value: int
    latent: bool = False
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class StateFacts:
    """The states of a recurrent layer: shapes without the batch, the num_convs convolutions first (inputs, channels).

    dtypes: names, one for each shape.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    num_convs: int


@dataclass(frozen=True)
class CompressedFacts:
    """A compressor of DeepSeek V4: for every ratio tokens one entry of entry channels.

    name: transformers' for it. inputs: channels that it keeps of a token until the token is in all entries that it
    counts for, and as many of its gate. overlap: whether those of one window count for the next entry as well.
    """

    name: str
    ratio: int
    entry: int
    inputs: int
    overlap: bool

    @property
    def window(self) -> int:
        """Tokens whose inputs may still be needed, counting the next token."""
        return self.ratio * (2 if self.overlap else 1)


@dataclass(frozen=True)
class LayerFacts:
    """All that one layer keeps; what it does not keep is None. indexer: channels of its indexer's keys.

    cross: what it keeps of the encoder's output. compressed: its compressors.
    """

    attention: AttentionFacts | None = None
    indexer: int | None = None
    states: StateFacts | None = None
    cross: AttentionFacts | None = None
    compressed: tuple[CompressedFacts, ...] = ()


@dataclass(frozen=True)
class EncoderFacts:
    """An encoder of features (mel, frames): its positions are what the decoder's cross attention keeps."""

    features: tuple[int, int]
    positions: int
    hidden_size: int


@dataclass(frozen=True)
class Architecture:
    """The facts about a model that its paged cache depends on.

    max_model_len: tokens of prompt and answer together. cache_argument: name of the argument of the model's forward
    that takes the cache. continues_states: whether a pass of several tokens goes on from the states before it; where
    it does not, a prompt must be computed in one piece. sharding: how ranks share states; None where there are none, or
    that is not known.
    """

    layers: tuple[LayerFacts, ...]
    max_model_len: int
    vocab_size: int
    cache_argument: str
    encoder: EncoderFacts | None = None
    continues_states: bool = True
    sharding: StateSharding | None = None


def check_config(config: Any, name: str) -> None:  # noqa: ANN401 - transformers is not typed
    """Raise ModelError, naming the model type and what it is about it, for a model that cannot be run.

    Needs the config only, no weights.
    """
    if config.is_encoder_decoder:
        if not hasattr(config, "num_mel_bins") or not hasattr(config, "max_source_positions"):
            raise refusal(name, config, "its encoder takes text; of encoder-decoder models only whisper's kind is run")
        return
    text = config.get_text_config(decoder=True)
    for layer, kind in enumerate(layer_classes(text)):
        if kind not in SUPPORTED_LAYERS:
            raise refusal(name, config, f"layer {layer} keeps a {kind}, which has no paged form here")
    scaling = _rope_types(getattr(text, "rope_parameters", None)) & _LENGTH_DEPENDENT_ROPE
    if scaling:
        raise refusal(name, config, f"its rope type {min(scaling)!r} changes cached keys with the sequence's length")


def refusal(name: str, config: Any, reason: str) -> ModelError:  # noqa: ANN401 - transformers is not typed
    """Return the error that says why a model cannot be run."""
    return ModelError(f"model {name!r} (model_type {config.model_type!r}) cannot be run: {reason}")


def layer_classes(text: Any) -> tuple[str, ...]:  # noqa: ANN401 - transformers is not typed
    """Return the class that transformers' own cache makes for each layer of a decoder's config.

    The layer's type, where transformers has no class for it.
    """
    from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

    # A model's file registers classes of its own when it is imported, which loading the weights would do.
    types, _ = get_layer_types_and_kwargs(text)
    if any(kind not in DYNAMIC_LAYER_TYPE_MAPPING for kind in types):
        _import_model(text)
    classes = DYNAMIC_LAYER_TYPE_MAPPING
    return tuple(classes[kind].__name__ if kind in classes else str(kind) for kind in types)


def _import_model(text: Any) -> None:  # noqa: ANN401 - transformers is not typed
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)


def max_model_len(model: Any, name: str, layers: tuple[LayerFacts, ...]) -> int:  # noqa: ANN401
    """Return the tokens that a sequence may have. Raises ModelError where the config does not say it."""
    text = model.config.get_text_config(decoder=True)
    for field in ("max_target_positions", "max_position_embeddings"):
        found = getattr(text, field, None)
        if isinstance(found, int):
            return found
    if all(layer.attention is None for layer in layers):
        return _UNBOUNDED
    raise refusal(name, model.config, "its config has no max_position_embeddings to tell how long a sequence may be")


def cache_argument(model: Any, name: str) -> str:  # noqa: ANN401 - transformers is not typed
    """Return the name under which the model takes a cache: it was renamed between releases of transformers."""
    parameters = inspect.signature(model.forward).parameters
    for argument in ("cache", "past_key_values", "cache_params"):
        if argument in parameters:
            return argument
    raise refusal(name, model.config, "it does not take a KV cache")


def _rope_types(parameters: Any) -> set[str]:  # noqa: ANN401 - from a JSON file
    """Collect the rope types, which some configs give once and some per kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    nested = [_rope_types(value) for value in parameters.values() if isinstance(value, dict)]
    return set().union({str(parameters.get("rope_type"))}, *nested)
