"""Another node's tier: looked up over the side channel, read over a mover straight into this node's cache."""

import logging
import queue
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from typing import ClassVar

import numpy as np

from pdtx import __version__
from pdtx.cache import KVCaches
from pdtx.engine.control_channel import ControlChannel
from pdtx.engine.coverage import require_all_received
from pdtx.engine.describe import facts_of, own_facts
from pdtx.engine.matching import match_caches
from pdtx.engine.peer_loads import PeerLease, Piece, Way
from pdtx.engine.registering import regions_of, register_cache
from pdtx.engine.waking import Mailbox
from pdtx.errors import (
    DeadlineExceeded,
    IncompatiblePeer,
    PdtxError,
    PeerLost,
    PeerUnreachable,
    ProtocolError,
    TierBusy,
    TierError,
)
from pdtx.plan import STATE, CostTable, PlanCache
from pdtx.plan.runs import Int64s
from pdtx.protocol import (
    MAX_TIER_BLOCKS,
    PROTOCOL_VERSION,
    CacheDescription,
    Failure,
    Message,
    Reject,
    TierDone,
    TierFound,
    TierHello,
    TierLookup,
    TierWelcome,
)
from pdtx.sidechannel import Security
from pdtx.text import reason_of
from pdtx.tiers import HASH_BYTES, Fence, GroupUsage, Moved, PrefixKeys, Side, Tier, TierUsage
from pdtx.tiers.geometry import block_nbytes
from pdtx.transports import Mover, TransferHandle

logger = logging.getLogger(__name__)

_MOST_LOADS = 64
_PAUSE_S = 5.0
"""After a peer could not be reached, how long nobody tries again: requests must not wait for it one after another."""

_ROUND_TRIP_S = 1e-3


