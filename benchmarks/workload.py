"""What is moved: one request's blocks of a paged cache, and how every byte of it is told from every other."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from benchmarks.peers import Workload
from pdtx.cache.buffer import RankMemory
from pdtx.cache.codes import POISON
from pdtx.cache.poison import fill_with_poison
from pdtx.errors import InputError
from pdtx.kvspec import FullAttentionSpec, MLAAttentionSpec
from pdtx.layout import AnyLayout, any_layout
from pdtx.plan import Endpoint, TransferPlan, build_plan
from pdtx.plan.runs import Int64s

Side = Literal["source", "destination"]
Ids = Literal["random", "contiguous"]

LLAMA_3_8B = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
DEEPSEEK_V3 = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype="bfloat16")

NHD, FLASHINFER_NHD, FLASHINFER_HND, MLA = "flash_attn_nhd", "flashinfer_nhd", "flashinfer_hnd", "mla"

_SEEDS: dict[Side, int] = {"source": 1, "destination": 2}
_WORD = 8
_CODE = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd number: its products with all numbers below 2^64 differ, and look random in every byte."""
_CHUNK_BLOCKS = 32
"""Blocks looked at at once, of one layer: 1 MiB of keys, which stays in the processor's cache."""
_CHUNK_ELEMENTS = 1 << 19


@dataclass(frozen=True)
class Case:
    """A request of so many blocks, in caches of twice as many and the null block.

    layouts: presets of source and destination. layers_per_put: layers that one transfer moves; 0 for all.
    """

    spec: FullAttentionSpec = LLAMA_3_8B
    layers: int = 32
    blocks: int = 128
    layouts: tuple[str, str] = (NHD, NHD)
    ids: Ids = "random"
    layers_per_put: int = 1

    @property
    def pool(self) -> int:
        """Blocks of a cache: 257 for 128."""
        return 2 * self.blocks + 1

    @property
    def positions(self) -> int:
        """Tokens."""
        return self.blocks * self.spec.block_size

    @property
    def nbytes(self) -> int:
        """Bytes moved."""
        return self.layers * self.blocks * self.spec.page_size_bytes

    @property
    def room(self) -> int:
        """Bytes of a cache, the same for both sides."""
        return max(self.layout("source").size_bytes, self.layout("destination").size_bytes)

    def layout(self, side: Side) -> AnyLayout:
        """Return a side's layout."""
        name = self.layouts[0 if side == "source" else 1]
        return any_layout(name, self.spec, num_layers=self.layers, num_blocks=self.pool)

    def block_ids(self, side: Side) -> Int64s:
        """Return a side's block table: the same on every call and in every process. Never block 0."""
        if self.ids == "contiguous":
            first = 1 if side == "source" else self.blocks + 1
            return np.arange(first, first + self.blocks, dtype=np.int64)
        random = np.random.default_rng(_SEEDS[side])
        return random.permutation(self.pool - 1)[: self.blocks].astype(np.int64) + 1

    def plans(self) -> list[TransferPlan]:
        """Return what is moved, one plan for each transfer."""
        step = self.layers_per_put or self.layers
        ends = [Endpoint.of(self.layout(side), self.block_ids(side)) for side in _SEEDS]
        layers = [range(first, min(first + step, self.layers)) for first in range(0, self.layers, step)]
        return [build_plan(ends[0], ends[1], range(self.positions), part) for part in layers]

    def of_peers(self) -> Workload:
        """Return the same runs for the yardsticks. Raises InputError where the two sides lie differently."""
        if self.layouts[0] != self.layouts[1] or self.layouts[0] not in (NHD, MLA):
            raise InputError(f"yardsticks move equal caches of one region a layer and K/V part, not {self.layouts}")
        parts = 2 if self.layouts[0] == NHD else 1
        ids = (self.block_ids(side) for side in _SEEDS)
        return Workload(self.spec.page_size_bytes // parts, self.layers * parts, self.pool, *ids)

    def one_block(self) -> "Case":
        """Return the same of one block, all layers in one transfer."""
        return replace(self, blocks=1, layers_per_put=0)


LLAMA_CASE = Case()
"""256 MiB: 8,192 runs of 32 KiB."""
DEEPSEEK_CASE = Case(DEEPSEEK_V3, layers=61, layouts=(MLA, MLA))
"""137 MiB: 7,808 runs of 18 KiB."""


class Contents:
    """One side's cache, in memory that is large enough for it: filled with codes, poisoned, or compared.

    The code of each 8 bytes is their number in the order (layer, K or V, token, head, channel), times an odd number: no
    two are equal, so bytes at a wrong place show, wherever they come from.
    """

    def __init__(self, case: Case, side: Side, memory: torch.Tensor) -> None:
        self._case, self.layout = case, case.layout(side)
        if len(memory) < self.layout.size_bytes:
            raise InputError(f"a cache of {self.layout.size_bytes} bytes does not fit into {len(memory)}")
        self._memory = memory[: self.layout.size_bytes]
        self._ids = torch.from_numpy(case.block_ids(side))

    @cached_property
    def _views(self) -> list[torch.Tensor]:
        """K and V of all layers in turn, each (blocks, tokens, ...) of 2-byte elements, whatever lies in memory."""
        (part,) = self.layout.parts
        rank, axes = RankMemory(self.layout, self._memory), part.layout.by_name
        inner = ("head", "channel") if "channel" in axes else ("byte",)
        parts = [{"kv": kv} for kv in range(axes["kv"].extent)] if "kv" in axes else [{}]
        return [
            rank.view(part, ("block", "token", *inner), torch.int16, {"layer": layer, **kv})
            for layer in range(self._case.layers)
            for kv in parts
        ]

    def _chunks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield (view, block ids, codes), the codes as 2-byte elements in the shape of the view's blocks."""
        number = 0
        for view in self._views:
            for first in range(0, len(self._ids), _CHUNK_BLOCKS):
                ids = self._ids[first : first + _CHUNK_BLOCKS]
                words = len(ids) * view[0].numel() * view.itemsize // _WORD
                codes = torch.arange(number + 1, number + words + 1) * _CODE
                yield view, ids, codes.view(torch.int16).view(len(ids), *view.shape[1:])
                number += words

    def fill(self) -> None:
        """Write the codes."""
        for view, ids, codes in self._chunks():
            view[ids] = codes

    def poison(self) -> None:
        """Make sure that nothing of an earlier round is left."""
        fill_with_poison(self._memory)

    def wrong(self) -> int:
        """Count the 2-byte elements of the request that are not as they were sent."""
        return sum(_differing(view[ids], codes) for view, ids, codes in self._chunks())

    def strays(self) -> int:
        """Count the 2-byte elements outside the request that are not poison. The request's are poisoned by this."""
        for view in self._views:
            view[self._ids] = POISON
        poison = torch.full((_CHUNK_ELEMENTS,), POISON, dtype=torch.int16)
        elements, found = self._memory.view(torch.int16), 0
        for first in range(0, len(elements), _CHUNK_ELEMENTS):
            part = elements[first : first + _CHUNK_ELEMENTS]
            found += _differing(part, poison[: len(part)])
        return found


def _differing(found: torch.Tensor, expected: torch.Tensor) -> int:
    return 0 if torch.equal(found, expected) else int((found != expected).sum())
