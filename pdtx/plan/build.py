"""Build a plan: match two caches by token position and cut what they share into contiguous runs."""

from collections.abc import Callable, Sequence

import numpy as np

from pdtx.errors import PlanError
from pdtx.layout import Layout
from pdtx.parallel import Box
from pdtx.plan.audit import audit_run_set
from pdtx.plan.endpoint import Endpoint
from pdtx.plan.runs import Int64s
from pdtx.plan.shape import PlanShape, make_shape, position_group
from pdtx.plan.transfer import TransferPlan
from pdtx.units import ceil_div

WHOLE = (Box(),)

MakeShape = Callable[[Layout, Layout, Layout, tuple[Box, ...], int, range], PlanShape]

_SPARSE = 64
"""Pool blocks for each one used, above which marking the used ones costs more than sorting them."""


def build_plan(
    src: Endpoint,
    dst: Endpoint,
    tokens: range,
    layers: range | None = None,
    *,
    dst_layer: int | None = None,
    merge: bool = True,
    boxes: Sequence[Box] = WHOLE,
    shapes: MakeShape = make_shape,
) -> TransferPlan:
    """Plan the copy of tokens (positions in the request) of layers (default all) from src to dst.

    Tokens are matched by position, never by count: token t lies in block block_ids[t // block_size] at
    t % block_size on either side. layers are the source's; they go to dst_layer, ... (default: the same numbers).
    boxes: what of each layer and block is copied, by default everything; see pdtx.parallel.transfers.
    Where tokens of a block must stay together (a record layout says so), the first and the last block move whole.
    shapes: makes the plan's shape, or knows it; see PlanCache.

    The result has passed the audit. Cost: O(blocks), whatever the number of runs; plan.flat expands them.
    Raises PlanError naming the field and both values where the two sides cannot be matched, LayoutError where a
    layout's blocks cannot be moved at all.
    """
    if tokens.step != 1 or not 0 <= tokens.start <= tokens.stop:
        raise PlanError(f"tokens {tokens} are not a range of positions")
    layers, dst_layer = _check_layers(src, dst, layers, dst_layer)
    group = position_group(src.layout, dst.layout)
    origin = tokens.start // group * group
    relative = range(tokens.start - origin, tokens.stop - origin)
    shape = shapes(src.layout, dst.layout, dst.stream_layout, tuple(boxes), len(layers), relative)
    for side, name in ((src, "source"), (dst, "destination")):
        side.check(name, tokens)
    src_ids, dst_ids = (side.block_ids[origin // side.layout.block_size :] for side in (src, dst))
    runs = shape.bind(src_ids, dst_ids, layers.start, dst_layer)
    if not (shape.proved and _distinct(dst, tokens)):
        audit_run_set(runs, src.layout, dst.layout, shape.expected_bytes)
        shape.audited = True
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


def _distinct(side: Endpoint, tokens: range) -> bool:
    """Whether each position has a block of its own group of positions; the ids have been found to be in range."""
    size = side.layout.block_size
    used: Int64s = side.block_ids[tokens.start // size : ceil_div(tokens.stop, size)]
    pool = side.layout.parts[0].layout.extent("block")
    if pool > _SPARSE * len(used):
        ordered = np.sort(used)
        return bool((ordered[1:] != ordered[:-1]).all())
    marks = np.zeros(pool, bool)
    marks[used] = True
    return int(np.count_nonzero(marks)) == len(used)
