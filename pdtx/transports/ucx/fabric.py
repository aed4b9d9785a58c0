"""The UCX engine: one context for each mover, memory registered once, and a worker of its own for every connection."""

import logging
import threading
from typing import ClassVar

import torch

from pdtx.errors import TransferError
from pdtx.transports.base import Region, Registration
from pdtx.transports.onesided.fabric import Fabric, Link
from pdtx.transports.ucx.environment import setting
from pdtx.transports.ucx.lanes import lanes_of_context
from pdtx.transports.ucx.link import Engine, Remote, UcxLink
from pdtx.transports.ucx.memory import Memory
from pdtx.transports.ucx.runtime import make_runtime
from pdtx.transports.ucx.status import UcsError

logger = logging.getLogger(__name__)

_SCRATCH_BYTES = 64 << 10


class UcxFabric(Fabric[Remote]):
    """See Fabric. runtime: one of RUNTIMES. library: wheel, system, nixl or a path; None leaves it to the runtime."""

    pulls: ClassVar[bool] = False

    def __init__(self, *, runtime: str = "auto", library: str | None = None) -> None:
        """Raise InputError if that UCX cannot be had, TransferError if it does not start."""
        loaded = make_runtime(runtime, library)
        try:
            context = loaded.context()
        except UcsError as error:
            tls = setting("UCX_TLS", "all transports")
            devices = setting("UCX_NET_DEVICES", "all devices")
            raise TransferError(f"{loaded} does not start with {tls} and {devices}: {error.reason}") from None
        memory = Memory(loaded.ucp, context)
        lanes = lanes_of_context(loaded.ucp.context_info(context.handle))
        scratch = memory.register(Region(torch.zeros(_SCRATCH_BYTES, dtype=torch.uint8)))
        self._engine = Engine(loaded, context, memory, lanes, scratch)
        self._lock = threading.Lock()
        self._links = set[UcxLink]()
        self._retired = 0
        self._closed = False

    def __str__(self) -> str:
        return str(self._engine.runtime)

    def register(self, region: Region) -> Registration | None:
        """Register a region, see Fabric."""
        return self._engine.memory.register(region).registration

    def link(self, control: int) -> Link[Remote]:
        """Return a new connection, see Fabric."""
        with self._lock:
            if self._closed:
                raise TransferError("this UCX engine is closed")
            link = UcxLink(self._engine, control, self._forget, self._retire)
            self._links.add(link)
        return link

    def _forget(self, link: UcxLink) -> None:
        with self._lock:
            self._links.discard(link)
            last = self._closed and not self._links
        if last:
            self._give_back()

    def _retire(self, link: UcxLink) -> None:
        """Forget a link whose worker will never be destroyed."""
        with self._lock:
            self._links.discard(link)
            self._retired += 1

    def close(self) -> None:
        """Give everything back, see Fabric."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            open_links = len(self._links)
        if open_links:
            # To destroy what a thread may still be using would bring the process down.
            logger.warning(
                "%d connections of %s are still open: its memory stays registered till then", open_links, self
            )
        else:
            self._give_back()

    def _give_back(self) -> None:
        """Give back what the links had in common; the last of them is gone, and there will be no more."""
        if self._retired:
            logger.info("%d workers of peers that were cut off stay, and with them what %s holds", self._retired, self)
            return
        self._engine.memory.close()
        self._engine.context.close()
