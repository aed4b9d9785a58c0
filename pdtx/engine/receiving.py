"""What the consumer does for its mover: it admits sessions, plans where payloads go, and accounts for them."""

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from pdtx.cache import GroupAllocator, KVCaches
from pdtx.engine.inbound import InboundRequest, InboundState, Session
from pdtx.engine.shipping import regions_of
from pdtx.errors import AuthenticationFailed, PdtxError, PeerLost, TransferRefused
from pdtx.layout import Layout
from pdtx.plan import PlanCache
from pdtx.transports import Placement, TransferKey

logger = logging.getLogger(__name__)


class Requests(Protocol):
    """The consumer, as far as the receiver knows it. The first two, and the count, are used under its lock."""

    duplicate_notices: int

    def session(self, session_id: str) -> Session | None:
        """Return a session, if there is one."""

    def request(self, session_id: str, request_id: str) -> InboundRequest | None:
        """Return a request that has not ended, if there is one."""

    def fail(self, request: InboundRequest, error: PdtxError) -> None:
        """End a request as failed."""

    def fail_where(self, which: Callable[[InboundRequest], bool], error: PdtxError) -> None:
        """End all requests of a kind as failed."""

    def grant_queued(self) -> None:
        """Grant what blocks that have returned allow."""


class PayloadReceiver:
    """The Receiver of the consumer's mover: called from the mover's threads.

    plan_layout: the layout to plan the first buffer with instead of its own: a deliberate fault, for tests.
    """

    def __init__(
        self,
        cache: KVCaches,
        allocator: GroupAllocator,
        requests: Requests,
        lock: threading.RLock,
        plan_layout: Layout | None,
    ) -> None:
        self._allocator, self._requests, self._lock = allocator, requests, lock
        self._regions, self._plan_layout = regions_of(cache), plan_layout
        self._plans = PlanCache()
        self._placing: dict[tuple[str, TransferKey], InboundRequest] = {}  # payloads arriving now

    def admit(self, session_id: str) -> bytes:
        """Return the token of a session."""
        with self._lock:
            session = self._requests.session(session_id)
        if session is None:
            raise AuthenticationFailed("no such session")
        return session.token

    def place(self, session_id: str, key: TransferKey) -> Placement:
        """Plan where a payload goes, from this side's own facts."""
        with self._lock:
            request = self._requests.request(session_id, key.request_id)
            if request is None or request.blocks is None or request.state is not InboundState.RECEIVING:
                raise TransferRefused(f"{key} was not granted")
            if (session_id, key) in self._placing:  # of an earlier request of that name
                raise TransferRefused(f"{key} is still being received")
            match, move = request.arrivals.expect(key)
            self._allocator.hold(request.blocks)
            self._placing[session_id, key] = request
        layers, positions = range(key.layer_start, key.layer_stop), range(key.token_start, key.token_stop)
        source = match.source_stand_in(positions.stop)
        fault = self._plan_layout if match.index == 0 else None
        here = match.destination(request.granted(match.group), fault)
        try:
            plan = match.plan(match.moves[move], source, here, layers, positions, merge=False, plans=self._plans)
        except BaseException:
            with self._lock:
                del self._placing[session_id, key]
            self._unplace(request)
            raise
        slices = plan.destination()
        with self._lock:
            request.received_runs += len(slices)
        return Placement(self._regions[match.index][key.dst_rank], slices, request.deadline)

    def _unplace(self, request: InboundRequest) -> None:
        """Give back the hold of a payload that nothing writes any more; the request may have ended meanwhile."""
        if request.blocks is not None:
            self._allocator.unhold(request.blocks)
            self._requests.grant_queued()

    def placed(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        """Account for a payload that has arrived, or stopped. To be told so again changes nothing."""
        with self._lock:
            request = self._placing.pop((session_id, key), None)
            if request is None:
                self._requests.duplicate_notices += 1
                logger.warning("the mover told the end of %s again", key)
                return
            if error is None:
                request.arrivals.arrive(key, nbytes)
                request.received_bytes += nbytes
        self._unplace(request)
        if error is not None:
            self._requests.fail(request, error)

    def offer(self, session_id: str, key: TransferKey) -> Placement:
        """Refuse: a decode node's cache is written by its producers, not read."""
        raise TransferRefused(f"{key}: this node gives nothing away")

    def offered(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        """Learn of nothing, for nothing was offered."""

    def notified(self, session_id: str, data: bytes) -> None:
        """Log a notice: what a producer has to say comes over the side channel."""
        logger.info("ignored a notice of %d bytes of session %s", len(data), session_id)

    def closed(self, session_id: str, reason: str) -> None:
        """Fail what a producer had under way when its data connection ended.

        What has all arrived waits for the word that it is complete, which comes over the control channel.
        """

        def cut(request: InboundRequest) -> bool:
            ours = request.session.session_id == session_id and request.state is InboundState.RECEIVING
            return ours and request.missing() is not None

        self._requests.fail_where(cut, PeerLost(f"the data connection ended: {reason}"))
