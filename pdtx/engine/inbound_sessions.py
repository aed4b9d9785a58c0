"""A consumer's sessions: one for each producer, each with its match of the two caches."""

import logging

import msgspec

from pdtx.engine.coverage import require_all_received
from pdtx.engine.describe import CacheFacts, facts_of
from pdtx.engine.handshake import check_hello, new_session
from pdtx.engine.inbound import Session
from pdtx.engine.matching import Match, match_caches
from pdtx.engine.receiving import PayloadReceiver
from pdtx.protocol import CacheDescription, Hello

logger = logging.getLogger(__name__)

_MAX_MATCHES = 16
"""Descriptions of producers' caches whose match is remembered, so that hellos cost little."""


class SessionTable:
    """The sessions by their producers, each of which has one at most. Changed by the consumer's control thread alone.

    facts: of the consumer's cache. receiver: is told which data connections to admit.
    """

    def __init__(self, facts: CacheFacts, receiver: PayloadReceiver) -> None:
        self._facts, self._receiver = facts, receiver
        self.sessions: dict[bytes, Session] = {}  # by side-channel address, which every message comes with
        self._matches: dict[bytes, Match] = {}

    def make(self, peer: bytes, hello: Hello) -> Session:
        """Return a session for a producer. Raises IncompatiblePeer or ProtocolError."""
        check_hello(hello)
        match = self._match(hello.cache)
        require_all_received([match])
        return new_session(peer, hello.engine_id, match)

    def _match(self, description: CacheDescription) -> Match:
        key = msgspec.msgpack.encode(description)
        found = self._matches.get(key)
        if found is None:
            found = match_caches(facts_of(description), self._facts)
            while len(self._matches) >= _MAX_MATCHES:
                del self._matches[next(iter(self._matches))]
            self._matches[key] = found
        return found

    def add(self, session: Session) -> None:
        """Admit a session's data connections from now on. The one that its producer had before has been dropped."""
        if session.match.not_sent:
            logger.warning("%s has %s, not sent here", session.engine_id, session.match.not_sent_text)
        self.sessions[session.peer] = session
        self._receiver.add_session(session.session_id, session.token)

    def of_id(self, session_id: str) -> Session | None:
        """Return a session by its id, if it has not ended."""
        return next((session for session in self.sessions.values() if session.session_id == session_id), None)

    def drop(self, peer: bytes) -> Session | None:
        """Admit nothing of a producer any more; return the session that it had, if any."""
        session = self.sessions.pop(peer, None)
        if session is not None:
            self._receiver.drop_session(session.session_id)
        return session
