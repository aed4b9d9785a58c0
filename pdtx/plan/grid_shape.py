"""A grid of runs before it has block ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdtx.layout import Part, StridedLayout
from pdtx.plan.grids import GridAxis, RunGrid
from pdtx.plan.runs import Int64s
from pdtx.plan.segments import Segments


@dataclass(frozen=True)
class Side:
    """One side of a grid: its part's layout, and the bytes that part and cuts add to every offset, one by one."""

    layout: StridedLayout
    shifts: tuple[int, ...]

    @classmethod
    def of(cls, part: Part, cuts: Sequence[tuple[str, int]]) -> "Side":
        """Take a part from cuts on: axis and first step of each."""
        return cls(part.layout, (part.offset, *(part.layout.stride(axis) * first for axis, first in cuts)))

    def place(self, segments: Segments, block_ids: Int64s, layer: int, out: Int64s) -> None:
        """Write to out where segments begin; layer: the first one."""
        segments.place(self.layout, block_ids, sum(self.shifts) + layer * self.layout.stride("layer"), out)


@dataclass(frozen=True)
class GridShape:
    """A grid without block ids: pieces of segments that the same loops run through, each with the bytes of its runs."""

    src: Side
    dst: Side
    pieces: tuple[tuple[Segments, int], ...]
    outer: tuple[GridAxis, ...]
    middle: tuple[GridAxis, ...]
    inner: tuple[GridAxis, ...]
    parts: int

    @property
    def loops(self) -> tuple[GridAxis, ...]:
        """All loops, slowest first."""
        return (*self.outer, *self.middle, *self.inner)

    def bind(self, src_ids: Int64s, dst_ids: Int64s, src_layer: int, dst_layer: int) -> RunGrid:
        """Return the runs for block ids and first layers."""
        size = sum(len(segments) for segments, _ in self.pieces)
        src, dst, lengths = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
        first = 0
        for segments, nbytes in self.pieces:
            piece = slice(first, first + len(segments))
            self.src.place(segments, src_ids, src_layer, src[piece])
            self.dst.place(segments, dst_ids, dst_layer, dst[piece])
            lengths[piece] = nbytes
            first = piece.stop
        return RunGrid(src, dst, lengths, self.outer, self.inner, self.parts, self.middle)
