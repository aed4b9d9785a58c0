"""One part of one layer as coordinates see it: read, written, poisoned and looked at in chunks of blocks."""

import functools
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from pdtx.cache.buffer import RankMemory
from pdtx.cache.codes import POISON_BYTES
from pdtx.layout import Part

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Codes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Chunk:
    """Blocks of a table, as steps of the block axis, and the steps of the token axis that are meant of each.

    first_step: of the first block, counted over the whole table; per_block: steps of a block.
    """

    blocks: torch.Tensor
    first_step: int
    per_block: int
    steps: range


class Plane:
    """K, V or another part of one layer: (block steps, token steps, heads, ...) in the widest words there are.

    number: another one for each part, and for K and V of it. row_bytes: of a head of a token; of all of a state.
    """

    def __init__(self, memory: RankMemory, part: Part, layer: int, kv: int, number: int) -> None:
        layout = part.layout
        axes, self.layer, self.kv, self.number, self.itemsize = layout.by_name, layer, kv, number, layout.itemsize
        outer = ["block", *(name for name in ("token", "head") if name in axes and "token" in axes)]
        # By name, not by their places in memory: both sides must mean the same element by the same number.
        inner = sorted(set(axes) - {*outer, "layer", "kv"}, reverse=True)
        self.row_bytes = layout.itemsize * prod(axes[name].extent for name in inner)
        at = {"layer": layer} | ({"kv": kv} if "kv" in axes else {})
        offset = part.offset + sum(axes[name].stride * step for name, step in at.items())
        sizes = [*(axes[name].extent for name in outer), *[1] * (3 - len(outer))]
        strides = [*(axes[name].stride for name in outer), *[0] * (3 - len(outer))]
        sizes += [*(axes[name].extent for name in inner), layout.itemsize]
        strides += [*(axes[name].stride for name in inner), 1]
        if strides[-2] == layout.itemsize:  # whole rows of bytes, else elements one by one
            sizes[-2:], strides[-2:] = [sizes[-2] * layout.itemsize], [1]
        unit = next(unit for unit in (8, 4, 2, 1) if all(n % unit == 0 for n in (offset, sizes[-1], *strides[:-1])))
        words = memory.memory[: memory.memory.numel() // unit * unit].view(_INTEGERS[unit])
        # as_strided counts from the start of the storage, not from where the aligned region begins in it.
        first = words.storage_offset() + offset // unit
        self.view = words.as_strided(
            [*sizes[:-1], sizes[-1] // unit], [*(stride // unit for stride in strides[:-1]), 1], first
        )
        self._unit, self._odd = unit, (offset % 2, tuple(stride % 2 for stride in strides)) if unit == 1 else None

    def take(self, chunk: Chunk, heads: range) -> torch.Tensor:
        """Return a contiguous copy of a chunk."""
        found = self.view.index_select(0, chunk.blocks)
        return found[:, chunk.steps.start : chunk.steps.stop, heads.start : heads.stop].contiguous()

    def put(self, chunk: Chunk, heads: range, values: torch.Tensor) -> None:
        """Store a chunk, or one value everywhere in it."""
        inside = self.view[:, chunk.steps.start : chunk.steps.stop, heads.start : heads.stop]
        inside[chunk.blocks] = values

    def poison(self, chunk: Chunk, heads: range) -> None:
        """Store poison."""
        if self._odd is None:
            word = int.from_bytes(POISON_BYTES * (self._unit // 2), "little", signed=True)
            self.put(chunk, heads, torch.tensor(word, dtype=self.view.dtype, device=self.view.device))
        else:
            self.put(chunk, heads, self._odd_poison(chunk, heads).to(self.view.device))

    def unpoisoned(self, chunk: Chunk, heads: range) -> int:
        """Count the bytes of a chunk that are not poison."""
        here = self.take(chunk, heads)
        if self._odd is None:
            return count_unpoisoned(as_bytes(here).reshape(-1))
        return int((here.cpu() != self._odd_poison(chunk, heads)).sum())

    def _odd_poison(self, chunk: Chunk, heads: range) -> torch.Tensor:
        """The bytes of poison where not all is made of 2-byte words: which of the two depends on the address alone."""
        start, steps = self._odd or (0, ())
        shape = len(chunk.blocks), len(chunk.steps), len(heads), *self.view.shape[3:]
        firsts: list[torch.Tensor | int] = [chunk.blocks.cpu(), chunk.steps.start, heads.start]
        firsts += [0] * (len(shape) - len(firsts))
        odd = torch.full(shape, start, dtype=torch.int64)
        for axis, (first, extent, step) in enumerate(zip(firsts, shape, steps, strict=True)):
            at = first if isinstance(first, torch.Tensor) else first + torch.arange(extent)
            odd += (at * step).view([-1 if place == axis else 1 for place in range(len(shape))])
        return torch.tensor(list(POISON_BYTES), dtype=torch.uint8)[odd % 2]

    def shaped(self, codes: Codes, num_heads: int) -> torch.Tensor:
        """Return codes, (blocks, steps, heads, words), as what the view has there."""
        raw = codes.view(np.uint8)[..., : self.row_bytes]
        shape = (*codes.shape[:2], num_heads, *self.view.shape[3:])
        words = torch.from_numpy(np.ascontiguousarray(raw)).view(_INTEGERS[self._unit])
        return words.reshape(shape).to(self.view.device)


def count_unpoisoned(piece: torch.Tensor) -> int:
    """Count the bytes, (n,), that are not poison, of memory that begins with the first of its two bytes."""
    here = piece.cpu().numpy()
    return int(np.count_nonzero(here != _poison_bytes(len(here))))


@functools.lru_cache(maxsize=8)
def _poison_bytes(count: int) -> npt.NDArray[np.uint8]:
    meant: npt.NDArray[np.uint8] = np.resize(np.frombuffer(POISON_BYTES, np.uint8), count)
    return meant


def as_bytes(words: torch.Tensor) -> torch.Tensor:
    """Return words as bytes, contiguous."""
    return words.contiguous().view(torch.uint8)


def poison_hex(itemsize: int) -> str:
    """Return what an element of poison looks like."""
    return (POISON_BYTES * itemsize)[:itemsize][::-1].hex()
