"""Run a loaded model once over transformers' own cache, and read off what each layer keeps."""

from typing import Any

import torch

from pdtx.errors import ModelError
from pdtx.runner.architecture import (
    Architecture,
    AttentionFacts,
    CompressedFacts,
    EncoderFacts,
    LayerFacts,
    StateFacts,
    cache_argument,
    check_config,
    max_model_len,
    refusal,
)
from pdtx.runner.sharding import sharding_of

_TOKENS = 2
"""Tokens of the probe: as in a prompt, more than one."""
_DISTURBANCE = 1e6


def inspect_model(model: Any, name: str) -> Architecture:  # noqa: ANN401 - transformers is not typed
    """Return the facts about a loaded model; a few tokens are computed to see what its layers really store.

    Raises ModelError for a model that cannot be run, see check_config.
    """
    check_config(model.config, name)
    argument = cache_argument(model, name)
    if model.config.is_encoder_decoder:
        return _inspect_encoder_decoder(model, name, argument)
    cache = _new_cache(model)
    _compute(model, argument, cache, _TOKENS)
    layers = tuple(_layer(model, name, index, layer) for index, layer in enumerate(cache.layers))
    if all(layer == LayerFacts() for layer in layers):
        raise refusal(name, model.config, "none of its layers keeps anything")
    return Architecture(
        layers,
        max_model_len(model, name, layers),
        model.config.get_text_config(decoder=True).vocab_size,
        argument,
        continues_states=_continues_states(model, argument, layers),
        sharding=sharding_of(model.config.get_text_config(decoder=True), layers),
    )


def _new_cache(model: Any) -> Any:  # noqa: ANN401 - transformers is not typed
    from transformers import DynamicCache

    return DynamicCache(config=model.config.get_text_config(decoder=True))


