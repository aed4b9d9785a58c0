"""A connection around another one, for doubles that change one thing and leave the rest."""

from pdtx.errors import PdtxError
from pdtx.plan import Runs
from pdtx.transports import Connection, Path, Region, TransferHandle, TransferKey


class WrappedConnection(Connection):
    """Hands every call to inner."""

    def __init__(self, inner: Connection) -> None:
        self.inner = inner

    @property
    def path(self) -> Path:
        """See Connection."""
        return self.inner.path

    @property
    def stages(self) -> bool:
        """See Connection."""
        return self.inner.stages

    @property
    def ended(self) -> PdtxError | None:
        """See Connection."""
        return self.inner.ended

    def put(
        self, key: TransferKey, region: Region, runs: Runs, deadline: float, *, staged: bool = False
    ) -> TransferHandle:
        """See Connection."""
        return self.inner.put(key, region, runs, deadline, staged=staged)

    def get(self, key: TransferKey, region: Region, runs: Runs, deadline: float) -> TransferHandle:
        """See Connection."""
        return self.inner.get(key, region, runs, deadline)

    def notify(self, data: bytes, deadline: float) -> TransferHandle:
        """See Connection."""
        return self.inner.notify(data, deadline)

    def close(self) -> None:
        """See Connection."""
        self.inner.close()
