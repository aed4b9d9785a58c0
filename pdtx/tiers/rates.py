"""How fast copies have been, for estimates of the next one."""

import threading

_RUN_S = 2e-7
"""Seconds that a run costs besides its bytes."""
_LEAST_BYTES = 64 << 10
"""What is smaller says more about the way there than about the copy."""
_WEIGHT = 0.25


class Rate:
    """Bytes a second: a mean in which the last ones count most. Safe to use from several threads."""

    def __init__(self, guess: float) -> None:
        """guess: before the first measurement."""
        self._rate, self._measured, self._lock = guess, False, threading.Lock()

    def note(self, nbytes: int, seconds: float) -> None:
        """Take a measurement in."""
        if nbytes < _LEAST_BYTES or seconds <= 0:
            return
        with self._lock:
            weight = _WEIGHT if self._measured else 1.0
            self._rate, self._measured = (1 - weight) * self._rate + weight * nbytes / seconds, True

    def seconds_for(self, nbytes: int, num_runs: int) -> float:
        """Estimate the time of a copy."""
        with self._lock:
            return nbytes / self._rate + num_runs * _RUN_S
