"""Loads from another node's tier: gets under way, and what has become of the blocks that they were to bring."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from pdtx.engine.matching import BufferMatch, Match
from pdtx.errors import TierError
from pdtx.parallel import RankTransfer
from pdtx.plan.runs import Int64s
from pdtx.protocol import TierWelcome
from pdtx.tiers import Failed, Lease, Moved, Side
from pdtx.tiers.base import Bools
from pdtx.tiers.contents import NO_HASH
from pdtx.tiers.copies import compact
from pdtx.transports import Connection, TransferHandle

if TYPE_CHECKING:
    from pdtx.engine.peer_tier import PeerTier

_PIECE_BLOCKS = 64
"""Blocks that one get brings at most, so that a peer that dies takes no more than it must with it."""


@dataclass(frozen=True)
class Way:
    """A session with the peer."""

    welcome: TierWelcome
    match: Match
    connection: Connection


@dataclass(frozen=True)
class Piece:
    """What one get brings: blocks that follow one another, of layers that do so at the peer, from rank to rank."""

    match: BufferMatch
    move: RankTransfer
    layers: range
    places: range


class PeerLease(Lease):
    """Blocks of a peer's tier. See Lease. Once the peer has taken them back every load fails."""

    def __init__(
        self,
        tier: "PeerTier",
        way: Way,
        request_id: str,
        places: Sequence[Int64s],
        found: tuple[Bools, ...],
        known: Sequence[Mapping[int, bytes]],
    ) -> None:
        """known: the content hashes of each group's blocks, by place."""
        self._tier, self._way, self._request_id, self._known = tier, way, request_id, known
        self._there = tuple(each[mask] for each, mask in zip(places, found, strict=True))
        self.found = found
        self._lock, self._running, self._released, self._told = threading.Lock(), 0, False, False

    def load(self, into: Side, places: Sequence[Int64s]) -> "Future[Moved]":
        """Read blocks into the tier's cache, see Lease."""
        tier = self._tier
        if into.cache is not tier.cache or into.of_tier:
            raise TierError("a peer's blocks go into the cache that its tier was opened for")
        for group, (asked, there) in enumerate(zip(places, self._there, strict=True)):
            unknown = np.setdiff1d(asked, there)
            if len(unknown):
                name = tier.cache.groups[group].name
                raise TierError(f"group {name} block {unknown[0]} was not found, and cannot be loaded")
        tier.begin_load()
        with self._lock:
            if self._released:
                tier.end_load([places[0][:0]] * len(places), [places[0][:0]] * len(places))
                raise TierError("the lease was released: its blocks may be others' by now; look them up again")
            self._running += 1
        load = _Load(self, tier, self._way, self._request_id, into, places)
        load.start()
        return load.future

    def contents(self, group: int, places: Int64s) -> list[bytes]:
        """Return the content hashes that the peer has of blocks of a group, see Lease."""
        return [self._known[group].get(place, NO_HASH) for place in places.tolist()]

    def loaded(self) -> None:
        """Note that a load has ended."""
        with self._lock:
            self._running -= 1
        self._tell()

    def release(self) -> None:
        """Let the peer evict the blocks, see Lease."""
        with self._lock:
            self._released = True
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            if self._told or not self._released or self._running:
                return
            self._told = True
        if any(map(len, self._there)):
            self._tier.done(self._request_id)


@dataclass
class _Load:
    """One load under way: gets, and what has become of them."""

    lease: PeerLease
    tier: "PeerTier"
    way: Way
    request_id: str
    into: Side
    asked: Sequence[Int64s]
    future: "Future[Moved]" = field(default_factory=Future)

    def __post_init__(self) -> None:
        self._lock, self._left, self._nbytes = threading.Lock(), 1, 0
        self._failed: dict[tuple[int, int], str] = {}  # (group, place): why
        self._begun = time.monotonic()

    def start(self) -> None:
        """Begin all gets. Blocks of one that cannot be begun have failed."""
        deadline = time.monotonic() + self.tier.load_s
        self.future.set_running_or_notify_cancel()
        for piece in self._pieces():
            with self._lock:
                self._left += 1
            try:
                handle = self.tier.get(self.way, piece, self.request_id, self.into, deadline)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is these blocks' failure
                self._end(piece, 0, str(error))
                continue
            handle.on_end(lambda ended, of=piece: self._ended(of, ended))  # type: ignore[misc]
        self._settle()

    def _pieces(self) -> Iterator[Piece]:
        for group, places in enumerate(self.asked):
            _, whole = compact(self.into, group, places, self.tier.block_tokens)
            self._failed |= {(group, place): "it has no blocks to go to" for place in places[~whole].tolist()}
            matches = [match for match in self.way.match.buffers if match.group == group]
            for run in _ranges(places[whole]):
                for match in matches:
                    for move in match.moves:
                        yield from (Piece(match, move, layers, run) for layers in _layers(match))

    def _ended(self, piece: Piece, handle: TransferHandle) -> None:
        self._end(piece, handle.nbytes, str(handle.error) if handle.error is not None else None)

    def _end(self, piece: Piece, nbytes: int, error: str | None) -> None:
        with self._lock:
            if error is None:
                self._nbytes += nbytes
            else:
                for place in piece.places:
                    self._failed.setdefault((piece.match.group, place), error)
        self._settle()

    def _settle(self) -> None:
        """Count one get as over; the last one makes the result."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        groups = self.tier.cache.groups
        bad = [np.array([p for g, p in self._failed if g == group], np.int64) for group in range(len(groups))]
        good = [np.setdiff1d(asked, wrong) for asked, wrong in zip(self.asked, bad, strict=True)]
        self.tier.end_load(good, bad)
        self.lease.loaded()
        failed = tuple(Failed(groups[group].name, place, why) for (group, place), why in self._failed.items())
        seconds = time.monotonic() - self._begun
        self.future.set_result(Moved(tuple(good), failed, nbytes=self._nbytes, seconds=seconds))


def _ranges(places: Int64s) -> Iterator[range]:
    """Cut places into runs that follow one another, of _PIECE_BLOCKS at most."""
    ordered = np.sort(places)
    for run in np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1):
        for first in range(0, len(run), _PIECE_BLOCKS):
            part = run[first : first + _PIECE_BLOCKS]
            yield range(int(part[0]), int(part[-1]) + 1)


def _layers(match: BufferMatch) -> Iterator[range]:
    """Cut a buffer's layers into runs that follow one another at the peer."""
    breaks = np.flatnonzero(np.diff(np.asarray(match.layers)) != 1) + 1
    edges = [0, *breaks.tolist(), len(match.layers)]
    yield from (range(start, stop) for start, stop in pairwise(edges))
