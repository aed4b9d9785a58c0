"""The memory of a station: one piece, cut up for the buffers of a case, and used again for the next one."""

import gc
from collections.abc import Sequence
from itertools import accumulate

import torch

from pdtx.cache.device import open_device
from pdtx.cache.memory import allocate
from pdtx.cache.shared import HUGE_PAGE_BYTES
from pdtx.errors import InputError
from pdtx.units import format_bytes, round_up

_LARGE_BYTES = 64 << 20
"""Memory of which it matters when exactly it is given back."""


def region_ends(sizes: Sequence[int]) -> list[int]:
    """Return where regions of sizes bytes lie one after another: each one's begin, and the last one's end."""
    return [0, *accumulate(round_up(size, HUGE_PAGE_BYTES) for size in sizes)]


class StationMemory:
    """Memory for caches, on one device, of max_bytes at most."""

    def __init__(self, device: str, max_bytes: int) -> None:
        """Raises InputError for a device that is not there."""
        self.device, self.max_bytes = open_device(device), max_bytes
        self._memory: torch.Tensor | None = None
        self._shared = False

    def cut(self, sizes: Sequence[int], *, shared: bool) -> list[torch.Tensor]:
        """Return regions of sizes bytes, uint8, each aligned to 2 MiB. What was cut before must not be used any more.

        shared: where other processes of this host can be let map them.
        Raises InputError, before anything is allocated, if they come to more than max_bytes.
        """
        *starts, total = self.require(sizes)
        if self._memory is None or len(self._memory) < total or self._shared != shared:
            self.free()  # first, so that there never are two
            self._memory, self._shared = allocate(total, self.device, shared=shared), shared
        memory = self._memory
        return [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def require(self, sizes: Sequence[int]) -> list[int]:
        """Return where cut() lets each region begin, and where the last one ends. Raises InputError as cut() does."""
        ends = region_ends(sizes)
        if ends[-1] > self.max_bytes:
            raise InputError(
                f"the caches of this case need {format_bytes(ends[-1])} here, and --max-bytes allows "
                f"{format_bytes(self.max_bytes)}; take fewer tokens, a smaller batch or fewer layers, or raise it"
            )
        return ends

    def free(self) -> None:
        """Give the memory back. Idempotent."""
        nbytes = 0 if self._memory is None else len(self._memory)
        self._memory = None
        if nbytes >= _LARGE_BYTES:
            # Ended connections hold on to what they have moved until Python looks for what only knows itself.
            gc.collect()
