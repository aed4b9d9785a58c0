"""Runs as NIXL takes them: indices into lists of equal units, in requests of a bounded size."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdtx.plan import Slices
from pdtx.plan.runs import Int64s
from pdtx.ranges.units import common_unit

Descriptors = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int32]

_MOST_UNITS = 1 << 31
_WORTH = 4
"""Units a run, on average, up to which indices are cheaper than descriptors."""


class Batch(NamedTuple):
    """Runs between a region here (local) and one of the peer's (remote): int64, shape (n,), offsets in bytes."""

    local: Int64s
    remote: Int64s
    nbytes: Int64s

    @classmethod
    def of(cls, local: int, remote: int, nbytes: int) -> "Batch":
        """Return a batch of one run."""
        return cls(*(np.array([number], np.int64) for number in (local, remote, nbytes)))

    def cut(self, most: int) -> "Batch":
        """Return the same with no run longer than most bytes."""
        if not len(self.nbytes) or int(self.nbytes.max()) <= most:
            return self
        parts = np.maximum(1, -(-self.nbytes // most))
        ends = np.cumsum(parts)
        # How far into its run each part begins.
        inside = (np.arange(ends[-1]) - np.repeat(ends - parts, parts)) * most
        local, remote, nbytes = (np.repeat(numbers, parts) for numbers in self)
        return Batch(local + inside, remote + inside, np.minimum(nbytes - inside, most))

    def pieces(self, most_bytes: int, most_runs: int) -> Iterator["Batch"]:
        """Cut into batches of at most so many bytes, but at least one run, and at most so many runs."""
        ends, start = np.cumsum(self.nbytes), 0
        while start < len(ends):
            limit = most_bytes + int(ends[start] - self.nbytes[start])
            stop = min(int(ends.searchsorted(limit, side="right")), start + most_runs)
            stop = max(stop, start + 1)
            yield Batch(*(numbers[start:stop] for numbers in self))
            start = stop

    def unit(self, *region_bytes: int) -> int | None:
        """Return the unit of which every run is a whole number on both sides; None where too many would be needed.

        region_bytes: sizes of the regions that are cut into units.
        """
        unit = common_unit(Slices(self.local, self.nbytes), Slices(self.remote, self.nbytes))
        many = int(self.nbytes.sum()) // unit > _WORTH * len(self.nbytes) or max(region_bytes) // unit >= _MOST_UNITS
        return None if many else unit


def units_of(offsets: Int64s, nbytes: Int64s, unit: int) -> Indices:
    """Return the indices of the units of ranges; int32, shape (all units,)."""
    counts = nbytes // unit
    ends = np.cumsum(counts)
    firsts = offsets // unit - (ends - counts)
    indices: Indices = (np.arange(counts.sum()) + np.repeat(firsts, counts)).astype(np.int32)
    return indices


def strided(address: int, nbytes: int, device: int, unit: int) -> Descriptors:
    """Describe a whole region as so many units as fit; uint64, shape (1, 5): address, bytes, device, stride, count."""
    return np.array([[address, unit, device, unit, nbytes // unit]], np.uint64)


def listed(address: int, offsets: Int64s, nbytes: Int64s, device: int) -> Descriptors:
    """Describe ranges one by one; uint64, shape (n, 3): address, bytes, device."""
    rows = np.empty((len(offsets), 3), np.uint64)
    rows[:, 0] = offsets
    rows[:, 0] += np.uint64(address)
    rows[:, 1] = nbytes
    rows[:, 2] = device
    return rows
