"""UCX's objects made and ended by ucx-py (module ucp), ucxx's predecessor: conda and source builds only.

Its endpoints flush when they are closed, for as long as that takes; so those are pdtx's own. Written against the API
of ucx-py 0.45, which the registry does not have: tested with a stand-in only.
"""

from importlib import import_module
from types import ModuleType

from pdtx.errors import InputError
from pdtx.transports.ucx.library import SYSTEM, WHEEL, loaded_by
from pdtx.transports.ucx.libucp import Ucp
from pdtx.transports.ucx.raw_runtime import RawEndpoint
from pdtx.transports.ucx.runtime import Context, Endpoint, Runtime, Worker


class UcxPyRuntime(Runtime):
    """See Runtime. choice: None, "wheel" or "system"; ucx-py finds its libucp itself."""

    name = "ucx-py"

    def __init__(self, choice: str | None) -> None:
        """Raise InputError if ucx-py is not there, or comes with another library."""
        if choice not in (None, WHEEL, SYSTEM):
            raise InputError(f"ucx-py finds its UCX itself; use runtime raw for {choice}")
        try:
            package = import_module("ucp")
            self._api = import_module("ucp._libs.ucx_api")
        except ImportError as error:
            raise InputError(f"ucx-py does not load: {error}; install ucxx-cu12 instead, or use runtime raw") from None
        self.ucp = loaded_by("ucx-py", choice)
        self.label = f"ucx-py {package.__version__}"

    def context(self) -> Context:
        """Return a new context, see Runtime."""
        return UcxPyContext(self._api, self.ucp)


class UcxPyContext(Context):
    """See Context."""

    def __init__(self, api: ModuleType, ucp: Ucp) -> None:
        super().__init__()
        self.api, self.ucp = api, ucp
        self.own = api.UCXContext({}, feature_flags=(api.Feature.RMA, api.Feature.WAKEUP))
        self.handle = int(self.own.handle)

    def worker(self) -> Worker:
        """Return a new worker, see Context."""
        with self.lock:
            return UcxPyWorker(self)

    def close(self) -> None:
        """Destroy it, see Context."""
        if self.own is not None:
            self.own.close()
            self.own, self.handle = None, 0


class UcxPyWorker(Worker):
    """See Worker."""

    def __init__(self, context: UcxPyContext) -> None:
        self._ucp, self._context = context.ucp, context
        self._own = context.api.UCXWorker(context.own)
        self.handle = int(self._own.handle)
        self.address = bytes(self._own.get_address())
        self._endpoints = list[RawEndpoint]()

    def connect(self, address: bytes) -> Endpoint:
        """Return an endpoint, see Worker."""
        endpoint = RawEndpoint(self._ucp, self, address)
        self._endpoints.append(endpoint)
        return endpoint

    def close(self) -> None:
        """Destroy it, see Worker."""
        if self._own is not None:
            with self._context.lock:
                self._own.close()
            self._own, self.handle = None, 0
            self._endpoints.clear()
