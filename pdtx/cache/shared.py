"""Memory in an anonymous file, so that another process on this host can be given it to map.

The file is sealed. Nobody can shrink it, so a process that has mapped it never meets a page that is gone. Nobody but
its maker, who has mapped it before, can write to it, not through the descriptor either; and no seal can be lifted.
"""

import ctypes
import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt
import torch

from pdtx.errors import InputError

HUGE_PAGE_BYTES = 2 << 20
"""What shared memory is aligned to, in the file and in each process: only then can it be mapped by huge pages."""

MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25

# fcntl has this one only since Python 3.12.
_F_SEAL_FUTURE_WRITE = 0x10
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL

_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

libc = ctypes.CDLL(None, use_errno=True)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
libc.mmap.restype = ctypes.c_void_p

_files = dict[int, tuple[int, int]]()
"""Shared memory of this process: address -> (bytes, descriptor)."""


class Mapping:
    """nbytes of a file from offset on, mapped here; offset: a multiple of HUGE_PAGE_BYTES.

    address: of the first byte, aligned to HUGE_PAGE_BYTES. Nothing may touch it after close().
    """

    def __init__(self, fd: int, offset: int, nbytes: int, *, writable: bool = False) -> None:
        """Map. The descriptor stays the caller's. Raises OSError."""
        # A place that is large enough to hold it aligned, most of which the file then takes.
        self._reserved_bytes = nbytes + HUGE_PAGE_BYTES
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._reserved = _map(None, self._reserved_bytes, _PROT_NONE, private, -1, 0)
        try:
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            aligned = self._reserved + -self._reserved % HUGE_PAGE_BYTES
            self.address = _map(aligned, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
        except OSError:
            self.close()
            raise
        # Advice only: a kernel without huge pages declines, and nothing but the speed changes.
        libc.madvise(self.address, nbytes, MADV_HUGEPAGE)

    def close(self) -> None:
        """Unmap. Idempotent."""
        if self._reserved_bytes:
            libc.munmap(self._reserved, self._reserved_bytes)
            self._reserved_bytes = 0


def _map(address: int | None, nbytes: int, access: int, flags: int, fd: int, offset: int) -> int:
    mapped = libc.mmap(address, nbytes, access, flags, fd, offset)
    if mapped is None or mapped == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(mapped)


class _SharedMemory:
    """A file of its own, mapped, for as long as an array or a tensor over it lives."""

    def __init__(self, nbytes: int) -> None:
        self._fd = os.memfd_create("pdtx-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, max(1, nbytes) + -max(1, nbytes) % HUGE_PAGE_BYTES)
            self._mapping = Mapping(self._fd, 0, max(1, nbytes), writable=True)
            # Last: the seal against writing lets live what is mapped before it, and nothing after.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            self._give_back()
            raise
        address = self._mapping.address
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        _files[address] = nbytes, self._fd

    def _give_back(self) -> None:
        if hasattr(self, "_mapping"):
            _files.pop(self._mapping.address, None)
            self._mapping.close()
        os.close(self._fd)

    def __del__(self) -> None:
        if hasattr(self, "__array_interface__"):
            self._give_back()


def allocate_shared(nbytes: int) -> torch.Tensor:
    """Return nbytes of zeroed uint8 memory on the CPU, shape (nbytes,), aligned to HUGE_PAGE_BYTES, freed with it.

    Raises InputError if the memory cannot be had.
    """
    # The kernel lets a file be larger than all memory, and kills who uses it then.
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes > physical:
        raise InputError(f"no shared memory for a cache of {nbytes} bytes: this host has {physical}")
    try:
        memory = np.asarray(_SharedMemory(nbytes))
    except OSError as error:
        raise InputError(f"no shared memory for a cache of {nbytes} bytes: {error.strerror or error}") from None
    _take_huge_pages(memory)
    return torch.from_numpy(memory)


def _take_huge_pages(memory: npt.NDArray[np.uint8]) -> None:
    """Let memory be filled with huge pages now, where the kernel can (Linux 6.1).

    Advice is not enough: as most kernels are set up, files get no huge pages by themselves. With small ones a scattered
    copy looks up more than it copies, in every process that has mapped them.
    """
    whole = memory.nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    memory[:whole:HUGE_PAGE_BYTES] = 0  # only what has a page can be put into a larger one
    libc.madvise(memory.ctypes.data, whole, _MADV_COLLAPSE)


def shared_file(memory: torch.Tensor) -> tuple[int, int] | None:
    """Return the descriptor of the file that contiguous memory lies in, and where; None for memory of another kind.

    The descriptor is borrowed: it lives as long as the memory does.
    """
    if memory.device.type != "cpu":
        return None
    first, nbytes = memory.data_ptr(), memory.numel() * memory.itemsize
    for address, (size, fd) in list(_files.items()):
        if address <= first and first + nbytes <= address + size:
            return fd, first - address
    return None
