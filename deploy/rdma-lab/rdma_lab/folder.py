"""The folder of one run: made for it, gone with it; what a killed run left is removed by the next one."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "pdtx-rdma-lab-"
_LOCK = "lock"


@contextmanager
def run_folder() -> Iterator[Path]:
    """Make a folder and hold its lock; remove it at the end."""
    # Short: the wire's address may have 108 characters. Not in TMPDIR, which can be long.
    parent = Path("/tmp")
    sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep(parent: Path) -> None:
    """Remove folders of runs that are no more: nobody holds their lock, which the kernel lets go with its process."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
