"""The producer's way for payloads: what one session matches, its data connection, and the shipper that uses it."""

import time

from pdtx.engine.matching import Match
from pdtx.engine.shipping import Shipper
from pdtx.errors import PdtxError
from pdtx.transports import Connection

_SETTLE_S = 0.5
"""A connection that breaks because a transfer was cut off has done so by then."""

_LOOK_S = 0.01


class Route:
    """One session's way. It is never mended: a connection that ended is replaced together with its session."""

    def __init__(self, match: Match, connection: Connection, shipper: Shipper) -> None:
        self.match, self.connection, self.shipper = match, connection, shipper
        self._cut_at = float("-inf")

    def note_cut(self) -> None:
        """Learn that a transfer was given up while its bytes were moving."""
        self._cut_at = time.monotonic()

    def ended(self) -> PdtxError | None:
        """What ended the connection, if it has. Waits a moment where a transfer was cut off just now."""
        while self.connection.ended is None and time.monotonic() < self._cut_at + _SETTLE_S:
            time.sleep(_LOOK_S)
        return self.connection.ended

    def close(self) -> None:
        """End the connection, and then the shipper, once it has dealt with what it was given."""
        self.connection.close()
        self.shipper.close()
