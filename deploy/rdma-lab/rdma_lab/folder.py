"""The folder of one run: made for it, gone with it; what a killed run left is removed by the next one."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "pdtx-rdma-lab-"


@contextmanager
def run_folder() -> Iterator[Path]:
    """Make a folder and hold its lock; remove it at the end."""
    # Short: the wire's address may have 108 characters. Not in TMPDIR, which can be long.
    parent = Path("/tmp")
    sweep(parent)
    folder, lock = _locked_folder(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(parent: Path) -> tuple[Path, int]:
    """Return a new folder and a descriptor that holds its lock, the folder's own: none is ever without one."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # Until the lock is had, the sweep of another run takes the folder for one that was left.
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def sweep(parent: Path) -> None:
    """Remove folders of runs that are no more: nobody holds their lock, which the kernel lets go with its process."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            lock = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
