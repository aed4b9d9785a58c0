"""A transformers Cache over paged caches, for one forward pass of one sequence.

This module imports transformers when it is imported, so it is itself imported late.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DummyLayer, EncoderDecoderCache

from pdtx.cache import PagedLatentCache
from pdtx.runner.architecture import Architecture, AttentionFacts, CompressedFacts, LayerFacts
from pdtx.runner.buffers import CachePlan
from pdtx.runner.layers import (
    PagedAttentionLayer,
    PagedCompressedLayer,
    PagedCrossLayer,
    PagedHybridLayer,
    PagedIndexedLayer,
    PagedStateLayer,
)
from pdtx.runner.pages import (
    AttentionPages,
    CompressedPages,
    IndexerPages,
    KeyValuePages,
    LatentPages,
    Pass,
    Place,
    SharedPages,
    StatePages,
)
from pdtx.runner.sequence import PagedSequence

Biases = Mapping[str, torch.Tensor]
"""From a compressor's name to the bias of its gates, (ratio, channels)."""


def paged_cache(
    architecture: Architecture, plan: CachePlan, sequence: PagedSequence, run: Pass, biases: Sequence[Biases]
) -> Any:  # noqa: ANN401 - transformers is not typed
    """Return a transformers Cache for one forward pass of a sequence, whose cache was made from plan.

    biases: for each layer, those of its compressors' gates.
    """
    layers = zip(architecture.layers, plan.places, biases, strict=True)
    makers = [_Maker(facts, places, sequence, run, bias) for facts, places, bias in layers]
    own = Cache(layers=[maker.own() for maker in makers])
    if architecture.encoder is None:
        return own
    positions = architecture.encoder.positions
    return EncoderDecoderCache(own, Cache(layers=[maker.cross(positions) for maker in makers]))


def flush(cache: Any) -> None:  # noqa: ANN401 - transformers is not typed
    """Write states that only lie in the cache's tensors to the pages."""
    for layer in getattr(cache, "self_attention_cache", cache).layers:
        if isinstance(layer, PagedStateLayer):
            layer.flush()


class _Maker:
    """Makes the cache layers of one of the model's layers."""

    def __init__(
        self, facts: LayerFacts, places: dict[str, tuple[int, int]], sequence: PagedSequence, run: Pass, biases: Biases
    ) -> None:
        self._facts, self._places, self._sequence, self._run = facts, places, sequence, run
        self._biases = biases

    def _at(self, what: str) -> tuple[Any, Place]:
        """The buffer that holds something of this layer, and where in it."""
        index, layer = self._places[what]
        buffer = self._sequence.cache.buffers[index]
        return buffer, Place(index, layer, self._sequence.table(buffer.group), self._run)

    def _attention(self, what: str, facts: AttentionFacts) -> AttentionPages:
        buffer, place = self._at(what)
        if isinstance(buffer, PagedLatentCache):
            return LatentPages(buffer, place, facts.key) if facts.value else SharedPages(buffer, place)
        return KeyValuePages(buffer, place)

    def _states(self, num_convs: int) -> StatePages:
        buffer, place = self._at("states")
        return StatePages(buffer, place, num_convs)

    def _compressor(self, facts: CompressedFacts) -> CompressedPages:
        entries, inputs = (self._at(f"{facts.name} {what}") for what in ("entries", "inputs"))
        return CompressedPages(facts, *entries, *inputs, self._biases.get(facts.name))

    def own(self) -> Any:  # noqa: ANN401 - transformers is not typed
        """Return the layer for what the model keeps of its own tokens."""
        facts, run = self._facts, self._run
        if facts.states is not None:
            states = self._states(facts.states.num_convs)
            if facts.attention is None:
                return PagedStateLayer(states, run)
            return PagedHybridLayer(states, self._attention("attention", facts.attention), facts.attention, run)
        if facts.attention is None:
            return DummyLayer()
        pages = self._attention("attention", facts.attention)
        if facts.compressed:
            compressors = [self._compressor(one) for one in facts.compressed]
            return PagedCompressedLayer(pages, facts.attention, run, compressors)
        if facts.indexer is not None:
            return PagedIndexedLayer(pages, IndexerPages(*self._at("indexer")), facts.attention, run)
        return PagedAttentionLayer(pages, facts.attention, run)

    def cross(self, positions: int) -> Any:  # noqa: ANN401 - transformers is not typed
        """Return the layer for what the model keeps of the encoder's output."""
        facts = self._facts.cross
        return (
            DummyLayer()
            if facts is None
            else PagedCrossLayer(self._attention("cross", facts), facts, self._run, positions)
        )
