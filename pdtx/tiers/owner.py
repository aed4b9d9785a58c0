"""One process a folder: a locked file that says whose it is. The lock ends with the process, however that ends."""

import contextlib
import fcntl
import os
from pathlib import Path

from pdtx.errors import TierError, TierInUse

LOCK_NAME = "pdtx.lock"


class FolderOwner:
    """Holds a folder until release()."""

    def __init__(self, folder: Path) -> None:
        """Make the folder where it is absent. Raises TierInUse, with the holder's pid; TierError where it cannot be."""
        path = folder / LOCK_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise TierError(f"cannot keep blocks in {folder}: {error.strerror}; give a folder to write to") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise TierInUse(
                f"{folder} is in use by another tier, of the process {holder}; give each process a folder of its own"
            ) from None
        except OSError as error:
            os.close(self._fd)
            raise TierError(f"cannot lock {path}: {error.strerror}; give a folder of another file system") from None
        with contextlib.suppress(OSError):
            # Only for the message above: a full disk is no reason not to read what is there.
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Let others have the folder. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
