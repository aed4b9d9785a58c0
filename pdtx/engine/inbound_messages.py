"""What the messages and connections of producers mean to a consumer's requests."""

import logging
from collections.abc import Callable

from pdtx.engine.arrivals import Notice
from pdtx.engine.inbound import InboundRequest, Session
from pdtx.engine.inbound_control import InboundControl
from pdtx.engine.landing import Door
from pdtx.engine.states import InboundState
from pdtx.errors import DeadlineExceeded, PdtxError, PeerLost, TransferError, TransferRefused
from pdtx.protocol import Bye, Complete, Failure, Hello, LayerDone, Message, Reference, Refuse, TransferRequest
from pdtx.text import reason_of
from pdtx.transports import TransferKey

logger = logging.getLogger(__name__)


class InboundMessages:
    """Hands what comes from producers to the requests that it is about; each method is an event."""

    def __init__(self, core: InboundControl) -> None:
        self._core = core

    # -- sessions -----------------------------------------------------------------------------------------------------

    def on_hello(
        self,
        peer: bytes,
        hello: Hello,
        welcome: Callable[[Session], Message] | None,
        names: tuple[str, bytes] | None = None,
    ) -> Session:
        """Open a session for a producer's process; the one that it had before has ended.

        welcome: makes the answer; None where this side has spoken first, of a session of those names (id and
        token).
        Raises IncompatiblePeer or ProtocolError.
        """
        core = self._core
        session = core.engines.make(peer, hello, names)
        core.engines.check(session)
        earlier = core.engines.earlier(session)
        for before in earlier:
            self._retire(before, session)
        core.engines.add(session)
        for before in earlier:
            for request in self._of(before) if before.peer == peer else ():
                ask = request.ask_of(before)
                if ask is not None and _arrived(request):
                    ask.session = session
        if welcome is not None:
            core.effects.send(peer, welcome(session))
        core.pulls.on_session(session)
        return session

    def _retire(self, before: Session, after: Session) -> None:
        """End a session because another one takes its place: nothing can come over its data connection any more.

        What has all arrived does not need that and goes on over the same channel; what has not is asked for again
        where the process resumes.
        """
        core, same = self._core, before.incarnation == after.incarnation
        if same and before.resumes:
            core.suspend(before)
        core.engines.drop(before, keep=same)
        cut = [request for request in self._of(before) if not (same and (_arrived(request) or before.resumes))]
        lost = PeerLost(f"{before.name} opened another session" if same else f"{before.name} was started anew")
        core.end_all(cut, lost, but=before)
        if same and before.peer != after.peer:
            lost = PeerLost(f"{before.name} lost its control channel")
            core.end_all([request for request in self._of(before) if _arrived(request)], lost, but=before)

    def _of(self, session: Session) -> list[InboundRequest]:
        """The requests that a session has asked for."""
        return [request for request in self._core.requests.values() if request.ask_of(session) is not None]

    def on_lost(self, peer: bytes, reason: str, *, departed: bool = False, dialled: bool = False) -> None:
        """A control channel has ended, and with it all requests of that process, but for those that it resumes.

        departed: it has said goodbye, so that it does not come back. dialled: this side has dialled, so that only what
        it pulls goes on: the producer cannot dial.
        """
        core = self._core
        session = core.sessions.get(peer)
        if session is None:
            return
        lost = PeerLost(f"lost {session.name}: {reason}")
        resumes = session.resumes and not departed
        if resumes:
            core.suspend(session)
        ended = [
            request
            for request in self._of(session)
            if _arrived(request) or _completed(request, session) or not resumes or (dialled and not request.pulled)
        ]
        engine = core.engines.engine_of(session)
        if not resumes:  # of what it has not asked for yet, the others must not wait for it
            ended += [
                request for request in core.requests.values() if request.engine is engine and request not in ended
            ]
        engine.failed.lost(session.process)
        core.engines.drop(session, keep=resumes)
        core.end_all(ended, lost, but=session)
        if not resumes:
            core.pulls.on_lost(session, lost)
        core.forget_idle(engine)

    def on_connection_closed(self, session_id: str, reason: str) -> None:
        """Fail what a producer's process had under way when its data connection ended, unless it resumes it.

        What has all arrived waits for the completion, which comes over the control channel.
        """
        session = self._core.engines.of_id(session_id)
        if session is None:
            return
        if session.resumes:
            self._core.suspend(session)
            return
        cut = [
            request
            for request in self._of(session)
            if request.state is InboundState.RECEIVING and request.missing() is not None
        ]
        lost = PeerLost(f"the data connection of {session.name} ended: {reason}")
        self._core.end_all([request for request in cut if _learns_itself(request, lost)], lost, tell=False)
        self._core.end_all(cut, lost)

    # -- payloads -----------------------------------------------------------------------------------------------------

    def on_payload_failed(self, session_id: str, request_id: str, door: Door, error: PdtxError) -> None:
        """A payload has not arrived."""
        core = self._core
        session = core.engines.of_id(session_id)
        if session is None:
            return
        request = core.requests.get((core.engines.engine_of(session), request_id))
        ask = request.ask_of(session) if request is not None else None
        if request is None or ask is None or ask.door is not door:
            return
        if session.resumes and not isinstance(error, DeadlineExceeded | TransferRefused):
            core.suspend(session)  # its connection is at its end
        else:
            core.fail(request, error, tell=not _learns_itself(request, error))

    def on_payload_twice(self, key: TransferKey) -> None:
        """The transport reported the end of a payload again, which changes nothing."""
        self._core.duplicate_notices += 1
        logger.warning("the mover told the end of %s again", key)

    # -- messages -----------------------------------------------------------------------------------------------------

    def on_message(self, peer: bytes, message: Message) -> None:
        """A message that is no hello."""
        core = self._core
        session = core.sessions.get(peer)
        if session is None:
            logger.warning("ignored a %s from a peer that has not said hello", type(message).__name__)
            # It may have been given up as silent while it was only slow, and take itself for connected.
            core.effects.send(peer, Bye(reason="it has no session; say hello first"))
        elif isinstance(message, TransferRequest):
            core.on_request(session, message)
        elif isinstance(message, Refuse):
            core.pulls.on_refused(session, message)
        elif isinstance(message, LayerDone | Complete | Failure | Reference):
            self._on_request_message(session, message)
        else:
            logger.warning("ignored a %s from %s", type(message).__name__, session.name)

    def _on_request_message(self, session: Session, message: LayerDone | Complete | Failure | Reference) -> None:
        core = self._core
        request = core.requests.get((core.engines.engine_of(session), message.request_id))
        if request is None or request.ask_of(session) is None:
            core.unknown_notices += isinstance(message, LayerDone)
            logger.info("ignored a %s for unknown request %s", type(message).__name__, message.request_id)
            return
        match message:
            case LayerDone():
                self._on_notice(request, session, message)
            case Reference():
                # One is asked for at a time, once all has arrived; what comes beside that is not kept: it may be of
                # an earlier request of that name.
                if request.state is InboundState.READY and request.references.empty():
                    request.references.put(message)
            case Failure():
                reason = f"{session.name} failed in {reason_of(message.phase)}: {reason_of(message.reason)}"
                core.fail(request, TransferError(reason), but=session)
            case Complete():
                self._on_complete(request, session, message)

    def _on_notice(self, request: InboundRequest, session: Session, done: LayerDone) -> None:
        """Count a notice if it is the first one of a payload that is here; else it only counts as what it is."""
        core = self._core
        key = TransferKey(
            done.request_id,
            done.layer_start,
            done.layer_stop,
            done.token_start,
            done.token_stop,
            done.buffer,
            done.src_rank,
            done.dst_rank,
        )
        notice = request.landing.notice(key, done.nbytes)
        core.duplicate_notices += notice is Notice.DUPLICATE
        core.unknown_notices += notice is Notice.UNKNOWN
        if notice is not Notice.NEW:
            logger.warning("ignored a notice of %s from %s: %s", key, session.name, notice.value)

    def _on_complete(self, request: InboundRequest, session: Session, complete: Complete) -> None:
        """Accept a request only if every byte that the producer's processes claim has been received here."""
        core, ask = self._core, request.ask_of(session)
        if request.state is not InboundState.RECEIVING or ask is None or ask.complete is not None:
            logger.warning("ignored a second completion of request %s", request.request_id)
            return
        ask.complete = complete
        said = [one.complete for one in request.asks.values() if one.complete is not None]
        if complete.num_tokens == request.num_tokens and len(said) < request.engine.processes:
            return
        missing = request.missing() or request.landing.unnoticed()
        received, noticed, claimed = request.received_bytes, request.noticed_bytes, sum(one.nbytes for one in said)
        if missing is None and complete.num_tokens == request.num_tokens and claimed == received == noticed:
            first_token = next((one.first_token for one in said if one.first_token is not None), None)
            request.complete = Complete(
                request_id=request.request_id, first_token=first_token, num_tokens=request.num_tokens, nbytes=claimed
            )
            request.go(InboundState.READY)
            for one in request.asks.values():
                # Its data connection may have ended before this came, over the control channel.
                one.suspended = one.suspended and core.sessions.get(one.session.peer) is not one.session
            core.effects.ready(request)
            return
        claims = f"claims {complete.num_tokens} tokens and {claimed} bytes, noticed {noticed}, received {received}"
        if missing is not None:
            claims = f"{missing} ({claims})"
        core.fail(request, TransferError(f"{session.name} completed {request.request_id} wrongly: {claims}"))


def _learns_itself(request: InboundRequest, error: PdtxError) -> bool:
    """Whether a producer need not be told: it holds on what it offers, and knows that its own connection has ended."""
    return request.pulled and not isinstance(error, DeadlineExceeded | TransferRefused)


def _completed(request: InboundRequest, session: Session) -> bool:
    """Whether a process has said that its part is complete: it does not ask for that again."""
    ask = request.ask_of(session)
    return ask is not None and ask.complete is not None


def _arrived(request: InboundRequest) -> bool:
    return request.state is InboundState.READY
