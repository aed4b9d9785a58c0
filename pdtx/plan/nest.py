"""One side of a grid of runs: offsets inside loops, expanded without a temporary array more than is needed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from pdtx.plan.runs import Int64s

Loop = tuple[int, int]
"""So many steps, each so many bytes further."""


@dataclass(frozen=True)
class Nest:
    """Ranges of one region: one for each step of outer, group, step of middle, segment of the group, and step of inner.

    offsets, nbytes: the segments' first ranges; int64, shape (segments,), parts of them a group.
    outer, middle, inner: loops, slowest first.
    """

    offsets: Int64s
    nbytes: Int64s
    outer: tuple[Loop, ...] = ()
    inner: tuple[Loop, ...] = ()
    parts: int = 1
    middle: tuple[Loop, ...] = ()

    def __len__(self) -> int:
        return len(self.offsets) * prod(count for count, _ in (*self.outer, *self.middle, *self.inner))

    @property
    def first(self) -> int:
        """Where the first range begins; there must be one."""
        return int(self.offsets[0])

    @property
    def end(self) -> int:
        """Where the last range ends."""
        return int(self.offsets[-1] + self.nbytes[-1]) + _reach((*self.outer, *self.middle, *self.inner))

    def fill(self, out: Int64s) -> None:
        """Write the offsets of all ranges to out, shape (len(self),), in stream order."""
        offsets = self.offsets
        if self.middle:
            groups = offsets.reshape(-1, 1, self.parts)
            offsets = (groups + _steps(self.middle)[None, :, None]).reshape(-1)
        outer, inner = _steps(self.outer), _steps(self.inner)
        if len(inner) > 1 and len(outer) > 1:
            offsets, inner = np.add.outer(offsets, inner).reshape(-1), inner[:1]
        if len(inner) > 1:
            np.add(offsets[:, None], inner[None, :], out=out.reshape(-1, len(inner)))
        else:
            np.add(outer[:, None], offsets[None, :], out=out.reshape(len(outer), -1))

    def fill_nbytes(self, out: Int64s) -> None:
        """Write the lengths of all ranges to out, likewise."""
        if not len(self.nbytes):
            return
        if int(self.nbytes.min()) == int(self.nbytes.max()):
            out.fill(self.nbytes[0])
            return
        counts = [prod(count for count, _ in loops) for loops in (self.outer, self.middle, self.inner)]
        out.reshape(counts[0], -1, counts[1], self.parts, counts[2])[:] = self.nbytes.reshape(1, -1, 1, self.parts, 1)

    @cached_property
    def gaps(self) -> tuple[Int64s, ...]:
        """Bytes from the end of a range to the start of the next one, for every way in which one can follow another.

        The ways are the levels of the loops, so that two nests of the same loops have arrays of the same shapes.
        """
        return tuple(self._gaps()) if len(self.offsets) else ()

    def _gaps(self) -> Iterator[Int64s]:
        starts, nbytes = self.offsets.reshape(-1, self.parts), self.nbytes.reshape(-1, self.parts)
        below = 0
        for count, stride in reversed(self.inner):
            yield stride - below - self.nbytes
            below += (count - 1) * stride
        yield (starts[:, 1:] - starts[:, :-1] - nbytes[:, :-1] - below).reshape(-1)
        spans = starts[:, -1] - starts[:, 0]
        for count, stride in reversed(self.middle):
            yield stride - below - spans - nbytes[:, -1]
            below += (count - 1) * stride
        yield starts[1:, 0] - starts[:-1, -1] - nbytes[:-1, -1] - below
        below += int(starts[-1, -1] - starts[0, 0])
        for count, stride in reversed(self.outer):
            yield stride - below - nbytes[-1:, -1]
            below += (count - 1) * stride

    @property
    def touching(self) -> bool:
        """Whether a range may begin where its predecessor in the stream ends."""
        return any(not gap.all() for gap in self.gaps)

    def folded(self) -> "Nest":
        """Return the same ranges with loops taken into them whose steps are contiguous, and neighbours joined."""
        nest = self._fold_inner()
        if nest.parts > 1 and not nest.inner:
            nest = nest._fold_parts()._fold_inner()
        if nest.inner or nest.middle:
            return nest
        nest = nest._join()
        while len(nest.offsets) == 1 and nest.outer and nest.outer[-1][1] == nest.nbytes[0]:
            nest = replace(nest, outer=nest.outer[:-1], nbytes=nest.nbytes * nest.outer[-1][0])
        return nest

    def _fold_inner(self) -> "Nest":
        nest = self
        if nest.parts == 1 and nest.middle:
            nest = replace(nest, inner=(*nest.middle, *nest.inner), middle=())
        inner, nbytes = nest.inner, nest.nbytes
        while inner and (nbytes == inner[-1][1]).all():
            inner, nbytes = inner[:-1], nbytes * inner[-1][0]
        return nest if inner is nest.inner else replace(nest, inner=inner, nbytes=nbytes)

    def _fold_parts(self) -> "Nest":
        """Join the segments of each group, if all of them touch."""
        starts, nbytes = self.offsets.reshape(-1, self.parts), self.nbytes.reshape(-1, self.parts)
        if (starts[:, 1:] != starts[:, :-1] + nbytes[:, :-1]).any():
            return self
        return replace(self, offsets=np.ascontiguousarray(starts[:, 0]), nbytes=nbytes.sum(axis=1), parts=1)

    def _join(self) -> "Nest":
        """Join neighbouring segments, where no loop runs inside them."""
        joins = self.offsets[1:] == self.offsets[:-1] + self.nbytes[:-1]
        if not joins.any():
            return self
        starts = np.concatenate(([0], np.flatnonzero(~joins) + 1))
        return replace(self, offsets=self.offsets[starts], nbytes=np.add.reduceat(self.nbytes, starts), parts=1)


def _reach(loops: Sequence[Loop]) -> int:
    return sum((count - 1) * stride for count, stride in loops)


def _steps(loops: Sequence[Loop]) -> Int64s:
    """Offsets of all steps of nested loops, slowest first; int64, shape (product of counts,)."""
    steps = np.zeros(1, np.int64)
    for count, stride in loops:
        steps = np.add.outer(steps, np.arange(count, dtype=np.int64) * stride).reshape(-1)
    return steps
