"""A tier's memory on the host: pinned for CUDA where that is possible, and on which NUMA node it lies."""

import ctypes
import logging
import os
import platform
import time
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from pdtx.cache import KVCaches

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 << 30
"""Bytes of one registration at most: drivers have failed at 512 GiB."""

_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}
"""The system call's number."""
_SAMPLES = 64

_libc = ctypes.CDLL(None, use_errno=True)


class PinnedMemory:
    """What of a cache's memory on the host is registered with CUDA.

    state: "pinned", or why it is not. seconds: that it took. The memory must outlive close().
    """

    def __init__(self, cache: KVCaches) -> None:
        """Register, or say why not: a tier works without, only its copies to a device are slower."""
        self._pieces, begun = list[int](), time.monotonic()
        self.state = self._register(cache)
        self.seconds = time.monotonic() - begun
        self.is_pinned = self.state == "pinned"

    def _register(self, cache: KVCaches) -> str:
        if cache.device.type != "cpu":
            return f"on {cache.device}"
        if not torch.cuda.is_available():
            return "pageable: no CUDA device"
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for address, nbytes in pieces_of(cache):
            code = int(runtime.cudaHostRegister(address, nbytes, 0))
            if code:
                self.close()
                logger.warning("a tier's memory could not be pinned (CUDA error %d); going on without", code)
                return f"pageable: CUDA error {code} when it was to be pinned"
            self._pieces.append(address)
        return "pinned"

    def close(self) -> None:
        """Undo the registrations. Idempotent."""
        while self._pieces:
            torch.cuda.cudart().cudaHostUnregister(self._pieces.pop())  # type: ignore[no-untyped-call]


def pieces_of(cache: KVCaches, most: int = PIECE_BYTES) -> Iterator[tuple[int, int]]:
    """Yield the address and size of pieces of at most so many bytes that make up a cache's memory."""
    for memory in _memories(cache):
        for first in range(0, memory.numel(), most):
            yield memory.data_ptr() + first, min(most, memory.numel() - first)


def _memories(cache: KVCaches) -> Iterable[torch.Tensor]:
    return (rank.memory for buffer in cache.buffers for rank in buffer.ranks)


def numa_nodes(cache: KVCaches) -> str:
    """Say on which NUMA nodes a cache's memory lies, by a sample of its pages: "0", "0, 1" or "unknown"."""
    if cache.device.type != "cpu" or not (number := _MOVE_PAGES.get(platform.machine())):
        return "unknown"
    found = set[int]()
    page = os.sysconf("SC_PAGE_SIZE")
    for memory in _memories(cache):
        first, last = memory.data_ptr(), memory.data_ptr() + max(0, memory.numel() - 1)
        pages = np.linspace(first, last, _SAMPLES).astype(np.uint64) // np.uint64(page) * np.uint64(page)
        status = np.full(_SAMPLES, -1, np.int32)
        arguments = (ctypes.c_long(0), ctypes.c_ulong(_SAMPLES), ctypes.c_void_p(pages.ctypes.data))
        where = ctypes.c_void_p(status.ctypes.data)
        # Without nodes to move to, the call only says where each page is.
        if _libc.syscall(ctypes.c_long(number), *arguments, ctypes.c_void_p(None), where, ctypes.c_int(0)):
            return "unknown"
        found |= set(status[status >= 0].tolist())
    return ", ".join(map(str, sorted(found))) or "unknown"
