"""How ranks share the states of a loaded model's recurrent layers."""

from typing import Any

from pdtx.errors import ModelError
from pdtx.kvspec import StateSharding
from pdtx.models import state_sharding
from pdtx.runner.architecture import LayerFacts


def sharding_of(config: Any, layers: tuple[LayerFacts, ...]) -> StateSharding | None:  # noqa: ANN401
    """Return how ranks share the states that a model keeps in transformers.

    config: transformers', of the decoder. None for a model that keeps none, or of which that is not known.
    """
    states = next((layer.states for layer in layers if layer.states is not None), None)
    if states is None:
        return None
    try:
        known = state_sharding(config.to_dict())
    except ModelError:
        return None
    if known is not None and states.num_convs == 1 < len(known.conv):
        # transformers has one convolution over all channels where vLLM has several, as Kimi-Linear's q, k and v.
        return StateSharding(conv=(tuple(segment for conv in known.conv for segment in conv),), heads=known.heads)
    return known
