"""How much a connection begins ahead of what has arrived: enough to keep the path busy, and the rest can be cancelled.

What has been begun crosses, whatever becomes of its request, and over a slow link all the buffers on the path hold
seconds of it. Only acknowledgements from the other end tell how much that is: so the rate is measured by them, and no
more is begun than crosses in a moment. Where the rate is high this is more than buffers hold, and nothing waits.
"""

import time
from collections.abc import Callable

_LEAST_TRANSFERS = 2
"""One that is crossing and one behind it, so that the path is busy while the acknowledgement comes back."""

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
    """The transfers of one connection that have been begun and not been acknowledged.

    begin() and end(): each from one thread at a time. There is no lock: each number is written by one of them only, and
    others may see it a moment late.
    round_trip_s: returns the shortest time of a round trip that has been seen.
    """

    def __init__(self, round_trip_s: Callable[[], float]) -> None:
        self._round_trip_s = round_trip_s
        self._begun = self._begun_bytes = 0
        self._ended = self._ended_bytes = 0
        self._rate = 0.0  # bytes a second
        self._limit = float(_LEAST_BYTES)
        self._ahead_s, self._looked_at, self._measured_at = _AHEAD_S, float("-inf"), time.monotonic()
        self._refused = False

    def has_room(self, nbytes: int) -> bool:
        """Whether a transfer of nbytes may be begun now. If not, a later end() says that there is more room."""
        if self._fits(nbytes):
            return True
        self._refused = True
        return self._fits(nbytes)  # again: an end() just before would not have said so

    def _fits(self, nbytes: int) -> bool:
        few = self._begun - self._ended < _LEAST_TRANSFERS
        return few or self._begun_bytes - self._ended_bytes + nbytes <= self._limit

    def begin(self, nbytes: int) -> int:
        """Enter a transfer of nbytes; returns the bytes that had arrived by then, for end()."""
        self._begun += 1
        self._begun_bytes += nbytes
        return self._ended_bytes

    def end(self, nbytes: int, begun_at: float, arrived_before: int) -> bool:
        """Take out a transfer that has arrived or been refused; True if has_room() has been False since the last True.

        begun_at: time.monotonic() of its begin(), which returned arrived_before.
        """
        self._ended += 1
        self._ended_bytes += nbytes
        now = time.monotonic()
        # Thousands a millisecond apart say the same, unless someone waits for it.
        if self._refused or now - self._measured_at > _MEASURE_S:
            self._measure((self._ended_bytes - arrived_before) / max(now - begun_at, 1e-6), now)
        if not self._refused:
            return False
        self._refused = False
        return True

    def _measure(self, rate: float, now: float) -> None:
        self._rate = max(rate, self._rate * 0.5 ** ((now - self._measured_at) / _HALVED_S))
        self._measured_at = now
        if now - self._looked_at >= _LOOK_S:
            self._looked_at, self._ahead_s = now, max(_AHEAD_S, 2 * self._round_trip_s())
        self._limit = max(_LEAST_BYTES, self._rate * self._ahead_s)
