"""The producer's way for payloads: what one session matches, its data connection, and how pieces move over it."""

from dataclasses import dataclass

from pdtx.engine.matching import Match
from pdtx.engine.picking import ModePicker
from pdtx.errors import PdtxError, TransferRefused
from pdtx.plan.runs import Runs
from pdtx.protocol import Welcome
from pdtx.transports import Connection, Path, Region, TransferHandle, TransferKey


class NoConnection(Connection):
    """Stands for the data connection of two processes that exchange nothing but messages."""

    path = Path("other", "nothing moves between these two processes")

    def put(
        self, key: TransferKey, region: Region, runs: Runs, deadline: float, *, staged: bool = False
    ) -> TransferHandle:
        """Raise TransferRefused."""
        raise TransferRefused(f"{key}: {self.path.detail}")

    def get(self, key: TransferKey, region: Region, runs: Runs, deadline: float) -> TransferHandle:
        """Raise TransferRefused."""
        raise TransferRefused(f"{key}: {self.path.detail}")

    def notify(self, data: bytes, deadline: float) -> TransferHandle:
        """Raise TransferRefused."""
        raise TransferRefused(self.path.detail)

    def close(self) -> None:
        """Do nothing."""


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

    @property
    def carries(self) -> bool:
        """Whether any payload goes this way."""
        return not isinstance(self.connection, NoConnection)
