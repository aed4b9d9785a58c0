"""The mover within one host, see pdtx.transports.shm."""

from typing import ClassVar

from pdtx.transports.onesided.mover import OneSidedMover
from pdtx.transports.shm.copying import CopyBy
from pdtx.transports.shm.fabric import ShmFabric


class ShmMover(OneSidedMover):
    """See Mover. Addresses look like HOST:PORT and name local sockets of this host; no network is involved.

    copy_by, threads: how mapped memory is copied, see Copier.
    """

    name: ClassVar[str] = "shm"
    within_host: ClassVar[bool] = True

    def __init__(self, *, copy_by: CopyBy = "auto", threads: int = 0) -> None:
        super().__init__(ShmFabric(copy_by, threads))
