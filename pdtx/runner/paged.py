"""transformers' cache interface over a PagedKVCache: attention reads its keys and values from the pages alone.

The objects here live for one forward pass and own no K/V. This module imports transformers when it is imported, so it
is itself imported late.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from pdtx.cache import PagedKVCache
from pdtx.errors import ModelError

OnLayer = Callable[[int, int, int], None]
"""Called as on_layer(layer, start, stop) once K/V of tokens start..stop of that layer are in the pages."""


class PagedFullAttentionLayer(CacheLayerMixin):  # type: ignore[misc]
    """One full-attention layer of one sequence during one forward pass.

    layer: its index in the cache; block_ids: the sequence's blocks; num_tokens: tokens already in them.
    """

    is_sliding = False

    def __init__(
        self, cache: PagedKVCache, layer: int, block_ids: torch.Tensor, num_tokens: int, on_layer: OnLayer | None
    ) -> None:
        super().__init__()
        self._cache, self._layer, self._block_ids = cache, layer, block_ids
        self._num_tokens, self._on_layer = num_tokens, on_layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pages exist already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store K/V of T new tokens in the pages; return all of the sequence as read back from them.

        key_states, value_states: (1, heads, T, channels). Returns contiguous (1, heads, context, channels), so that
        what attention computes cannot depend on where the blocks lie.
        Raises ModelError if the shape is not that of the cache's spec.
        """
        self._check(key_states, value_states)
        start, stop = self._num_tokens, self._num_tokens + key_states.shape[2]
        self._cache.write(
            self._layer, self._block_ids, start, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        )
        self._num_tokens = stop
        if self._on_layer is not None:
            self._on_layer(self._layer, start, stop)
        key, value = self._cache.read(self._layer, self._block_ids, 0, stop)
        return key.transpose(0, 1).contiguous()[None], value.transpose(0, 1).contiguous()[None]

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        spec, tokens = self._cache.spec, key_states.shape[2]
        wanted = (1, spec.num_kv_heads, tokens, spec.head_size), (1, spec.num_kv_heads, tokens, spec.head_size_v)
        found = tuple(key_states.shape), tuple(value_states.shape)
        if found != wanted:
            raise ModelError(
                f"layer {self._layer} computed K and V of shapes {found[0]} and {found[1]}, but the cache is for "
                f"{wanted[0]} and {wanted[1]}; make the cache from this model's kv_cache_spec"
            )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys attention will see for query_length new tokens, and the position of the first."""
        return self._num_tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens stored."""
        return self._num_tokens

    def get_max_length(self) -> int:
        """Return the number of tokens the sequence's blocks can hold."""
        return len(self._block_ids) * self._cache.spec.block_size

    # transformers' bodies for these work on tensors of the layer's own, and there are none.
    def reset(self) -> None:
        """Refuse: pages are freed by their allocator."""
        raise NotImplementedError("a paged layer cannot be reset; free its blocks")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refuse: beam search would need copies of pages."""
        raise NotImplementedError("a paged layer cannot be reordered for beam search")

    def offload(self) -> None:
        """Refuse: pages stay where they are."""
        raise NotImplementedError("a paged layer cannot be offloaded")

    def prefetch(self) -> None:
        """Refuse: pages stay where they are."""
        raise NotImplementedError("a paged layer cannot be prefetched")


LAYER_CLASSES: dict[str, type[PagedFullAttentionLayer]] = {"full_attention": PagedFullAttentionLayer}
"""The class for each kind of layer that can be run."""


def paged_cache(
    layer_kinds: tuple[str, ...],
    cache: PagedKVCache,
    block_ids: torch.Tensor,
    num_tokens: int,
    on_layer: OnLayer | None = None,
) -> Any:  # noqa: ANN401 - transformers is not typed
    """Return a transformers Cache for one forward pass of the sequence that has num_tokens tokens in block_ids.

    Raises ModelError for a kind of layer without a class.
    """
    layers = []
    for layer, kind in enumerate(layer_kinds):
        if kind not in LAYER_CLASSES:
            raise ModelError(f"layer {layer} is of kind {kind!r}; only {', '.join(LAYER_CLASSES)} can be run")
        layers.append(LAYER_CLASSES[kind](cache, layer, block_ids, num_tokens, on_layer))
    return Cache(layers=layers)
