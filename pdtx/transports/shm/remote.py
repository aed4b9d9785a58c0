"""A peer's region as it is reached from here."""

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pdtx.cache.shared import HUGE_PAGE_BYTES, Mapping
from pdtx.errors import ProtocolError, TransferError

_TMPFS_MAGIC = 0x01021994
_STATFS_BYTES = 256
"""More than struct statfs has; the type of the file system comes first in it."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True)
class Mapped:
    """nbytes of a peer's shared memory, mapped here at address, to be read only."""

    mapping: Mapping
    address: int
    nbytes: int

    @property
    def memory(self) -> torch.Tensor:
        """The same as a tensor, for reading; only until the mapping is closed."""
        return torch.from_numpy(np.asarray(self))

    @property
    def __array_interface__(self) -> dict[str, object]:
        # Said to be writable, which it is not: torch knows no other tensors, and warns of them.
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


@dataclass(frozen=True)
class Foreign:
    """nbytes at an address of the peer's."""

    address: int
    nbytes: int


@dataclass(frozen=True)
class OnCuda:
    """A peer's device memory, opened here; uint8, shape (nbytes,)."""

    memory: torch.Tensor


Remote = Mapped | Foreign | OnCuda


def map_file(descriptors: Sequence[int], offset: int, nbytes: int) -> Mapped:
    """Map nbytes of a peer's file from byte offset on. The descriptor stays the caller's.

    Raises ProtocolError for a file that could harm who reads it or is too small, TransferError if it cannot be mapped.
    """
    if len(descriptors) != 1:
        raise ProtocolError(f"the peer shared a file and sent {len(descriptors)} descriptors")
    _check_file(descriptors[0], offset, nbytes)
    skipped = offset % HUGE_PAGE_BYTES
    try:
        mapping = Mapping(descriptors[0], offset - skipped, skipped + max(1, nbytes))
    except OSError as error:
        if error.errno == errno.EACCES:
            raise ProtocolError("the peer shared a file that cannot be read") from None
        raise TransferError(f"{nbytes} bytes of shared memory cannot be mapped: {error.strerror or error}") from None
    return Mapped(mapping, mapping.address + skipped, nbytes)


def _check_file(descriptor: int, offset: int, nbytes: int) -> None:
    """Raise ProtocolError unless a file has the bytes, and always will.

    A page that is gone from a mapped file kills whoever reads it. Only memory can be sealed against that; in huge
    pages of their own file system (hugetlbfs) not even then.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        kind = _file_system(descriptor)
    except OSError as error:
        raise ProtocolError(f"the peer shared what is no memory file: {error.strerror or error}") from None
    if kind != _TMPFS_MAGIC:
        raise ProtocolError(f"the peer shared a file of file system {kind:#x}, which is not plain memory")
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("the peer shared a file that it could still shrink; it must be sealed against that")
    # After the seal, so that it cannot change any more.
    size = os.fstat(descriptor).st_size
    if offset > size or nbytes > size - offset:
        raise ProtocolError(f"the peer shared bytes {offset} to {offset + nbytes} of a file of {size}")


def _file_system(descriptor: int) -> int:
    status = (ctypes.c_char * _STATFS_BYTES)()
    if _libc.fstatfs(descriptor, status):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return ctypes.c_long.from_buffer(status).value
