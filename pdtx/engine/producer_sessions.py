"""The producer's way to its sessions: consumers that it dials, and those that dial it."""

import logging
import threading
import time
from collections.abc import Sequence

from pdtx.address import numeric_host, parse_address
from pdtx.engine.control_channel import AcceptedChannel, ControlChannel
from pdtx.engine.control_thread import FLOOD, ControlThread, PeerInbox
from pdtx.engine.coverage import require_all_sent
from pdtx.engine.handshake import make_reject
from pdtx.engine.opening import SessionOpener
from pdtx.engine.outbound_control import OutboundControl
from pdtx.engine.outbound_messages import OutboundMessages
from pdtx.engine.outbound_session import DecodeEngine, OutboundSession
from pdtx.engine.route import Route
from pdtx.errors import IncompatiblePeer, InputError, PdtxError, PeerLost
from pdtx.protocol import Message, Reject, Welcome
from pdtx.sidechannel import Listener, Security

logger = logging.getLogger(__name__)


class ProducerSessions:
    """Makes sessions for a producer's control, and brings it what its peers say.

    Everything that changes a session is an event of the control thread; dialling and shaking hands is done by whoever
    connects, and by the opener's threads.
    """

    def __init__(self, core: OutboundControl, control: ControlThread, opener: SessionOpener) -> None:
        self._core, self._control, self._opener = core, control, opener
        self._messages = OutboundMessages(core)
        self._listener: Listener | None = None
        self._listening = threading.Lock()
        self._inboxes: dict[bytes, PeerInbox] = {}  # of the listener's thread
        self._accepted: dict[bytes, OutboundSession] = {}  # of the control thread
        self._channels = list[ControlChannel]()  # of those that connect; never forgotten

    # -- consumers that are dialled -----------------------------------------------------------------------------------

    def connect(self, addresses: Sequence[str], security: Security, timeout_s: float) -> DecodeEngine:
        """Open a session with every process of a consumer. Raises as KVProducer.connect()."""
        deadline, sessions = time.monotonic() + timeout_s, list[OutboundSession]()
        routes = list[Route]()
        gone = self._control.call(self._gone_at, {_place(address) for address in addresses})
        try:
            for address in addresses:
                session = self._dialled(address, security)
                sessions.append(session)
                channel = session.channel
                if isinstance(channel, ControlChannel):
                    routes.append(self._opener.open(channel, max(0.0, deadline - time.monotonic())))
            engine = _engine_of(routes)
        except BaseException:
            for route in routes:
                route.connection.close()
            for session in sessions:
                if session.channel is not None:
                    session.channel.close()  # or its heartbeats would keep the consumer's session alive
            raise
        self._control.call(self._add, engine, list(zip(sessions, routes, strict=True)))
        for one in gone:
            self._control.call(self._forget, one)
        return engine

    def _gone_at(self, places: set[tuple[str, int]]) -> list[DecodeEngine]:
        """Return the consumers that were at some places and are gone; InputError for one that is not."""
        found = list[DecodeEngine]()
        for engine in self._core.engines:
            dialled = [one for one in engine.sessions if isinstance(one.channel, ControlChannel)]
            here = [one.channel.address for one in dialled if one.channel and _place(one.channel.address) in places]
            if not here:
                continue
            if all(one.lost is None for one in dialled):
                raise InputError(f"this producer is connected to {engine.engine_id} at {here[0]} already")
            if any(one.new or one.live for one in dialled):
                raise InputError(
                    f"this producer has requests under way to {engine.engine_id} at {here[0]}, which was lost; "
                    "they go on by themselves once it is there again, or end: connect after that"
                )
            found.append(engine)
        return found

    def _forget(self, engine: DecodeEngine) -> None:
        """Forget a consumer that is gone, now that there is another one in its place."""
        self._core.drop_engine(engine)
        for session in engine.sessions:
            session.close(PeerLost(f"{engine.engine_id} is gone"))
            if session.route is not None:
                session.route.connection.close()

    def _dialled(self, address: str, security: Security) -> OutboundSession:
        inbox, session = PeerInbox(), OutboundSession()

        def on_message(message: Message) -> None:
            if isinstance(message, Welcome | Reject):
                channel.answer(message)
            elif inbox.take():
                self._control.post(self._handle, session, inbox, message)
            else:
                channel.give_up(FLOOD)

        # Before anything of a channel that is dialled anew: dialling ends the old one's thread, which posts this.
        channel = ControlChannel(
            address, security, on_message, lambda reason: self._control.post(self._on_lost, session, reason)
        )
        session.channel = channel
        self._channels.append(channel)
        return session

    def _add(self, engine: DecodeEngine, found: Sequence[tuple[OutboundSession, Route]]) -> None:
        for session, route in found:
            engine.add(session)
            session.opened(route, session.channel.lost if session.channel is not None else None)
        self._core.add_engine(engine)

    def _handle(self, session: OutboundSession, inbox: PeerInbox, message: Message) -> None:
        inbox.done()
        self._messages.on_message(session, message)

    def _on_lost(self, session: OutboundSession, reason: str) -> None:
        self._core.on_lost(session, PeerLost(f"lost {session.peer}: {reason}"))

    def reopen(self, session: OutboundSession, timeout_s: float) -> None:
        """Open a session anew, in the background. One that the consumer has dialled is over: it may dial again."""
        channel = session.channel
        if not isinstance(channel, ControlChannel):
            problem = session.opening or PeerLost("its data connection ended")
            if channel is not None:
                channel.close()
            self._control.post(self._core.on_not_opened, session, problem)
            self._control.post(self._core.on_lost, session, problem)
            return

        def done(found: Route | PdtxError) -> None:
            if isinstance(found, PdtxError):
                self._control.post(self._core.on_not_opened, session, found)
            else:
                self._control.post(self._core.on_opened, session, found, channel.lost)

        self._opener.reopen(channel, session.route, timeout_s, done)

    # -- consumers that dial ------------------------------------------------------------------------------------------

    def listen(self, address: str, security: Security) -> str:
        """Serve consumers that dial; return the address. Raises as KVProducer.listen()."""
        if self._listener is not None:
            raise InputError(f"this producer listens at {self._listener.endpoint} already; make another one")
        with self._listening:  # a consumer may dial before this returns
            self._listener = Listener(address, self._on_message, self._on_peer_lost, security=security)
        return self._listener.endpoint.removeprefix("tcp://")

    def _on_message(self, peer: bytes, message: Message) -> None:
        with self._listening:
            listener = self._listener
        if listener is None:
            return
        inbox = self._inboxes.setdefault(peer, PeerInbox())
        if not inbox.take():
            listener.give_up(peer, FLOOD)
        else:
            self._control.post(self._handle_accepted, listener, peer, inbox, message)

    def _on_peer_lost(self, peer: bytes, reason: str) -> None:
        self._inboxes.pop(peer, None)
        self._control.post(self._on_accepted_lost, peer, reason)

    def _handle_accepted(self, listener: Listener, peer: bytes, inbox: PeerInbox, message: Message) -> None:
        inbox.done()
        session = self._accepted.get(peer)
        if isinstance(message, Welcome):
            if session is not None:
                self._on_accepted_lost(peer, "it asked for another session")
            self._accept(listener, peer, message)
        elif session is None:
            logger.warning("ignored a %s from a peer that has not said welcome", type(message).__name__)
        else:
            self._messages.on_message(session, message)

    def _on_accepted_lost(self, peer: bytes, reason: str) -> None:
        session = self._accepted.pop(peer, None)
        if session is not None:
            lost = PeerLost(f"lost {session.peer}: {reason}")
            if isinstance(session.channel, AcceptedChannel):
                session.channel.lost = lost
            self._core.on_lost(session, lost)
            if session.route is not None:
                session.route.connection.close()

    def _accept(self, listener: Listener, peer: bytes, welcome: Welcome) -> None:
        name = welcome.engine_id, welcome.process, welcome.incarnation
        for other in [other for other, before in self._accepted.items() if before.accepted_from == name]:
            self._on_accepted_lost(other, "it opened another session")  # whose end has not been noticed here
        channel = AcceptedChannel(listener, peer)
        session = self._accepted[peer] = OutboundSession(channel, renews=False, accepted_from=name)
        if self._core.over is not None:
            self._refuse(peer, session, self._core.over)
            return

        def done(found: Route | PdtxError) -> None:
            self._control.post(self._on_accepted, peer, session, found)

        self._join(session, welcome)
        self._opener.accept(welcome, channel.send, done)

    def _join(self, session: OutboundSession, welcome: Welcome) -> None:
        """Add a session to those with the same consumer's other processes."""
        for engine in self._core.engines:
            same = (engine.engine_id, engine.processes) == (welcome.engine_id, welcome.processes)
            if same and len(engine.sessions) < engine.processes:
                engine.add(session)
                return
        self._core.add_engine(DecodeEngine(welcome.engine_id, welcome.processes, [session]))

    def _on_accepted(self, peer: bytes, session: OutboundSession, found: Route | PdtxError) -> None:
        if not isinstance(found, PdtxError) and self._accepted.get(peer) is not session:
            found.connection.close()
            return
        if isinstance(found, PdtxError):
            self._refuse(peer, session, found)
            return
        session.route = found
        try:
            if session.engine is not None and len(session.engine.routes) == session.engine.processes:
                _check_whole(session.engine.routes)
        except PdtxError as error:
            found.connection.close()
            self._refuse(peer, session, error)
            return
        self._core.on_opened(session, found, None)

    def _refuse(self, peer: bytes, session: OutboundSession, error: PdtxError) -> None:
        logger.warning("no session with %s: %s", session.peer, error)
        if session.channel is not None:
            session.channel.send(make_reject(error))
        self._accepted.pop(peer, None)
        self._core.on_lost(session, error)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close every channel and connection, and wait for what is being opened. Idempotent."""
        for channel in self._channels:
            channel.close()
        self._opener.close()
        for channel in self._channels:
            channel.close()  # again: what was being opened may have dialled anew
        if self._listener is not None:
            self._listener.close()
        for route in self._control.call(lambda: [session.route for session in self._core.sessions]):
            if route is not None:
                route.connection.close()


def _engine_of(routes: Sequence[Route]) -> DecodeEngine:
    """Return the consumer that routes lead to. Raises IncompatiblePeer, or InputError unless they are all of it."""
    first = routes[0].welcome
    named = sorted(route.welcome.process for route in routes)
    if named != list(range(first.processes)):
        raise InputError(
            f"{first.engine_id} has {first.processes} processes, and the addresses are those of {named}; "
            "give the address of each, once"
        )
    _check_whole(routes)
    return DecodeEngine(first.engine_id, first.processes)


def _check_whole(routes: Sequence[Route]) -> None:
    """Check that routes lead to the processes of one consumer, which have all that is sent. Raises IncompatiblePeer."""
    first = routes[0].welcome
    for route in routes:
        for field in ("engine_id", "processes"):
            ours, other = getattr(first, field), getattr(route.welcome, field)
            if ours != other:
                raise IncompatiblePeer(f"{field} of the consumer's processes", str(ours), str(other))
    require_all_sent([route.match for route in routes])


def _place(address: str) -> tuple[str, int]:
    """Return the numeric address, so that two names of one are the same."""
    host, port = parse_address(address)
    return numeric_host(host), port
