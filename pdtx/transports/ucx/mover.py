"""The mover over UCX."""

from typing import ClassVar

from pdtx.transports.onesided.mover import OneSidedMover
from pdtx.transports.ucx.environment import knobs
from pdtx.transports.ucx.fabric import UcxFabric


class UcxMover(OneSidedMover):
    """See Mover.

    runtime: auto (ucxx, else ucx-py, else raw), ucxx, ucx-py or raw: who makes UCX's objects.
    library: wheel, system, nixl or a path to libucp.so.0; None takes the runtime's own.
    advertise_host: what others connect to, needed where the address listened at is a wildcard.
    piece_bytes: of what is packed when staged.
    """

    name: ClassVar[str] = "ucx"

    def __init__(
        self,
        *,
        runtime: str = "auto",
        library: str | None = None,
        advertise_host: str | None = None,
        piece_bytes: int = 8 << 20,
    ) -> None:
        """Raise InputError if that UCX cannot be had, TransferError if it does not start."""
        fabric = UcxFabric(runtime=runtime, library=library)
        super().__init__(fabric, advertise_host=advertise_host, piece_bytes=piece_bytes)

    @property
    def knobs(self) -> dict[str, str]:
        """UCX's settings in this process's environment, by name: a part of every result."""
        return knobs()
