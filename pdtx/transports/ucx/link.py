"""One connection over UCX: a worker on either side, and an endpoint on the side that moves the bytes."""

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdtx.errors import DeadlineExceeded, PdtxError, PeerUnreachable, ProtocolError
from pdtx.native import library as native_library
from pdtx.plan import Runs
from pdtx.transports.base import Path, PathKind, Region
from pdtx.transports.onesided.fabric import Link, Progress, Shared
from pdtx.transports.ucx.channel import GET, PUT, Channel, Wait, params_for
from pdtx.transports.ucx.environment import setting
from pdtx.transports.ucx.host import host_id, peer_name
from pdtx.transports.ucx.lanes import DIRECT, Lane, Route, route_of_endpoint, route_of_request
from pdtx.transports.ucx.memory import Memory, Registered
from pdtx.transports.ucx.messages import (
    VERSION,
    Greeting,
    Key,
    pack_greeting,
    pack_key,
    padded_address,
    unpack_greeting,
    unpack_key,
)
from pdtx.transports.ucx.posting import Batch, Transfer
from pdtx.transports.ucx.pump import make_pump
from pdtx.transports.ucx.runtime import Context, Runtime, keep_for_ever
from pdtx.transports.ucx.status import UNREACHABLE, UcsError

_PROBE_BYTES = 32 << 10


@dataclass(frozen=True)
class Remote:
    """A peer's region, reachable from here: UCX's key for the endpoint, and the address of the first byte there."""

    key: int
    address: int


@dataclass(frozen=True)
class Engine:
    """What all connections of a fabric have in common. lanes: what UCX may use here. scratch: memory to try it with."""

    runtime: Runtime
    context: Context
    memory: Memory
    lanes: tuple[Lane, ...]
    scratch: Registered

    @property
    def kinds(self) -> list[PathKind]:
        """The kinds of the lanes."""
        return sorted({lane.kind for lane in self.lanes} - {"other"})


