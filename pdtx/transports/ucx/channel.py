"""A worker at work: the operations of one connection, each with its deadline, and an end to all of them."""

import time
from typing import NamedTuple

from pdtx.errors import DeadlineExceeded, PdtxError, PeerLost, TransferAborted
from pdtx.native import library as native_library
from pdtx.transports.onesided.fabric import Progress
from pdtx.transports.ucx.libucp import Ucp
from pdtx.transports.ucx.posting import Batch, Poster, Transfer, batches, make_poster
from pdtx.transports.ucx.pump import Pump
from pdtx.transports.ucx.runtime import Endpoint, Worker
from pdtx.transports.ucx.status import IN_PROGRESS, OK, error_of, pointer_error
from pdtx.transports.ucx.structs import RequestParams

PUT, GET = "ucp_put_nbx", "ucp_get_nbx"

WINDOW = 1024
"""Requests that may be under way when the next batch is posted."""

_TICK_S = 0.02
_SETTLE_S = 1.0
_QUIET_S = 10.0
_IDLE_ROUNDS = 16


class Wait(NamedTuple):
    """What is waited for, from when, until when, and whether it has been given up."""

    phase: str
    begun: float
    deadline: float
    progress: Progress | None = None


class Channel:
    """The initiator's side of a connection: used by one thread at a time. After an error nothing works any more."""

    def __init__(self, ucp: Ucp, worker: Worker, pump: Pump, peer: str) -> None:
        self._ucp, self._worker, self._pump, self._peer = ucp, worker, pump, peer
        self._endpoint: Endpoint | None = None
        self._broken: PdtxError | None = None
        self._orphans = list[int]()

    def connect(self, address: bytes) -> None:
        """Make the endpoint. Nothing is known of the peer before the first operation. Raises UcsError."""
        self._endpoint = self._worker.connect(address)

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint. Raises PeerLost if it is none, or broken."""
        if self._broken is not None:
            raise PeerLost(f"the UCX connection to {self._peer} has ended: {self._broken}")
        if self._endpoint is None:
            raise PeerLost(f"there is no UCX connection to {self._peer}")
        return self._endpoint

    def move(self, operation: str, transfer: Transfer, runs: Batch, wait: Wait) -> None:
        """Put or get runs; returns when the bytes lie where they should.

        Raises DeadlineExceeded, TransferAborted, PeerLost or TransferError, and the connection is at its end.
        """
        poster = make_poster(self._ucp, operation, native_library())
        try:
            for batch in batches(*runs):
                poster.post(transfer, batch)
                if wait.progress is not None:
                    wait.progress.moved(int(batch.nbytes.sum()))
                self._ucp.progress(self._worker.handle)
                poster.reap()
                self._look(poster, wait)
                self._drain(poster, WINDOW, wait)
            self._drain(poster, 0, wait)
            if operation == PUT:
                self.flush(wait)
        except BaseException as error:
            self.abandon(error)
            self._settle(poster)
            raise

    def describe(self, operation: str, transfer: Transfer, nbytes: int, wait: Wait) -> str:
        """Carry out one operation of nbytes and return UCX's description of how. Raises as move(), or UcsError."""
        function = self._ucp.put if operation == PUT else self._ucp.get
        request = function(self.endpoint.handle, transfer.local, nbytes, transfer.remote, transfer.key, transfer.params)
        if not request:
            return ""
        if error := pointer_error(request):
            raise self._ucp.error("try the connection", error)
        text = self._ucp.protocol(request)
        self.finish(request, wait)
        return text

    def flush(self, wait: Wait) -> None:
        """Wait for the peer to have all that was put. Raises as move()."""
        if request := self._ucp.flush(self.endpoint.handle):
            self.finish(request, wait)

    def finish(self, request: int, wait: Wait) -> None:
        """Wait for a request to end, and free it. Raises as move()."""
        self._orphans.append(request)
        while not self._pump.run(self._next_look(wait), request=request):
            self._look(None, wait)
        self._orphans.remove(request)
        status = self._ucp.request_status(request)
        self._ucp.free_request(request)
        self._check(status, wait)

    def _drain(self, poster: Poster, limit: int, wait: Wait) -> None:
        """Wait until at most limit operations are under way."""
        while poster.pending > limit:
            self._pump.run(self._next_look(wait), request=poster.oldest)
            poster.reap()
            self._look(poster, wait)

    def _next_look(self, wait: Wait) -> float:
        return min(wait.deadline, time.monotonic() + _TICK_S)

    def _look(self, poster: Poster | None, wait: Wait) -> None:
        """Raise if there is a reason not to go on."""
        self._check((poster.error if poster is not None else OK) or self.endpoint.status, wait)
        if wait.progress is not None and wait.progress.stopped:
            raise TransferAborted(f"{wait.phase} of {self._peer} was given up")
        now = time.monotonic()
        if now >= wait.deadline:
            raise DeadlineExceeded(wait.phase, self._peer, round(now - wait.begun, 3))

    def _check(self, status: int, wait: Wait) -> None:
        """Raise what a status means. What broke the endpoint says more than what that did to a request."""
        if status != OK:
            raise error_of(self._ucp.error(f"finish {wait.phase}", self.endpoint.status or status), self._peer)

    def abandon(self, error: BaseException) -> None:
        """End the connection because of error: UCX does not touch any memory for it from here on."""
        if self._broken is None:
            self._broken = error if isinstance(error, PdtxError) else PeerLost(f"{type(error).__name__} {error}")
        if self._endpoint is not None:
            self._endpoint.close()

    def _settle(self, poster: Poster) -> None:
        """Take back the requests that closing the endpoint has ended."""
        limit = time.monotonic() + _SETTLE_S
        while (poster.pending or self._orphans) and time.monotonic() < limit:
            self._ucp.progress(self._worker.handle)
            poster.reap()
            self._free_orphans()
        self._quieten()

    def _quieten(self) -> None:
        """Let what a closed endpoint has left behind come to its end.

        A copy within the host (cma) that UCX has begun goes on while there is progress, though its request has ended.
        Its bytes must lie where they should before anybody is told that nothing moves any more; and a worker that is
        destroyed before brings the whole process down.
        """
        limit, idle = time.monotonic() + _QUIET_S, 0
        while idle < _IDLE_ROUNDS and time.monotonic() < limit:
            idle = 0 if self._ucp.progress(self._worker.handle) else idle + 1

    def _free_orphans(self) -> None:
        for request in list(self._orphans):
            if self._ucp.request_status(request) != IN_PROGRESS:
                self._ucp.free_request(request)
                self._orphans.remove(request)

    def close(self) -> None:
        """Close the endpoint; the worker is still there. Idempotent."""
        self.abandon(PeerLost("it was closed"))
        self._quieten()
        self._free_orphans()


def params_for(memory_handle: int, *, at_once: bool = True) -> RequestParams:
    """Return the parameters of operations on registered memory. at_once: False makes a request of each of them."""
    mask = RequestParams.MEMORY_HANDLE | (0 if at_once else RequestParams.NOT_AT_ONCE)
    return RequestParams(field_mask=mask, memory_handle=memory_handle)
