"""The producer's way for payloads: what one session matches, its data connection, and how pieces move over it."""

from dataclasses import dataclass

from pdtx.engine.matching import Match
from pdtx.engine.picking import ModePicker
from pdtx.errors import PdtxError
from pdtx.protocol import Welcome
from pdtx.transports import Connection


@dataclass(eq=False)
class Route:
    """One session's way. It is never repaired: a connection that ended is replaced together with its session.

    probing: a transfer was cut off while its bytes were moving, and whether the connection has outlived that is being
    found out. failed: it has not. Changed by the producer's control thread alone.
    """

    welcome: Welcome
    match: Match
    connection: Connection
    modes: ModePicker
    probing: bool = False
    failed: PdtxError | None = None

    @property
    def ended(self) -> PdtxError | None:
        """What ended the connection, if it has."""
        return self.connection.ended
