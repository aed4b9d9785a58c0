"""How much a connection begins ahead of what has arrived: enough to keep the way busy, little enough to cancel the rest.

What has been begun crosses, whatever becomes of its request, and over a slow link all the buffers on the way hold
seconds of it. Only acknowledgements from the other end tell how much that is: so the rate is measured by them, and no
more is begun than crosses in a moment. Where the rate is high this is more than buffers hold, and nothing waits.
"""

import threading
import time
from collections.abc import Callable

_LEAST_TRANSFERS = 2
"""One that is crossing and one behind it, so that the way is busy while the acknowledgement comes back."""

_LEAST_BYTES = 256 << 10
"""Small transfers may be begun up to this, also before the rate is known."""

_AHEAD_S = 0.1
"""The moment, unless round trips take longer: then twice as long as one."""

_HALVED_S = 0.1
"""In this time half of a rate is forgotten that is not reached any more."""

_MEASURE_S = 0.001
_LOOK_S = 1.0
"""How often the round trip's time is asked for."""


class SendWindow:
    """The transfers of one connection that have been begun and not been acknowledged. Safe to use from several threads.

    round_trip_s: returns the shortest time of a round trip that has been seen.
    """

    def __init__(self, round_trip_s: Callable[[], float]) -> None:
        self._round_trip_s = round_trip_s
        self._lock = threading.Lock()
        self._transfers = self._nbytes = self._arrived = 0
        self._rate = 0.0  # bytes a second
        self._limit = float(_LEAST_BYTES)
        self._ahead_s, self._looked_at, self._measured_at = _AHEAD_S, float("-inf"), time.monotonic()
        self._refused = False

    def has_room(self, nbytes: int) -> bool:
        """Whether a transfer of nbytes may be begun now. If not, a later end() says that there is more room."""
        with self._lock:
            room = self._transfers < _LEAST_TRANSFERS or self._nbytes + nbytes <= self._limit
            self._refused = self._refused or not room
            return room

    def begin(self, nbytes: int) -> int:
        """Enter a transfer of nbytes; returns the bytes that had arrived by then, for end()."""
        with self._lock:
            self._transfers += 1
            self._nbytes += nbytes
            return self._arrived

    def end(self, nbytes: int, begun_at: float, arrived_before: int) -> bool:
        """Take out a transfer that has arrived or been refused; True if one was refused room since the last True.

        begun_at: time.monotonic() of its begin(), which returned arrived_before.
        """
        now = time.monotonic()
        with self._lock:
            self._transfers -= 1
            self._nbytes -= nbytes
            self._arrived += nbytes
            refused, self._refused = self._refused, False
            # Thousands a millisecond apart say the same, unless someone waits for it.
            if refused or now - self._measured_at > _MEASURE_S:
                self._measure((self._arrived - arrived_before) / max(now - begun_at, 1e-6), now)
            return refused

    def _measure(self, rate: float, now: float) -> None:
        self._rate = max(rate, self._rate * 0.5 ** ((now - self._measured_at) / _HALVED_S))
        self._measured_at = now
        if now - self._looked_at >= _LOOK_S:
            self._looked_at, self._ahead_s = now, max(_AHEAD_S, 2 * self._round_trip_s())
        self._limit = max(_LEAST_BYTES, self._rate * self._ahead_s)
