"""From a region to what a socket can read or write: straight iovecs, or bounce buffers where those cost more.

Both kinds yield iovec arrays, see pdtx.ranges.iovec, in stream order:
gather yields ranges that hold the payload and may be read until the next one is asked for; scatter yields ranges to be
filled, and puts them in their place when the next one is asked for. What was yielded last is in its place when the
iteration has ended.
"""

import contextlib
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from pdtx.native import library
from pdtx.plan import Slices
from pdtx.ranges.hostgrid import HostGrid
from pdtx.ranges.iovec import Iovecs, range_of
from pdtx.ranges.units import UnitGrid, common_unit
from pdtx.transports.base import Region

BOUNCE_BYTES = 2 << 20
"""Of one buffer: small enough that the first piece of a layer is packed soon, and the others while it is sent."""

# What is received goes through a buffer that stays in the processor's cache until it is put in its place.
_SCATTER_BYTES = 1 << 20

# The kernel takes as long for a range of a system call as for a KiB of data. Measured for 1 MiB in random places, in
# microseconds, received straight / through a buffer by the C library / by torch: ranges of 64 B 6950 / 730 / 1650,
# 256 B 1160 / 400 / 1200, 1 KiB 380 / 330 / 690, 4 KiB 240 / 280 / 540; sending is alike.
_SMALL_BYTES_FOR_C, _SMALL_BYTES_FOR_TORCH = 1024, 256
_FEW_RANGES = 64


class Stage(Protocol):
    """A way from a region's ranges to iovecs. Used by one thread at a time."""

    def gather(self, region: Region, slices: Slices) -> Generator[Iovecs, None, None]:
        """Yield the payload of slices, to be read."""

    def scatter(self, region: Region, slices: Slices, *, settled: bool = False) -> Generator[Iovecs, None, None]:
        """Yield room for the payload of slices, to be filled.

        settled: whenever a range has been yielded, the region is left alone, by its device too.
        """


class Stager:
    """Chooses the way of each payload, and keeps the buffers. Used by one thread at a time.

    always: bounce everything. nbytes: of a buffer.
    """

    def __init__(self, always: bool, nbytes: int) -> None:
        self._always, self._nbytes = always, nbytes
        self._bounces = dict[torch.device, BounceStage]()

    def is_straight(self, region: Region, *, staged: bool) -> bool:
        """Whether a payload that is staged or not moves without a buffer."""
        return region.on_cpu and not staged and not self._always

    def choose(self, region: Region, slices: Slices, staged: bool | None = None) -> Stage | None:
        """Return the stage of a payload, None for the ranges themselves. staged: None leaves it to their size."""
        if staged is None:
            staged = _are_small(slices)
        if self.is_straight(region, staged=staged):
            return None
        device = region.memory.device
        if device not in self._bounces:
            self._bounces[device] = BounceStage(self._nbytes)
        return self._bounces[device]


def _are_small(slices: Slices) -> bool:
    if len(slices) < _FEW_RANGES or slices.total >= len(slices) * _SMALL_BYTES_FOR_C:
        return False
    return library() is not None or slices.total < len(slices) * _SMALL_BYTES_FOR_TORCH


def _grid(memory: torch.Tensor, slices: Slices) -> UnitGrid | HostGrid:
    native = library() if memory.device.type == "cpu" else None
    return UnitGrid(memory, slices, common_unit(slices)) if native is None else HostGrid(memory, slices, native)


