"""One connection over NIXL: an agent on either side, so that a peer is cut off by ending the agent it knows."""

import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pdtx.errors import DeadlineExceeded, PdtxError, PeerLost, PeerUnreachable, ProtocolError, TransferAborted
from pdtx.plan import Runs
from pdtx.transports.base import Path, PathKind, Region
from pdtx.transports.nixl.agent import Agent, Op, Request
from pdtx.transports.nixl.batches import Batch
from pdtx.transports.nixl.library import Library
from pdtx.transports.nixl.messages import (
    VERSION,
    Greeting,
    Key,
    Place,
    pack,
    unpack_greeting,
    unpack_key,
)
from pdtx.transports.nixl.pace import Pace
from pdtx.transports.nixl.protocols import GET, PUT
from pdtx.transports.onesided.fabric import Link, Progress, Shared
from pdtx.transports.ucx.host import host_id
from pdtx.transports.ucx.lanes import DIRECT, Lane

PROBE_BYTES = 32 << 10
_REQUEST_BYTES = 32 << 20
"""Of one request: where NIXL copies by itself, nobody looks at the clock before a request is through."""
_REQUEST_RUNS = 8192
_WINDOW = 2
"""Requests under way at a time, so that the network does not run dry between them."""

_MORE = b"+"
"""Goes with each request: whoever waits at the other end sees that it is worth looking often."""
_NOTICE_S = 10.0
_MAX_TAGS = 4096


@dataclass(frozen=True)
class Engine:
    """What all connections of a fabric have in common.

    versions: of NIXL, and what is under it. lanes: what its UCX may use here, empty if that is not known.
    scratch: memory to try connections with.
    """

    library: Library
    backend: str
    versions: str
    lanes: tuple[Lane, ...]
    scratch: Region

    @property
    def kinds(self) -> list[PathKind]:
        """The kinds of the lanes."""
        return sorted({lane.kind for lane in self.lanes} - {"other"})


@dataclass(frozen=True)
class Wait:
    """What is waited for, until when, and whether it has been given up."""

    phase: str
    deadline: float
    progress: Progress


