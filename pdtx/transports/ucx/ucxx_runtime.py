"""UCX's objects made and ended by ucxx (packages ucxx-cu12 and ucxx-cu13, or conda's)."""

import sys
from importlib import import_module
from types import ModuleType

from pdtx.errors import InputError
from pdtx.transports.ucx import library
from pdtx.transports.ucx.environment import set_default, set_value
from pdtx.transports.ucx.library import loaded_by
from pdtx.transports.ucx.libucp import Ucp
from pdtx.transports.ucx.runtime import Context, Endpoint, Runtime, Worker
from pdtx.transports.ucx.status import UcsError

_PREFER_SYSTEM = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"


class UcxxRuntime(Runtime):
    """See Runtime. choice: None, "wheel" or "system"; ucxx finds its libucp itself."""

    name = "ucxx"

    def __init__(self, choice: str | None) -> None:
        """Raise InputError if ucxx is not there, or comes with another library."""
        if choice not in (None, library.WHEEL, library.SYSTEM):
            raise InputError(f"ucxx finds its UCX itself, on wheel or system; use runtime raw for {choice}")
        self._api = _import(choice)
        self.ucp = loaded_by("ucxx", choice)
        self.label = f"ucxx {_short(import_module('ucxx').__version__)}"

    def context(self) -> Context:
        """Return a new context, see Runtime."""
        return UcxxContext(self._api, self.ucp)


def _import(choice: str | None) -> ModuleType:
    """Import ucxx's lower layer, with the library that was chosen."""
    if choice is not None and "ucxx" not in sys.modules:
        set_value(_PREFER_SYSTEM, "true" if choice == library.SYSTEM else "false")
    # ucxx sets it too, but after it has loaded UCX, which then does not read it any more and warns of it.
    set_default("UCX_MEMTYPE_CACHE", "n")
    try:
        import_module("ucxx")
        return import_module("ucxx._lib.libucxx")
    except ImportError as error:
        raise InputError(f"ucxx does not load: {error}; install ucxx-cu12 or ucxx-cu13, or use runtime raw") from None


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _translated(ucp: Ucp, error: Exception, doing: str) -> UcsError:
    """A failure of ucxx as one of UCX."""
    return ucp.error(doing, ucp.status_said(str(error)))


class UcxxContext(Context):
    """See Context."""

    def __init__(self, api: ModuleType, ucp: Ucp) -> None:
        super().__init__()
        self.api, self.ucp = api, ucp
        try:
            self.own = api.UCXContext(feature_flags=(api.Feature.RMA, api.Feature.WAKEUP))
        except api.UCXError as error:
            raise _translated(ucp, error, "start") from None
        self.handle = self.own.handle

    def worker(self) -> Worker:
        """Return a new worker, see Context."""
        with self.lock:
            return UcxxWorker(self)

    def close(self) -> None:
        """Destroy it, see Context."""
        self.own, self.handle = None, 0


class UcxxWorker(Worker):
    """See Worker. ucxx destroys it when nothing refers to it any more."""

    def __init__(self, context: UcxxContext) -> None:
        self.api, self.ucp, self._context = context.api, context.ucp, context
        try:
            self.own = self.api.UCXWorker(context.own)
            self.address = bytes(self.own.address)
        except self.api.UCXError as error:
            raise _translated(self.ucp, error, "create a worker") from None
        self.handle = self.own.handle
        self._endpoints = list[UcxxEndpoint]()

    def connect(self, address: bytes) -> Endpoint:
        """Return an endpoint, see Worker."""
        endpoint = UcxxEndpoint(self, address)
        self._endpoints.append(endpoint)
        return endpoint

    def close(self) -> None:
        """Destroy it, see Worker."""
        for endpoint in self._endpoints:
            endpoint.close()
        self._endpoints.clear()
        with self._context.lock:
            self.own, self.handle = None, 0


class UcxxEndpoint(Endpoint):
    """See Endpoint."""

    def __init__(self, worker: UcxxWorker, address: bytes) -> None:
        api, self._ucp = worker.api, worker.ucp
        try:
            there = api.UCXAddress.create_from_buffer(address)
            self._own = api.UCXEndpoint.create_from_worker_address(worker.own, there, True)
        except api.UCXError as error:
            raise _translated(worker.ucp, error, "connect") from None
        self._own.set_close_callback(self._closed)
        self.handle = self._own.handle

    def _closed(self) -> None:
        """Note that UCX has given the endpoint up; called from within progress."""
        try:
            self._own.raise_on_error()
        except Exception as error:  # noqa: BLE001 - a callback has nobody to raise to
            self.status = self._ucp.status_said(str(error))

    def close(self) -> None:
        """Close by force, see Endpoint."""
        if self._own is not None:
            self._own.remove_close_callback()
            self._own.close_blocking()
            self._own, self.handle = None, 0
