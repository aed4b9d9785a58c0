"""Ranges of a region as rows of equal units, so that torch's index operations can move them on any device."""

import math

import numpy as np
import torch

from pdtx.plan import Slices
from pdtx.plan.runs import Int64s

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def common_unit(*sides: Slices) -> int:
    """Return the largest number of bytes that divides every offset and length, at least 1."""
    numbers = np.concatenate([numbers for side in sides for numbers in (side.offsets, side.nbytes)])
    return max(1, int(np.gcd.reduce(numbers)))


class UnitGrid:
    """A region cut into units of which every range of slices is a whole number.

    The payload is a sequence of units; first and stop below are positions in it.
    """

    def __init__(self, memory: torch.Tensor, slices: Slices, unit: int) -> None:
        self.unit, self.device = unit, memory.device
        self._counts = slices.nbytes // unit
        self._ends = np.cumsum(self._counts)
        # What a range's place in the region is away from its place in the payload.
        self._shifts = slices.offsets // unit - (self._ends - self._counts)
        # Widest words that fit: devices copy those faster. Bytes after the last whole unit are in no range.
        place = math.gcd(unit, memory.data_ptr(), memory.storage_offset())
        size, dtype = next((size, dtype) for size, dtype in _WORDS if place % size == 0)
        self._words = unit // size
        self._rows = self.as_rows(memory[: len(memory) // unit * unit], dtype)

    def as_rows(self, memory: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """View contiguous bytes as rows of one unit each, shape (units, words of a unit)."""
        return memory.view(dtype or self._rows.dtype).view(-1, self._words)

    def pieces(self, nbytes: int) -> list[tuple[int, int]]:
        """Cut the payload into pieces (first, stop) of at most nbytes each, but at least one unit."""
        step, total = max(1, nbytes // self.unit), int(self._counts.sum())
        return [(first, min(first + step, total)) for first in range(0, total, step)]

    def rows_of(self, first: int, stop: int) -> Int64s:
        """Indices in the region of the units first..stop; int64, shape (stop - first,)."""
        low = int(self._ends.searchsorted(first, side="right"))
        high = int(self._ends.searchsorted(stop, side="left")) + 1
        ends, counts = self._ends[low:high], self._counts[low:high]
        inside = np.minimum(ends, stop) - np.maximum(ends - counts, first)
        rows: Int64s = np.arange(first, stop, dtype=np.int64) + np.repeat(self._shifts[low:high], inside)
        return rows

    def _index(self, first: int, stop: int) -> torch.Tensor:
        return torch.from_numpy(self.rows_of(first, stop)).to(self.device)

    def take(self, first: int, stop: int) -> torch.Tensor:
        """Return a copy of the units first..stop as rows, on the region's device."""
        return self._rows.index_select(0, self._index(first, stop))

    def pack(self, first: int, stop: int, buffer: torch.Tensor) -> None:
        """Copy the units first..stop into a buffer of bytes of just that size, on the region's device."""
        torch.index_select(self._rows, 0, self._index(first, stop), out=self.as_rows(buffer))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def put(self, first: int, stop: int, rows: torch.Tensor) -> None:
        """Write rows, from any device, as the units first..stop."""
        there = rows.view(self._rows.dtype).view(-1, self._words).to(self.device, non_blocking=True)
        if rows.is_cuda and self.device.type == "cpu":
            # They come into memory that torch pins; to a device its stream keeps the order, to the host nothing does.
            torch.cuda.current_stream(rows.device).synchronize()
        self._rows.index_copy_(0, self._index(first, stop), there)
