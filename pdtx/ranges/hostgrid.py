"""Ranges of a region in host memory as a stream of bytes, moved by the C library; the counterpart of UnitGrid."""

import numpy as np
import torch

from pdtx.native import Memory, Native
from pdtx.plan import Slices
from pdtx.plan.runs import Int64s


class HostGrid:
    """See UnitGrid: its unit is one byte, for every alignment costs the same here."""

    unit = 1

    def __init__(self, memory: torch.Tensor, slices: Slices, native: Native) -> None:
        self._region, self._native = Memory(memory.data_ptr(), memory.numel()), native
        self._offsets, self._ends = slices.offsets, np.cumsum(slices.nbytes)
        self._begins = self._ends - slices.nbytes

    def pieces(self, nbytes: int) -> list[tuple[int, int]]:
        """Cut the payload into pieces (first, stop) of at most nbytes each."""
        total = int(self._ends[-1]) if len(self._ends) else 0
        return [(first, min(first + nbytes, total)) for first in range(0, total, nbytes)]

    def _cut(self, first: int, stop: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return where the ranges of a piece are in the region and in the piece, and their lengths."""
        low = int(self._ends.searchsorted(first, side="right"))
        high = int(self._begins.searchsorted(stop, side="left"))
        begins = self._begins[low:high]
        starts = np.maximum(begins, first)
        there: Int64s = self._offsets[low:high] + (starts - begins)
        return there, starts - first, np.minimum(self._ends[low:high], stop) - starts

    def pack(self, first: int, stop: int, buffer: torch.Tensor) -> None:
        """Copy the bytes first..stop of the payload into a buffer of just that size."""
        there, here, nbytes = self._cut(first, stop)
        self._native.copy_runs(Memory(buffer.data_ptr(), buffer.numel()), self._region, here, there, nbytes)

    def put(self, first: int, stop: int, buffer: torch.Tensor) -> None:
        """Copy a buffer to the bytes first..stop of the payload."""
        there, here, nbytes = self._cut(first, stop)
        self._native.copy_runs(self._region, Memory(buffer.data_ptr(), buffer.numel()), there, here, nbytes)
