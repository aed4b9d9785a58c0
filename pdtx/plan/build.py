"""Build a plan: match two caches by token position and cut what they share into contiguous runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

from pdtx.errors import PlanError
from pdtx.layout import Part, StridedLayout
from pdtx.parallel import Box
from pdtx.plan.audit import audit_run_set
from pdtx.plan.endpoint import Endpoint
from pdtx.plan.match import BoxAxis, box_axes, check_parts, match_parts, whole_blocks
from pdtx.plan.runs import GridAxis, Int64s, RunGrid, Runs, RunSet
from pdtx.units import ceil_div

_WHOLE = (Box(),)


@dataclass(frozen=True)
class TransferPlan:
    """The runs that carry layers x tokens of one request from src to dst.

    layers: of the source, dst_layer: the first of the destination; tokens: positions. runs: compressed, unmerged.
    """

    src: Endpoint
    dst: Endpoint
    layers: range
    tokens: range
    runs: RunSet
    dst_layer: int = 0
    merge: bool = True

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return self.runs.total

    @cached_property
    def flat(self) -> Runs:
        """What to move, one run after another; joined where they touch on both sides, if merging was asked for.

        Runs of a segment that loops run through (one for each head, say) are left as they are: at most the last of them
        could be joined, and then no loop would describe them any more.
        """
        merged = self._merged
        return merged.flat if merged.looped or not self.merge else merged.flat.merged()

    @property
    def sizes(self) -> dict[int, int]:
        """How many runs of each number of bytes flat has, the largest first; loops inside segments are not expanded."""
        if self._merged.looped or not self.merge:
            return self._merged.sizes()
        sizes, times = np.unique(self.flat.nbytes, return_counts=True)
        return dict(zip(sizes.tolist()[::-1], times.tolist()[::-1], strict=True))

    @cached_property
    def _merged(self) -> RunSet:
        return self.runs.merged() if self.merge else self.runs


def build_plan(
    src: Endpoint,
    dst: Endpoint,
    tokens: range,
    layers: range | None = None,
    *,
    dst_layer: int | None = None,
    merge: bool = True,
    boxes: Sequence[Box] = _WHOLE,
) -> TransferPlan:
    """Plan the copy of tokens (positions in the request) of layers (default all) from src to dst.

    Tokens are matched by position, never by count: token t lies in block block_ids[t // block_size] at
    t % block_size on either side. layers are the source's; they go to dst_layer, ... (default: the same numbers).
    boxes: what of each layer and block is copied, by default everything; see pdtx.parallel.transfers.
    Where tokens of a block must stay together (a record layout says so), the first and the last block move whole.

    The result has passed the audit. Cost: O(blocks), whatever the number of runs; plan.flat expands them.
    Raises PlanError naming the field and both values where the two sides cannot be matched, LayoutError where a
    layout's blocks cannot be moved at all.
    """
    pairs = match_parts(src.layout, dst.layout)
    layers, dst_layer = _check_layers(src, dst, layers, dst_layer)
    for side, name in ((src, "source"), (dst, "destination")):
        if tokens.step != 1 or not 0 <= tokens.start <= tokens.stop:
            raise PlanError(f"tokens {tokens} are not a range of positions")
        side.check(name, tokens)
    grids, expected = list[RunGrid](), 0
    for src_part, dst_part in pairs:
        copy = _PartCopy(src, dst, src_part, dst_part, layers, dst_layer, tokens if layers else range(0))
        for box in boxes:
            if box.part in ("", src_part.name):
                grids += copy.grids(box)
                expected += copy.nbytes(box)
    runs = RunSet(tuple(_joined(grids)))
    audit_run_set(runs, src.layout, dst.layout, expected)
    return TransferPlan(src, dst, layers, tokens, runs, dst_layer, merge)


def _check_layers(src: Endpoint, dst: Endpoint, layers: range | None, dst_layer: int | None) -> tuple[range, int]:
    ours, theirs = (side.layout.parts[0].layout.extent("layer") for side in (src, dst))
    if layers is None and ours != theirs:
        raise PlanError(
            f"number of layers differs: source {src.layout.name} has {ours}, destination {dst.layout.name} has {theirs}"
        )
    layers = range(ours) if layers is None else layers
    first = layers.start if dst_layer is None else dst_layer
    for side, start, extent in (("source", layers.start, ours), ("destination", first, theirs)):
        if layers.step != 1 or layers.stop < layers.start or start < 0 or start + len(layers) > extent:
            raise PlanError(
                f"{side} layers {start}..{start + layers.stop - layers.start} are not a part of 0..{extent}"
            )
    return layers, first


@dataclass(frozen=True)
class _PartCopy:
    """One part of a layout copied to its like: segments of tokens, and a box of the other axes for each."""

    src: Endpoint
    dst: Endpoint
    src_part: Part
    dst_part: Part
    layers: range
    dst_layer: int
    tokens: range

    def __post_init__(self) -> None:
        check_parts(self.src_part.layout, self.dst_part.layout)

    @cached_property
    def steps(self) -> range:
        """The tokens as steps of the token axis."""
        layout = self.src_part.layout
        together = whole_blocks(layout, self.dst_part.layout)
        unit = layout.block_size if together else layout.tokens_per_step
        return _stepped(self.tokens, unit, layout.tokens_per_step)

    def nbytes(self, box: Box) -> int:
        """Payload bytes of a box, by its extents alone."""
        layout = self.src_part.layout
        axes = box_axes(layout, self.dst_part.layout, box, len(self.layers), 1)
        step = layout.itemsize * prod(axis.extent for axis in axes)
        return step * len(self.steps) if self.layers else 0

    def grids(self, box: Box) -> list[RunGrid]:
        """Return the runs of a box: one grid for each length of segment."""
        src, dst = self.src_part.layout, self.dst_part.layout
        starts, counts = _segments(self.steps, min(src.token_steps, dst.token_steps))
        edges = np.concatenate(([0], np.flatnonzero(np.diff(counts)) + 1, [len(counts)])).tolist()
        return [
            self._grid(box, starts[first:last], int(counts[first])) for first, last in pairwise(edges) if last > first
        ]

    def _grid(self, box: Box, starts: Int64s, count: int) -> RunGrid:
        """Return the runs of segments of count steps each."""
        src, dst = self.src_part.layout, self.dst_part.layout
        run, axes = _atom(src.itemsize, box_axes(src, dst, box, len(self.layers), count))
        # Around the segments goes what steps farther than a block in the source, so that the stream follows its memory.
        block_stride = src.stride("block")
        outer = tuple(GridAxis(a.extent, a.src, a.dst) for a in axes if a.src >= block_stride)
        inner = tuple(GridAxis(a.extent, a.src, a.dst) for a in axes if a.src < block_stride)
        src_at = self.src_part.offset + self.layers.start * src.stride("layer")
        dst_at = self.dst_part.offset + self.dst_layer * dst.stride("layer")
        for cut in box.cuts:
            src_at += cut.src * src.stride(cut.axis)
            dst_at += cut.dst * dst.stride(cut.axis)
        return RunGrid(
            _offsets(self.src, src, starts) + src_at,
            _offsets(self.dst, dst, starts) + dst_at,
            np.full(len(starts), run, np.int64),
            outer,
            inner,
        )


def _stepped(tokens: range, unit: int, tokens_per_step: int) -> range:
    """Return tokens as steps of tokens_per_step each; the first and last units of tokens are taken whole."""
    steps = unit // tokens_per_step
    return range(tokens.start // unit * steps, ceil_div(tokens.stop, unit) * steps) if tokens else range(0)


def _segments(steps: range, unit: int) -> tuple[Int64s, Int64s]:
    """Cut steps at every multiple of unit: first step and number of steps of each piece."""
    if not len(steps):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    inner = np.arange(steps.start // unit + 1, ceil_div(steps.stop, unit), dtype=np.int64) * unit
    starts = np.concatenate(([steps.start], inner)).astype(np.int64)
    return starts, np.diff(starts, append=steps.stop)


def _offsets(side: Endpoint, layout: StridedLayout, starts: Int64s) -> Int64s:
    """Byte offsets of each segment's block and first token."""
    block, token = np.divmod(starts, layout.token_steps)
    stride = layout.stride("token") if "token" in layout.by_name else 0
    offsets: Int64s = side.block_ids[block] * layout.stride("block") + token * stride
    return offsets


def _atom(itemsize: int, axes: list[BoxAxis]) -> tuple[int, list[BoxAxis]]:
    """Grow the largest box contiguous on both sides; return its bytes and the axes left over, in source order."""
    run, left = itemsize, list(axes)
    while True:
        absorbed = next((axis for axis in left if axis.src == run and axis.dst == run), None)
        if absorbed is None:
            return run, left
        run *= absorbed.extent
        left.remove(absorbed)


def _joined(grids: list[RunGrid]) -> list[RunGrid]:
    """Put segments of different lengths into one grid where their loops are the same, keeping token order.

    So a last, partial block follows its predecessor in the stream and can merge with it.
    """
    joined = list[RunGrid]()
    for grid in grids:
        last = joined[-1] if joined else None
        if last and last.outer == grid.outer and not last.inner and not grid.inner:
            src, dst, nbytes = (
                np.concatenate((getattr(last, side), getattr(grid, side))) for side in ("src", "dst", "nbytes")
            )
            joined[-1] = RunGrid(src, dst, nbytes, outer=last.outer)
        else:
            joined.append(grid)
    return joined
