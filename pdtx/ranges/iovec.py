"""Scatter/gather I/O: byte ranges as iovec arrays built by numpy, moved by the C library's writev and recvmsg.

An iovec array is uint64, shape (n, 2): address and length of each range, the layout of C's struct iovec[n].
The system calls go through ctypes because Python's own take one memoryview per range, which costs more than the copy;
ctypes releases the GIL meanwhile.
"""

import ctypes
import os
import socket
from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pdtx.errors import PlanError
from pdtx.plan import Slices

Iovecs = npt.NDArray[np.uint64]
VectorCall = Callable[[int, int, int], int]
VectorCallAt = Callable[[int, int, int, int], int]

# The kernel refuses more ranges than this in one call.
IOV_MAX = 1024
_IOVEC_BYTES = 16

_libc = ctypes.CDLL(None, use_errno=True)


def _vector_call(name: str) -> VectorCall:
    function = getattr(_libc, name)
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    function.restype = ctypes.c_ssize_t

    def call(fd: int, iovecs: int, count: int) -> int:
        moved = int(function(fd, iovecs, count))
        if moved < 0:
            raise _os_error()
        return moved

    return call


def _os_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


writev = _vector_call("writev")
"""writev(fd, address of the iovecs, their number) -> bytes written. Raises OSError."""


def _vector_call_at(name: str) -> VectorCallAt:
    function = getattr(_libc, name)
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    function.restype = ctypes.c_ssize_t

    def call(fd: int, iovecs: int, count: int, offset: int) -> int:
        moved = int(function(fd, iovecs, count, offset))
        if moved < 0:
            raise _os_error()
        return moved

    return call


preadv = _vector_call_at("preadv64")
"""preadv(fd, address of the iovecs, their number, offset in the file) -> bytes read, 0 at its end. Raises OSError."""
pwritev = _vector_call_at("pwritev64")
"""pwritev(fd, address of the iovecs, their number, offset in the file) -> bytes written. Raises OSError."""


class _MessageHeader(ctypes.Structure):
    """C's struct msghdr."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("iovecs", ctypes.c_void_p),
        ("iovec_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_libc.recvmsg.argtypes = (ctypes.c_int, ctypes.POINTER(_MessageHeader), ctypes.c_int)
_libc.recvmsg.restype = ctypes.c_ssize_t


_libc.sendmsg.argtypes = (ctypes.c_int, ctypes.POINTER(_MessageHeader), ctypes.c_int)
_libc.sendmsg.restype = ctypes.c_ssize_t


def send_at_once(fd: int, iovecs: int, count: int) -> int:
    """Send what the socket has room for, without waiting: writev() for a socket that blocks. Raises OSError."""
    header = _MessageHeader(iovecs=iovecs, iovec_count=count)
    moved = int(_libc.sendmsg(fd, ctypes.byref(header), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL))
    if moved < 0:
        raise _os_error()
    return moved


def receive_all(fd: int, iovecs: int, count: int) -> int:
    """Fill all of the iovecs, or as many as come before the socket's time-out: readv, but it does not return early.

    Returns the bytes read, 0 at the end of the stream. Raises OSError.
    """
    # readv returns with what has arrived, a few hundred KiB: twenty trips through Python where this makes one.
    header = _MessageHeader(iovecs=iovecs, iovec_count=count)
    moved = int(_libc.recvmsg(fd, ctypes.byref(header), socket.MSG_WAITALL))
    if moved < 0:
        raise _os_error()
    return moved


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Return where an array's bytes are; array.ctypes does the same, and takes longer."""
    address: int = array.__array_interface__["data"][0]
    return address


def iovecs(base: int, slices: Slices, before: bytes = b"") -> Iovecs:
    """Return the ranges of a region that starts at address base, shape (n, 2), or (n + 1, 2) with the bytes before.

    The caller keeps `before` alive.
    """
    first = 1 if before else 0
    vectors = np.empty((len(slices) + first, 2), np.uint64)
    if before:
        vectors[0] = address_of(np.frombuffer(before, np.uint8)), len(before)
    vectors[first:, 0] = slices.offsets
    vectors[first:, 0] += np.uint64(base)
    vectors[first:, 1] = slices.nbytes
    return vectors


def range_of(address: int, nbytes: int) -> Iovecs:
    """Return one contiguous range, shape (1, 2)."""
    return np.array([[address, nbytes]], np.uint64)


def check_within(slices: Slices, nbytes: int, what: str) -> None:
    """Raise PlanError unless every range lies inside a region of nbytes; what names the region in the message."""
    # As unsigned numbers negative ones are huge: two comparisons find all that is wrong. A length that is too large
    # is found by the first; what it makes of the second does not matter.
    size, lengths = np.uint64(nbytes), slices.nbytes.view(np.uint64)
    wrong = (lengths > size) | (slices.offsets.view(np.uint64) > size - lengths)
    if wrong.any():
        at = int(wrong.argmax())
        raise PlanError(
            f"run {at} covers {int(slices.nbytes[at])} bytes from byte {int(slices.offsets[at])} of {what}, "
            f"beyond its region of {nbytes}"
        )


class IovecCursor:
    """How far a sequence of calls has come in an iovec array. Moves over partial calls without a loop per range."""

    def __init__(self, vectors: Iovecs, total: int | None = None) -> None:
        """total: bytes of all ranges, where that is known. The array is changed: the range under way gets narrower."""
        self._vectors = vectors if vectors.flags.c_contiguous else np.ascontiguousarray(vectors)
        self._address = address_of(self._vectors)
        self._at = 0
        self.done = 0
        self.total = int(self._vectors[:, 1].sum()) if total is None else total

    @cached_property
    def _ends(self) -> npt.NDArray[np.uint64]:
        """Where each range ends in the stream. Most payloads are through in one call, and never need it."""
        return np.cumsum(self._vectors[:, 1], dtype=np.uint64)

    def move(self, call: VectorCall, fd: int) -> int:
        """Make one call on what is left; return the bytes it moved. Raises OSError."""
        moved = call(fd, *self.window())
        self.advance(moved)
        return moved

    def move_at(self, call: VectorCallAt, fd: int, start: int) -> int:
        """Make one call on what is left, which lies from byte start + done of a file on. Raises OSError."""
        moved = call(fd, *self.window(), start + self.done)
        self.advance(moved)
        return moved

    def window(self, nbytes: int | None = None) -> tuple[int, int]:
        """Return the address and the number of the next ranges, of nbytes at most unless the first has more."""
        count = min(IOV_MAX, len(self._vectors) - self._at)
        if nbytes is not None:
            whole = int(self._ends.searchsorted(np.uint64(self.done + nbytes), side="right")) - self._at
            count = min(count, max(1, whole))
        return self._address + _IOVEC_BYTES * self._at, count

    def advance(self, nbytes: int) -> None:
        """Leave the next nbytes behind."""
        if nbytes == self.total - self.done:
            self.done, self._at = self.total, len(self._vectors)
            return
        ends = self._ends
        self.done += nbytes
        self._at = int(ends.searchsorted(np.uint64(self.done), side="right"))
        if self._at < len(self._vectors):
            vector, left = self._vectors[self._at], ends[self._at] - np.uint64(self.done)
            vector[0] += vector[1] - left
            vector[1] = left
