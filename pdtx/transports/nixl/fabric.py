"""The NIXL engine: an agent for each connection, with every region registered that the mover knows."""

import logging
import threading
from typing import ClassVar

import torch

from pdtx.errors import PdtxError, TransferError
from pdtx.transports.base import Region, Registration
from pdtx.transports.nixl.agent import Agent
from pdtx.transports.nixl.library import BUNDLED, Library, load
from pdtx.transports.nixl.link import Engine, NixlLink
from pdtx.transports.nixl.messages import Place
from pdtx.transports.onesided.fabric import Fabric, Link
from pdtx.transports.ucx import library as ucx_library
from pdtx.transports.ucx.host import peer_name
from pdtx.transports.ucx.lanes import Lane, lanes_of_context

logger = logging.getLogger(__name__)

_SCRATCH_BYTES = 64 << 10
_NOBODY = "nobody yet"


class NixlFabric(Fabric[Place]):
    """See Fabric. num_threads: of NIXL's backend, beside the caller's. tls: UCX_TLS for it; None leaves it alone."""

    pulls: ClassVar[bool] = False

    def __init__(self, *, backend: str = "UCX", num_threads: int = 0, tls: str | None = None) -> None:
        """Raise InputError if there is no NIXL, or no such backend in it; TransferError if it does not start."""
        self._library, self._options = load(), (backend, num_threads, tls)
        self._lock = threading.Lock()
        self._regions = dict[Place, tuple[Region, Registration]]()
        self._links = set[NixlLink]()
        self._closed = False
        scratch = Region(torch.zeros(_SCRATCH_BYTES, dtype=torch.uint8))
        # The first agent shows that NIXL works here; it then waits for the first connection.
        self._spare: Agent | None = self._make(_NOBODY)
        versions, lanes = _under(self._library, tls) if backend == "UCX" else (str(self._library), ())
        self._engine = Engine(self._library, backend, versions, lanes, scratch)
        self._spare.register(scratch)

    def _make(self, peer: str) -> Agent:
        return Agent(self._library, *self._options, peer)

    def register(self, region: Region) -> Registration | None:
        """Register a region, see Fabric.

        With the agent that waits, which tells what it costs; those of open connections do it when they need it.
        """
        place = Place.of(region)
        with self._lock:
            self._check_open()
            if place not in self._regions:
                if region.nbytes == 0:
                    raise TransferError("NIXL cannot register an empty region")
                within = next((kept for whole, kept in self._regions.values() if whole.contains(region)), None)
                if within is not None:
                    return within
                seconds = self._ready_spare().register(region)
                self._regions[place] = region, Registration(region.nbytes, seconds)
            return self._regions[place][1]

    def link(self, control: int) -> Link[Place]:
        """Return a new connection, see Fabric."""
        with self._lock:
            self._check_open()
            agent, self._spare = self._ready_spare(), None
            agent.peer = peer_name(control)
            link = NixlLink(self._engine, agent, self._forget)
            self._links.add(link)
        return link

    def _ready_spare(self) -> Agent:
        """Return an agent without a connection that has registered everything."""
        if self._spare is None:
            self._spare = self._make(_NOBODY)
            for region in (self._engine.scratch, *(region for region, _ in self._regions.values())):
                self._spare.register(region)
        return self._spare

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError("this NIXL engine is closed")

    def _forget(self, link: NixlLink) -> None:
        with self._lock:
            self._links.discard(link)

    def close(self) -> None:
        """Give everything back, see Fabric."""
        with self._lock:
            self._closed = True
            spare, self._spare = self._spare, None
            self._regions.clear()
            open_links = len(self._links)
        if spare is not None:
            spare.close()
        if open_links:
            logger.warning("%d connections of NIXL are still open: their memory stays registered", open_links)


def _under(library: Library, tls: str | None) -> tuple[str, tuple[Lane, ...]]:
    """Return the versions of NIXL and of the UCX that it has loaded, and what that one may use here."""
    paths = [path for path in ucx_library.mapped() if path.name.startswith(BUNDLED)]
    if not paths:
        return str(library), ()
    try:
        ucp = ucx_library.load(str(paths[0]))
        with library.settings(tls):
            context = ucp.create_context()
        try:
            return f"{library}, UCX {ucp.version_text}", lanes_of_context(ucp.context_info(context))
        finally:
            ucp.destroy_context(context)
    except PdtxError as error:
        logger.warning("the transports of NIXL's UCX remain unknown: %s", error)
        return str(library), ()
