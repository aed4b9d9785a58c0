"""A paged cache of keys and values, seen through a layout."""

from math import prod
from typing import ClassVar

import torch

from pdtx.cache.buffer import PagedBuffer, RankMemory
from pdtx.cache.device import torch_dtype
from pdtx.cache.tokens import put_tokens, take_tokens
from pdtx.cache.verify import Kind
from pdtx.errors import LayoutError
from pdtx.kvspec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from pdtx.layout import KVCacheLayout, PartedLayout
from pdtx.parallel import heads_of_rank

AttentionSpecs = FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec | CrossAttentionSpec
_TOKENS = ("block", "token", "head", "channel")


class PagedKVCache(PagedBuffer):
    """A buffer of layers that keep a key and a value for every token.

    layout: a preset of ELEMENT_ORDERS or PARTED_ORDERS, see pdtx.layout.
    dtype: torch's. Rank r holds the heads heads_of_rank(r, tp_size, spec.num_kv_heads).
    Raises LayoutError, SpecError or ParallelError for impossible numbers, InputError if the memory cannot be had.
    """

    spec: AttentionSpecs

    usual_name, usual_layout = "full", "flash_attn_nhd"
    kind: ClassVar[Kind] = "kv"

    def _open(self) -> None:
        spec = self.spec
        self.dtype = torch_dtype(spec.dtype)
        self.itemsize = self.dtype.itemsize
        self.head_size, self.head_size_v = spec.head_size, getattr(spec, "head_size_v", spec.head_size)
        self._heads = [heads_of_rank(rank, self.tp_size, spec.num_kv_heads) for rank in self.tp_ranks]
        # The first rank here that holds a head speaks for it.
        self._owners = [
            place
            for place, heads in enumerate(self._heads)
            if all(heads.start not in earlier for earlier in self._heads[:place])
        ]
        self._views = [[self._pair(rank, layer) for layer in range(self.num_layers)] for rank in self.ranks]

    def _check_layout(self) -> None:
        if not isinstance(self.layout, KVCacheLayout | PartedLayout):
            raise LayoutError(f"{self.layout.name} does not hold plain keys and values, as buffer {self.name} needs")

    def _pair(self, rank: RankMemory, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each (block steps, tokens of a step, heads, channels)."""
        parts = rank.layout.parts
        if len(parts) == 1:
            views = [rank.view(parts[0], _TOKENS, self.dtype, {"layer": layer, "kv": kv}) for kv in range(2)]
        else:
            views = [rank.view(part, _TOKENS, self.dtype, {"layer": layer}) for part in parts]
        return views[0], views[1]

    def view(self, layer: int) -> torch.Tensor:
        """One layer of the first rank here in logical order: (2, block steps, tokens, heads, channels).

        Raises LayoutError where keys and values do not share their strides.
        """
        parts = self.layout.parts
        if len(parts) > 1:
            raise LayoutError(f"{self.layout.name} has no one view of keys and values")
        return self.ranks[0].view(parts[0], ("kv", *_TOKENS), self.dtype, {"layer": layer})

    def write(self, layer: int, block_ids: torch.Tensor, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key and value, each (T, heads, channels), as tokens start..start+T of a request.

        heads: of the whole model; each rank that is here keeps its own.
        block_ids: the request's block table, int64, on the cache's device; only the blocks of these tokens are touched.
        Raises CacheError if the blocks are too few.
        """
        self._check_fit(block_ids, start, start + len(key))
        steps = self._steps(block_ids)
        for heads, views in zip(self._heads, self._views, strict=True):
            for view, rows in zip(views[layer], (key, value), strict=True):
                put_tokens(view, steps, start, rows[:, heads.start : heads.stop])

    def read(self, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return contiguous copies of key and value of tokens start..stop, each (T, heads, channels).

        Raises CacheError if the blocks are too few, or not all ranks are here.
        """
        self.require_all_ranks()
        self._check_fit(block_ids, start, stop)
        steps = self._steps(block_ids)
        found = [self._read_rank(rank, layer, steps, start, stop) for rank in self._owners]
        if len(found) == 1:
            return found[0]
        return torch.cat([key for key, _ in found], 1), torch.cat([value for _, value in found], 1)

    def block_tensors(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return shape and dtype of a block's key and value, see PagedBuffer."""
        heads = self.spec.num_kv_heads
        return tuple(((self.block_size, heads, size), self.dtype) for size in (self.head_size, self.head_size_v))

    def read_block(self, layer: int, block_id: int) -> tuple[torch.Tensor, ...]:
        """Return key and value of a block, see PagedBuffer."""
        return self.read(layer, torch.tensor([block_id], device=self.device), 0, self.block_size)

    def _read_rank(
        self, place: int, layer: int, steps: torch.Tensor, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (take_tokens(view, steps, start, stop) for view in self._views[place][layer])
        return key, value

    def rows_shape(self, positions: int) -> tuple[int, int, int, int]:
        """Return (2, positions, heads, bytes of a head), see PagedBuffer.

        Where key and value heads differ in size: (1, positions, heads, bytes of a key and of a value behind it).
        """
        heads, item = self.spec.num_kv_heads, self.itemsize
        if self.head_size == self.head_size_v:
            return 2, positions, heads, self.head_size * item
        return 1, positions, heads, (self.head_size + self.head_size_v) * item

    def common_units(self, rank: int, other_rank: int, other_tp: int) -> range:
        """Return the KV heads that both ranks hold, see PagedBuffer."""
        heads = self.spec.num_kv_heads
        ours = heads_of_rank(rank, self.tp_size, heads)
        theirs = heads_of_rank(other_rank, other_tp, heads)
        return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))

    def common_rows(
        self, rank: int, other_rank: int, other_tp: int, layer: int, block_ids: torch.Tensor, start: int, stop: int
    ) -> torch.Tensor:
        """Return the bytes of tokens start..stop of the KV heads that both ranks hold, see PagedBuffer."""
        place, units = self.place_of(rank), self.common_units(rank, other_rank, other_tp)
        self._check_fit(block_ids, start, stop)
        key, value = self._read_rank(place, layer, self._steps(block_ids), start, stop)
        first = self._heads[place].start
        own = slice(units.start - first, max(units.start, units.stop) - first)
        return self._as_rows(key[:, own], value[:, own])

    def canonical(self, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the bytes of tokens start..stop, see PagedBuffer."""
        return self._as_rows(*self.read(layer, block_ids, start, stop))

    def _as_rows(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self.head_size == self.head_size_v:
            return torch.stack((key, value)).cpu().view(torch.uint8)
        return torch.cat((key, value), -1)[None].cpu().view(torch.uint8)

    def write_canonical(self, layer: int, block_ids: torch.Tensor, start: int, rows: torch.Tensor) -> None:
        """Store the bytes of tokens start.., see PagedBuffer."""
        self.require_all_ranks()
        elements = rows.to(self.device).contiguous().view(self.dtype)
        if self.head_size == self.head_size_v:
            key, value = elements
        else:
            key, value = torch.split(elements[0], [self.head_size, self.head_size_v], -1)
        self.write(layer, block_ids, start, key, value)

    def replicas_differ(self, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> int:
        """Count elements in which a rank's copy of a head is not that of the first rank that holds it."""
        self._check_fit(block_ids, start, stop)
        steps, differing, owner = self._steps(block_ids), 0, 0
        for place in range(len(self.ranks)):
            if place in self._owners:
                owner = place
                continue
            copies = (self._read_rank(one, layer, steps, start, stop) for one in (owner, place))
            for first, other in zip(*copies, strict=True):
                size = (prod(first.shape), self.itemsize)
                pairs = (one.contiguous().view(torch.uint8).reshape(size) for one in (first, other))
                differing += int(torch.ne(*pairs).any(-1).sum())
        return differing
