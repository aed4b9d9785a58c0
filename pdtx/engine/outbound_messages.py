"""What the messages of a consumer's processes mean to a producer's requests."""

import logging

import numpy as np

from pdtx.engine.outbound import OutboundRequest
from pdtx.engine.outbound_control import OutboundControl
from pdtx.engine.outbound_leg import ArrivedParts, Leg
from pdtx.engine.outbound_session import OutboundSession
from pdtx.engine.shipping import Asked
from pdtx.engine.states import LegState
from pdtx.errors import PdtxError, ProtocolError, TransferError, VerificationError
from pdtx.protocol import Failure, Finished, Grant, Message, Pull, ReadReference, Refuse, Release, Renew
from pdtx.text import reason_of

logger = logging.getLogger(__name__)

_MAX_READING = 8
"""Pieces of reference data of one request that one process reads at once; it asks for one after another."""


class OutboundMessages:
    """Hands what comes over a session to the request that it is about. Its methods are events of the control thread."""

    def __init__(self, core: OutboundControl) -> None:
        self._core = core

    def on_message(self, session: OutboundSession, message: Message) -> None:
        """A message that is no part of a handshake."""
        if isinstance(message, Pull):
            self._core.offers.on_pull(session, message)
            return
        if isinstance(message, Renew):
            self._core.offers.on_renew(session, message)
            return
        if not isinstance(message, Grant | Refuse | Failure | Release | Finished | ReadReference):
            logger.warning("ignored a %s from %s", type(message).__name__, session.peer)
            return
        leg = self._leg(session, message.request_id)
        if leg is None:
            self._on_unknown(session, message)
        elif not leg.answers(message.attempt):
            logger.info("ignored a late %s for request %s", type(message).__name__, message.request_id)
        else:
            self._on_answer(leg, message)

    def _leg(self, session: OutboundSession, request_id: str) -> Leg | None:
        request = self._core.requests.get(request_id)
        legs = request.legs if request is not None else ()
        return next((leg for leg in legs if leg.session is session), None)

    def _on_answer(self, leg: Leg, message: Grant | Refuse | Failure | Release | Finished | ReadReference) -> None:
        core, request, peer = self._core, leg.request, leg.session.peer
        match message:
            case Grant():
                self._on_grant(leg, message)
            case Refuse():
                text = f"{peer} refused {message.request_id}: {reason_of(message.reason)}"
                core.end(request, TransferError(text))
            case Failure():
                # It may be about an earlier request of that name; the consumer must not wait for this one then.
                core.end(request, _consumers(leg, message))
            case Release():
                if leg.state is LegState.COMPLETED:
                    core.on_released(leg)
            case Finished():
                self._on_finished(leg, message)
            case ReadReference():
                self._on_read_reference(leg, message)

    def _on_grant(self, leg: Leg, grant: Grant) -> None:
        """Ship what waits for the grant. Which blocks it names is checked by the plan, as everything is."""
        route = leg.route
        if route is None or leg.state is not LegState.ASKED:
            return
        try:
            self._check_grant(leg.request, leg.session.peer, len(route.match.consumer.groups), grant)
            groups = self._core.cache.groups
            stops = [groups[one.producer_group].positions(leg.request.num_tokens).stop for one in route.match.buffers]
            arrived = ArrivedParts(grant.arrived, route.match, stops) if grant.arrived else None
            tables = tuple(np.asarray(group.block_ids, dtype=np.int64) for group in grant.groups)
            leg.take(grant, tables, arrived)
        except ProtocolError as error:
            self._core.end(leg.request, error)
            return
        self._core.on_granted(leg)

    def _check_grant(self, request: OutboundRequest, peer: str, groups: int, grant: Grant) -> None:
        if len(grant.groups) != groups:
            raise ProtocolError(f"{peer} granted blocks of {len(grant.groups)} groups and has {groups}")
        if grant.cached_tokens > request.num_tokens:
            tokens = f"{grant.cached_tokens} cached tokens of a prompt of {request.num_tokens}"
            raise ProtocolError(f"{peer} claims {tokens}")

    def _on_finished(self, leg: Leg, finished: Finished) -> None:
        if not leg.completed:
            # It may be about an earlier request of that name: this one has not all been delivered.
            text = f"{leg.session.peer} finished request {finished.request_id} before all of it was delivered"
            self._core.end(leg.request, ProtocolError(text))
        elif leg.state is not LegState.FINISHED:
            self._core.on_leg_done(leg, finished)

    def _on_unknown(
        self, session: OutboundSession, message: Grant | Refuse | Failure | Release | Finished | ReadReference
    ) -> None:
        if isinstance(message, ReadReference):
            reason = f"request {message.request_id} is not here any more"
            failure = Failure(request_id=message.request_id, phase="verification", reason=reason)
            self._core.effects.send(session, failure)
        else:
            logger.warning("ignored a %s for unknown request %s", type(message).__name__, message.request_id)

    def _on_read_reference(self, leg: Leg, ask: ReadReference) -> None:
        core, request = self._core, leg.request
        if leg.state is not LegState.COMPLETED or leg.session.route is None:
            what = (
                "is not here any more" if request.returned else "is not complete, and there is nothing to compare yet"
            )
            core.end(request, ProtocolError(f"request {request.request_id} {what}"))
            return
        if leg.reading >= _MAX_READING:
            text = f"{leg.session.peer} asked for {leg.reading + 1} pieces of reference data at once"
            core.end(request, ProtocolError(f"{text}; at most {_MAX_READING} of a request"))
            return
        leg.reading += 1
        core.effects.ship(Asked(leg, leg.session.route, ask))


def _consumers(leg: Leg, failure: Failure) -> PdtxError:
    """Return the consumer's failure as an error of this side."""
    text = f"{leg.session.peer} failed in {reason_of(failure.phase)}: {reason_of(failure.reason)}"
    return TransferError(text) if failure.wrong is None else VerificationError(text, failure.wrong)
