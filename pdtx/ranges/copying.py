"""Copying ranges of one region to those of another, on any devices."""

import torch

from pdtx.plan import Slices
from pdtx.ranges.units import UnitGrid, common_unit

_COPY_BYTES = 8 << 20


def copy_ranges(src: torch.Tensor, src_ranges: Slices, dst: torch.Tensor, dst_ranges: Slices) -> None:
    """Copy in stream order; src, dst: uint8, shape (bytes of the region,); as many bytes on both sides."""
    unit = common_unit(src_ranges, dst_ranges)
    reading, writing = UnitGrid(src, src_ranges, unit), UnitGrid(dst, dst_ranges, unit)
    for first, stop in reading.pieces(_COPY_BYTES):
        writing.put(first, stop, reading.take(first, stop))
