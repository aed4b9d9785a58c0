"""Staging for engines that push: a payload packed by torch into registered buffers, one while another is moved."""

from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from pdtx.cache.memory import allocate
from pdtx.plan import Slices
from pdtx.ranges.units import UnitGrid, common_unit
from pdtx.transports.base import Region

_BUFFERS = 2


class Packer:
    """Two buffers of nbytes each for every device, made when first used and kept. Used by one thread at a time."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._regions = dict[tuple[torch.device, int], Region]()
        self._thread: ThreadPoolExecutor | None = None

    def pack(self, region: Region, slices: Slices) -> Generator[tuple[Region, Slices], None, None]:
        """Yield the payload in pieces, each a buffer and its filled range; it is good until the next one is asked for.

        The next piece is packed meanwhile, on the region's device.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="pdtx-packer")
        grid = UnitGrid(region.memory, slices, common_unit(slices))
        pieces = grid.pieces(self._nbytes)
        ahead = [self._thread.submit(self._fill, grid, 0, *pieces[0])] if pieces else list[Future[int]]()
        try:
            for turn in range(len(pieces)):
                nbytes = ahead.pop().result()
                if turn + 1 < len(pieces):
                    ahead.append(self._thread.submit(self._fill, grid, turn + 1, *pieces[turn + 1]))
                buffer = self._regions[grid.device, turn % _BUFFERS]
                yield buffer, Slices(np.zeros(1, np.int64), np.array([nbytes], np.int64))
        finally:
            for future in ahead:
                future.exception()  # nothing reads the region any more once pack() is over

    def _fill(self, grid: UnitGrid, turn: int, first: int, stop: int) -> int:
        nbytes = (stop - first) * grid.unit
        place = grid.device, turn % _BUFFERS
        if place not in self._regions or self._regions[place].nbytes < nbytes:
            self._regions[place] = Region(allocate(max(nbytes, self._nbytes), grid.device))
        grid.pack(first, stop, self._regions[place].memory[:nbytes])
        return nbytes

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
