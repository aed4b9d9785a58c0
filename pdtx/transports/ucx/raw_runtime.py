"""UCX's objects made and ended by pdtx itself, on any libucp."""

import time

from pdtx.transports.ucx.libucp import Ucp
from pdtx.transports.ucx.runtime import Context, Endpoint, Runtime, Worker
from pdtx.transports.ucx.status import IN_PROGRESS
from pdtx.transports.ucx.structs import EndpointParams, ErrorHandler

_CLOSE_S = 1.0


class RawRuntime(Runtime):
    """See Runtime."""

    name = "raw"

    def __init__(self, ucp: Ucp) -> None:
        self.ucp = ucp

    def context(self) -> Context:
        """Return a new context, see Runtime."""
        return RawContext(self.ucp)


class RawContext(Context):
    """See Context."""

    def __init__(self, ucp: Ucp) -> None:
        super().__init__()
        self._ucp, self.handle = ucp, ucp.create_context()

    def worker(self) -> Worker:
        """Return a new worker, see Context."""
        with self.lock:
            return RawWorker(self._ucp, self)

    def close(self) -> None:
        """Destroy it, see Context."""
        if self.handle:
            self._ucp.destroy_context(self.handle)
            self.handle = 0


class RawWorker(Worker):
    """See Worker."""

    def __init__(self, ucp: Ucp, context: Context) -> None:
        self._ucp, self._context = ucp, context
        self.handle = ucp.create_worker(context.handle)
        self.address = ucp.worker_address(self.handle)
        self._endpoints = list[RawEndpoint]()

    def connect(self, address: bytes) -> Endpoint:
        """Return an endpoint, see Worker."""
        endpoint = RawEndpoint(self._ucp, self, address)
        # UCX may call its error handler as long as the worker is there.
        self._endpoints.append(endpoint)
        return endpoint

    def close(self) -> None:
        """Destroy it, see Worker."""
        if self.handle:
            with self._context.lock:
                self._ucp.destroy_worker(self.handle)
            self.handle = 0
            self._endpoints.clear()


class RawEndpoint(Endpoint):
    """See Endpoint."""

    def __init__(self, ucp: Ucp, worker: Worker, address: bytes) -> None:
        self._ucp, self._worker = ucp, worker
        self._params = EndpointParams(
            field_mask=EndpointParams.ADDRESS | EndpointParams.ERROR_MODE | EndpointParams.ERROR_HANDLER,
            address=address,
            error_mode=EndpointParams.PEER,
            error_handler=ErrorHandler(self._broke),
        )
        self.handle = ucp.create_endpoint(worker.handle, self._params)

    def _broke(self, argument: object, endpoint: object, status: int) -> None:
        self.status = status

    def close(self) -> None:
        """Close by force, see Endpoint."""
        if not self.handle:
            return
        request, self.handle = self._ucp.close_endpoint(self.handle), 0
        limit = time.monotonic() + _CLOSE_S
        while request and self._ucp.request_status(request) == IN_PROGRESS and time.monotonic() < limit:
            self._ucp.progress(self._worker.handle)
        if request:
            self._ucp.free_request(request)
