"""The ways to copy runs within a host, each as a generator of the bytes that its steps have moved.

A step is some milliseconds' worth, so that whoever drives it can look at the clock.
"""

import os
from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np
import torch

from pdtx.cache import record_fence
from pdtx.errors import InputError
from pdtx.native import Memory, Native, library
from pdtx.plan import Runs, Slices
from pdtx.ranges.units import UnitGrid, common_unit
from pdtx.transports.base import Region
from pdtx.transports.pairing import cut_stream
from pdtx.transports.shm.attach import AttachedCopy, bounded, may_attach
from pdtx.transports.shm.remote import Foreign, Mapped, Remote

CopyBy = Literal["auto", "native", "kernel", "torch"]

_STEP_BYTES = 16 << 20
_TORCH_STEP_BYTES = 4 << 20
"""Torch makes a copy of its own in between, which should stay in the processor's cache."""

_PAST_CACHES_BYTES = 8 << 20
"""From here on nobody will find the bytes in a cache afterwards anyway."""

_ONE_THREAD_BYTES = 1 << 20
"""Below this to start another thread takes longer than it saves."""

MAX_THREADS = 16

_SMALL_RUN_BYTES = 2048
"""Runs below this cost the kernel more to look up than torch to copy twice."""

Steps = Iterator[int]


class Copier:
    """The way to copy, chosen once.

    copy_by: how mapped memory is copied: the C library ("native"), process_vm_readv ("kernel") or torch; "auto" is the
    fastest there is. Private memory is always read by the kernel, a device's by torch.
    threads: that the C library copies with; 0 for two, where there is more than one core.
    library: what copies mapped memory, for reports.
    """

    def __init__(self, copy_by: CopyBy = "auto", threads: int = 0) -> None:
        """Raise InputError for a way to copy that is unknown or not to be had here, or too many threads."""
        if copy_by not in get_args(CopyBy):
            raise InputError(f"copy_by is {copy_by!r}; one of {', '.join(get_args(CopyBy))}")
        if isinstance(threads, bool) or not isinstance(threads, int) or not 0 <= threads <= MAX_THREADS:
            raise InputError(f"threads is {threads!r}; a number of 1 to {MAX_THREADS}, or 0 for pdtx's choice")
        self._threads = threads or min(2, len(os.sched_getaffinity(0)))
        self._native = library() if copy_by in ("auto", "native") else None
        if copy_by == "native" and self._native is None:
            raise InputError("copy_by='native' needs pdtx's C library, which is not built; see pdtx.native")
        self._by_kernel = copy_by == "kernel" or (copy_by == "auto" and may_attach())
        self._small_run_bytes = _SMALL_RUN_BYTES if copy_by == "auto" else 0
        native = f"pdtx native, {self._threads} thread{'s' if self._threads > 1 else ''}"
        self.library = native if self._native else "process_vm_readv" if self._by_kernel else "torch"

    def copy(self, remote: Remote, region: Region, runs: Runs, pid: int) -> Steps:
        """Return the steps that copy runs from a region of process pid. They raise OSError or RuntimeError."""
        to = Memory(region.address, region.nbytes)
        match remote:
            case Foreign():
                source = Memory(remote.address, remote.nbytes)
                if region.on_cpu:
                    return copy_by_kernel(pid, to, source, runs)
                return copy_by_kernel_and_torch(pid, region.memory, source, runs)
            case Mapped() if region.on_cpu and self._native:
                source = Memory(remote.address, remote.nbytes)
                return copy_by_native(self._native, to, source, runs, self._threads)
            case Mapped() if region.on_cpu and self._by_kernel and runs.total >= self._small_run_bytes * len(runs):
                return copy_by_kernel(os.getpid(), to, Memory(remote.address, remote.nbytes), runs)
        return copy_by_torch(region.memory, remote.memory, runs)


def copy_by_native(native: Native, to: Memory, source: Memory, runs: Runs, threads: int = 1) -> Steps:
    """Copy between two regions that are mapped here, by the C library."""
    past_caches = runs.total >= _PAST_CACHES_BYTES
    threads = threads if runs.total >= _ONE_THREAD_BYTES else 1
    runs = _bounded_runs(runs, _STEP_BYTES)
    ends, first, done = np.cumsum(runs.nbytes), 0, 0
    while first < len(runs):
        stop = max(first + 1, int(ends.searchsorted(done + _STEP_BYTES, side="right")))
        part = slice(first, stop)
        native.copy_runs(
            to, source, runs.dst[part], runs.src[part], runs.nbytes[part], past_caches=past_caches, threads=threads
        )
        first, moved = stop, int(ends[stop - 1]) - done
        done += moved
        yield moved


def _bounded_runs(runs: Runs, limit: int) -> Runs:
    src = bounded(Slices(runs.src, runs.nbytes), limit)
    if len(src) == len(runs):
        return runs
    return Runs(src.offsets, bounded(Slices(runs.dst, runs.nbytes), limit).offsets, src.nbytes)


def copy_by_kernel(pid: int, to: Memory, source: Memory, runs: Runs) -> Steps:
    """Copy from the memory of process pid, which may be this one. Raises OSError."""
    copy = AttachedCopy(pid, source.address, runs.source(), to.address, runs.destination(), _STEP_BYTES)
    while copy.left:
        yield copy.step()


def copy_by_torch(to: torch.Tensor, source: torch.Tensor, runs: Runs) -> Steps:
    """Copy from any device to any device; uint8, shape (bytes of the region,). Raises RuntimeError."""
    src, dst = runs.source(), runs.destination()
    unit = common_unit(src, dst)
    reading, writing = UnitGrid(source, src, unit), UnitGrid(to, dst, unit)
    for first, stop in reading.pieces(_TORCH_STEP_BYTES):
        writing.put(first, stop, reading.take(first, stop))
        # Nothing may be moving any more when the last step is through, nor pile up before.
        record_fence(to.device)()
        yield (stop - first) * unit


def copy_by_kernel_and_torch(pid: int, to: torch.Tensor, source: Memory, runs: Runs) -> Steps:
    """Copy from the memory of process pid to any device. Raises OSError or RuntimeError."""
    src, dst = runs.source(), runs.destination()
    unit = common_unit(src, dst)
    writing = UnitGrid(to, dst, unit)
    buffer = torch.empty(max(unit, _TORCH_STEP_BYTES), dtype=torch.uint8, pin_memory=to.is_cuda)
    for first, stop in writing.pieces(_TORCH_STEP_BYTES):
        nbytes = (stop - first) * unit
        packed = Slices(np.zeros(1, np.int64), np.array([nbytes]))
        copy = AttachedCopy(pid, source.address, cut_stream(src, first * unit, stop * unit), buffer.data_ptr(), packed)
        while copy.left:
            copy.step()
        writing.put(first, stop, buffer[:nbytes])
        record_fence(to.device)()
        yield nbytes
