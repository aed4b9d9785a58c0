"""Plain files of the sizes that a disk tier's blocks have: what a disk, or the system's page cache, gives at most."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from pdtx.bench.scene import TierScene
from pdtx.bench.turns import Way
from pdtx.bench.ways import nothing
from pdtx.cache.memory import allocate
from pdtx.errors import TierError

Bytes = npt.NDArray[np.uint8]


class Files:
    """Files of the sizes that a tier's blocks have, written from one buffer and read into another.

    direct: past the page cache. threads: that write and read at once.
    """

    def __init__(self, folder: Path, sizes: Sequence[int], *, direct: bool, threads: int) -> None:
        """folder: an existing one, for these files alone. sizes: bytes, multiples of a sector."""
        self.count, self.nbytes, self._folder = len(sizes), sum(sizes), folder
        self._direct = os.O_DIRECT if direct else 0
        self._written, self._read = (allocate(self.nbytes, torch.device("cpu")).numpy() for _ in range(2))
        ends = np.cumsum(sizes)
        self._parts = [slice(end - size, end) for end, size in zip(ends.tolist(), sizes, strict=True)]
        self._random, self._threads = np.random.default_rng(1), ThreadPoolExecutor(threads)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def renew(self) -> None:
        """Put other bytes into the buffer that is written, and none of them into the one that is read into."""
        self._written[:] = np.frombuffer(self._random.bytes(self.nbytes), np.uint8)
        self._read[:] = 0

    def write(self) -> None:
        """Write each file anew, under the name of the one before. Raises OSError."""
        list(self._threads.map(self._write, range(self.count)))

    def _write(self, number: int) -> None:
        path = self._folder / f"{number}.raw"
        fd = os.open(f"{path}.part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | self._direct, 0o600)
        try:
            _whole(os.pwrite, fd, self._written[self._parts[number]])
        finally:
            os.close(fd)
        os.replace(f"{path}.part", path)

    def read(self) -> None:
        """Read each file. Raises OSError."""
        list(self._threads.map(self._read_one, range(self.count)))

    def _read_one(self, number: int) -> None:
        fd = os.open(self._folder / f"{number}.raw", os.O_RDONLY | self._direct)
        try:
            _whole(_pread_into, fd, self._read[self._parts[number]])
        finally:
            os.close(fd)

    def wrong(self) -> int:
        """Count bytes that were not read as they were written."""
        return int(np.count_nonzero(self._written != self._read))


def _pread_into(fd: int, block: memoryview, offset: int) -> int:
    return os.preadv(fd, [block], offset)


def _whole(move: Callable[[int, memoryview, int], int], fd: int, block: Bytes) -> None:
    """Move a whole block, however many calls that takes. Raises TierError where the file ends before."""
    view, done = block.data, 0
    while done < len(view):
        moved = move(fd, view[done:], done)
        if not moved:
            raise TierError(f"a file ended after {done} of {len(view)} bytes")
        done += moved


class RawWrite(Way):
    """Write files of the sizes that a tier's blocks have, from memory where they lie one after another."""

    def __init__(self, scene: TierScene, files: Files, detail: str) -> None:
        super().__init__("raw pwrite", detail, scene.nbytes)
        self._files = files

    def prepare(self) -> None:
        """See Way."""
        self._files.renew()

    def move(self) -> float:
        """See Way."""
        begun = time.perf_counter()
        self._files.write()
        return time.perf_counter() - begun

    def count_wrong(self) -> int:
        """See Way."""
        self._files.read()
        return self._files.wrong()


class RawRead(Way):
    """Read such files."""

    def __init__(self, scene: TierScene, files: Files, detail: str, before: Callable[[], None] = nothing) -> None:
        super().__init__("raw pread", detail, scene.nbytes)
        self._files, self._before = files, before

    def prepare(self) -> None:
        """See Way."""
        self._files.renew()
        self._files.write()

    def move(self) -> float:
        """See Way."""
        self._before()
        begun = time.perf_counter()
        self._files.read()
        return time.perf_counter() - begun

    def count_wrong(self) -> int:
        """See Way."""
        return self._files.wrong()


def drop_from_page_cache(folder: Path) -> None:
    """Have the system forget what it remembers of the files under a folder. Raises OSError."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                # Only what is on the disk can be forgotten.
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