class UcxLink(Link[Remote]):
    """See Link. The side that asks for path, or moves anything, connects to the other by then. control: see Fabric."""

    def __init__(
        self,
        engine: Engine,
        control: int,
        forget: Callable[["UcxLink"], None],
        retire: Callable[["UcxLink"], None],
    ) -> None:
        """Raise UcsError if UCX cannot make a worker.

        forget: called once, when nothing of the link is left; or retire, where its worker stays for ever.
        """
        self._engine, self._ucp, self._forget, self._retire = engine, engine.runtime.ucp, forget, retire
        self._peer = peer_name(control)
        self._worker = engine.context.worker()
        self._pump = make_pump(self._ucp, self._worker.handle, native_library())
        self._channel = Channel(self._ucp, self._worker, self._pump, self._peer)
        self._greeting: Greeting | None = None
        self._deadline = 0.0
        self._path: Path | None = None
        self._keys = list[int]()
        self._gone = False
        self._lock = threading.Lock()  # over _gone: interrupt() signals a worker that is there

    # -- getting acquainted -------------------------------------------------------------------------------------------

    def greeting(self) -> bytes:
        """Return what the peer needs, see Link."""
        engine = self._engine
        return pack_greeting(
            Greeting(VERSION, self._worker.address, host_id(), engine.kinds, pack_key(engine.scratch.key))
        )

    def join(self, greeting: bytes, deadline: float) -> None:
        """Note the peer's greeting, see Link. Which of the two connects is known when path is asked for."""
        self._greeting, self._deadline = unpack_greeting(greeting), deadline

    @property
    def path(self) -> Path:
        """What carries the payload, see Link. Connects when it is asked for first, until the deadline of join().

        Raises PeerUnreachable, ProtocolError or DeadlineExceeded.
        """
        if self._path is None:
            self._path = self._connect(max(self._deadline, time.monotonic() + 0.001))
        return self._path

    def _connect(self, deadline: float) -> Path:
        greeting = self._greeting
        if greeting is None:
            raise ProtocolError(f"the UCX connection to {self._peer} has not been joined")
        wait = Wait("the UCX connection", time.monotonic(), deadline)
        try:
            self._channel.connect(padded_address(greeting))
            put, get = self._explore(greeting, wait)
        except UcsError as error:
            self._channel.abandon(error)
            raise self._unreachable(error) from None
        except (DeadlineExceeded, ProtocolError) as error:
            self._channel.abandon(error)
            raise
        except PdtxError as error:
            self._channel.abandon(error)
            raise PeerUnreachable(f"UCX cannot reach {self._peer}: {error}") from None
        detail = put.detail if put.emulated or not get.emulated else f"{put.detail}, gets emulated"
        return Path(put.kind, detail, put.emulated, str(self._engine.runtime), self._possible(greeting))

    def _unreachable(self, error: UcsError) -> PeerUnreachable:
        text = f"UCX cannot reach {self._peer} with {setting('UCX_TLS', 'all transports')}: {error.reason}"
        if error.status == UNREACHABLE:
            text += "; noticing that a peer is gone needs a network transport on both sides, such as tcp, beside others"
        return PeerUnreachable(text)

    def _explore(self, greeting: Greeting, wait: Wait) -> tuple[Route, Route]:
        """Try a put and a get on scratch memory and return how UCX carried them out."""
        scratch = self._engine.scratch
        remote = self._unpack(unpack_key(greeting.scratch, scratch.key.nbytes))
        params = params_for(scratch.handle, at_once=False)
        transfer = Transfer(
            self._channel.endpoint.handle, remote.key, ctypes.addressof(params), scratch.key.address, remote.address
        )
        nbytes = min(_PROBE_BYTES, scratch.key.nbytes)
        # The first one sees the connection made: only after it does UCX know the peer's side of every lane.
        self._channel.describe(PUT, transfer, nbytes, wait)
        self._channel.flush(wait)
        put, get = (self._channel.describe(operation, transfer, nbytes, wait) for operation in (PUT, GET))
        self._channel.flush(wait)
        lanes = route_of_endpoint(self._ucp.endpoint_info(self._channel.endpoint.handle))
        return route_of_request(put) or lanes, route_of_request(get) or lanes

    def _possible(self, greeting: Greeting) -> tuple[PathKind, ...]:
        shared = [kind for kind in self._engine.kinds if kind in greeting.kinds]
        return tuple(kind for kind in shared if kind != "shm" or greeting.host == host_id())

    # -- memory -------------------------------------------------------------------------------------------------------

    def share(self, region: Region) -> Shared:
        """Register a region, see Link."""
        return Shared(pack_key(self._engine.memory.register(region).key))

    def open(self, shared: Shared, nbytes: int) -> Remote:
        """Unpack the key of a peer's region, see Link."""
        key = unpack_key(shared.key, nbytes)
        _ = self.path  # keys are for an endpoint
        return self._unpack(key)

    def _unpack(self, key: Key) -> Remote:
        handle = self._ucp.unpack_key(self._channel.endpoint.handle, key.padded())
        self._keys.append(handle)
        return Remote(handle, key.address)

    # -- moving -------------------------------------------------------------------------------------------------------

    def write(self, region: Region, remote: Remote, runs: Runs, deadline: float, progress: Progress) -> None:
        """Put runs, see Link."""
        self._move(PUT, region, remote, Batch(runs.src, runs.dst, runs.nbytes), Wait("the put", 0, deadline, progress))

    def read(self, remote: Remote, region: Region, runs: Runs, deadline: float, progress: Progress) -> None:
        """Get runs, see Link."""
        self._move(GET, region, remote, Batch(runs.dst, runs.src, runs.nbytes), Wait("the get", 0, deadline, progress))

    def _move(self, operation: str, region: Region, remote: Remote, runs: Batch, wait: Wait) -> None:
        endpoint = self._channel.endpoint
        params = params_for(self._engine.memory.register(region).handle)
        transfer = Transfer(endpoint.handle, remote.key, ctypes.addressof(params), region.address, remote.address)
        self._channel.move(operation, transfer, runs, wait._replace(begun=time.monotonic()))

    # -- the side that waits ------------------------------------------------------------------------------------------

    def wait_readable(self, descriptor: int, timeout_s: float) -> bool:
        """Let the peer's operations go on until a descriptor can be read, see Link."""
        if self._gone:
            return super().wait_readable(descriptor, timeout_s)
        return self._pump.run(time.monotonic() + timeout_s, descriptor=descriptor)

    def revoke(self) -> bool:
        """Let the worker rest for ever if that keeps the peer from writing here, see Link.

        It does where the peer needs the worker, as over tcp. It does not where the peer's process or network card
        reaches the memory by itself; such a peer goes on until it is told otherwise.
        """
        if self._gone:
            return True
        near = self._greeting is None or self._greeting.host == host_id()
        if any(lane.kind == "rdma" or (near and lane.transport in DIRECT) for lane in self._engine.lanes):
            return False
        with self._lock:
            self._gone = True
        # Not destroyed: with answers to a peer under way that does not read, UCX brings the whole process down. Without
        # progress nothing is received; what the worker holds is the price, once for each peer that had to be cut off.
        keep_for_ever(self._worker)
        self._retire(self)
        return True

    def interrupt(self) -> None:
        """Wake a call that is under way, see Link."""
        with self._lock:
            if not self._gone:
                self._pump.interrupt()

    def close(self) -> None:
        """Cut the connection, see Link."""
        if not self._gone:
            self._destroy()

    def _destroy(self) -> None:
        for key in self._keys:
            self._ucp.destroy_key(key)
        self._keys.clear()
        self._channel.close()
        with self._lock:
            self._gone = True
        # Not under the lock: it takes as long as the kernel does, and nobody signals this worker any more.
        self._worker.close()
        self._forget(self)