class PeerTier(Tier):
    """Reads the tier that a TierServer serves at address. See Tier; store() is refused.

    Connects at the first lookup, and again after a loss. cache: what is loaded into, the only one. mover: its own.
    answer_s: how long a handshake or a lookup may take; load_s: a load. What fails is a miss, with the blocks named.
    """

    name: ClassVar[str] = "peer"

    def __init__(
        self,
        address: str,
        cache: KVCaches,
        description: CacheDescription,
        mover: Mover,
        *,
        block_tokens: int,
        security: Security,
        costs: CostTable | None = None,
        answer_s: float = 2.0,
        load_s: float = 10.0,
    ) -> None:
        self.address, self.cache, self.mover, self.block_tokens = address, cache, mover, block_tokens
        self.answer_s, self.load_s = answer_s, load_s
        self.engine_id = f"reader-{uuid.uuid4().hex[:8]}"
        self._facts = own_facts(cache, description)
        self._regions, self.plans = regions_of(cache), PlanCache()
        self._costs, _ = (costs or CostTable({})).of(mover.name, cache.device.type)
        sizes = (nbytes // group.block_size for nbytes, group in zip(block_nbytes(cache), cache.groups, strict=True))
        self._block_nbytes = tuple(
            per_position * (block_tokens if group.counts_tokens else group.block_size)
            for per_position, group in zip(sizes, cache.groups, strict=True)
        )
        self._usage = tuple(GroupUsage(group.name) for group in cache.groups)
        self._channel = ControlChannel(address, security, self._on_message, self._on_lost)
        self._opening, self._lock = threading.Lock(), threading.Lock()
        self._answers: dict[str, Mailbox[TierFound | PdtxError]] = {}
        self._way: Way | None = None
        self._problem: PdtxError | None = None
        self._not_before = 0.0
        self._loads = 0
        self._closed = False

    # -- the session --------------------------------------------------------------------------------------------------

    def _open(self) -> Way:
        """Return the session, made anew where it was lost. Raises what is in the way, for a while without trying."""
        with self._opening:
            way = self._way
            if way is not None and way.connection.ended is None:
                return way
            if self._closed:
                raise TierError(f"the tier of {self.address} is closed here")
            if time.monotonic() < self._not_before:
                raise PeerUnreachable(f"{self.address} is left alone for a while: {self._problem}")
            if way is not None:
                way.connection.close()
            try:
                self._way = self._greet()
            except PdtxError as error:
                self._way, self._problem, self._not_before = None, error, time.monotonic() + _PAUSE_S
                raise
            return self._way

    def _greet(self) -> Way:
        deadline = time.monotonic() + self.answer_s
        register_cache(self.mover, self.cache)
        hello = TierHello(
            protocol=PROTOCOL_VERSION,
            pdtx_version=__version__,
            engine_id=self.engine_id,
            cache=self._facts.description,
            block_tokens=self.block_tokens,
        )
        welcome = self._channel.greet(hello, self.answer_s)
        if not isinstance(welcome, TierWelcome):
            raise ProtocolError(f"{self.address} answered with a {type(welcome).__name__}")
        match = match_caches(facts_of(welcome.cache), self._facts)
        require_all_received([match])
        endpoint = next((each for each in welcome.data_endpoints if each.mover == self.mover.name), None)
        if endpoint is None:
            offered = ", ".join(each.mover for each in welcome.data_endpoints)
            raise IncompatiblePeer("mover", offered, self.mover.name, "choose one that both sides have")
        connection = self.mover.connect(endpoint.address, welcome.session_id, welcome.token, deadline)
        logger.info("reads the tier of %s at %s over %s", welcome.engine_id, self.address, connection.path)
        return Way(welcome, match, connection)

    def _on_message(self, message: Message) -> None:
        match message:
            case TierWelcome() | Reject():
                self._channel.answer(message)
            case TierFound():
                self._answer(message.request_id, message)
            case Failure():
                text = f"{self.address} failed in {reason_of(message.phase)}: {reason_of(message.reason)}"
                self._answer(message.request_id, TierError(text))
            case _:
                logger.warning("ignored a %s from %s", type(message).__name__, self.address)

    def _answer(self, request_id: str, answer: TierFound | PdtxError) -> None:
        with self._lock:
            waiting = self._answers.pop(request_id, None)
        if waiting is not None:
            waiting.put(answer)
        elif isinstance(answer, TierFound):
            self.done(request_id)  # nobody waits any more

    def _on_lost(self, reason: str) -> None:
        lost = PeerLost(f"lost {self.address}: {reason}")
        with self._lock:
            waiting, self._answers = self._answers, {}
        for each in waiting.values():
            each.put(lost)
        way, self._way = self._way, None
        if way is not None:
            way.connection.close()

    def close(self) -> None:
        """End the session; what is being loaded fails. Idempotent."""
        self._closed = True
        self._leave()
        with self._opening:  # which may have been going on, and has made another session
            self._leave()
        self.mover.close()

    def _leave(self) -> None:
        self._channel.close()
        way, self._way = self._way, None
        if way is not None:
            way.connection.close()

    # -- the tier -----------------------------------------------------------------------------------------------------

    def lookup(self, keys: PrefixKeys, places: Sequence[Int64s]) -> PeerLease:
        """Ask the peer, see Tier. Raises PeerError, ProtocolError, TierError or DeadlineExceeded too."""
        if keys.block_tokens != self.block_tokens:
            raise TierError(f"keys of blocks of {keys.block_tokens} tokens; the peer's have {self.block_tokens}")
        way, request_id = self._open(), uuid.uuid4().hex
        count = min(MAX_TIER_BLOCKS, len(keys))
        ask = TierLookup(
            request_id=request_id,
            digests=list(keys.digests[:count]),
            proofs=list(keys.proofs[:count]),
            places=[each[each < count].tolist() for each in places],
        )
        waiting = Mailbox[TierFound | PdtxError]()
        with self._lock:
            self._answers[request_id] = waiting
        try:
            self._channel.send(ask)
            answer = waiting.get(self.answer_s)
        except queue.Empty:
            with self._lock:
                answered = self._answers.pop(request_id, None) is None
            if answered:  # just now: what was found is pinned at the peer
                self.done(request_id)
            raise DeadlineExceeded("blocks to be found", self.address, self.answer_s) from None
        finally:
            with self._lock:
                self._answers.pop(request_id, None)
        if isinstance(answer, PdtxError):
            raise answer
        if len(answer.places) != len(places):
            raise ProtocolError(f"{self.address} found blocks of {len(answer.places)} groups, not {len(places)}")
        known = self._known(answer)
        found = tuple(np.isin(asked, there) for asked, there in zip(places, answer.places, strict=True))
        for usage, nbytes, mask in zip(self._usage, self._block_nbytes, found, strict=True):
            missed = int((~mask).sum())
            with self._lock:
                usage.missed.add(missed, missed * nbytes)
        return PeerLease(self, way, request_id, places, found, known)

    def _known(self, answer: TierFound) -> tuple[dict[int, bytes], ...]:
        """Return the content hashes of each group by place. Raises ProtocolError for those of other buffers."""
        known = list[dict[int, bytes]]()
        for group, (places, contents) in enumerate(zip(answer.places, answer.contents, strict=True)):
            expected = HASH_BYTES * len(self.cache.buffers_of(group))
            wrong = next((len(content) for content in contents if len(content) not in (0, expected)), None)
            if wrong is not None:
                name = self.cache.groups[group].name
                raise ProtocolError(
                    f"{self.address} gave a content hash of {wrong} bytes for group {name}, not {expected}"
                )
            known.append(dict(zip(places, contents, strict=True)))
        return tuple(known)

    def store(self, keys: PrefixKeys, source: Side, places: Sequence[Int64s], fence: Fence) -> "Future[Moved]":
        """Refuse: a peer's tier is only read."""
        raise TierError(f"the tier of {self.address} can be read and not written")

    def usage(self) -> TierUsage:
        """Return what was loaded and missed here; what the peer holds is not known."""
        return TierUsage(self.name, self._usage, 0, 0, {"address": self.address})

    def seconds_for(self, nbytes: int, num_runs: int) -> float:
        """Estimate the time of a load by the mover's costs, see Tier."""
        return _ROUND_TRIP_S + num_runs * self._costs.run_s + nbytes / self._costs.wire_bytes_per_s

    # -- for leases ---------------------------------------------------------------------------------------------------

    def done(self, request_id: str) -> None:
        """Tell the peer that a lease is over."""
        self._channel.send(TierDone(request_id=request_id))

    def begin_load(self) -> None:
        """Count one more load. Raises TierBusy."""
        with self._lock:
            if self._loads >= _MOST_LOADS:
                raise TierBusy(f"{self._loads} loads from {self.address} are under way; try again when one is done")
            self._loads += 1

    def end_load(self, places: Sequence[Int64s], failed: Sequence[Int64s]) -> None:
        """Count what a load came to."""
        with self._lock:
            self._loads -= 1
            for usage, nbytes, good, bad in zip(self._usage, self._block_nbytes, places, failed, strict=True):
                usage.loaded.add(len(good), len(good) * nbytes)
                usage.failed.add(len(bad), len(bad) * nbytes)

    def get(self, way: Way, piece: Piece, request_id: str, into: Side, deadline: float) -> TransferHandle:
        """Begin to read one piece. Raises what keeps it from being begun."""
        match, places, tokens = piece.match, piece.places, self.block_tokens
        table, positions = into.tables[match.group], range(places.start * tokens, places.stop * tokens)
        named = positions
        if self.cache.groups[match.group].kind == "state":
            positions, named = STATE, places
        there = match.destination(table)
        source = match.source_stand_in(positions.stop)
        plan = match.plan(piece.move, source, there, piece.layers, positions, plans=self.plans)
        key = match.key(request_id, piece.move, piece.layers, named)
        region = self._regions[match.index][piece.move.dst_rank]
        return way.connection.get(key, region, plan.to_move, deadline)
