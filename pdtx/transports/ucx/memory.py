"""Memory that is registered with UCX: each region once, until the end of the mover."""

import threading
import time
from dataclasses import dataclass

from pdtx.errors import TransferError
from pdtx.transports.base import Region, Registration
from pdtx.transports.ucx.libucp import Ucp
from pdtx.transports.ucx.messages import Key
from pdtx.transports.ucx.runtime import Context
from pdtx.transports.ucx.status import UcsError


@dataclass(frozen=True)
class Registered:
    """A region that UCX can reach. It keeps the region alive: its addresses cannot become something else's.

    within: whether handle and registration are those of a larger region.
    """

    region: Region
    handle: int
    key: Key
    registration: Registration
    within: bool = False


class Memory:
    """What is registered in a context. Safe to use from several threads."""

    def __init__(self, ucp: Ucp, context: Context) -> None:
        self._ucp, self._context = ucp, context
        self._lock = threading.Lock()
        self._registered = dict[tuple[int, int], Registered]()
        self._closed = False

    def register(self, region: Region) -> Registered:
        """Register a region, unless it or one that it lies in is. Raises TransferError."""
        place = region.address, region.nbytes
        with self._lock:
            if self._closed:
                raise TransferError("this UCX engine is closed")
            if place not in self._registered:
                self._registered[place] = self._within(region) or self._register(region)
            return self._registered[place]

    def _within(self, region: Region) -> Registered | None:
        """Return what reaches a region that lies in a registered one."""
        whole = next((known for known in self._registered.values() if known.region.contains(region)), None)
        if whole is None or region.nbytes == 0:
            return None
        key = Key(region.address, region.nbytes, whole.key.packed)
        return Registered(region, whole.handle, key, whole.registration, within=True)

    def _register(self, region: Region) -> Registered:
        if region.nbytes == 0:
            raise TransferError("UCX cannot register an empty region")
        begun = time.perf_counter()
        with self._context.lock:
            try:
                handle = self._ucp.map_memory(self._context.handle, region.address, region.nbytes)
            except UcsError as error:
                raise TransferError(f"{error}; see ulimit -l and the memory that is free") from None
            packed = self._ucp.pack_key(self._context.handle, handle)
        registration = Registration(region.nbytes, time.perf_counter() - begun)
        return Registered(region, handle, Key(region.address, region.nbytes, packed), registration)

    def close(self) -> None:
        """Give all of it back; nothing uses it any more. Idempotent."""
        with self._lock, self._context.lock:
            self._closed = True
            for registered in self._registered.values():
                if registered.within:
                    continue
                self._ucp.unmap_memory(self._context.handle, registered.handle)
            self._registered.clear()
