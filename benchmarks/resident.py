"""How much memory a process needs at most while something is done."""

import ctypes
from pathlib import Path

_SELF = Path("/proc/self")
_PAGE = 4 << 10
_RESET_PEAK = "5"

_libc = ctypes.CDLL(None)


class PeakMemory:
    """Counts from when it is made: bytes of resident memory above those of then, at the highest."""

    def __init__(self) -> None:
        self.forget()
        self._before = _status("VmRSS")
        self._mapped_before = _mapped_of_peers()

    def forget(self) -> None:
        """Forget the highest so far; what it is compared with stays."""
        # What earlier work has freed, and the allocator has kept, is nobody's need any more.
        _libc.malloc_trim(0)
        (_SELF / "clear_refs").write_text(_RESET_PEAK)

    def above(self) -> int:
        """Return the bytes, a page at least.

        Pages of a peer's memory that are mapped here are no copy, and count at the peer: they are taken off, as far as
        they are mapped still.
        """
        highest = _status("VmHWM")  # before looking at the mappings, which takes memory where they are many
        peers = max(0, _mapped_of_peers() - self._mapped_before)
        return max(_PAGE, highest - self._before - peers)


def _status(name: str) -> int:
    lines = (_SELF / "status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _mapped_of_peers() -> int:
    """Resident bytes of read-only mappings of anonymous files: how a peer's shared memory is seen."""
    total, counts = 0, False
    with (_SELF / "smaps").open() as lines:
        for line in lines:
            words = line.split()
            if not words[0].endswith(":"):
                counts = words[1].startswith("r--s") and "/memfd:" in line
            elif counts and words[0] == "Rss:":
                total += int(words[1]) << 10
    return total
