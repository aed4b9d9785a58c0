"""The shape of a plan: all that follows from layouts, boxes and positions, without block ids and first layers.

Making a shape costs some hundred microseconds of Python; binding it to block ids costs a few numpy operations on them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from pdtx.layout import Layout, Part, StridedLayout
from pdtx.parallel import Box
from pdtx.plan.grid_shape import GridShape, Side
from pdtx.plan.grids import RunSet
from pdtx.plan.match import BoxAxis, box_axes, check_parts, match_parts, tokens_together
from pdtx.plan.proof import Cell, blocks_apart
from pdtx.plan.runs import Int64s
from pdtx.plan.segments import Segments, cut
from pdtx.units import ceil_div


@dataclass(eq=False)
class PlanShape:
    """All grids of a plan. Block ids count from the position group that the first token is in.

    expected_bytes: what layouts and boxes say that is moved, whatever the grids say. blocks_apart: whether block ids
    that differ never share a byte of the destination, and none in range leaves its region, see pdtx.plan.proof.
    audited: whether runs of one block are known to lie apart, from an audit of all runs.
    """

    grids: tuple[GridShape, ...]
    expected_bytes: int
    blocks_apart: bool
    audited: bool = False

    @property
    def proved(self) -> bool:
        """Whether block ids that are in range and differ make a right plan, without another audit."""
        return self.blocks_apart and self.audited

    def bind(self, src_ids: Int64s, dst_ids: Int64s, src_layer: int, dst_layer: int) -> RunSet:
        """Return the runs for block ids, from the origin's on, and first layers."""
        return RunSet(tuple(grid.bind(src_ids, dst_ids, src_layer, dst_layer) for grid in self.grids))


def position_group(src: Layout, dst: Layout) -> int:
    """Positions after which a shape is the same again: the larger of both sides' blocks."""
    return max(src.block_size, dst.block_size)


def make_shape(
    src: Layout, dst: Layout, order: Layout, boxes: Sequence[Box], num_layers: int, tokens: range
) -> PlanShape:
    """Return the shape of a plan for num_layers layers of tokens, which count from the start of a position group.

    order: the layout whose memory the stream follows: the destination's, as both sides know it.
    Raises PlanError or LayoutError where the layouts cannot be matched.
    """
    grids, expected, src_cells, dst_cells = list[GridShape](), 0, list[Cell](), list[Cell]()
    pairs = zip(match_parts(src, dst), match_parts(src, order), strict=True)
    for (src_part, dst_part), (_, order_part) in pairs:
        copy = _PartCopy(src_part, dst_part, order_part.layout, num_layers, tokens if num_layers else range(0))
        for box in boxes:
            if box.part in ("", src_part.name):
                expected += copy.nbytes(box)
                for grid in copy.grids(box):
                    grids.append(grid)
                    src_cells.append(Cell.of(grid, "src", num_layers))
                    dst_cells.append(Cell.of(grid, "dst", num_layers))
    apart = blocks_apart(dst_cells, dst.size_bytes) and all(cell.inside(src.size_bytes) for cell in src_cells)
    return PlanShape(tuple(_joined(grids)), expected, apart)


@dataclass(frozen=True)
class _PartCopy:
    """One part of a layout copied to its like: segments of tokens, and a box of the other axes for each."""

    src_part: Part
    dst_part: Part
    order: StridedLayout
    num_layers: int
    tokens: range

    def __post_init__(self) -> None:
        check_parts(self.src_part.layout, self.dst_part.layout)

    @property
    def steps(self) -> range:
        """The tokens as steps of the token axis; the first and last blocks are taken whole where they must be."""
        layout = self.src_part.layout
        unit, tokens = tokens_together(layout, self.dst_part.layout), self.tokens
        steps = unit // layout.tokens_per_step
        return range(tokens.start // unit * steps, ceil_div(tokens.stop, unit) * steps) if tokens else range(0)

    def nbytes(self, box: Box) -> int:
        """Payload bytes of a box, by its extents alone."""
        layout = self.src_part.layout
        axes = box_axes(layout, self.dst_part.layout, box, self.num_layers, 1)
        step = layout.itemsize * prod(axis.extent for axis in axes)
        return step * len(self.steps) if self.num_layers else 0

    def grids(self, box: Box) -> Iterator[GridShape]:
        """Yield the runs of a box: a grid for each length of segment."""
        src, dst = self.src_part.layout, self.dst_part.layout
        unit = min(src.token_steps, dst.token_steps)
        for segments in cut(self.steps, unit, dst.token_steps // unit):
            yield self._grid(box, segments)

    def _grid(self, box: Box, segments: Segments) -> GridShape:
        src, dst, order = self.src_part.layout, self.dst_part.layout, self.order
        axes = box_axes(src, dst, box, self.num_layers, segments.steps, order)
        run, axes = _atom(src.itemsize, axes)
        axes.sort(key=lambda axis: -axis.order)
        # Around the segments goes what steps farther than a block; around those of a group, what steps farther than
        # one of them; so that the stream follows the destination's memory.
        block, segment = order.stride("block"), order.stride("block")
        if segments.parts > 1:
            segment = segments.unit * order.stride("token")
        outer = tuple(axis.loop for axis in axes if axis.order >= block)
        middle = tuple(axis.loop for axis in axes if segment <= axis.order < block)
        inner = tuple(axis.loop for axis in axes if axis.order < segment)
        src_side = Side.of(self.src_part, [(cut.axis, cut.src) for cut in box.cuts])
        dst_side = Side.of(self.dst_part, [(cut.axis, cut.dst) for cut in box.cuts])
        parts = segments.parts if middle else 1
        return GridShape(src_side, dst_side, ((segments, run),), outer, middle, inner, parts)


def _atom(itemsize: int, axes: list[BoxAxis]) -> tuple[int, list[BoxAxis]]:
    """Grow the largest box contiguous on both sides; return its bytes and the axes left over."""
    run, left = itemsize, list(axes)
    while True:
        absorbed = next((axis for axis in left if axis.src == axis.dst == axis.order == run), None)
        if absorbed is None:
            return run, left
        run *= absorbed.extent
        left.remove(absorbed)


def _joined(grids: list[GridShape]) -> Iterator[GridShape]:
    """Put segments of different lengths into one grid where their loops are the same, keeping token order.

    So a last, partial block follows its predecessor in the stream and can merge with it.
    """
    last: GridShape | None = None
    for grid in grids:
        plain = last and not (last.middle or last.inner or grid.middle or grid.inner)
        if last and plain and (last.src, last.dst, last.outer) == (grid.src, grid.dst, grid.outer):
            last = replace(last, pieces=(*last.pieces, *grid.pieces))
            continue
        if last:
            yield last
        last = grid
    if last:
        yield last
