"""One NIXL agent, with what it has registered and prepared; its failures are errors of pdtx."""

import ctypes
import itertools
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TypeVar

from pdtx.errors import PdtxError, PeerLost, PeerUnreachable, ProtocolError, TransferError
from pdtx.transports.base import Region
from pdtx.transports.nixl.batches import Batch, listed, strided, units_of
from pdtx.transports.nixl.library import Library
from pdtx.transports.nixl.messages import Place

Op = Literal["READ", "WRITE"]
Result = TypeVar("Result")

LOCAL = "NIXL_INIT_AGENT"
_MAX_LISTS = 64
_numbers = itertools.count()


class Request:
    """A transfer that has been posted."""

    def __init__(self, handle: object, nbytes: int, state: str) -> None:
        self.handle, self.nbytes, self.state = handle, nbytes, state


class Agent:
    """Safe to use from several threads: NIXL itself is not, so that one call at a time goes through.

    peer: who is at the other end, for messages. Raises InputError for a backend that is not there, or TransferError.
    """

    def __init__(self, library: Library, backend: str, num_threads: int, tls: str | None, peer: str) -> None:
        # Agents are known by their names, on both sides.
        self.name = f"pdtx-{os.getpid():x}-{next(_numbers):x}-{secrets.token_hex(4)}"
        self.peer = peer
        self._library, self._lock, self._registering = library, threading.Lock(), threading.Lock()
        self._agent: Any = None
        self._closed = False
        self._regions = dict[Place, tuple[Region, object]]()
        self._lists = OrderedDict[tuple[str, Place, int], Any]()
        self._open = set[Request]()
        self._start(backend, num_threads, tls)

    def _start(self, backend: str, num_threads: int, tls: str | None) -> None:
        reason = ""
        try:
            self._agent = self._library.agent(self.name, backend, num_threads, tls)
        except self._library.failures as failure:
            reason = _reason(failure)
        if reason:
            tls = tls or os.environ.get("UCX_TLS")
            chosen = f" with UCX_TLS={tls}" if tls and backend == "UCX" else ""
            raise TransferError(
                f"NIXL does not start its backend {backend}{chosen}: {reason}; standard error says more"
            )

    def _call(self, doing: str, call: Callable[[], Result]) -> Result:
        """Call NIXL, holding the lock. Raises PeerLost or TransferError."""
        error: PdtxError
        with self._lock:
            if self._closed:
                raise PeerLost(f"the NIXL connection to {self.peer} is closed")
            try:
                return call()
            except self._library.lost as failure:
                error = PeerLost(f"{self.peer} is gone: NIXL failed to {doing} ({_reason(failure)})")
            except self._library.failures as failure:
                error = TransferError(f"NIXL failed to {doing}: {_reason(failure)} (peer {self.peer})")
        # Out here, so that the error does not refer to the failure, and by its frames to the agent: that one has to
        # be gone after close().
        raise error

    # -- getting acquainted -------------------------------------------------------------------------------------------

    def meet(self, name: str, metadata: bytes) -> None:
        """Take what the peer's agent, called name, says of itself or of a region.

        Raises ProtocolError for what is nothing of that agent's, PeerUnreachable if there is no way to it.
        """
        met: object = None
        with self._lock:
            if self._closed:
                raise PeerLost(f"the NIXL connection to {self.peer} is closed")
            try:
                met = self._agent.add_remote_agent(metadata)
            except self._library.unreadable:
                pass
            except self._library.failures as failure:
                met = failure
        reason = _reason(met) if isinstance(met, Exception) else ""
        if reason:
            met = None  # see _call
            raise PeerUnreachable(f"NIXL finds no way to {self.peer}: {reason}")
        if met not in (name, name.encode()):
            raise ProtocolError(f"{self.peer} sent metadata that is not its own, or of another version of NIXL")

    # -- memory -------------------------------------------------------------------------------------------------------

    def register(self, region: Region) -> float:
        """Register a region, unless it or one that it lies in is; return the seconds that took."""
        place = Place.of(region)
        described = [(place.address, place.nbytes, place.device, "")]
        with self._registering:
            begun = time.perf_counter()
            if place not in self._regions:
                descriptors = next((kept for whole, kept in self._regions.values() if whole.contains(region)), None)
                if descriptors is None:
                    descriptors = self._call(
                        "register memory", lambda: self._agent.register_memory(described, mem_type=place.memory)
                    )
                # It keeps the region alive: its addresses cannot become something else's.
                self._regions[place] = region, descriptors
            return time.perf_counter() - begun

    def describe(self, region: Region, *, itself: bool = False) -> bytes:
        """Return what the peer needs to reach a region, which is registered; itself: and this agent, to begin with.

        Nothing about other regions is in it.
        """
        _, descriptors = self._regions[Place.of(region)]
        metadata: bytes = self._call(
            "describe a region", lambda: self._agent.get_partial_agent_metadata(descriptors, inc_conn_info=itself)
        )
        return metadata

    # -- requests -----------------------------------------------------------------------------------------------------

    def post(self, op: Op, here: Place, there: tuple[str, Place], batch: Batch, notice: bytes) -> Request:
        """Begin to move a batch between a region here and one of the named agent's, which then hears notice."""
        name, remote = there
        unit = batch.unit(here.nbytes, remote.nbytes)

        def make() -> object:
            if unit is None:
                sides = [
                    self._agent.get_xfer_descs(listed(place.address, offsets, batch.nbytes, place.device), place.memory)
                    for place, offsets in ((here, batch.local), (remote, batch.remote))
                ]
                return self._agent.initialize_xfer(op, *sides, name, notice)
            return self._agent.make_prepped_xfer(
                op,
                self._prepared(LOCAL, here, unit),
                units_of(batch.local, batch.nbytes, unit),
                self._prepared(name, remote, unit),
                units_of(batch.remote, batch.nbytes, unit),
                notice,
            )

        def make_known() -> Request:
            # Under the lock: close() must know every request that there is.
            request = Request(make(), int(batch.nbytes.sum()), "")
            self._open.add(request)
            return request

        request = self._call(f"prepare a {op}", make_known)
        try:
            request.state = self._call(f"begin a {op}", lambda: self._agent.transfer(request.handle))
        except BaseException:
            self.release(request)
            raise
        return request

    def _prepared(self, name: str, place: Place, unit: int) -> object:
        """Return a region as a prepared list of units; kept, since NIXL looks up the memory of a list once only."""
        known = name, place, unit
        if known not in self._lists:
            rows = strided(place.address, place.nbytes, place.device, unit)
            self._lists[known] = self._agent.prep_xfer_dlist(name, rows, mem_type=place.memory)
            if len(self._lists) > _MAX_LISTS:
                self._lists.popitem(last=False)[1].release()
        self._lists.move_to_end(known)
        return self._lists[known]

    def ended(self, request: Request) -> bool:
        """Whether a request has ended well; lets others go on meanwhile. Raises PeerLost or TransferError."""
        if request.state == self._library.in_progress:
            request.state = self._call("move bytes", lambda: self._agent.check_xfer_state(request.handle))
        if request.state not in (self._library.in_progress, self._library.done):
            raise TransferError(f"NIXL ended a request as {request.state} (peer {self.peer})")
        return request.state == self._library.done

    def release(self, request: Request) -> None:
        """Give a request back; one under way is cancelled. The agent's end takes along what cannot be."""

        def give_back() -> None:
            handle: Any = request.handle
            if handle is not None:
                handle.release()
                self._open.discard(request)
                request.handle = None

        if request.handle is not None:
            self._call("release a request", give_back)

    # -- notices ------------------------------------------------------------------------------------------------------

    def notify(self, name: str, notice: bytes) -> None:
        """Tell the named agent something, after all that was moved there before."""
        self._call("send a notification", lambda: self._agent.send_notif(name, notice))

    def notices(self, name: str) -> list[bytes]:
        """Return what the named agent has told since the last time; lets its operations go on."""
        heard: dict[str, list[bytes]] = self._call("make progress", lambda: self._agent.get_new_notifs())
        return heard.get(name, []) if heard else []

    def rest(self) -> None:
        """Never call the agent again, nor destroy it: without progress made here nothing comes over a socket.

        UCX below it crashes now and then if it is destroyed while what it has to answer to a stopped peer is under way.
        """
        with self._lock:
            self._closed = True
            agent, self._agent = self._agent, None
        # Not in any list: those are emptied when the process ends, and the agent destroyed after all.
        for kept in (agent, *self._lists.values(), *(described for _, described in self._regions.values())):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        self._library.protocols.forget(self.name)

    def close(self) -> None:
        """Destroy the agent: no peer can reach memory through it any more, as far as that needs this process.

        Takes as long as the kernel does; other threads run meanwhile, see ending.
        """
        with self._lock:
            self._closed = True
            agent, self._agent = self._agent, None
            for request in self._open:
                _abandon(request.handle)
            self._open.clear()
            self._lists.clear()
        if agent is not None:
            self._library.ender.end(agent)
        del agent  # where that has not ended it, this does
        # Not before: memory that is still registered must not become something else's.
        self._regions.clear()
        self._library.protocols.forget(self.name)


def _abandon(handle: Any) -> None:  # noqa: ANN401
    """Keep a request that could not be cancelled from being released once its agent is gone."""
    with suppress(AttributeError):
        handle._released = True


def _reason(error: Exception) -> str:
    """Return NIXL's words for a failure."""
    return str(error).removeprefix("NIXL_ERR_").replace("_", " ").lower() or type(error).__name__
