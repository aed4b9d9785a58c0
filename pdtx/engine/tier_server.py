"""A node's tier in host memory, served to other nodes: they look blocks up, and read them while they are pinned."""

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdtx import __version__
from pdtx.address import join_address, parse_address
from pdtx.engine.coverage import require_all_received
from pdtx.engine.describe import facts_of, own_facts
from pdtx.engine.handshake import make_reject, new_session
from pdtx.engine.inbound import Session
from pdtx.engine.matching import BufferMatch, Match, match_caches
from pdtx.engine.registering import regions_of, register_cache
from pdtx.errors import AuthenticationFailed, IncompatiblePeer, PdtxError, ProtocolError, TransferRefused
from pdtx.plan import STATE, PlanCache
from pdtx.plan.runs import Int64s
from pdtx.protocol import (
    MAX_TIER_HASHES,
    PROTOCOL_VERSION,
    Bye,
    CacheDescription,
    DataEndpoint,
    Failure,
    Message,
    TierDone,
    TierFound,
    TierHello,
    TierLookup,
    TierWelcome,
)
from pdtx.sidechannel import Listener, Security
from pdtx.text import reason_of
from pdtx.tiers import PrefixKeys
from pdtx.tiers.cpu import CpuTier
from pdtx.tiers.shelved import ShelfLease
from pdtx.transports import Mover, Placement, TransferKey

logger = logging.getLogger(__name__)

LEASE_S = 30.0
MOST_LEASES = 64
"""Of one peer at a time."""

_MOST_SHARE = 0.5
"""Of the tier's blocks that peers' leases may pin together: the node's own requests need room to store."""

_LOOK_S = 0.25


@dataclass
class _Lent:
    """Blocks that a peer may read until deadline. readers: offers under way, with which it lasts longer.

    counts: blocks of each group.
    """

    session: Session
    lease: ShelfLease
    counts: tuple[int, ...]
    deadline: float
    readers: int = 0
    over: bool = False


