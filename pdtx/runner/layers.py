"""transformers' cache interface over paged caches: layers read what they keep from the pages alone.

The objects here live for one forward pass and keep nothing of a request. This module imports transformers when it is
imported, so it is itself imported late.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from pdtx.runner.architecture import AttentionFacts
from pdtx.runner.pages import (
    AttentionPages,
    CompressedPages,
    IndexerPages,
    Pass,
    StatePages,
)


class PagedAttentionLayer(CacheLayerMixin):  # type: ignore[misc]
    """One attention layer of one sequence during one forward pass.

    facts.window, facts.chunk: where they are set, earlier positions than they reach back to are never read: their
    blocks may be gone.
    """

    def __init__(self, pages: AttentionPages, facts: AttentionFacts, run: Pass) -> None:
        super().__init__()
        self._pages, self._facts, self._run, self._num_tokens = pages, facts, run, run.start
        self.is_sliding = facts.window is not None or facts.chunk is not None
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pages exist already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store K/V of T new tokens in the pages; return all that the layer attends to as read back from them.

        key_states, value_states: (1, heads, T, channels). Returns contiguous (1, heads, context, channels).
        Raises ModelError if the shape is not that of the cache's spec.
        """
        first = self._first
        self._pages.write(self._num_tokens, key_states, value_states)
        self._num_tokens += key_states.shape[2]
        return self._pages.read(first, self._num_tokens)

    @property
    def _first(self) -> int:
        """The first position that the next token attends to, as transformers' own layers of the kind keep it."""
        if self._facts.window is not None:
            return max(0, self._num_tokens - self._facts.window + 1)
        if self._facts.chunk is not None:
            return self._num_tokens // self._facts.chunk * self._facts.chunk
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys attention will see for query_length new tokens, and the position of the first."""
        return self._num_tokens + query_length - self._first, self._first

    def get_seq_length(self) -> int:
        """Return the number of tokens stored."""
        return self._num_tokens

    def get_max_length(self) -> int:
        """Return the number of tokens that the layer looks back on, -1 for all."""
        return self._facts.window or self._facts.chunk or -1

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


class PagedIndexedLayer(PagedAttentionLayer):
    """An attention layer whose indexer keeps keys of its own."""

    indexer_position_ids = None

    def __init__(self, pages: AttentionPages, indexer: IndexerPages, facts: AttentionFacts, run: Pass) -> None:
        super().__init__(pages, facts, run)
        self._indexer = indexer

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store the indexer's keys (1, T, channels) of the new tokens; return those of all tokens."""
        return self._indexer.append(indexer_key_states)


class PagedCompressedLayer(PagedAttentionLayer):
    """A layer of DeepSeek V4: a window, and compressors that work as transformers' DeepseekV4CSACache does.

    Kept of a token are its inputs to the compressors, before the bias of the gates; entries are kept as they are made.
    """

    def __init__(
        self, pages: AttentionPages, facts: AttentionFacts, run: Pass, compressors: Sequence[CompressedPages]
    ) -> None:
        super().__init__(pages, facts, run)
        self._compressors = {one.facts.name: one for one in compressors}
        self.compress_rate = compressors[0].facts.ratio
        self.entry_count = dict.fromkeys(self._compressors, run.start // self.compress_rate)

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Store what the compressor needs of the new tokens; return all of whole windows, and the first's position.

        kv, gate: (1, T, channels); returned as they are, with those of before that are not compressed yet in front.
        """
        pages, first = self._compressors[name], self.entry_count[name] * self.compress_rate
        pages.write_inputs(kv, gate)
        old_kv, old_gate = pages.read_inputs(first, self._run.start)
        kv, gate = torch.cat([old_kv, kv], dim=1), torch.cat([old_gate, gate], dim=1)
        usable = kv.shape[1] // self.compress_rate * self.compress_rate
        return kv[:, :usable], gate[:, :usable], first

    def update_overlap_state(
        self, name: str, _kv: torch.Tensor, _gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return what the window before the first new one counts for it, (1, ratio, head_dim) each; None at first."""
        pages, first = self._compressors[name], self.entry_count[name] * self.compress_rate
        if not first or pages.bias is None:
            return None, None
        kv, gate = pages.read_inputs(first - self.compress_rate, first)
        return kv[..., :head_dim], (gate + pages.bias)[..., :head_dim]

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Store the new entries (1, n, channels); return all."""
        pages, count = self._compressors[name], self.entry_count[name]
        pages.write_entries(count, compressed)
        self.entry_count[name] += compressed.shape[1]
        return pages.read_entries(self.entry_count[name])


class PagedStateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """One recurrent layer of one sequence during one forward pass: transformers' own, filled from the pages.

    Models change the tensors in place as well as through the methods, so flush() comes after the pass at the latest.
    """

    def __init__(self, pages: StatePages, run: Pass) -> None:
        super().__init__(number_of_states=pages.num_convs)
        self._state_pages = pages
        if run.start:
            self._fill(*pages.read())

    def _fill(self, convs: list[torch.Tensor], others: list[torch.Tensor]) -> None:
        for index, state in enumerate(convs):
            self.conv_states[index], self.conv_kernel_size[index] = state, state.shape[-1]
            self.is_conv_states_initialized[index] = self.has_previous_state[index] = True
        for index, state in enumerate(others):
            self.recurrent_states[index], self.is_recurrent_states_initialized[index] = state, True
        self.dtype, self.device = convs[0].dtype, convs[0].device

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Take the recurrent state, after which the layer has all of this pass; see transformers."""
        found: torch.Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        self.flush()
        return found

    def flush(self) -> None:
        """Write the states to the pages, unless they are there already."""
        pages, at = self._state_pages, self._state_pages.at
        if (at.index, at.layer) not in at.run.stored:
            convs = [state for state in self.conv_states.values() if state is not None]
            pages.write(convs, [state for state in self.recurrent_states.values() if state is not None])


class PagedHybridLayer(PagedStateLayer, PagedAttentionLayer):
    """A layer with attention and states."""

    def __init__(self, states: StatePages, pages: AttentionPages, facts: AttentionFacts, run: Pass) -> None:
        PagedAttentionLayer.__init__(self, pages, facts, run)
        PagedStateLayer.__init__(self, states, run)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - transformers is not typed
        """Make room for states, as transformers does; attention has its pages."""
        if not args:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)


class PagedCrossLayer(PagedAttentionLayer):
    """What a decoder's layer keeps of the encoder's output: written in the sequence's first pass, read in all."""

    def __init__(self, pages: AttentionPages, facts: AttentionFacts, run: Pass, positions: int) -> None:
        self._positions = positions
        super().__init__(pages, facts, run)
        self._num_tokens = positions if run.start else 0

    @property
    def keys(self) -> torch.Tensor:
        """Keys of all the encoder's positions."""
        return self._pages.read(0, self._positions)[0]

    @keys.setter
    def keys(self, _value: object) -> None:
        """Ignore what transformers' base class sets."""

    @property
    def values(self) -> torch.Tensor:
        """Values of all the encoder's positions."""
        return self._pages.read(0, self._positions)[1]

    @values.setter
    def values(self, _value: object) -> None:
        """Ignore what transformers' base class sets."""
