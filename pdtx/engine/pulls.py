"""Requests that this node pulls: asked of a producer that offers them, and its leases renewed until they have ended."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdtx.engine.inbound import Arrived, InboundRequest, PrefillEngine, Session
from pdtx.errors import DeadlineExceeded, InputError, PdtxError, PeerLost, TransferError
from pdtx.protocol import MAX_RENEWALS, Pull, Refuse, Renew
from pdtx.text import reason_of

if TYPE_CHECKING:
    from pdtx.engine.inbound_control import InboundControl

logger = logging.getLogger(__name__)

_RENEW_S = 1.0
"""Between two renewals of leases, at most."""

_UNKNOWN_RENEW_S = 0.5
"""The same, as long as a lease is not known."""

_LEASES = 3
"""A lease is renewed so many times before it would end: a renewal may be late, or lost with its channel."""


@dataclass(frozen=True)
class PendingPull:
    """A pull that no process has answered. deadline: time.monotonic() by which the request must have all arrived."""

    request_id: str
    source: PrefillEngine
    generation: int | None
    deadline: float
    begun: float


class Pulls:
    """What this node has pulled. Changed by the consumer's control thread alone.

    pending: not answered as yet, by request id.
    """

    def __init__(self, core: "InboundControl") -> None:
        self._core = core
        self.pending: dict[str, PendingPull] = {}
        self._asked: dict[InboundRequest, int | None] = {}  # with the generation that was pulled
        self._renew_at = 0.0

    def begin(self, source: PrefillEngine, request_id: str, generation: int | None, deadline: float) -> None:
        """Ask every process of a producer for its part of an offered request.

        Raises InputError for a request id in use, PeerLost for a producer of which a process is not there any more, or
        why this node is closing.
        """
        core = self._core
        if core.closing is not None:
            raise core.closing
        if request_id in self.pending or any(one.request_id == request_id for one in core.requests.values()):
            raise InputError(f"request id {request_id!r} is in use")
        if not source.whole:
            gone = sorted(set(range(source.processes)) - set(source.members))
            raise PeerLost(f"{source.engine_id}: nothing is heard of its processes {', '.join(map(str, gone))}")
        silent = sorted(source.failed.silent(request_id) & set(source.members))
        if silent and source.processes > 1:  # one of them could answer with what it had offered then
            raise InputError(
                f"request id {request_id!r}: processes {', '.join(map(str, silent))} of {source.engine_id} have not "
                "answered an earlier pull of it, which has failed; pull it later, or have it offered under another id"
            )
        self.pending[request_id] = PendingPull(request_id, source, generation, deadline, time.monotonic())
        source.failed.pulls_again(request_id)
        for session in source.members.values():
            core.effects.send(session.peer, Pull(request_id=request_id, generation=generation))
        self._renew_at = min(self._renew_at, time.monotonic() + _UNKNOWN_RENEW_S)

    def on_asked(self, request: InboundRequest) -> None:
        """Take note if a request is one that was pulled: it goes on as any other."""
        found = self.pending.get(request.request_id)
        if found is not None and found.source is request.engine:
            del self.pending[request.request_id]
            request.pulled = True
            request.deadline = min(request.deadline, found.deadline)
            self._asked[request] = found.generation

    def waits_for(self, engine: PrefillEngine) -> bool:
        """Whether a pull from a producer has not been answered."""
        return any(found.source is engine for found in self.pending.values())

    def wants(self, engine: PrefillEngine) -> bool:
        """Whether anything that was pulled from a producer has not all arrived."""
        return any(source is engine for source, _ in self._wanted())

    def on_session(self, session: Session) -> None:
        """Ask a process again for what it has not begun, or has lost with the session before."""
        engine = self._core.engines.engine_of(session)
        lacking = [(one.request_id, one.generation) for one in self.pending.values() if one.source is engine]
        for request, generation in self._asked.items():
            ask = request.asks.get(session.process)
            if request.engine is engine and not request.has_ended and (ask is None or ask.suspended):
                lacking.append((request.request_id, generation))
        for request_id, generation in lacking:
            self._core.effects.send(session.peer, Pull(request_id=request_id, generation=generation))

    def on_gone(self, engine: PrefillEngine, error: PdtxError) -> None:
        """A producer cannot be had any more, and with it nothing that was pulled from there."""
        self._core.end_all([request for request in self._asked if request.engine is engine], error)
        for found in [found for found in self.pending.values() if found.source is engine]:
            self.drop(found.request_id, error)

    def on_refused(self, session: Session, refuse: Refuse) -> None:
        """A process does not send its part of a request."""
        core, engine = self._core, self._core.engines.engine_of(session)
        engine.failed.answered(refuse.request_id, session.process)
        error = TransferError(f"{session.name} refused {refuse.request_id}: {reason_of(refuse.reason)}")
        found = self.pending.get(refuse.request_id)
        request = core.requests.get((engine, refuse.request_id))
        if found is not None and found.source is engine:
            self.drop(refuse.request_id, error, answered=session)
        elif request is not None and request.pulled and _waits_for(request, session):
            core.fail(request, error, but=session)
        else:
            logger.info("ignored a refusal of %s by %s", refuse.request_id, session.name)

    def on_lost(self, session: Session, error: PdtxError) -> None:
        """A process of a producer is gone, and with it what was pulled from there and not answered."""
        for found in list(self.pending.values()):
            if found.source.engine_id == session.engine_id and session.process not in found.source.members:
                self.drop(found.request_id, error, answered=session)

    def drop(self, request_id: str, error: PdtxError, *, answered: Session | None = None) -> None:
        """Want a request no more, if nothing of it was answered. answered: by whom it was now."""
        found = self.pending.pop(request_id, None)
        if found is None:
            return
        self._core.forget_idle(found.source)
        silent = {number for number in found.source.members if answered is None or number != answered.process}
        if silent:
            reason = f"it is not wanted any more: {reason_of(error)}"
            found.source.failed.add_pulled(request_id, silent, reason)
        if request_id in self._core.expectations.expected:
            self._core.expectations.drop(request_id, error)
        else:
            self._core.expectations.arrived.add(Arrived(request_id, error, None))

    def drop_all(self, error: PdtxError) -> None:
        """Want nothing any more."""
        for request_id in list(self.pending):
            self.drop(request_id, error)

    def tick(self, now: float) -> None:
        """Drop what nobody has answered by its deadline, and renew the leases of all else."""
        for found in [found for found in self.pending.values() if found.deadline < now]:
            waited = round(found.deadline - found.begun, 3)
            self.drop(found.request_id, DeadlineExceeded("an answer to the pull", found.source.engine_id, waited))
        for request in [request for request in self._asked if request.has_ended]:
            del self._asked[request]
        if now >= self._renew_at:
            self._renew(now)

    def _renew(self, now: float) -> None:
        names = dict[PrefillEngine, list[str]]()
        for engine, request_id in self._wanted():
            names.setdefault(engine, []).append(request_id)
        for engine, found in names.items():
            for session in engine.members.values():
                for first in range(0, len(found), MAX_RENEWALS):
                    renew = Renew(request_ids=found[first : first + MAX_RENEWALS])
                    self._core.effects.send(session.peer, renew)
        shortest = min((request.ask.lease_s for request in self._asked), default=_LEASES * _RENEW_S)
        most = _UNKNOWN_RENEW_S if self.pending else _RENEW_S
        self._renew_at = now + min(most, shortest / _LEASES)

    def _wanted(self) -> Iterable[tuple[PrefillEngine, str]]:
        yield from ((found.source, found.request_id) for found in self.pending.values())
        yield from ((request.engine, request.request_id) for request in self._asked if not request.has_ended)


def _waits_for(request: InboundRequest, session: Session) -> bool:
    """Whether a process is still to ask for its part, for the first time or in a new session."""
    ask = request.asks.get(session.process)
    return ask is None or ask.suspended
