"""The audit that every plan passes before a byte moves."""

import numpy as np

from pdtx.errors import PlanError
from pdtx.layout import KVCacheLayout
from pdtx.plan.runs import Int64s, Runs


def audit_runs(runs: Runs, src: KVCacheLayout, dst: KVCacheLayout, expected_bytes: int) -> None:
    """Check runs against both regions.

    Raises PlanError if a run leaves its region, if two runs write the same destination byte, or if the
    runs do not add up to expected_bytes. Cost: one sort of the destinations.
    """
    if len(runs) and int(runs.nbytes.min()) < 1:
        raise PlanError(f"audit: a run of {int(runs.nbytes.min())} bytes")
    if runs.total != expected_bytes:
        raise PlanError(f"audit: the runs hold {runs.total} bytes, the request has {expected_bytes}")
    _check_bounds("source", runs.src, runs.nbytes, src.size_bytes)
    _check_bounds("destination", runs.dst, runs.nbytes, dst.size_bytes)
    order = np.argsort(runs.dst, kind="stable")
    starts, ends = runs.dst[order], (runs.dst + runs.nbytes)[order]
    clash = np.flatnonzero(starts[1:] < ends[:-1])
    if len(clash):
        at = int(clash[0])
        raise PlanError(f"audit: two runs write byte {int(starts[at + 1])} of the destination")


def _check_bounds(side: str, offsets: Int64s, nbytes: Int64s, size_bytes: int) -> None:
    bad = np.flatnonzero((offsets < 0) | (offsets + nbytes > size_bytes))
    if len(bad):
        at = int(bad[0])
        raise PlanError(
            f"audit: run {at} covers bytes {int(offsets[at])}..{int(offsets[at] + nbytes[at])} of the {side}, "
            f"beyond its region of {size_bytes}"
        )
