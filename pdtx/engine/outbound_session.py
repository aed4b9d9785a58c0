"""The session that carries a producer's requests, and when another one is needed."""

import logging
import time
from collections.abc import Iterable

from pdtx.engine.route import Route
from pdtx.errors import DeadlineExceeded, PdtxError, PeerLost, PeerSilent, TransferError
from pdtx.transports import TransferHandle

logger = logging.getLogger(__name__)

_PAUSE_S = 0.05
"""Between two attempts at a new session."""

_STUCK_S = 2.0
"""How long after its deadline a transfer may go on before its connection is given up."""

_NEAR_S = 0.25
"""The consumer may notice a deadline so much earlier: a failed request's transfer as near to its own counts as cut."""


class OutboundSession:
    """What a producer knows of its session. Changed by the producer's control thread alone.

    lost: what ended it, until there is another one. over: why there will not be another one.
    opening: what the one that is being opened replaces. attempt_error: what was in the way of the last attempt.
    """

    def __init__(self) -> None:
        self.route: Route | None = None
        self.lost: PdtxError | None = None
        self.over: PdtxError | None = None
        self.opening: PdtxError | None = None
        self.attempt_error: PdtxError | None = None
        self.retry_at = 0.0

    @property
    def peer(self) -> str:
        """The consumer's name, for messages."""
        return self.route.welcome.engine_id if self.route is not None else "the decode node"

    def problem(self, now: float, moving: Iterable[TransferHandle]) -> PdtxError | None:
        """Return why nothing new may be begun in the session, if so. moving: all that the transport has."""
        route = self.route
        if self.lost is not None or route is None:
            return self.lost
        stuck = any(handle.deadline + _STUCK_S < now for handle in moving)
        return (
            route.ended or route.failed or (TransferError("a transfer goes on after its deadline") if stuck else None)
        )

    def waits(self, now: float, cut: Iterable[TransferHandle]) -> bool:
        """Whether nothing new may be begun yet: the end of a transfer that is cut off may be its connection's, too.

        cut: what the transport has of requests that have ended.
        """
        probing = self.route is not None and self.route.probing
        return probing or any(handle.deadline <= now + _NEAR_S for handle in cut)

    def begin_opening(self, problem: PdtxError, now: float) -> bool:
        """Note that another session is to be opened; False where the last attempt was only just now."""
        if now < self.retry_at:
            return False
        if self.attempt_error is None:
            logger.warning("cannot go on with %s as before: %s", self.peer, problem)
        self.opening = problem
        return True

    def opened(self, route: Route, lost: PdtxError | None) -> None:
        """Note that there is a new session. lost: what has ended its control channel meanwhile."""
        renewed = self.opening is not None
        self.route, self.lost, self.opening, self.attempt_error = route, lost, None, None
        if renewed:
            logger.warning("a new session with %s is open", self.peer)

    def not_opened(self, error: PdtxError) -> None:
        """Note that there is none: to be tried again where the consumer may only be slow; else for good."""
        problem, self.opening = self.opening, None
        if isinstance(error, PeerSilent | PeerLost | DeadlineExceeded):
            self.lost = self.attempt_error = error
            self.retry_at = time.monotonic() + _PAUSE_S
        elif self.over is None:
            text = f"{problem}; a new session with {self.peer} cannot be had: {error}"
            self.over = self.lost = PeerLost(text)

    def close(self, error: PdtxError) -> PdtxError:
        """Note that there will be no session any more; return why."""
        self.over = self.over or error
        self.lost = self.lost or self.over
        return self.over
