"""What a shape proves for all block ids: that no block reaches into another's bytes, or out of its region.

Then an audit of all runs is needed once for a shape, and for other block ids it is enough that they are in range and
differ: runs of two blocks lie in two cells, and runs of one block lie as they did in the audit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Literal

from pdtx.plan.grid_shape import GridShape

_MOST_PLACES = 1 << 16


@dataclass(frozen=True)
class Cell:
    """What a grid touches of a block's bytes on one side.

    stride, count: of the block axis. layer: bytes from layer to layer. places: where the cells of block 0 begin, one
    for each step of the loops that go beyond all blocks; None for too many. low, high: the bytes inside a cell that are
    touched. reach: end of the last byte that a run of the last block and layer can touch, from the region's start.
    """

    stride: int
    count: int
    layer: int
    places: frozenset[int] | None
    low: int
    high: int
    reach: int

    @classmethod
    def of(cls, grid: GridShape, side: Literal["src", "dst"], num_layers: int) -> "Cell":
        """Look at one side of a grid of num_layers layers."""
        here = grid.src if side == "src" else grid.dst
        layout = here.layout
        stride, count, layer = layout.stride("block"), layout.extent("block"), layout.stride("layer")
        all_blocks = stride * count
        loops = [(axis.count, int(getattr(axis, f"{side}_stride"))) for axis in grid.loops]
        near = sum((steps - 1) * step for steps, step in loops if step < all_blocks)
        far = [range(0, steps * step, step) for steps, step in loops if step >= all_blocks]
        low = sum(shift for shift in here.shifts if shift < all_blocks)
        far_shift = sum(shift for shift in here.shifts if shift >= all_blocks)
        # The first layer is not known yet: it may be as late as the layers allow.
        layers = (layout.extent("layer") - num_layers) * layer
        high = low + max(segments.last_offset(layout) + nbytes for segments, nbytes in grid.pieces) + near
        places = None
        if prod(len(steps) for steps in far) <= _MOST_PLACES:
            places = frozenset(far_shift + sum(steps) for steps in product(*far))
        reach = high + far_shift + sum(steps[-1] for steps in far) + layers + (count - 1) * stride
        return cls(stride, count, layer, places, low, high + (layers if layer < all_blocks else 0), reach)

    def inside(self, size_bytes: int) -> bool:
        """Whether no run leaves the region, whatever block and layer it is of."""
        return self.low >= 0 and self.reach <= size_bytes


def blocks_apart(cells: Sequence[Cell], size_bytes: int) -> bool:
    """Whether runs of different blocks never share a byte, and none leaves the region; False also where unproved.

    cells: of all grids, on the side that is written. Every run lies in place + block * stride .. the same of the next
    block, and any two places are all blocks apart.
    """
    if not cells:
        return True
    first, places = cells[0], set[int]()
    for cell in cells:
        alike = (cell.stride, cell.count, cell.layer) == (first.stride, first.count, first.layer)
        if not alike or cell.places is None or cell.high > cell.stride or not cell.inside(size_bytes):
            return False
        places |= cell.places
    return all(other - one >= first.stride * first.count for one, other in pairwise(sorted(places)))
