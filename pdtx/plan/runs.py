"""Byte runs one by one, as numpy arrays."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Slices:
    """Byte ranges of one region, in stream order: offsets[i] .. offsets[i] + nbytes[i]. Both int64, shape (n,)."""

    offsets: Int64s
    nbytes: Int64s

    def __len__(self) -> int:
        return len(self.offsets)

    @cached_property
    def total(self) -> int:
        """Bytes of all ranges."""
        return int(self.nbytes.sum())

    def joined(self) -> "Slices":
        """Join neighbours that touch."""
        starts = run_starts(self.nbytes, self.offsets)
        return Slices(self.offsets[starts], _sums(self.nbytes, starts))


@dataclass(frozen=True)
class Runs:
    """Runs (src[i], dst[i], nbytes[i]) in stream order; int64, shape (n,). Offsets count from each side's region."""

    src: Int64s
    dst: Int64s
    nbytes: Int64s

    def __len__(self) -> int:
        return len(self.nbytes)

    @cached_property
    def total(self) -> int:
        """Bytes of all runs."""
        return int(self.nbytes.sum())

    def merged(self) -> "Runs":
        """Join neighbours that are contiguous on both sides."""
        starts = run_starts(self.nbytes, self.src, self.dst)
        return Runs(self.src[starts], self.dst[starts], _sums(self.nbytes, starts))

    def source(self) -> Slices:
        """The source's ranges in stream order, joined where they touch there."""
        return Slices(self.src, self.nbytes).joined()

    def destination(self) -> Slices:
        """The destination's ranges in stream order, joined where they touch there."""
        return Slices(self.dst, self.nbytes).joined()


def run_starts(nbytes: Int64s, *sides: Int64s) -> npt.NDArray[np.intp]:
    """Indices at which a run does not continue its predecessor on every one of the sides."""
    if len(nbytes) == 0:
        return np.zeros(0, np.intp)
    joins = np.ones(len(nbytes) - 1, bool)
    for side in sides:
        joins &= side[1:] == side[:-1] + nbytes[:-1]
    return np.concatenate(([0], np.flatnonzero(~joins) + 1))


def _sums(nbytes: Int64s, starts: npt.NDArray[np.intp]) -> Int64s:
    return np.add.reduceat(nbytes, starts) if len(starts) else nbytes