class BounceStage:
    """Two host buffers of nbytes each (pinned where CUDA is in use): one is packed while the other is on the wire."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._buffers = list[torch.Tensor]()
        self._stream: torch.cuda.Stream | None = None

    def gather(self, region: Region, slices: Slices) -> Generator[Iovecs, None, None]:
        """Yield the payload packed into host memory, at most nbytes at a time; the next piece is packed meanwhile."""
        grid = _grid(region.memory, slices)
        pieces = grid.pieces(self._nbytes)
        if isinstance(grid, HostGrid) or grid.device.type == "cpu":
            yield from self._gather_here(grid, pieces)
        else:
            yield from self._gather_there(grid, pieces)

    def _gather_here(self, grid: UnitGrid | HostGrid, pieces: list[tuple[int, int]]) -> Generator[Iovecs, None, None]:
        """Pack on the CPU: the first piece in this thread, the others in another one while this one is sending."""

        def pack(turn: int) -> Iovecs:
            first, stop = pieces[turn]
            buffer = self._buffer(turn, (stop - first) * grid.unit, pin=False)
            grid.pack(first, stop, buffer)
            return range_of(buffer.data_ptr(), buffer.numel())

        if not pieces:
            return
        packed = pack(0)
        if len(pieces) == 1:
            yield packed
            return
        # On the way out it waits for what is being packed: nothing reads the region any more then.
        with ThreadPoolExecutor(1, thread_name_prefix="pdtx-tcp-packer") as thread:
            for turn in range(1, len(pieces)):
                ahead: Future[Iovecs] = thread.submit(pack, turn)
                yield packed
                packed = ahead.result()
            yield packed

    def _gather_there(self, grid: UnitGrid, pieces: list[tuple[int, int]]) -> Generator[Iovecs, None, None]:
        """Pack on the device, which goes on by itself."""
        ready: _Piece | None = None
        try:
            for turn, (first, stop) in enumerate(pieces):
                packing = self._pack(grid, first, stop, turn)
                if ready is not None:
                    yield ready.wait()
                ready = packing
            if ready is not None:
                yield ready.wait()
        finally:
            self._settle()

    def scatter(self, region: Region, slices: Slices, *, settled: bool = False) -> Generator[Iovecs, None, None]:
        """Yield host memory to be filled, at most nbytes at a time; the piece before is put in its place meanwhile.

        settled: or before that, see Stage.
        """
        grid = _grid(region.memory, slices)
        on_cpu = isinstance(grid, HostGrid) or grid.device.type == "cpu"
        copies = list[_Piece | None]([None, None])
        try:
            for turn, (first, stop) in enumerate(
                grid.pieces(min(self._nbytes, _SCATTER_BYTES) if on_cpu else self._nbytes)
            ):
                # The buffer is free again when the copy out of it, two pieces ago, has ended.
                last = copies[turn % 2]
                if last is not None:
                    last.wait()
                buffer = self._buffer(turn, (stop - first) * grid.unit, pin=not on_cpu)
                yield range_of(buffer.data_ptr(), buffer.numel())
                with self._on_stream(grid):
                    grid.put(first, stop, buffer)
                copies[turn % 2] = self._piece(grid, buffer)
                if settled:
                    self._settle()
        finally:
            self._settle()

    def _pack(self, grid: UnitGrid, first: int, stop: int, turn: int) -> "_Piece":
        buffer = self._buffer(turn, (stop - first) * grid.unit, pin=True)
        with self._on_stream(grid):
            rows = grid.take(first, stop)
            buffer.view(rows.dtype).view(rows.shape).copy_(rows, non_blocking=True)
        return self._piece(grid, buffer)

    def _buffer(self, turn: int, nbytes: int, *, pin: bool) -> torch.Tensor:
        """Return nbytes of one of the two buffers; larger ones than asked for where one unit needs it."""
        while len(self._buffers) < 2:
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if len(self._buffers[turn % 2]) < nbytes:
            # Pinning is slow: at once for every payload to come.
            size = max(nbytes, self._nbytes) if pin else nbytes
            self._buffers[turn % 2] = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        return self._buffers[turn % 2][:nbytes]

    def _on_stream(self, grid: UnitGrid | HostGrid) -> contextlib.AbstractContextManager[object]:
        """Copies go on a stream of their own, so that they neither wait for the model's kernels nor hold them up."""
        if isinstance(grid, HostGrid) or grid.device.type != "cuda":
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(grid.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)

    def _piece(self, grid: UnitGrid | HostGrid, buffer: torch.Tensor) -> "_Piece":
        on_cuda = isinstance(grid, UnitGrid) and grid.device.type == "cuda"
        event = self._stream.record_event() if self._stream is not None and on_cuda else None
        return _Piece(buffer, event)

    def _settle(self) -> None:
        """Wait for all copies: the caller may hand region and buffers to others now."""
        if self._stream is not None:
            self._stream.synchronize()


@dataclass(frozen=True)
class _Piece:
    """A host buffer with a copy under way to or from it; event is None where copies are synchronous."""

    buffer: torch.Tensor
    event: torch.cuda.Event | None

    def wait(self) -> Iovecs:
        """Wait for the copy; return the buffer as one range."""
        if self.event is not None:
            self.event.synchronize()
        return range_of(self.buffer.data_ptr(), self.buffer.numel())
