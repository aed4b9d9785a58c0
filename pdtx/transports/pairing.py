"""Two sides' ranges, each in stream order, as the runs that lead from one to the other."""

import numpy as np

from pdtx.errors import PlanError
from pdtx.plan import Runs, Slices
from pdtx.plan.runs import Int64s


def pair_slices(src: Slices, dst: Slices) -> Runs:
    """Return the runs that move the stream of src to dst, each as long as both sides allow.

    Raises PlanError if the streams differ in length.
    """
    if src.total != dst.total:
        raise PlanError(f"{src.total} bytes cannot be moved to {dst.total}")
    if len(src) == len(dst) and np.array_equal(src.nbytes, dst.nbytes):
        return Runs(src.offsets, dst.offsets, src.nbytes)
    ends = np.union1d(np.cumsum(src.nbytes), np.cumsum(dst.nbytes))
    ends = ends[ends > 0]
    starts = np.concatenate((np.zeros(1, np.int64), ends))[:-1]
    return Runs(_places(src, starts), _places(dst, starts), ends - starts)


def cut_stream(slices: Slices, start: int, stop: int) -> Slices:
    """Return the ranges of the bytes start..stop of a stream."""
    ends = np.cumsum(slices.nbytes)
    begins = ends - slices.nbytes
    low, high = int(ends.searchsorted(start, side="right")), int(begins.searchsorted(stop, side="left"))
    begins, ends = begins[low:high], ends[low:high]
    first = np.maximum(begins, start)
    return Slices(slices.offsets[low:high] + first - begins, np.minimum(ends, stop) - first)


def _places(slices: Slices, positions: Int64s) -> Int64s:
    """Offsets in the region of positions in the stream."""
    ends = np.cumsum(slices.nbytes)
    inside = ends.searchsorted(positions, side="right")
    places: Int64s = slices.offsets[inside] + positions - (ends[inside] - slices.nbytes[inside])
    return places