class NixlLink(Link[Place]):
    """See Link. agent belongs to this object from now on. forget: called once, when nothing of the link is left."""

    def __init__(self, engine: Engine, agent: Agent, forget: Callable[["NixlLink"], None]) -> None:
        self._engine, self._peer, self._forget = engine, agent.peer, forget
        self._agent: Agent | None = agent
        self._greeting: Greeting | None = None
        self._deadline = 0.0
        self._path: Path | None = None
        self._broken: PdtxError | None = None
        self._tags = set[bytes]()
        self._lock = threading.Lock()  # over the agent's end

    @property
    def _live(self) -> Agent:
        """The agent. Raises PeerLost if it has been ended."""
        agent = self._agent
        if agent is None:
            raise PeerLost(f"the NIXL connection to {self._peer} has ended: {self._broken or 'it was closed'}")
        return agent

    @property
    def _other(self) -> Greeting:
        """What the peer has said."""
        if self._greeting is None:
            raise ProtocolError(f"the NIXL connection to {self._peer} has not been joined")
        return self._greeting

    # -- getting acquainted -------------------------------------------------------------------------------------------

    def greeting(self) -> bytes:
        """Return what the peer needs, see Link."""
        agent, engine = self._live, self._engine
        place = Place.of(engine.scratch)
        metadata = agent.describe(engine.scratch, itself=True)
        return pack(
            Greeting(VERSION, agent.name, engine.versions, engine.backend, metadata, host_id(), engine.kinds, place)
        )

    def join(self, greeting: bytes, deadline: float) -> None:
        """Take in the peer's greeting, see Link."""
        told = unpack_greeting(greeting)
        if told.backend != self._engine.backend:
            raise PeerUnreachable(
                f"{self._peer} uses NIXL's backend {told.backend}, this side {self._engine.backend}; choose one"
            )
        if told.agent == self._live.name:
            raise ProtocolError(f"{self._peer} calls its NIXL agent what this side's is called")
        try:
            self._live.meet(told.agent, told.metadata)
        except PdtxError as error:
            if told.library != self._engine.versions:
                raise PeerUnreachable(f"{error}; it runs {told.library}, this side {self._engine.versions}") from None
            raise
        self._greeting, self._deadline = told, deadline

    @property
    def path(self) -> Path:
        """What carries the payload, see Link. Tries the connection when it is asked for first, by join()'s deadline.

        Raises PeerUnreachable, PeerLost, ProtocolError or DeadlineExceeded.
        """
        if self._path is None:
            self._path = self._explore(max(self._deadline, time.monotonic() + 0.001))
        return self._path

    def _explore(self, deadline: float) -> Path:
        """Write and read scratch memory, and see what NIXL's UCX has said about it."""
        scratch, told = self._engine.scratch, self._other
        nbytes = min(PROBE_BYTES, scratch.nbytes, told.scratch.nbytes)
        wait = Wait("the NIXL connection", deadline, Progress(lambda _: None, lambda: False, b""))
        whole = Batch.of(0, 0, nbytes)
        self._move("WRITE", scratch, told.scratch, whole, wait)
        self._move("READ", scratch, told.scratch, whole, wait)
        name, protocols = self._live.name, self._engine.library.protocols
        put, get = (protocols.route(name, operation, nbytes) for operation in (PUT, GET))
        if put is None:
            reason = self._engine.library.mute or "which does not say what carries its bytes"
            detail = f"backend {told.backend}, {reason}"
            return Path("other", detail, library=self._engine.versions, possible=self._possible("other"))
        slow_gets = get is not None and get.emulated and not put.emulated
        detail = f"{put.detail}, gets emulated" if slow_gets else put.detail
        return Path(put.kind, detail, put.emulated, self._engine.versions, self._possible(put.kind))

    def _possible(self, found: PathKind) -> tuple[PathKind, ...]:
        both = {kind for kind in self._engine.kinds if kind in self._other.kinds and (kind != "shm" or self._near)}
        return tuple(sorted((both | {found}) - {"other"}))

    @property
    def _near(self) -> bool:
        """Whether the peer is, or may be, on this host."""
        return self._greeting is None or self._greeting.host == host_id()

    # -- memory -------------------------------------------------------------------------------------------------------

    def share(self, region: Region) -> Shared:
        """Register a region, see Link."""
        agent = self._live
        agent.register(region)
        return Shared(pack(Key(Place.of(region), agent.describe(region))))

    def open(self, shared: Shared, nbytes: int) -> Place:
        """Take in what the peer says of a region, see Link."""
        key = unpack_key(shared.key, nbytes)
        self._live.meet(self._other.agent, key.metadata)
        return key.place

    # -- moving -------------------------------------------------------------------------------------------------------

    def write(self, region: Region, remote: Place, runs: Runs, deadline: float, progress: Progress) -> None:
        """WRITE runs, see Link."""
        batch = Batch(runs.src, runs.dst, runs.nbytes)
        self._move("WRITE", region, remote, batch, Wait("the end of a NIXL WRITE", deadline, progress))

    def read(self, remote: Place, region: Region, runs: Runs, deadline: float, progress: Progress) -> None:
        """READ runs, see Link."""
        batch = Batch(runs.dst, runs.src, runs.nbytes)
        self._move("READ", region, remote, batch, Wait("the end of a NIXL READ", deadline, progress))

    def _move(self, op: Op, region: Region, remote: Place, runs: Batch, wait: Wait) -> None:
        """Move runs in requests; after an error the agent is gone, and with it whatever was under way."""
        agent, name = self._live, self._other.agent
        begun, posted = time.monotonic(), deque[Request]()
        try:
            if len(runs.nbytes):
                agent.register(region)
            here = Place.of(region)
            for batch in runs.cut(_REQUEST_BYTES).pieces(_REQUEST_BYTES, _REQUEST_RUNS):
                self._look(wait, begun)
                posted.append(agent.post(op, here, (name, remote), batch, _MORE))
                if len(posted) == _WINDOW:
                    self._finish(agent, posted, wait, begun)
            while posted:
                self._finish(agent, posted, wait, begun)
            if wait.progress.tag:
                agent.notify(name, wait.progress.tag)
        except BaseException as error:
            self._abandon(error, posted)
            raise

    def _finish(self, agent: Agent, posted: deque[Request], wait: Wait, begun: float) -> None:
        """Wait for the oldest request."""
        pace = Pace()
        while not agent.ended(posted[0]):
            self._look(wait, begun)
            pace.rest()
        # Given up while it still read its source, a request may have read what had changed.
        self._look(wait, begun)
        request = posted.popleft()
        agent.release(request)
        wait.progress.moved(request.nbytes)

    def _look(self, wait: Wait, begun: float) -> None:
        """Raise if there is a reason not to go on."""
        if wait.progress.stopped:
            raise TransferAborted(f"{wait.phase} with {self._peer} was given up")
        now = time.monotonic()
        if now >= wait.deadline:
            raise DeadlineExceeded(wait.phase, self._peer, round(now - begun, 3))

    def _abandon(self, error: BaseException, posted: deque[Request]) -> None:
        """End the agent because of error: nothing is moved from here on."""
        agent = self._agent
        while posted and agent is not None:
            with suppress(PdtxError):  # the agent's end takes it along
                agent.release(posted.popleft())
        self._end(error if isinstance(error, PdtxError) else PeerLost(f"{type(error).__name__} {error}"))

    # -- the side that waits ------------------------------------------------------------------------------------------

    def wait_readable(self, descriptor: int, timeout_s: float) -> bool:
        """Let the peer's operations go on until a descriptor can be read, see Link."""
        agent = self._agent
        if agent is None or self._greeting is None:
            return super().wait_readable(descriptor, timeout_s)
        ready = select.poll()
        ready.register(descriptor, select.POLLIN)
        pace, limit = Pace(), time.monotonic() + timeout_s
        while not ready.poll(0):
            if self._listen(agent):
                pace = Pace()
            now = time.monotonic()
            if now >= limit:
                return False
            if (rest := pace.next()) >= 0.001:
                ready.poll(min(rest, limit - now) * 1000)
            else:
                time.sleep(rest)
        return True

    def _listen(self, agent: Agent) -> bool:
        """Take the peer's notices, and make progress; whether there were any."""
        notices = agent.notices(self._other.agent)
        self._tags.update(notice for notice in notices if notice != _MORE)
        if len(self._tags) > _MAX_TAGS:
            raise ProtocolError(
                f"{self._peer} sent more than {_MAX_TAGS} notifications of transfers that it never ended"
            )
        return bool(notices)

    def confirm(self, tag: bytes, deadline: float) -> None:
        """Wait for the notification that NIXL delivers behind a put, see Link."""
        begun, pace = time.monotonic(), Pace()
        limit = min(deadline, begun + _NOTICE_S)
        while tag not in self._tags:
            self._listen(self._live)
            if tag in self._tags:
                break
            if time.monotonic() >= limit:
                raise DeadlineExceeded("the notification of a put", self._peer, round(time.monotonic() - begun, 3))
            pace.rest()
        self._tags.discard(tag)

    def revoke(self) -> bool:
        """End the agent if that keeps the peer from writing here, see Link.

        It does where the peer needs this process or what it has registered with a network card. It does not where the
        peer's process reaches the memory by itself; such a peer goes on until it is told otherwise.
        """
        if self._agent is None:
            return True
        if self._near and (not self._engine.lanes or any(lane.transport in DIRECT for lane in self._engine.lanes)):
            return False
        over_sockets = bool(self._engine.lanes) and all(lane.transport == "tcp" for lane in self._engine.lanes)
        self._end(PeerLost("the peer was cut off"), rests=over_sockets)
        return True

    def close(self) -> None:
        """End the agent, see Link."""
        self._end(PeerLost("it was closed"))

    def _end(self, reason: PdtxError, *, rests: bool = False) -> None:
        with self._lock:
            agent, self._agent = self._agent, None
            self._broken = self._broken or reason
        if agent is not None:
            if rests:
                agent.rest()
            else:
                agent.close()
            self._forget(self)
