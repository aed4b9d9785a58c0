"""What the consumer does for its transport: it admits sessions, plans where payloads go, and accounts for them."""

import logging
import threading
from typing import Protocol

from pdtx.cache import KVCaches
from pdtx.engine.landing import Door
from pdtx.engine.matching import BufferMatch
from pdtx.engine.registering import regions_of
from pdtx.errors import AuthenticationFailed, PdtxError, TransferRefused
from pdtx.layout import Layout
from pdtx.plan import PlanCache
from pdtx.transports import Placement, TransferKey

logger = logging.getLogger(__name__)


class ReceivingEvents(Protocol):
    """What a receiver reports, from the transport's threads: post what is to be done about it."""

    def on_payload_failed(self, session_id: str, request_id: str, door: Door, error: PdtxError) -> None:
        """Learn that a payload has not arrived."""

    def on_payload_twice(self, key: TransferKey) -> None:
        """Learn that the transport reported the end of a payload again."""

    def on_connection_closed(self, session_id: str, reason: str) -> None:
        """Learn that a session's data connection has ended."""


class PayloadReceiver:
    """The Receiver of the consumer's transport: called from the transport's threads.

    Which sessions there are and what is granted to them is set by the control thread. The lock guards the three tables,
    and is never held while anything else is called.
    plan_layout: the layout to plan the first buffer with instead of its own: a deliberate fault, for tests.
    """

    def __init__(self, cache: KVCaches, events: ReceivingEvents, plan_layout: Layout | None) -> None:
        self._events, self._regions, self._plan_layout = events, regions_of(cache), plan_layout
        self._plans = PlanCache()
        self._lock = threading.Lock()
        self._tokens: dict[str, bytes] = {}
        self._doors: dict[tuple[str, str], Door] = {}  # (session id, request id)
        self._placing: dict[tuple[str, TransferKey], Door] = {}  # payloads arriving now

    # -- the control thread -------------------------------------------------------------------------------------------

    def add_session(self, session_id: str, token: bytes) -> None:
        """Admit a session's data connections from now on."""
        with self._lock:
            self._tokens[session_id] = token

    def drop_session(self, session_id: str) -> None:
        """Admit no data connection of a session any more."""
        with self._lock:
            self._tokens.pop(session_id, None)

    def grant(self, session_id: str, request_id: str, door: Door) -> None:
        """Let a session's payloads for a request in, as far as the door does."""
        with self._lock:
            self._doors[session_id, request_id] = door

    def withdraw(self, session_id: str, request_id: str, door: Door) -> None:
        """Forget what was granted. What is being written now ends at its door all the same."""
        with self._lock:
            if self._doors.get((session_id, request_id)) is door:
                del self._doors[session_id, request_id]

    @property
    def num_placing(self) -> int:
        """Payloads that are being written now."""
        return len(self._placing)

    # -- the Receiver -------------------------------------------------------------------------------------------------

    def admit(self, session_id: str) -> bytes:
        """Return the token of a session."""
        with self._lock:
            token = self._tokens.get(session_id)
        if token is None:
            raise AuthenticationFailed("no such session")
        return token

    def place(self, session_id: str, key: TransferKey) -> Placement:
        """Plan where a payload goes, from this side's own facts."""
        with self._lock:
            door = self._doors.get((session_id, key.request_id))
            if door is None:
                raise TransferRefused(f"{key} was not granted")
            if (session_id, key) in self._placing:  # of an earlier request of that name
                raise TransferRefused(f"{key} is still being received")
            self._placing[session_id, key] = door
        began = False
        try:
            match, move = door.begin(key)
            began = True
            return self._placement(door, key, match, move)
        except BaseException:
            with self._lock:
                del self._placing[session_id, key]
            if began:
                door.end(key, None)
            raise

    def _placement(self, door: Door, key: TransferKey, match: BufferMatch, move: int) -> Placement:
        layers, positions = range(key.layer_start, key.layer_stop), range(key.token_start, key.token_stop)
        source = match.source_stand_in(positions.stop)
        fault = self._plan_layout if match.index == 0 else None
        here = match.destination(door.landing.tables[match.group], fault)
        plan = match.plan(match.moves[move], source, here, layers, positions, merge=False, plans=self._plans)
        slices = plan.destination()
        door.note_runs(len(slices))
        return Placement(self._regions[match.index][key.dst_rank], slices, door.landing.deadline)

    def placed(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        """Account for a payload that has arrived, or stopped. A second report of it changes nothing."""
        with self._lock:
            door = self._placing.pop((session_id, key), None)
        if door is None:
            self._events.on_payload_twice(key)
            return
        if error is not None:
            # In this order: idle first, its blocks could be granted again before the request has failed.
            self._events.on_payload_failed(session_id, key.request_id, door, error)
        door.end(key, nbytes if error is None else None)

    def offer(self, session_id: str, key: TransferKey) -> Placement:
        """Refuse: a decode node's cache is written by its producers, not read."""
        raise TransferRefused(f"{key}: this node gives nothing away")

    def offered(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        """Learn of nothing, for nothing was offered."""

    def notified(self, session_id: str, data: bytes) -> None:
        """Log a notice: producers send what they have to say over the side channel. An empty one is a probe."""
        if data:
            logger.info("ignored a notice of %d bytes of session %s", len(data), session_id)

    def closed(self, session_id: str, reason: str) -> None:
        """Report that a producer's data connection has ended."""
        self._events.on_connection_closed(session_id, reason)
