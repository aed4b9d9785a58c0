"""Buffers that lie in the same bytes: how many bytes there are, and that no block shares any with another block."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
import torch

from pdtx.cache.buffer import PagedBuffer, RankMemory
from pdtx.cache.groups import CacheGroup
from pdtx.errors import CacheError
from pdtx.plan.runs import Int64s


def union_bytes(memories: Sequence[torch.Tensor]) -> int:
    """Return how many bytes lie in any of the memories, uint8 and contiguous."""
    ranges = sorted((str(one.device), one.data_ptr(), one.data_ptr() + one.numel()) for one in memories)
    total, before, reach = 0, "", 0
    for device, first, last in ranges:
        start = max(first, reach) if device == before else first
        total += max(0, last - start)
        before, reach = device, max(last, reach) if device == before else last
    return total


def share_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two memories, uint8 and contiguous, have bytes in common."""
    apart = other.data_ptr() - one.data_ptr()
    return one.device == other.device and -other.numel() < apart < one.numel()


@dataclass(frozen=True)
class _Pieces:
    """Where one buffer's blocks lie on one rank: piece p of block b is starts[p] + b * stride .. + nbytes.

    starts: addresses in the first block, int64, shape (pieces,). What a page leaves unused inside counts as its own.
    """

    starts: Int64s
    nbytes: int
    stride: int

    @classmethod
    def of(cls, rank: RankMemory) -> list["_Pieces"]:
        """Return the pieces of each part of the layout."""
        found = list[_Pieces]()
        for part in rank.layout.parts:
            count = part.layout.blocks_per_manager_block
            step = part.layout.stride("block")
            starts = np.array([rank.memory.data_ptr() + part.offset], np.int64)
            nbytes = part.layout.itemsize
            for axis in part.layout.axes:
                if axis.name == "block" or axis.extent == 1:
                    continue
                if axis.stride < step:
                    nbytes += (axis.extent - 1) * axis.stride
                else:
                    starts = (starts[:, None] + np.arange(axis.extent, dtype=np.int64) * axis.stride).reshape(-1)
            found.append(cls(starts, nbytes + (count - 1) * step, count * step))
        return found

    def meets(self, other: "_Pieces", num_blocks: int, *, same_block: bool) -> bool:
        """Whether a block shares bytes with another block of other, or (same_block) with the one of its own id."""
        apart = other.starts[None, :] - self.starts[:, None]
        far, rest = np.divmod(apart, self.stride)
        # Of the blocks of other only two can reach into block i of this: i - far, and the one before it.
        hits = np.zeros(apart.shape, bool)
        for distance, overlaps in ((-far, rest < self.nbytes), (-far - 1, self.stride - rest < other.nbytes)):
            counts = np.abs(distance) < num_blocks
            hits |= overlaps & counts & ((distance != 0) | same_block)
        return bool(hits.any())


@dataclass(frozen=True)
class _Side:
    """One buffer on one rank, and its pieces."""

    buffer: PagedBuffer
    memory: torch.Tensor
    pieces: tuple[_Pieces, ...]


def check_shared_bytes(groups: Sequence[CacheGroup], buffers: Sequence[PagedBuffer]) -> None:
    """Raise CacheError if writing one block of a buffer could change another block, of it or of another buffer.

    Blocks of one id may share bytes where their groups share a pool: then one group at a time uses the id.
    """
    sides = [_Side(buffer, rank.memory, tuple(_Pieces.of(rank))) for buffer in buffers for rank in buffer.ranks]
    for one, other in combinations(sides, 2):
        if share_bytes(one.memory, other.memory):
            mine, theirs = one.buffer.group, other.buffer.group
            pool = groups[mine].pool
            _check_pair(one, other, shared=mine != theirs and pool != "" and pool == groups[theirs].pool)


def _check_pair(one: _Side, other: _Side, *, shared: bool) -> None:
    same = one.buffer is other.buffer
    names = f"ranks of buffer {one.buffer.name}" if same else f"buffers {one.buffer.name} and {other.buffer.name}"
    for here, there in product(one.pieces, other.pieces):
        if here.stride != there.stride:
            raise CacheError(
                f"{names} share bytes, and their blocks lie {here.stride} and {there.stride} bytes apart: a block "
                "of one would lie in several of the other"
            )
        if here.meets(there, one.buffer.num_blocks, same_block=not shared):
            raise CacheError(
                f"{names} share bytes of blocks that can be in use at once; give other offsets, or name one pool "
                "for their groups if each block id is in use by one of them at a time"
            )
