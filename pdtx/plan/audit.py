"""The audit that every plan passes before a byte moves."""

import numpy as np

from pdtx.errors import PlanError
from pdtx.layout import Layout
from pdtx.plan.grids import RunGrid, RunSet
from pdtx.plan.runs import Int64s, Runs


def audit_run_set(runs: RunSet, src: Layout, dst: Layout, expected_bytes: int) -> None:
    """Check a plan's runs as audit_runs does, in their compressed form where that suffices.

    Where no run is longer than the step to its neighbour, along every loop and between the segments, none can overlap:
    that costs a sort of the segments, not of the runs. Otherwise all runs are looked at, one by one.
    Raises PlanError as audit_runs.
    """
    proved = (
        runs.total == expected_bytes
        and all(int(grid.nbytes.min(initial=1)) > 0 for grid in runs.grids)
        and _inside(runs, "src", src.size_bytes)
        and _inside(runs, "dst", dst.size_bytes)
        and _disjoint(runs.grids)
    )
    if not proved:
        audit_runs(runs.flat, src, dst, expected_bytes)


def audit_runs(runs: Runs, src: Layout, dst: Layout, expected_bytes: int) -> None:
    """Check runs against both regions, one by one.

    Raises PlanError if a run leaves its region, if one is longer than the stride to the next so that two write the same
    destination byte, or if the runs do not add up to expected_bytes. Cost: one sort of the destinations.
    """
    if len(runs) and int(runs.nbytes.min()) < 1:
        raise PlanError(f"audit: a run of {int(runs.nbytes.min())} bytes")
    _check_bounds("source", runs.src, runs.nbytes, src.size_bytes)
    _check_bounds("destination", runs.dst, runs.nbytes, dst.size_bytes)
    order = np.argsort(runs.dst, kind="stable")
    starts, lengths = runs.dst[order], runs.nbytes[order]
    ends = np.maximum.accumulate(starts + lengths) if len(starts) else starts
    clash = np.flatnonzero(starts[1:] < ends[:-1])
    if len(clash):
        at = int(clash[0])
        raise PlanError(
            f"audit: two runs write byte {int(starts[at + 1])} of the destination: "
            f"length {int(lengths[at])} > stride {int(starts[at + 1] - starts[at])}"
        )
    if runs.total != expected_bytes:
        raise PlanError(f"audit: the runs hold {runs.total} bytes, the request has {expected_bytes}")


def _check_bounds(side: str, offsets: Int64s, nbytes: Int64s, size_bytes: int) -> None:
    bad = np.flatnonzero((offsets < 0) | (offsets + nbytes > size_bytes))
    if len(bad):
        at = int(bad[0])
        raise PlanError(
            f"audit: run {at} covers bytes {int(offsets[at])}..{int(offsets[at] + nbytes[at])} of the {side}, "
            f"beyond its region of {size_bytes}"
        )


def _inside(runs: RunSet, side: str, size_bytes: int) -> bool:
    """Whether no run leaves a region."""
    for grid in runs.grids:
        offsets: Int64s = getattr(grid, side)
        if not len(offsets):
            continue
        reach = sum((axis.count - 1) * int(getattr(axis, f"{side}_stride")) for axis in grid.loops)
        if int(offsets.min()) < 0 or int((offsets + grid.nbytes).max()) + reach > size_bytes:
            return False
    return True


def _disjoint(grids: tuple[RunGrid, ...]) -> bool:
    """Whether no two runs write the same byte; False also where that cannot be told from the loops alone.

    The loops are unrolled in thought, the shortest step first. Pieces nearer to each other than the step are a cluster:
    where it is copied it must be no longer than the step, and its last copy must end before the next cluster begins. A
    cluster and its copies are one piece of the next loop. Cost: a sort of the segments, and a pass for each loop.
    """
    grids = tuple(grid for grid in grids if len(grid.dst))
    if not grids:
        return True
    loops = [_loops(grid) for grid in grids]
    strides = sorted({stride for found in loops for stride in found})
    if strides and strides[0] < 1:
        return False
    starts = np.concatenate([grid.dst for grid in grids])
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], (starts + np.concatenate([grid.nbytes for grid in grids]))[order]
    owner = np.repeat(np.arange(len(grids)), [len(grid.dst) for grid in grids])[order]
    # How often each piece is copied by each loop; a grid without the loop is there once.
    copies = [found.get(stride, 1) for stride in strides for found in loops]
    counts = np.array(copies, np.int64).reshape(len(strides), len(loops))[:, owner]
    if (starts[1:] < ends[:-1]).any():
        return False
    for stride in strides:
        first = np.concatenate(([0], np.flatnonzero(np.diff(starts) >= stride) + 1))
        longest = np.maximum.reduceat(ends, first) - starts[first]
        ends = np.maximum.reduceat(ends + (counts[0] - 1) * stride, first)
        counts = np.maximum.reduceat(counts, first, axis=1)
        starts = starts[first]
        if ((counts[0] > 1) & (longest > stride)).any() or (starts[1:] < ends[:-1]).any():
            return False
        counts = counts[1:]
    return True


def _loops(grid: RunGrid) -> dict[int, int]:
    """Steps in the destination and their numbers; a step of 0 where two loops have the same one."""
    found = dict[int, int]()
    for axis in grid.loops:
        if axis.count > 1:
            found[0 if axis.dst_stride in found else axis.dst_stride] = axis.count
    return found
