"""Byte runs as numpy arrays: compressed (grids of strided runs) and flat."""

from collections.abc import Sequence
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
        starts = _run_starts(self.nbytes, self.src, self.dst)
        return Runs(self.src[starts], self.dst[starts], _sums(self.nbytes, starts))

    def source(self) -> Slices:
        """The source's ranges in stream order, joined where they touch there."""
        return _one_side(self.src, self.nbytes)

    def destination(self) -> Slices:
        """The destination's ranges in stream order, joined where they touch there."""
        return _one_side(self.dst, self.nbytes)


def _run_starts(nbytes: Int64s, *sides: Int64s) -> npt.NDArray[np.intp]:
    """Indices at which a run does not continue its predecessor on every one of the sides."""
    if len(nbytes) == 0:
        return np.zeros(0, np.intp)
    joins = np.ones(len(nbytes) - 1, bool)
    for side in sides:
        joins &= side[1:] == side[:-1] + nbytes[:-1]
    return np.concatenate(([0], np.flatnonzero(~joins) + 1))


def _sums(nbytes: Int64s, starts: npt.NDArray[np.intp]) -> Int64s:
    return np.add.reduceat(nbytes, starts) if len(starts) else nbytes


def _one_side(offsets: Int64s, nbytes: Int64s) -> Slices:
    starts = _run_starts(nbytes, offsets)
    return Slices(offsets[starts], _sums(nbytes, starts))


@dataclass(frozen=True)
class GridAxis:
    """A loop over count steps, each src_stride and dst_stride bytes further."""

    count: int
    src_stride: int
    dst_stride: int


@dataclass(frozen=True)
class RunGrid:
    """Runs in compressed form: for each step of outer, for each segment, for each step of inner, one run.

    src, dst, nbytes: the segments' first runs; int64, shape (segments,).
    outer, inner: loops around and inside the segments, slowest first.
    """

    src: Int64s
    dst: Int64s
    nbytes: Int64s
    outer: tuple[GridAxis, ...] = ()
    inner: tuple[GridAxis, ...] = ()

    def __len__(self) -> int:
        return len(self.nbytes) * _count(self.outer) * _count(self.inner)

    @property
    def total(self) -> int:
        """Bytes of all runs."""
        return int(self.nbytes.sum()) * _count(self.outer) * _count(self.inner)

    def merged(self) -> "RunGrid":
        """Join segments that are contiguous on both sides, where no loop runs inside them."""
        if self.inner:
            return self
        runs = Runs(self.src, self.dst, self.nbytes).merged()
        return RunGrid(runs.src, runs.dst, runs.nbytes, self.outer)

    def expand(self) -> Runs:
        """Return the flat form."""

        def offsets(segments: Int64s, stride: str) -> Int64s:
            outer, inner = _steps(self.outer, stride), _steps(self.inner, stride)
            return (outer[:, None, None] + segments[None, :, None] + inner[None, None, :]).reshape(-1)

        shape = (_count(self.outer), len(self.nbytes), _count(self.inner))
        nbytes = np.broadcast_to(self.nbytes[None, :, None], shape).reshape(-1)
        return Runs(offsets(self.src, "src_stride"), offsets(self.dst, "dst_stride"), nbytes)


def _count(axes: Sequence[GridAxis]) -> int:
    return int(np.prod([axis.count for axis in axes], dtype=np.int64)) if axes else 1


def _steps(axes: Sequence[GridAxis], stride: str) -> Int64s:
    """Offsets of all steps of nested loops, slowest first; int64, shape (product of counts,)."""
    steps = np.zeros(1, np.int64)
    for axis in axes:
        steps = (steps[:, None] + np.arange(axis.count, dtype=np.int64) * getattr(axis, stride)).reshape(-1)
    return steps


@dataclass(frozen=True)
class RunSet:
    """The runs of a plan, kept compressed. The stream order is that of flat()."""

    grids: tuple[RunGrid, ...]

    def __len__(self) -> int:
        return sum(len(grid) for grid in self.grids)

    @property
    def total(self) -> int:
        """Bytes of all runs."""
        return sum(grid.total for grid in self.grids)

    def merged(self) -> "RunSet":
        """Join neighbours within each grid, without expanding one."""
        return RunSet(tuple(grid.merged() for grid in self.grids))

    @property
    def looped(self) -> bool:
        """Whether loops run through a segment."""
        return any(grid.inner for grid in self.grids)

    def sizes(self) -> dict[int, int]:
        """Return how many runs there are of each number of bytes, the largest first."""
        counts: dict[int, int] = {}
        for grid in self.grids:
            sizes, times = np.unique(grid.nbytes, return_counts=True)
            loops = _count(grid.outer) * _count(grid.inner)
            for size, number in zip(sizes.tolist(), times.tolist(), strict=True):
                counts[size] = counts.get(size, 0) + number * loops
        return dict(sorted(counts.items(), reverse=True))

    @cached_property
    def flat(self) -> Runs:
        """All runs in stream order, one by one."""
        parts = [grid.expand() for grid in self.grids]
        if len(parts) == 1:
            return parts[0]
        if not parts:
            empty = np.zeros(0, np.int64)
            return Runs(empty, empty, empty)
        return Runs(*(np.concatenate([getattr(part, side) for part in parts]) for side in ("src", "dst", "nbytes")))
