"""What a layer of transformers' cache reads and writes: one layer of a buffer, through a block table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from pdtx.cache import PagedKVCache, PagedLatentCache, PagedStateCache
from pdtx.errors import ModelError
from pdtx.runner.architecture import CompressedFacts

OnLayer = Callable[[int, int, int, int], None]
"""Called as on_layer(buffer, layer, start, stop) once what tokens start..stop make of a layer is in the pages.

buffer: its index; layer: index in the buffer; start, stop: token positions of the pass, whatever the buffer counts.
"""


@dataclass
class Pass:
    """One forward pass of one sequence, from token start on. stored: (buffer, layer) that on_layer was called for."""

    start: int
    stop: int
    on_layer: OnLayer | None = None
    stored: set[tuple[int, int]] = field(default_factory=set)

    def store(self, buffer: int, layer: int) -> None:
        """Note, and tell, that a layer of a buffer is in the pages."""
        self.stored.add((buffer, layer))
        if self.on_layer is not None:
            self.on_layer(buffer, layer, self.start, self.stop)


@dataclass(frozen=True)
class Place:
    """A layer of a buffer in one pass. index: the buffer's; table: the sequence's blocks in the buffer's group."""

    index: int
    layer: int
    table: torch.Tensor
    run: Pass

    def store(self) -> None:
        """Note, and tell, that the layer is in the pages."""
        self.run.store(self.index, self.layer)


class AttentionPages(Protocol):
    """Keys and values of one layer of one sequence, in transformers' shapes: (1, heads, tokens, channels)."""

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store positions start.. and tell that they are there. Raises ModelError for shapes that the cache is not for.

        keys, values: of as many positions.
        """

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return contiguous copies of positions start..stop."""


@dataclass(frozen=True)
class KeyValuePages:
    """A layer of a PagedKVCache."""

    cache: PagedKVCache
    at: Place

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values, see AttentionPages."""
        heads, tokens = self.cache.spec.num_kv_heads, keys.shape[2]
        wanted = (1, heads, tokens, self.cache.head_size), (1, heads, tokens, self.cache.head_size_v)
        _check_shapes(self.cache.layer_names[self.at.layer], (keys, values), wanted)
        self.cache.write(self.at.layer, self.at.table, start, keys[0].transpose(0, 1), values[0].transpose(0, 1))
        self.at.store()

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, see AttentionPages."""
        # Contiguous, so that what attention computes cannot depend on where the blocks lie.
        key, value = self.cache.read(self.at.layer, self.at.table, start, stop)
        return key.transpose(0, 1).contiguous()[None], value.transpose(0, 1).contiguous()[None]


@dataclass(frozen=True)
class LatentPages:
    """A layer of a PagedLatentCache that MLA's two tensors are one vector of. rank: channels of the first of them."""

    cache: PagedLatentCache
    at: Place
    rank: int

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store latent vectors and their part with position, see AttentionPages."""
        tokens = keys.shape[2]
        wanted = (1, 1, tokens, self.rank), (1, 1, tokens, self.cache.channels - self.rank)
        _check_shapes(self.cache.layer_names[self.at.layer], (keys, values), wanted)
        self.cache.write(self.at.layer, self.at.table, start, torch.cat((keys, values), -1)[0, 0])
        self.at.store()

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return latent vectors and their part with position, see AttentionPages."""
        rows = self.cache.read(self.at.layer, self.at.table, start, stop)[None, None]
        return rows[..., : self.rank].contiguous(), rows[..., self.rank :].contiguous()


@dataclass(frozen=True)
class SharedPages:
    """A layer of a PagedLatentCache whose vectors are keys and values at once, of one head."""

    cache: PagedLatentCache
    at: Place

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the vectors, see AttentionPages."""
        wanted = (1, 1, keys.shape[2], self.cache.channels)
        _check_shapes(self.cache.layer_names[self.at.layer], (keys, values), (wanted, wanted))
        self.cache.write(self.at.layer, self.at.table, start, keys[0, 0])
        self.at.store()

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the vectors, twice, see AttentionPages."""
        rows = self.cache.read(self.at.layer, self.at.table, start, stop)[None, None]
        return rows, rows


@dataclass(frozen=True)
class CompressedPages:
    """One of DeepSeek V4's compressors in a layer: its entries, and its inputs of tokens. bias: of gates, or None."""

    facts: CompressedFacts
    entries: PagedLatentCache
    entries_at: Place
    inputs: PagedLatentCache
    inputs_at: Place
    bias: torch.Tensor | None

    def read_inputs(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is kept of tokens start..stop, and of their gates, each (1, T, channels)."""
        rows = self.inputs.read(self.inputs_at.layer, self.inputs_at.table, start, stop)[None]
        return rows[..., : self.facts.inputs].contiguous(), rows[..., self.facts.inputs :].contiguous()

    def write_inputs(self, kv: torch.Tensor, gate: torch.Tensor) -> None:
        """Store what is kept of the pass's tokens, as read_inputs returns it."""
        at = self.inputs_at
        self.inputs.write(at.layer, at.table, at.run.start, torch.cat((kv, gate), -1)[0])
        at.store()

    def read_entries(self, count: int) -> torch.Tensor:
        """Return the first entries, (1, count, channels)."""
        at = self.entries_at
        return self.entries.read(at.layer, at.table, 0, count * self.facts.ratio)[None]

    def write_entries(self, first: int, entries: torch.Tensor) -> None:
        """Store entries (1, n, channels) as numbers first..; tell that the pass's are there, though there be none."""
        at = self.entries_at
        self.entries.write(at.layer, at.table, first * self.facts.ratio, entries[0])
        at.store()


@dataclass(frozen=True)
class IndexerPages:
    """A layer of the PagedLatentCache that holds an indexer's keys."""

    cache: PagedLatentCache
    at: Place

    def append(self, keys: torch.Tensor) -> torch.Tensor:
        """Store the keys (1, T, channels) of the pass's tokens; return those of all, as read back."""
        tokens = self.at.run.stop - self.at.run.start
        _check_shapes(self.cache.layer_names[self.at.layer], (keys,), ((1, tokens, self.cache.channels),))
        self.cache.write(self.at.layer, self.at.table, self.at.run.start, keys[0])
        self.at.store()
        return self.cache.read(self.at.layer, self.at.table, 0, self.at.run.stop)[None]


@dataclass(frozen=True)
class StatePages:
    """A layer of a PagedStateCache. num_convs: how many of its states are convolutions'."""

    cache: PagedStateCache
    at: Place
    num_convs: int

    def read(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the convolutions' states (1, channels, inputs) and the others (1, ...), contiguous."""
        states = self.cache.read(self.at.layer, int(self.at.table[0]))
        convs = [state.transpose(0, 1).contiguous()[None] for state in states[: self.num_convs]]
        return convs, [state[None] for state in states[self.num_convs :]]

    def write(self, convs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        """Store what read() returns, and tell that it is there. Raises CacheError for other shapes or types."""
        states = [*(state[0].transpose(0, 1) for state in convs), *(state[0] for state in others)]
        self.cache.write(self.at.layer, int(self.at.table[0]), states)
        self.at.store()


def _check_shapes(layer: str, tensors: Sequence[torch.Tensor], wanted: Sequence[tuple[int, ...]]) -> None:
    found = [tuple(tensor.shape) for tensor in tensors]
    if found != list(wanted):
        raise ModelError(
            f"{layer} computed tensors of shapes {', '.join(map(str, found))}, but the cache is for "
            f"{', '.join(map(str, wanted))}; make the cache with this model's make_cache"
        )
