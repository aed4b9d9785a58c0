"""Shared memory, private memory and CUDA memory of one host as an engine that pulls."""

import threading
from typing import ClassVar

from pdtx.errors import TransferError
from pdtx.transports.base import Region, Registration
from pdtx.transports.onesided.fabric import Fabric
from pdtx.transports.shm.copying import Copier, CopyBy
from pdtx.transports.shm.link import ShmLink, way_to
from pdtx.transports.shm.peer import Peer
from pdtx.transports.shm.remote import Remote


class ShmFabric(Fabric[Remote]):
    """See Fabric, and Copier for copy_by and threads."""

    pulls: ClassVar[bool] = True

    def __init__(self, copy_by: CopyBy = "auto", threads: int = 0) -> None:
        """Raise InputError for a way to copy that is not to be had here."""
        self._copier = Copier(copy_by, threads)
        self._lock = threading.Lock()
        self._ways = set[str]()

    def register(self, region: Region) -> Registration | None:
        """See Fabric; there is nothing to do but to remember how the region will be reached."""
        with self._lock:
            self._ways.add(way_to(region))
        return None

    def link(self, control: int) -> ShmLink:
        """See Fabric."""
        try:
            peer = Peer(control)
        except OSError as error:
            raise TransferError(f"the peer cannot be identified: {error.strerror or error}") from None
        with self._lock:
            return ShmLink(peer, self._copier, frozenset(self._ways))

    def close(self) -> None:
        """See Fabric; links hold all there is."""