class TierServer:
    """Serves one tier. Nothing can be written to it; what is read is pinned, for LEASE_S at most and to a bound.

    It is the Receiver of its mover, which is its own. Safe to use from several threads.
    """

    def __init__(self, tier: CpuTier, description: CacheDescription, mover: Mover, *, lease_s: float = LEASE_S) -> None:
        """description: of tier.cache, see describe_cache."""
        self.tier, self.mover, self.lease_s = tier, mover, lease_s
        self.engine_id = f"tier-{uuid.uuid4().hex[:8]}"
        self._facts = own_facts(tier.cache, description)
        self._most_blocks = [max(1, int(_MOST_SHARE * (group.num_blocks - 1))) for group in tier.cache.groups]
        self._regions, self._plans = regions_of(tier.cache), PlanCache()
        self._sessions: dict[str, Session] = {}
        self._lent: dict[tuple[str, str], _Lent] = {}  # (session id, request id)
        self._reading: dict[tuple[str, TransferKey], list[_Lent]] = {}
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._reaper = threading.Thread(target=self._reap, name="pdtx-tier-reaper", daemon=True)
        self._listener: Listener | None = None
        self._endpoints: list[DataEndpoint] = []

    def listen(self, address: str, *, security: Security, data_port: int = 0) -> str:
        """Serve at address ("HOST:PORT"), payloads at data_port of the same host; return the address.

        Raises AddressInUse, TransferError for memory that cannot be registered, InputError.
        """
        register_cache(self.mover, self.tier.cache)
        host, _ = parse_address(address)
        bound = self.mover.listen(join_address(host, data_port), self)
        self._endpoints = [DataEndpoint(mover=self.mover.name, address=bound)]
        with self._lock:  # a peer may say hello before this returns
            self._listener = Listener(address, self._on_message, self._on_lost, security=security)
        self._reaper.start()
        return self._listener.endpoint.removeprefix("tcp://")

    def close(self) -> None:
        """Stop serving, and unpin everything. Idempotent."""
        self._closing.set()
        if self._reaper.is_alive():
            self._reaper.join()
        self.mover.close()
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            lent = list(self._lent.values())
        for each in lent:
            self._end(each)

    @property
    def num_lent(self) -> int:
        """Blocks that peers' leases pin now."""
        with self._lock:
            return sum(sum(each.counts) for each in self._lent.values())

    # -- leases -------------------------------------------------------------------------------------------------------

    def _end(self, lent: _Lent) -> None:
        """Take a lease back; its blocks are unpinned once nobody reads them."""
        with self._lock:
            lent.over = True
            if lent.readers:
                return
            lent.lease.release()  # before the entry goes, by which others see what is pinned
            for key in [key for key, each in self._lent.items() if each is lent]:
                del self._lent[key]

    def _reap(self) -> None:
        while not self._closing.wait(_LOOK_S):
            now = time.monotonic()
            with self._lock:
                late = [each for each in self._lent.values() if each.deadline < now]
            for each in late:
                self._end(each)

    # -- messages, on the side channel's thread ------------------------------------------------------------------------

    def _send(self, peer: bytes, message: Message) -> None:
        with self._lock:  # listen() holds it until the listener is known
            listener = self._listener
        if listener is not None:
            listener.send(peer, message)

    def _on_lost(self, peer: bytes, reason: str) -> None:
        with self._lock:
            gone = [session for session in self._sessions.values() if session.peer == peer]
            for session in gone:
                del self._sessions[session.session_id]
            lent = [each for each in self._lent.values() if each.session in gone]
        for session in gone:
            logger.info("lost %s: %s", session.engine_id, reason)
        for each in lent:
            self._end(each)

    def _on_message(self, peer: bytes, message: Message) -> None:
        if isinstance(message, TierHello):
            self._on_hello(peer, message)
            return
        with self._lock:
            session = next((session for session in self._sessions.values() if session.peer == peer), None)
        if session is None:
            self._send(peer, Bye(reason="it has no session; a tier is served here, say hello to that first"))
        elif isinstance(message, TierLookup):
            self._on_lookup(session, message)
        elif isinstance(message, TierDone):
            with self._lock:
                lent = self._lent.get((session.session_id, message.request_id))
            if lent is not None:
                self._end(lent)
        else:
            logger.warning("ignored a %s from %s", type(message).__name__, session.engine_id)

    def _on_hello(self, peer: bytes, hello: TierHello) -> None:
        try:
            session = self._open(peer, hello)
        except ProtocolError as error:
            logger.warning("refused %s: %s", hello.engine_id, reason_of(error))
            self._send(peer, make_reject(error))
            return
        self._on_lost(peer, "it said hello again")
        with self._lock:
            self._sessions[session.session_id] = session
        welcome = TierWelcome(
            protocol=PROTOCOL_VERSION,
            pdtx_version=__version__,
            engine_id=self.engine_id,
            session_id=session.session_id,
            token=session.token,
            cache=self._facts.description,
            data_endpoints=self._endpoints,
            block_tokens=self.tier.block_tokens,
            lease_s=self.lease_s,
        )
        self._send(peer, welcome)

    def _open(self, peer: bytes, hello: TierHello) -> Session:
        """Return a session for who said hello. Raises IncompatiblePeer or ProtocolError."""
        ours, theirs = self.tier.block_tokens, hello.block_tokens
        if ours != theirs:
            advice = "give both nodes the same --kv-offloading-block-size"
            raise IncompatiblePeer("block size of the tier", str(ours), str(theirs), advice)
        match = match_caches(self._facts, facts_of(hello.cache))
        require_all_received([match])
        return new_session(peer, hello, match)

    def _on_lookup(self, session: Session, ask: TierLookup) -> None:
        try:
            found = self._look_up(session, ask)
        except PdtxError as error:
            failure = Failure(request_id=ask.request_id, phase="the lookup", reason=reason_of(error))
            self._send(session.peer, failure)
            return
        self._send(session.peer, found)

    def _look_up(self, session: Session, ask: TierLookup) -> TierFound:
        """Find and pin blocks; return what was found, for each of the peer's groups."""
        groups = len(session.match.consumer.groups)
        if len(ask.places) != groups:
            raise TransferRefused(f"places for {len(ask.places)} groups, of {groups}")
        name = session.session_id, ask.request_id
        with self._lock:
            if name in self._lent or sum(each.session is session for each in self._lent.values()) >= MOST_LEASES:
                raise TransferRefused(f"{ask.request_id} is in use, or {MOST_LEASES} others are; finish one first")
        ours = {match.group: match.producer_group for match in session.match.buffers}
        asked: list[Int64s] = [np.zeros(0, np.int64) for _ in self.tier.cache.groups]
        for group, places in enumerate(ask.places):
            if group in ours:
                asked[ours[group]] = np.unique(np.asarray(places, np.int64))
        keys = PrefixKeys(self.tier.block_tokens, tuple(ask.digests), tuple(ask.proofs))
        lease = self.tier.lookup(keys, asked)
        found = [places[mask] for places, mask in zip(asked, lease.found, strict=True)]
        hashes = [lease.contents(group, places) for group, places in enumerate(found)]
        counts = tuple(map(len, found))
        with self._lock:
            problem = self._too_much(counts)
            if sum(len(content) for each in hashes for content in each) > MAX_TIER_HASHES:
                problem = (
                    f"the content hashes of {sum(counts)} blocks are more than {MAX_TIER_HASHES} bytes; ask for less"
                )
            if session.session_id not in self._sessions:
                problem = "the session has ended"
            if problem is None and any(counts):
                self._lent[name] = _Lent(session, lease, counts, time.monotonic() + self.lease_s)
        if problem is not None:
            lease.release()
            raise TransferRefused(problem)
        if not any(counts):
            lease.release()
        theirs = [ours.get(group) for group in range(groups)]
        return TierFound(
            request_id=ask.request_id,
            places=[found[group].tolist() if group is not None else [] for group in theirs],
            contents=[hashes[group] if group is not None else [] for group in theirs],
        )

    def _too_much(self, counts: Sequence[int]) -> str | None:
        """Say of which group so many blocks more would be too many to pin for peers, if so. Called under the lock."""
        for group, (count, most) in enumerate(zip(counts, self._most_blocks, strict=True)):
            lent = sum(each.counts[group] for each in self._lent.values())
            if count and lent + count > most:
                name = self.tier.cache.groups[group].name
                return f"{count} blocks of group {name} beside {lent} would pin more than {most} for peers; ask later"
        return None

    # -- the Receiver, on the mover's threads --------------------------------------------------------------------------

    def admit(self, session_id: str) -> bytes:
        """Return the token of a session."""
        with self._lock:
            session = self._sessions.get(session_id)
        if session is None:
            raise AuthenticationFailed("no such session")
        return session.token

    def place(self, session_id: str, key: TransferKey) -> Placement:
        """Refuse: a tier is read by others, not written."""
        raise TransferRefused(f"{key}: nothing can be written to this tier")

    def placed(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        """Learn of nothing, for nothing was placed."""

    def offer(self, session_id: str, key: TransferKey) -> Placement:
        """Plan where a payload comes from, out of this side's own facts: blocks of a lease and nothing else."""
        with self._lock:
            lent = self._lent.get((session_id, key.request_id))
            if lent is None or lent.over or lent.session.session_id != session_id:
                raise TransferRefused(f"{key} was not found here, or too long ago")
            lent.readers += 1
            self._reading.setdefault((session_id, key), []).append(lent)
        try:
            return self._placement(lent, key)
        except BaseException:
            self.offered(session_id, key, 0, None)
            raise

    def _placement(self, lent: _Lent, key: TransferKey) -> Placement:
        match = self._matched(lent.session.match, key)
        move = match.moves[match.move_index[key.src_rank, key.dst_rank]]
        layers, positions = range(key.layer_start, key.layer_stop), range(key.token_start, key.token_stop)
        table = lent.lease.tables(match.producer_group)
        if self.tier.cache.groups[match.producer_group].kind == "state":
            # The key's position is the place, for a prompt has a state at the end of every block.
            if len(positions) != 1 or positions.stop > len(table):
                raise TransferRefused(f"{key} is not one of the {len(table)} states that were asked for")
            table, positions = table[positions.start : positions.stop], STATE
        elif positions.stop > len(table) * self.tier.block_tokens:
            raise TransferRefused(f"{key} goes beyond the {len(table)} blocks that were asked for")
        there = match.destination_stand_in(positions.stop)
        plan = match.plan(move, match.source(table), there, layers, positions, plans=self._plans)
        return Placement(self._regions[match.producer_index][move.src_rank], plan.source(), lent.deadline)

    def _matched(self, found: Match, key: TransferKey) -> BufferMatch:
        """Return the buffer that a key is about. Raises TransferRefused for one that is no part of it."""
        if not 0 <= key.buffer < len(found.buffers):
            raise TransferRefused(f"{key} is for buffer {key.buffer} of {len(found.buffers)}")
        match = found.buffers[key.buffer]
        layers = range(key.layer_start, key.layer_stop)
        inside = 0 <= layers.start < layers.stop <= len(match.layers) and 0 <= key.token_start < key.token_stop
        if not inside or not match.consecutive(layers):
            raise TransferRefused(f"{key} is not a part of the {len(match.layers)} layers of buffer {match.name}")
        if (key.src_rank, key.dst_rank) not in match.move_index:
            raise TransferRefused(f"{key}: rank {key.dst_rank} takes nothing of buffer {match.name} from there")
        return match

    def offered(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        """Learn that nobody reads for key any more. To be told so again changes nothing."""
        with self._lock:
            reading = self._reading.get((session_id, key))
            if not reading:
                return
            lent = reading.pop()
            if not reading:
                del self._reading[session_id, key]
            lent.readers -= 1
            ended = lent.over and not lent.readers
        if ended:
            self._end(lent)

    def notified(self, session_id: str, data: bytes) -> None:
        """Log a notice: what a peer has to say comes over the side channel."""
        logger.info("ignored a notice of %d bytes of session %s", len(data), session_id)

    def closed(self, session_id: str, reason: str) -> None:
        """Take back what a peer had been lent when its data connection ended."""
        with self._lock:
            lent = [each for each in self._lent.values() if each.session.session_id == session_id]
        for each in lent:
            self._end(each)
