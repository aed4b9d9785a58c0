"""From a region to what a socket can read or write: straight iovecs, or bounce buffers where the CPU cannot reach.

Both kinds yield iovec arrays, see pdtx.transports.iovec, in stream order:
gather yields ranges that hold the payload and may be read until the next one is asked for; scatter yields ranges to be
filled, and puts them in their place when the next one is asked for. What was yielded last is in its place when the
iteration has ended.
"""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import torch

from pdtx.plan import Slices
from pdtx.transports.base import Region
from pdtx.transports.iovec import Iovecs, iovecs, range_of
from pdtx.transports.units import UnitGrid, common_unit


class Stage(Protocol):
    """A way from a region's ranges to iovecs. Used by one thread at a time."""

    def gather(self, region: Region, slices: Slices) -> Generator[Iovecs, None, None]:
        """Yield the payload of slices, to be read."""

    def scatter(self, region: Region, slices: Slices) -> Generator[Iovecs, None, None]:
        """Yield room for the payload of slices, to be filled."""


class DirectStage:
    """For regions that system calls reach: the ranges themselves."""

    def gather(self, region: Region, slices: Slices) -> Generator[Iovecs, None, None]:
        """Yield the ranges of slices, once."""
        yield iovecs(region.address, slices)

    scatter = gather


class BounceStage:
    """Two host buffers of nbytes each (pinned where CUDA is in use): one is packed while the other is on the wire."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._buffers = list[torch.Tensor]()
        self._stream: torch.cuda.Stream | None = None

    def gather(self, region: Region, slices: Slices) -> Generator[Iovecs, None, None]:
        """Yield the payload packed into host memory, at most nbytes at a time; the next piece is packed meanwhile."""
        grid = UnitGrid(region.memory, slices, common_unit(slices))
        pieces = grid.pieces(self._nbytes)
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

    def scatter(self, region: Region, slices: Slices) -> Generator[Iovecs, None, None]:
        """Yield host memory to be filled, at most nbytes at a time; the piece before is put in its place meanwhile."""
        grid = UnitGrid(region.memory, slices, common_unit(slices))
        copies = list[_Piece | None]([None, None])
        try:
            for turn, (first, stop) in enumerate(grid.pieces(self._nbytes)):
                # The buffer is free again when the copy out of it, two pieces ago, has ended.
                last = copies[turn % 2]
                if last is not None:
                    last.wait()
                buffer = self._buffer(grid, turn, stop - first)
                yield range_of(buffer.data_ptr(), buffer.numel())
                with self._on_stream(grid.device):
                    grid.put(first, stop, grid.as_rows(buffer))
                copies[turn % 2] = self._piece(grid, buffer)
        finally:
            self._settle()

    def _pack(self, grid: "UnitGrid", first: int, stop: int, turn: int) -> "_Piece":
        buffer = self._buffer(grid, turn, stop - first)
        with self._on_stream(grid.device):
            rows = grid.take(first, stop)
            buffer.view(rows.dtype).view(rows.shape).copy_(rows, non_blocking=True)
        return self._piece(grid, buffer)

    def _buffer(self, grid: "UnitGrid", turn: int, units: int) -> torch.Tensor:
        nbytes = units * grid.unit
        while len(self._buffers) < 2:
            pin = grid.device.type == "cuda"
            self._buffers.append(torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=pin))
        if nbytes > len(self._buffers[turn % 2]):  # one unit is larger than the buffers
            self._buffers[turn % 2] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=grid.device.type == "cuda")
        return self._buffers[turn % 2][:nbytes]

    def _on_stream(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Copies go on a stream of their own, so that they neither wait for the model's kernels nor hold them up."""
        if device.type != "cuda":
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)

    def _piece(self, grid: "UnitGrid", buffer: torch.Tensor) -> "_Piece":
        event = self._stream.record_event() if self._stream is not None and grid.device.type == "cuda" else None
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
