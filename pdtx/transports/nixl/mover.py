"""The mover over NIXL."""

from typing import ClassVar

from pdtx.errors import InputError
from pdtx.transports.nixl.fabric import NixlFabric
from pdtx.transports.onesided.mover import OneSidedMover


class NixlMover(OneSidedMover):
    """See Mover.

    backend: NIXL's plugin that moves the bytes, the same on both sides. num_threads: of that backend beside the
    caller's, 0 or more. tls: UCX_TLS for the backend UCX; None leaves it to the environment.
    advertise_host: what others connect to, needed where the address listened at is a wildcard.
    piece_bytes: of what is packed when staged.
    """

    name: ClassVar[str] = "nixl"

    def __init__(
        self,
        *,
        backend: str = "UCX",
        num_threads: int = 0,
        tls: str | None = None,
        advertise_host: str | None = None,
        piece_bytes: int = 8 << 20,
    ) -> None:
        """Raise InputError if there is no NIXL, or no such backend in it; TransferError if it does not start."""
        if num_threads < 0:
            raise InputError(f"num_threads is {num_threads}; needs 0 or more")
        fabric = NixlFabric(backend=backend, num_threads=num_threads, tls=tls)
        super().__init__(fabric, advertise_host=advertise_host, piece_bytes=piece_bytes)
