"""Ranges of bytes in regions of memory: for system calls, for torch's index operations, and copied."""

from pdtx.ranges.copying import copy_ranges
from pdtx.ranges.hostgrid import HostGrid
from pdtx.ranges.iovec import IovecCursor, Iovecs, check_within, iovecs, preadv, pwritev, range_of
from pdtx.ranges.units import UnitGrid, common_unit

__all__ = [
    "HostGrid",
    "IovecCursor",
    "Iovecs",
    "UnitGrid",
    "check_within",
    "common_unit",
    "copy_ranges",
    "iovecs",
    "preadv",
    "pwritev",
    "range_of",
]
