"""Whole files between memory and a folder, past the system's page cache (O_DIRECT) where that is possible.

The system calls stand here by name, for tests to put failing ones in their place.
"""

import errno
import mmap
import os
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pdtx.errors import TierError
from pdtx.ranges import IovecCursor, Iovecs, preadv, pwritev, range_of
from pdtx.ranges.iovec import address_of

SECTOR = 4096
"""Bytes: what addresses, offsets and lengths are multiples of for O_DIRECT, enough for every usual device."""

_MODE = 0o600


def aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return zeroed memory for O_DIRECT, uint8, shape (nbytes,)."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def create(path: Path, *, direct: bool) -> int:
    """Open a file that is not there yet, to be written. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), _MODE)


def open_to_write(path: Path, *, direct: bool) -> int:
    """Open a file to be written over. Raises OSError."""
    return _regular(path, os.O_WRONLY | (os.O_DIRECT if direct else 0))


def open_to_read(path: Path | str, *, direct: bool) -> int:
    """Open a file. Raises OSError."""
    return _regular(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))


def _regular(path: Path | str, flags: int) -> int:
    """Open what must be a file: no link, and nothing that lets its readers wait. Raises OSError."""
    # Without O_NONBLOCK to open a pipe waits for its other end; of files it changes nothing.
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return fd


def write_own(path: Path, text: str) -> None:
    """Write a small file of the tier's own, whole or not at all. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    temporary.unlink(missing_ok=True)
    with os.fdopen(create(temporary, direct=False), "w") as file:
        file.write(text)
    temporary.replace(path)


def write_all(fd: int, ranges: Iovecs, total: int) -> None:
    """Write ranges, total bytes, from the file's begin on in as many calls as it takes. Raises OSError, TierError."""
    cursor = IovecCursor(ranges, total)
    while cursor.done < cursor.total:
        if not cursor.move_at(pwritev, fd, 0):
            raise TierError(f"short write: {cursor.done} of {cursor.total} bytes were written")


def read_all(fd: int, ranges: Iovecs, total: int) -> None:
    """Fill ranges, total bytes, from the file's begin on. Raises OSError, and TierError where the file ends before."""
    cursor = IovecCursor(ranges, total)
    while cursor.done < cursor.total:
        if not _read_some(cursor, fd):
            raise TierError(f"short read: {cursor.done} of {cursor.total} bytes are there")


def _read_some(cursor: IovecCursor, fd: int) -> int:
    try:
        return cursor.move_at(preadv, fd, 0)
    except OSError as error:
        # With O_DIRECT a file that ends within a sector cannot be asked for what would follow.
        if error.errno == errno.EINVAL and cursor.done % SECTOR:
            return 0
        raise


def takes_direct_io(folder: Path) -> bool:
    """Try O_DIRECT in a folder, by writing one sector and reading it back. Raises OSError where no file can be made."""
    path, page = folder / f".probe.{os.getpid()}.part", aligned(SECTOR)
    ranges = range_of(address_of(page), SECTOR)
    path.unlink(missing_ok=True)
    try:
        for opened, move in ((create, write_all), (open_to_read, read_all)):
            fd = opened(path, direct=True)
            try:
                move(fd, ranges.copy(), SECTOR)
            finally:
                os.close(fd)
    except OSError:
        return False
    else:
        return True
    finally:
        path.unlink(missing_ok=True)
