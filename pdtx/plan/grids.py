"""Byte runs in compressed form: grids of strided runs, and their expansion."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Literal

import numpy as np

from pdtx.plan.nest import Nest
from pdtx.plan.runs import Int64s, Runs, Slices

Side = Literal["src", "dst"]


@dataclass(frozen=True)
class GridAxis:
    """A loop over count steps, each src_stride and dst_stride bytes further."""

    count: int
    src_stride: int
    dst_stride: int


@dataclass(frozen=True)
class RunGrid:
    """Runs in compressed form: one run for each step of outer, group, step of middle, segment of the group, and inner.

    src, dst, nbytes: the segments' first runs; int64, shape (segments,). parts: segments in a group.
    outer, middle, inner: loops, slowest first.
    """

    src: Int64s
    dst: Int64s
    nbytes: Int64s
    outer: tuple[GridAxis, ...] = ()
    inner: tuple[GridAxis, ...] = ()
    parts: int = 1
    middle: tuple[GridAxis, ...] = ()

    @property
    def loops(self) -> tuple[GridAxis, ...]:
        """All loops, slowest first."""
        return (*self.outer, *self.middle, *self.inner)

    @property
    def _steps(self) -> int:
        return prod(axis.count for axis in self.loops)

    def __len__(self) -> int:
        return len(self.nbytes) * self._steps

    @property
    def total(self) -> int:
        """Bytes of all runs."""
        return int(self.nbytes.sum()) * self._steps

    def side(self, side: Side) -> Nest:
        """Return one side's ranges."""

        def loops(axes: Sequence[GridAxis]) -> tuple[tuple[int, int], ...]:
            return tuple((axis.count, getattr(axis, f"{side}_stride")) for axis in axes if axis.count > 1)

        outer, middle, inner = loops(self.outer), loops(self.middle), loops(self.inner)
        return Nest(getattr(self, side), self.nbytes, outer, inner, self.parts, middle)

    @property
    def looped(self) -> bool:
        """Whether loops run inside groups or segments, so that neighbours cannot be joined without expanding them."""
        return bool(self.inner or self.middle)

    def merged(self) -> "RunGrid":
        """Join segments that are contiguous on both sides, where no loop runs inside them."""
        if self.looped:
            return self
        runs = Runs(self.src, self.dst, self.nbytes).merged()
        return RunGrid(runs.src, runs.dst, runs.nbytes, self.outer)


@dataclass(frozen=True)
class RunSet:
    """The runs of a plan, kept compressed. The stream order is that of flat."""

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
        return any(grid.looped for grid in self.grids)

    def sizes(self) -> dict[int, int]:
        """Return how many runs there are of each number of bytes, the largest first."""
        counts: dict[int, int] = {}
        for grid in self.grids:
            sizes, times = np.unique(grid.nbytes, return_counts=True)
            loops = prod(axis.count for axis in grid.loops)
            for size, number in zip(sizes.tolist(), times.tolist(), strict=True):
                counts[size] = counts.get(size, 0) + number * loops
        return dict(sorted(counts.items(), reverse=True))

    @cached_property
    def flat(self) -> Runs:
        """All runs in stream order, one by one."""
        src, dst = self.nests("src"), self.nests("dst")
        # One block of memory: three would be given back to the system and faulted in again for every plan.
        columns = np.empty((3, len(self)), np.int64)
        return Runs(_fill(src, columns[0]), _fill(dst, columns[1]), _fill_nbytes(src, columns[2]))

    def expanding(self) -> Runs:
        """Return all runs as flat has them, but each array only made when it is asked for."""
        return ExpandingRuns(self)

    @cached_property
    def touching(self) -> bool:
        """Whether some run may continue its predecessor on both sides."""
        src, dst = self.nests("src"), self.nests("dst")
        inside = any(
            not (one | other).all()
            for ours, theirs in zip(src, dst, strict=True)
            for one, other in zip(ours.gaps, theirs.gaps, strict=True)
        )
        between = zip(pairwise(src), pairwise(dst), strict=True)
        return inside or any(a.end == b.first and c.end == d.first for (a, b), (c, d) in between)

    def num_ranges(self, side: Side) -> int:
        """Return the number of ranges of one side, joined where they touch there."""
        nests = self._folded(side)
        return len(self.ranges(side)) if _touching(nests) else sum(len(nest) for nest in nests)

    def ranges(self, side: Side) -> Slices:
        """Return the ranges of one side in stream order, joined where they touch there."""
        nests = self._folded(side)
        columns = np.empty((2, sum(len(nest) for nest in nests)), np.int64)
        found = Slices(_fill(nests, columns[0]), _fill_nbytes(nests, columns[1]))
        return found.joined() if _touching(nests) else found

    def nests(self, side: Side) -> list[Nest]:
        """Return one side of each grid."""
        return [grid.side(side) for grid in self.grids if len(grid.nbytes)]

    def _folded(self, side: Side) -> list[Nest]:
        return [nest.folded() for nest in self.nests(side)]


def _touching(nests: Sequence[Nest]) -> bool:
    return any(nest.touching for nest in nests) or any(one.end == other.first for one, other in pairwise(nests))


def _pieces(nests: Sequence[Nest]) -> Iterator[tuple[Nest, slice]]:
    """Yield where in the expanded arrays each nest's ranges belong."""
    first = 0
    for nest in nests:
        yield nest, slice(first, first + len(nest))
        first += len(nest)


def _fill(nests: Sequence[Nest], out: Int64s) -> Int64s:
    for nest, piece in _pieces(nests):
        nest.fill(out[piece])
    return out


def _fill_nbytes(nests: Sequence[Nest], out: Int64s) -> Int64s:
    for nest, piece in _pieces(nests):
        nest.fill_nbytes(out[piece])
    return out


class ExpandingRuns(Runs):
    """The runs of a RunSet. Each array is made when it is asked for, and each side's ranges without the other side."""

    def __init__(self, runs: RunSet) -> None:
        object.__setattr__(self, "runs", runs)

    runs: RunSet

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def _column(self) -> Int64s:
        return np.empty(len(self.runs), np.int64)

    @cached_property
    def total(self) -> int:
        """Bytes of all runs."""
        return self.runs.total

    @cached_property
    def src(self) -> Int64s:
        """See Runs."""
        return _fill(self.runs.nests("src"), self._column)

    @cached_property
    def dst(self) -> Int64s:
        """See Runs."""
        return _fill(self.runs.nests("dst"), self._column)

    @cached_property
    def nbytes(self) -> Int64s:
        """See Runs."""
        return _fill_nbytes(self.runs.nests("src"), self._column)

    def source(self) -> Slices:
        """See Runs."""
        return self.runs.ranges("src")

    def destination(self) -> Slices:
        """See Runs."""
        return self.runs.ranges("dst")