def _compute(model: Any, argument: str, cache: Any, tokens: int) -> None:  # noqa: ANN401
    ids = torch.zeros((1, tokens), dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        model(input_ids=ids, use_cache=True, **{argument: cache})


def _layer(model: Any, name: str, index: int, stored: Any) -> LayerFacts:  # noqa: ANN401
    """Return what one layer of the probe's cache holds."""
    kind = type(stored).__name__
    attention = _attention(model, name, index, stored) if getattr(stored, "keys", None) is not None else None
    if attention is not None and hasattr(stored, "compressed_kv"):
        return _compressed(model, name, index, stored)
    states = _states(model, name, index, stored) if hasattr(stored, "conv_states") else None
    if attention is None and states is None and kind != "DummyLayer":
        raise refusal(name, model.config, f"layer {index} stores nothing in its {kind}")
    indexer = getattr(stored, "indexer_keys", None)
    if getattr(stored, "indexer_position_ids", None) is not None:
        raise refusal(name, model.config, f"layer {index} keeps positions of its indexer, which have no paged form")
    return LayerFacts(attention, None if indexer is None else indexer.shape[-1], states)


def _attention(model: Any, name: str, index: int, stored: Any) -> AttentionFacts:  # noqa: ANN401
    heads, key, value = _stored_shape(model, name, index, stored, _TOKENS)
    text = model.config.get_text_config(decoder=True)
    size = getattr(stored, "sliding_window", None)
    chunked = size is not None and _is_chunked(text, index)
    rank, rope = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    latent = rank is not None and (heads, key, value) == (1, rank, rope)
    if latent and size is not None:
        raise refusal(name, model.config, f"layer {index} keeps MLA's latent vectors within a window")
    if chunked and key != value:
        raise refusal(name, model.config, f"layer {index} keeps chunks of keys of {key} and values of {value} channels")
    return AttentionFacts(heads, key, value, latent, None if chunked else size, size if chunked else None)


def _compressed(model: Any, name: str, index: int, stored: Any) -> LayerFacts:  # noqa: ANN401
    """Return what a layer of DeepSeek V4 keeps: a window of vectors, and its compressors, which tell their sizes."""
    if stored.keys is not stored.values:
        raise refusal(name, model.config, f"layer {index} keeps values beside its keys")
    found = list[CompressedFacts]()
    for which, kv in stored.buffer_kv.items():
        overlap = which in getattr(stored, "overlap_kv", {})
        inputs = kv.shape[-1]
        found.append(CompressedFacts(which, stored.compress_rate, inputs // (2 if overlap else 1), inputs, overlap))
    heads, key, _ = _stored_shape(model, name, index, stored, _TOKENS)
    if heads != 1:
        raise refusal(name, model.config, f"layer {index} keeps {heads} heads of shared keys and values")
    window = AttentionFacts(1, key, 0, latent=True, window=stored.sliding_window)
    return LayerFacts(window, compressed=tuple(found))


def gate_biases(model: Any, layers: tuple[LayerFacts, ...], name: str) -> list[dict[str, torch.Tensor]]:  # noqa: ANN401
    """Return, for each layer, the biases of the gates of its compressors by their names.

    Raises ModelError for a layer whose compressors' overlap cannot be computed, for want of one.
    """
    found: list[dict[str, torch.Tensor]] = [{} for _ in layers]
    for index, facts in enumerate(layers):
        if not facts.compressed:
            continue
        for path, module in model.get_decoder().layers[index].named_modules():
            bias, which = getattr(module, "position_bias", None), path.rpartition(".")[2]
            if isinstance(bias, torch.Tensor):
                found[index][which] = bias.detach()
        lacking = [one.name for one in facts.compressed if one.overlap and one.name not in found[index]]
        if lacking:
            raise refusal(name, model.config, f"layer {index} has no bias for the gates of its {lacking[0]}")
    return found


def _is_chunked(text: Any, index: int) -> bool:  # noqa: ANN401 - transformers is not typed
    """Whether a layer forgets whole chunks: transformers keeps both kinds in one class, and tells them by name."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    return bool(get_layer_types_and_kwargs(text)[0][index] == "chunked_attention")


def _stored_shape(model: Any, name: str, index: int, stored: Any, positions: int) -> tuple[int, int, int]:  # noqa: ANN401
    """Return KV heads, key channels and value channels of a layer that holds so many positions."""
    keys, values = stored.keys, stored.values
    if keys.dim() != 4 or values.dim() != 4:
        raise refusal(name, model.config, f"layer {index} stores K of shape {tuple(keys.shape)}, not four dimensions")
    (_, heads, tokens, key), (_, heads_v, tokens_v, value) = keys.shape, values.shape
    if (heads, tokens, tokens_v) != (heads_v, positions, positions):
        raise refusal(
            name,
            model.config,
            f"layer {index} stores K of shape {tuple(keys.shape)} and V of {tuple(values.shape)} for "
            f"{positions} positions",
        )
    if keys.dtype != model.dtype or values.dtype != model.dtype:
        raise refusal(name, model.config, f"layer {index} stores {keys.dtype} and {values.dtype} in {model.dtype}")
    return heads, key, value


def _states(model: Any, name: str, index: int, stored: Any) -> StateFacts:  # noqa: ANN401
    convs = [state for state in stored.conv_states.values() if state is not None]
    recurrent = [state for state in stored.recurrent_states.values() if state is not None]
    if any(state.dim() != 3 for state in convs):
        raise refusal(name, model.config, f"layer {index} has convolution states of other than three dimensions")
    if len(recurrent) > 1 or (recurrent and stored.number_of_states > 1) or not convs:
        raise refusal(
            name, model.config, f"layer {index} keeps {len(convs)} convolutions' and {len(recurrent)} other states"
        )
    shapes = [(state.shape[2], state.shape[1]) for state in convs] + [tuple(state.shape[1:]) for state in recurrent]
    dtypes = [str(state.dtype).removeprefix("torch.") for state in (*convs, *recurrent)]
    return StateFacts(tuple(shapes), tuple(dtypes), len(convs))


def _continues_states(model: Any, argument: str, layers: tuple[LayerFacts, ...]) -> bool:  # noqa: ANN401
    """Whether several tokens at a time go on from a recurrent state: some models start anew from nothing.

    Found by disturbing the first such state between two passes: if what follows is the same bit for bit, nobody
    looked at it.
    """
    first = next((i for i, layer in enumerate(layers) if layer.states and len(layer.states.shapes) > 1), None)
    if first is None:
        return True
    found = list[torch.Tensor]()
    for disturbance in (0.0, _DISTURBANCE):
        cache = _new_cache(model)
        _compute(model, argument, cache, _TOKENS)
        states = cache.layers[first].recurrent_states[0]
        with torch.inference_mode():
            states += disturbance
        _compute(model, argument, cache, _TOKENS)
        found.append(cache.layers[first].recurrent_states[0])
    return not torch.equal(*found)


def _inspect_encoder_decoder(model: Any, name: str, argument: str) -> Architecture:  # noqa: ANN401
    config = model.config
    encoder_input = getattr(model.get_encoder(), "main_input_name", None)
    frames = _frames(model)
    if encoder_input != "input_features" or frames is None:
        raise refusal(name, config, f"its encoder takes {encoder_input}, not features of a fixed number of frames")
    features = torch.zeros((1, config.num_mel_bins, frames), dtype=model.dtype, device=model.device)
    ids = torch.zeros((1, _TOKENS), dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode():
            output = model(input_features=features, decoder_input_ids=ids, use_cache=True)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"model {name!r} did not compute features of {frames} frames: {reason}") from error
    cache = getattr(output, argument)
    positions, own, cross = config.max_source_positions, cache.self_attention_cache, cache.cross_attention_cache
    layers = list[LayerFacts]()
    for index, (mine, theirs) in enumerate(zip(own.layers, cross.layers, strict=True)):
        if type(mine).__name__ != "DynamicLayer" or type(theirs).__name__ != "DynamicLayer":
            raise refusal(name, config, f"layer {index} keeps a {type(mine).__name__} and a {type(theirs).__name__}")
        layers.append(
            LayerFacts(
                _attention(model, name, index, mine),
                cross=AttentionFacts(*_stored_shape(model, name, index, theirs, positions)),
            )
        )
    hidden = output.encoder_last_hidden_state.shape[-1]
    facts = EncoderFacts((config.num_mel_bins, frames), positions, hidden)
    length = max_model_len(model, name, tuple(layers))
    return Architecture(tuple(layers), length, config.vocab_size, argument, facts)


def _frames(model: Any) -> int | None:  # noqa: ANN401 - transformers is not typed
    """Return the frames that the encoder's convolutions make its positions of, or None if it has no such."""
    encoder = model.get_encoder()
    convs = [getattr(encoder, name, None) for name in ("conv1", "conv2")]
    if any(conv is None for conv in convs):
        return None
    frames = int(model.config.max_source_positions)
    for conv in convs:
        frames *= conv.stride[0]  # type: ignore[union-attr]
    return frames
