"""Reading a process's memory by the kernel (process_vm_readv), one's own or another's."""

import ctypes
import os

import numpy as np

from pdtx.plan import Slices
from pdtx.plan.runs import Int64s
from pdtx.ranges.iovec import IovecCursor, iovecs, range_of

_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_vectors = (ctypes.c_void_p, ctypes.c_ulong)
_readv.argtypes = (ctypes.c_int, *_vectors, *_vectors, ctypes.c_ulong)
_readv.restype = ctypes.c_ssize_t


class AttachedCopy:
    """A copy under way from src of a process's memory to dst of one's own, both in stream order and of one size.

    piece_bytes: of one step, about.
    """

    def __init__(
        self, pid: int, src_base: int, src: Slices, dst_base: int, dst: Slices, piece_bytes: int = 16 << 20
    ) -> None:
        self._pid, self._piece_bytes = pid, piece_bytes
        # Each side's ranges are as long as they come there: fewer for the kernel to look up than runs.
        self._src = IovecCursor(iovecs(src_base, src))
        self._dst = IovecCursor(iovecs(dst_base, bounded(dst, piece_bytes)))

    @property
    def left(self) -> int:
        """Bytes to go."""
        return self._dst.total - self._dst.done

    def step(self) -> int:
        """Make one system call; return the bytes it moved, at least one. Raises OSError."""
        # It moves as much as both sides have room for: to bound one of them is enough.
        moved = int(_readv(self._pid, *self._dst.window(self._piece_bytes), *self._src.window(), 0))
        if moved <= 0:
            code = ctypes.get_errno() if moved else 0
            raise OSError(code, os.strerror(code) if code else "no byte could be read")
        self._dst.advance(moved)
        self._src.advance(moved)
        return moved


def bounded(slices: Slices, limit: int) -> Slices:
    """Return slices with those longer than limit bytes cut up."""
    if not len(slices) or int(slices.nbytes.max()) <= limit:
        return slices
    parts = np.maximum(1, -(-slices.nbytes // limit))
    which = np.repeat(np.arange(len(slices)), parts)
    skipped: Int64s = (np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)) * limit
    return Slices(slices.offsets[which] + skipped, np.minimum(slices.nbytes[which] - skipped, limit))


def read_bytes(pid: int, address: int, nbytes: int) -> bytes:
    """Return a few bytes of a process's memory. Raises OSError."""
    buffer = np.zeros(nbytes, np.uint8)
    there, here = range_of(address, nbytes), range_of(buffer.ctypes.data, nbytes)
    if _readv(pid, here.ctypes.data, 1, there.ctypes.data, 1, 0) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return buffer.tobytes()


def may_attach() -> bool:
    """Whether this process may read memory in this way at all, its own."""
    probe = np.ones(1, np.uint8)
    try:
        return read_bytes(os.getpid(), probe.ctypes.data, 1) == b"\1"
    except OSError:
        return False
