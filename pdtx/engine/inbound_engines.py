"""A consumer's producers: for each the sessions with its processes, and the match of both caches."""

import logging

import msgspec

from pdtx.engine.arrivals import expected_buffers
from pdtx.engine.coverage import require_all_received
from pdtx.engine.describe import CacheFacts, facts_of
from pdtx.engine.handshake import check_hello, new_session
from pdtx.engine.inbound import PrefillEngine, Session
from pdtx.engine.matching import Match, match_caches
from pdtx.engine.receiving import PayloadReceiver
from pdtx.errors import IncompatiblePeer, ProtocolError
from pdtx.protocol import CacheDescription, Hello

logger = logging.getLogger(__name__)

_MAX_MATCHES = 64
"""Descriptions of producers' caches whose match is remembered, so that hellos cost little."""


class EngineTable:
    """The producers, and the sessions with their processes. Changed by the consumer's control thread alone.

    facts: of the consumer's cache. receiver: is told which data connections to admit.
    sessions: by side-channel address, which every message comes with.
    """

    def __init__(self, facts: CacheFacts, receiver: PayloadReceiver) -> None:
        self._facts, self._receiver = facts, receiver
        self.sessions: dict[bytes, Session] = {}
        self._engines: dict[str, PrefillEngine] = {}
        self._engine_of: dict[Session, PrefillEngine] = {}
        self._matches: dict[bytes, Match] = {}

    def make(self, peer: bytes, hello: Hello, names: tuple[str, bytes] | None = None) -> Session:
        """Return a session for a process of a producer. names: its id and token, where that knows them already.

        Raises IncompatiblePeer or ProtocolError.
        """
        check_hello(hello)
        return new_session(peer, hello, self._match(hello.cache), names)

    def _match(self, description: CacheDescription) -> Match:
        key = msgspec.msgpack.encode(description)
        found = self._matches.get(key)
        if found is None:
            found = match_caches(facts_of(description), self._facts)
            while len(self._matches) >= _MAX_MATCHES:
                del self._matches[next(iter(self._matches))]
            self._matches[key] = found
        return found

    def earlier(self, session: Session) -> list[Session]:
        """Return the sessions that a new one takes the place of: its peer's, and its process's."""
        engine = self._engines.get(_key(session))
        places = self.sessions.get(session.peer), engine.members.get(session.process) if engine is not None else None
        return list(dict.fromkeys(found for found in places if found is not None))

    def check(self, session: Session) -> None:
        """Raise IncompatiblePeer for a process that does not go together with the other ones of its producer.

        ProtocolError for a hello that is older than the session which is there.
        The last of them shows whether together they have all that this node needs.
        """
        engine = self._engines.get(_key(session))
        for one in self.earlier(session):
            if one.incarnation == session.incarnation and one.number > session.number:
                raise ProtocolError(
                    f"hello {session.number} of {session.name} was held up: {one.number} came before it"
                )
        others = [one for one in engine.members.values() if one.process != session.process] if engine else []
        if others:
            first = others[0]
            for field, ours, theirs in (
                ("processes", first.processes, session.processes),
                ("tp_size", first.match.producer.tp_size, session.match.producer.tp_size),
                ("not_transferred", sorted(_kept(first)), sorted(_kept(session))),
            ):
                if ours != theirs:
                    advice = f"all processes of {session.engine_id} must agree on it"
                    raise IncompatiblePeer(f"{field} of the producer's processes", str(theirs), str(ours), advice)
        if len(others) + 1 == session.processes:
            require_all_received([session.match, *(one.match for one in others)])

    def add(self, session: Session) -> None:
        """Admit a session's data connections from now on. Those that it takes the place of have been dropped."""
        if session.match.not_sent:
            logger.warning("%s has %s, not transferred here", session.name, session.match.not_sent_text)
        engine = self._engines.get(_key(session))
        if engine is None:
            src_tp, kept = session.match.producer.tp_size, _kept(session)
            expected = expected_buffers(self._facts, src_tp, kept)
            engine = PrefillEngine(session.engine_id, session.processes, expected, kept, src_tp)
            self._engines[_key(session)] = engine
        engine.members[session.process] = session
        self._engine_of[session] = engine
        self.sessions[session.peer] = session
        self._receiver.add_session(session.session_id, session.token)

    def engine_of(self, session: Session) -> PrefillEngine:
        """Return the producer that a session is with a process of."""
        return self._engine_of[session]

    def of_id(self, session_id: str) -> Session | None:
        """Return a session by its id, if it has not ended."""
        return next((session for session in self.sessions.values() if session.session_id == session_id), None)

    def drop(self, session: Session, *, keep: bool = False) -> None:
        """Admit nothing of a session any more. keep: its producer, whose process may come back."""
        if self.sessions.get(session.peer) is session:
            del self.sessions[session.peer]
        self._receiver.drop_session(session.session_id)
        engine = self._engine_of.pop(session, None)
        if engine is not None and engine.members.get(session.process) is session:
            del engine.members[session.process]
            if not engine.members and not keep:
                self._engines.pop(_key(session), None)

    def forget(self, engine: PrefillEngine) -> None:
        """Forget a producer that was kept, once nothing of it is under way."""
        if not engine.members:
            for key in [key for key, one in self._engines.items() if one is engine]:
                del self._engines[key]


def _key(session: Session) -> str:
    """What the processes of one producer have in common; one alone is itself, whatever name it was given."""
    return session.engine_id if session.processes > 1 else f"{session.engine_id} {session.incarnation}"


def _kept(session: Session) -> frozenset[str]:
    return frozenset(session.match.producer.description.not_transferred)
