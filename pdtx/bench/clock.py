"""Clocks of other hosts, read from here: how far off they are, and how far that may be wrong."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DEFAULT_READS = 8

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Clock:
    """A remote time.monotonic(). offset_s: it minus ours. error_s: how far offset_s may be off; 0 where it is ours."""

    offset_s: float = 0.0
    error_s: float = 0.0

    def there(self, here: float) -> float:
        """Return what the remote clock shows when ours shows here."""
        return here + self.offset_s

    def here(self, there: float) -> float:
        """Return what our clock shows when the remote one shows there."""
        return there - self.offset_s


def boot_id() -> str:
    """Return what tells this boot of this machine from all others; "" where the kernel does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def read_clock(
    ask: Callable[[], float],
    *,
    reads: int = DEFAULT_READS,
    same_host: bool = False,
    now: Callable[[], float] = time.monotonic,
) -> Clock:
    """Return how far the clock that ask() reads is from ours.

    The answer was made between asking and its arrival, so of several the one with the shortest way is believed: it was
    read in the middle, give or take half the way. same_host: whether both are one machine's clock, which needs no
    offset at all; believed only if no reading says otherwise, for a container can have a clock of its own.
    Raises what ask raises.
    """
    best, shared = Clock(error_s=float("inf")), same_host
    for _ in range(reads):
        asked = now()
        at = ask()
        answered = now()
        half = (answered - asked) / 2
        shared = shared and asked <= at <= answered
        if half < best.error_s:
            best = Clock(at - (asked + half), half)
    return Clock() if shared else best
