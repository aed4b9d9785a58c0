"""The sessions that carry a producer's requests, and when another one is needed."""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from pdtx.engine.route import Route
from pdtx.errors import DeadlineExceeded, PdtxError, PeerLost, PeerSilent, PeerUnreachable, TransferError
from pdtx.protocol import Message
from pdtx.transports import TransferHandle

if TYPE_CHECKING:
    from pdtx.engine.outbound_leg import Leg

logger = logging.getLogger(__name__)

_PAUSE_S = 0.05
"""Between two attempts at a new session."""

_STUCK_S = 2.0
"""How long after its deadline a transfer may go on before its connection is given up."""

_NEAR_S = 0.25
"""The consumer may notice a deadline so much earlier: a failed request's transfer as near to its own counts as cut."""


class OutboundChannel(Protocol):
    """A session's control channel, whoever dialled."""

    address: str

    @property
    def lost(self) -> PdtxError | None:
        """What ended it, if something has."""

    def send(self, message: Message | bytes) -> None:
        """Send a message; goes nowhere where there is no channel any more. Raises ProtocolError."""

    def give_up(self, reason: str) -> None:
        """Take it for lost. Only from the channel's thread."""

    def close(self, linger_s: float = 1.0) -> None:
        """Say goodbye. Idempotent."""


class OutboundSession:
    """What a producer knows of its session with one process of a consumer. Changed by its control thread alone.

    channel: to that process. renews: whether a session that was lost may be replaced: where this side has dialled.
    accepted_from: the process (engine, number, incarnation) that has dialled this side, if it has.
    lost: what ended it, until there is another one. over: why there will not be another one.
    opening: what the one that is being opened replaces. attempt_error: what was in the way of the last attempt.
    new: legs that have not been asked for; live: those that have, until nothing of them is at the transport.
    """

    def __init__(
        self,
        channel: OutboundChannel | None = None,
        *,
        renews: bool = True,
        accepted_from: tuple[str, int, str] | None = None,
    ) -> None:
        self.channel, self.renews, self.accepted_from = channel, renews, accepted_from
        self.engine: DecodeEngine | None = None
        self.route: Route | None = None
        self.lost: PdtxError | None = None
        self.over: PdtxError | None = None
        self.opening: PdtxError | None = None
        self.attempt_error: PdtxError | None = None
        self.retry_at = 0.0
        self.new: dict[Leg, None] = {}
        self.live: dict[Leg, None] = {}

    @property
    def peer(self) -> str:
        """The consumer's name, for messages."""
        if self.route is None:
            return "the decode node"
        welcome = self.route.welcome
        which = f" process {welcome.process} of {welcome.processes}" if welcome.processes > 1 else ""
        return f"{welcome.engine_id}{which}"

    @property
    def is_broken(self) -> bool:
        """Whether it is known that nothing can go over it any more."""
        route = self.route
        return self.lost is not None or (route is not None and (route.ended or route.failed) is not None)

    def posted(self, legs: "Iterable[Leg]") -> Iterator[TransferHandle]:
        """What the transport has of legs."""
        return (handle for leg in legs for handle in leg.posted)

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

    def not_opened(self, error: PdtxError, *, patient: bool) -> None:
        """Note that there is none: to be tried again where the consumer may only be slow; else for good.

        patient: whether it may also come back after nobody has listened at its address.
        """
        problem, self.opening = self.opening, None
        if isinstance(error, PeerSilent | PeerLost | DeadlineExceeded) or (
            patient and isinstance(error, PeerUnreachable)
        ):
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


class DecodeEngine:
    """A consumer: the sessions with its processes. Changed by the producer's control thread alone.

    processes: how many it has; sessions: with those that are known.
    """

    def __init__(self, engine_id: str, processes: int, sessions: Iterable[OutboundSession] = ()) -> None:
        self.engine_id, self.processes = engine_id, processes
        self.sessions = list[OutboundSession]()
        for session in sessions:
            self.add(session)

    def add(self, session: OutboundSession) -> None:
        """Note the session with one more of its processes."""
        self.sessions.append(session)
        session.engine = self

    @property
    def over(self) -> PdtxError | None:
        """Why there will not be a session with one of its processes any more, if so."""
        return next((session.over for session in self.sessions if session.over is not None), None)

    @property
    def routes(self) -> list[Route]:
        """The ways to its processes that are there."""
        return [session.route for session in self.sessions if session.route is not None]
