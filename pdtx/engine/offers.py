"""Requests that are offered: held under a lease for a consumer that pulls them."""

import logging
import time
from typing import TYPE_CHECKING

from pdtx.engine.outbound import OutboundRequest
from pdtx.engine.outbound_session import OutboundSession
from pdtx.errors import LeaseExpired
from pdtx.protocol import Pull, Refuse, Renew

if TYPE_CHECKING:
    from pdtx.engine.outbound_control import OutboundControl

logger = logging.getLogger(__name__)

GRACE_S = 0.2
"""How much longer than its lease an offer is held: so long a message that renews it may take."""

_MAX_REMEMBERED = 10_000
"""Offers that have ended, which are still known for what they were."""


class Offers:
    """The leases of a producer's offered requests. Changed by its control thread alone.

    Each lease ends by its own time, whatever becomes of others. All times are this process's own: a consumer only ever
    says "from now".
    expired: leases that have ended before all was read. late_reads: pulls of what was not to be had any more, or had
    been pulled before. unknown_reads: pulls of what was never offered here, or in another generation.
    """

    def __init__(self, core: "OutboundControl") -> None:
        self._core = core
        self.expired = self.late_reads = self.unknown_reads = 0
        self._ended = dict[str, int]()  # generations of offers that are not to be had any more

    def start(self, request: OutboundRequest) -> None:
        """Begin the lease of a request, all of which has been computed."""
        if request.lease_s:
            request.lease_end = time.monotonic() + request.lease_s + GRACE_S

    def tick(self, now: float) -> None:
        """End what was held for as long as its lease says."""
        for request in [request for request in self._core.requests.values() if request.lease_end < now]:
            self.expired += 1
            late = LeaseExpired(request.request_id, request.lease_s, self._reader(request))
            self._core.end(request, late)

    def _reader(self, request: OutboundRequest) -> str:
        legs = [leg for leg in request.legs if not leg.released]
        return legs[0].session.peer if legs else ""

    def remember(self, request: OutboundRequest) -> None:
        """Note that a request has ended, for those who ask for it later."""
        if request.lease_s:
            self._ended.pop(request.request_id, None)
            self._ended[request.request_id] = request.generation
            if len(self._ended) > _MAX_REMEMBERED:
                del self._ended[next(iter(self._ended))]

    def on_pull(self, session: OutboundSession, pull: Pull) -> None:
        """Begin to send a process of a consumer its part of an offered request, or say why that cannot be."""
        request = self._core.requests.get(pull.request_id)
        problem = self._problem(request, session, pull)
        if request is None or problem is not None:
            logger.warning("%s cannot pull request %s: %s", session.peer, pull.request_id, problem)
            self._core.effects.send(session, Refuse(request_id=pull.request_id, reason=str(problem)))
            return
        self._core.add_leg(request, session)
        self._core.advance(session)

    def _problem(self, request: OutboundRequest | None, session: OutboundSession, pull: Pull) -> str | None:
        """Say why a pull cannot be, and count it."""
        known = request.generation if request is not None and request.lease_s else self._ended.get(pull.request_id)
        if known is None or pull.generation not in (None, known):
            self.unknown_reads += 1
            if known is None:
                return "no such request is offered here"
            return (
                f"generation {pull.generation} of it is not offered: it was offered anew, or the processes of this "
                "producer were not given one generation"
            )
        if request is None or not request.lease_s:
            self.late_reads += 1
            return "it is not held any more: its lease has ended, or it was read or cancelled"
        readers = {leg.session.engine for leg in request.legs}
        if any(leg.session is session for leg in request.legs) or (readers and session.engine not in readers):
            self.late_reads += 1
            return "it was pulled before"
        return None

    def on_renew(self, session: OutboundSession, renew: Renew) -> None:
        """Hold offered requests for their leases from now on: those that the session has pulled."""
        now = time.monotonic()
        for request_id in renew.request_ids:
            request = self._core.requests.get(request_id)
            pulled = request is not None and any(leg.session is session for leg in request.legs)
            if request is not None and pulled and request.lease_s and request.is_computed:
                request.lease_end = now + request.lease_s + GRACE_S

    def all_read(self, request: OutboundRequest) -> bool:
        """Whether each process of whoever pulls a request has begun to; of one that is not offered always."""
        engine = request.legs[0].session.engine if request.legs else None
        return not request.lease_s or (engine is not None and len(request.legs) >= engine.processes)
