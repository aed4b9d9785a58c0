"""Build a plan: match two caches by token position and cut what they share into contiguous runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from pdtx.errors import PlanError
from pdtx.layout import KVCacheLayout
from pdtx.plan.audit import audit_runs
from pdtx.plan.runs import GridAxis, Int64s, RunGrid, Runs, RunSet


@dataclass(frozen=True)
class Endpoint:
    """One side of a transfer: its layout, and the blocks that hold the request's tokens 0, 1, 2, ... in this order."""

    layout: KVCacheLayout
    block_ids: Int64s = field(repr=False)

    @classmethod
    def of(cls, layout: KVCacheLayout, block_ids: Sequence[int] | Int64s) -> "Endpoint":
        """Make an endpoint from any sequence of block ids."""
        return cls(layout, np.asarray(block_ids, dtype=np.int64))


@dataclass(frozen=True)
class TransferPlan:
    """The runs that carry layers x tokens of one request from src to dst.

    layers, tokens: half-open ranges. runs: compressed, unmerged. flat: what to move, merged if asked for.
    """

    src: Endpoint
    dst: Endpoint
    layers: range
    tokens: range
    runs: RunSet
    flat: Runs = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return self.runs.total


@dataclass(frozen=True)
class _BoxAxis:
    """An axis of the box that is copied for one segment of tokens."""

    name: str
    extent: int
    src: int
    dst: int


def build_plan(
    src: Endpoint,
    dst: Endpoint,
    tokens: range,
    layers: range | None = None,
    *,
    merge: bool = True,
) -> TransferPlan:
    """Plan the copy of tokens (positions in the request) of layers (default all) from src to dst.

    Tokens are matched by position, never by count: token t lies in block block_ids[t // block_size] at
    t % block_size on either side. The result has passed audit_runs.

    Raises PlanError naming the field and both values where the two sides cannot be matched.
    """
    layers = range(src.layout.extent("layer")) if layers is None else layers
    _check_pair(src.layout, dst.layout, layers)
    for side, name in ((src, "source"), (dst, "destination")):
        _check_blocks(side, name, tokens)
    unit = min(src.layout.block_size, dst.layout.block_size)
    starts, counts = _segments(tokens if layers else range(0), unit)
    grids = list[RunGrid]()
    first = 0
    for count, group in groupby(counts.tolist()):
        last = first + len(list(group))
        grids.append(_grid(src, dst, layers, starts[first:last], int(count)))
        first = last
    runs = RunSet(tuple(_joined(grids)))
    flat = runs.flat.merged() if merge else runs.flat
    plan = TransferPlan(src, dst, layers, tokens, runs, flat)
    audit_runs(flat, src.layout, dst.layout, len(tokens) * len(layers) * src.layout.bytes_per_token)
    return plan


def _check_pair(src: KVCacheLayout, dst: KVCacheLayout, layers: range) -> None:
    same = [(f"number of {name}s", src.extent(axis), dst.extent(axis)) for name, axis in _SAME]
    same.append(("bytes of an element", src.itemsize, dst.itemsize))
    for what, ours, theirs in same:
        if ours != theirs:
            raise PlanError(f"{what} differs: source {src.name} has {ours}, destination {dst.name} has {theirs}")
    small, large = sorted((src.block_size, dst.block_size))
    if large % small:
        raise PlanError(
            f"block sizes {src.block_size} (source) and {dst.block_size} (destination): neither divides the other"
        )
    if layers.step != 1 or not 0 <= layers.start <= layers.stop <= src.extent("layer"):
        raise PlanError(f"layers {layers} are not a part of 0..{src.extent('layer')}")


_SAME = (("layer", "layer"), ("K/V part", "kv"), ("KV head", "head"), ("channel", "channel"))


def _check_blocks(side: Endpoint, name: str, tokens: range) -> None:
    if tokens.step != 1 or not 0 <= tokens.start <= tokens.stop:
        raise PlanError(f"tokens {tokens} are not a range of positions")
    needed = -(-tokens.stop // side.layout.block_size)
    if len(side.block_ids) < needed:
        raise PlanError(
            f"{name} has {len(side.block_ids)} blocks of {side.layout.block_size} tokens, "
            f"too few for tokens {tokens.start}..{tokens.stop} ({needed} needed)"
        )
    used = side.block_ids[tokens.start // side.layout.block_size : needed]
    num_blocks = side.layout.extent("block")
    outside = used[(used < 0) | (used >= num_blocks)]
    if len(outside):
        raise PlanError(f"{name} block id {outside[0]} is outside its pool of {num_blocks} blocks")


def _segments(tokens: range, unit: int) -> tuple[Int64s, Int64s]:
    """Cut tokens at every multiple of unit: first token and number of tokens of each piece."""
    if not len(tokens):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    inner = np.arange(tokens.start // unit + 1, -(-tokens.stop // unit), dtype=np.int64) * unit
    starts = np.concatenate(([tokens.start], inner)).astype(np.int64)
    return starts, np.diff(starts, append=tokens.stop)


def _grid(src: Endpoint, dst: Endpoint, layers: range, starts: Int64s, count: int) -> RunGrid:
    """Return the runs of segments of count tokens each."""
    run, axes = _atom(src.layout, dst.layout, len(layers), count)
    # Around the segments goes what steps farther than a block in the source, so that the stream follows its memory.
    block_stride = src.layout.stride("block")
    outer = tuple(GridAxis(a.extent, a.src, a.dst) for a in axes if a.src >= block_stride)
    inner = tuple(GridAxis(a.extent, a.src, a.dst) for a in axes if a.src < block_stride)
    nbytes = np.full(len(starts), run, np.int64)
    return RunGrid(_offsets(src, layers, starts), _offsets(dst, layers, starts), nbytes, outer, inner)


def _offsets(side: Endpoint, layers: range, starts: Int64s) -> Int64s:
    """Byte offsets of the first element of each segment."""
    layout = side.layout
    block, token = np.divmod(starts, layout.block_size)
    offsets: Int64s = side.block_ids[block] * layout.stride("block") + token * layout.stride("token")
    return offsets + layers.start * layout.stride("layer")


def _atom(src: KVCacheLayout, dst: KVCacheLayout, num_layers: int, count: int) -> tuple[int, list[_BoxAxis]]:
    """Grow the largest box contiguous on both sides; return its bytes and the axes left over, in source order."""
    extents = {"layer": num_layers, "token": count}
    left = [
        _BoxAxis(axis.name, extents.get(axis.name, axis.extent), axis.stride, dst.stride(axis.name))
        for axis in src.axes
        if axis.name != "block"
    ]
    left = [axis for axis in left if axis.extent > 1]
    run = src.itemsize
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
