"""The CPU tier: a cache in the host's memory."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import ClassVar

import numpy as np

from pdtx.cache import KVCaches
from pdtx.cache.shared import shared_file
from pdtx.plan.runs import Int64s
from pdtx.tiers.base import Bools, Fence, Moved, Side
from pdtx.tiers.contents import known_contents
from pdtx.tiers.copies import Copier
from pdtx.tiers.counters import TierUsage
from pdtx.tiers.geometry import block_nbytes, capacities
from pdtx.tiers.holds import Held
from pdtx.tiers.keys import PrefixKeys
from pdtx.tiers.memory import PinnedMemory, numa_nodes
from pdtx.tiers.outcome import Outcome
from pdtx.tiers.shelf import WRITE_BACK_S, Evict, Evicted, Shelf
from pdtx.tiers.shelved import ShelfLease, ShelvedTier, Wanted
from pdtx.tiers.worker import MOST_BYTES, MOST_JOBS

CopierFactory = Callable[[KVCaches, KVCaches], Copier]

KeepElsewhere = Callable[[PrefixKeys, Side, Sequence[Int64s]], "Future[Moved] | None"]
"""Takes blocks that are leaving, as Tier.store() does, until its Future is done; None: it does not want them."""

CLOSE_S = 30.0
_GUESS = 5e9
"""Bytes a second, before the first load."""


class CpuTier(ShelvedTier):
    """Blocks in a cache of their own, from tier_caches(). See Tier."""

    name: ClassVar[str] = "cpu"
    title: ClassVar[str] = "CPU"

    def __init__(
        self,
        cache: KVCaches,
        *,
        like: KVCaches,
        policy: str = "lru",
        asked: int | None = None,
        block_tokens: int | None = None,
        threads: int = 1,
        most_jobs: int = MOST_JOBS,
        most_bytes: int = MOST_BYTES,
        copier: CopierFactory = Copier,
    ) -> None:
        """Keep blocks of `like`, and of caches with the same groups and buffers, in cache, which becomes the tier's.

        asked: bytes it was to have, for usage(). block_tokens: where the cache has states only, which do not tell.
        threads, most_jobs, most_bytes: see Worker; stores and loads have one each. copier: makes what copies.
        Raises TierError where the two do not fit together, or for an unknown policy.
        """
        self.cache = cache
        self.keep_elsewhere: KeepElsewhere | None = None
        self._asked, self._copier = cache.nbytes if asked is None else asked, copier
        sizes = block_nbytes(cache)
        shelves = [
            Shelf(group.name, capacity, policy, block_nbytes=nbytes, on_evict=self._hook(number))
            for number, (group, capacity, nbytes) in enumerate(zip(cache.groups, capacities(cache), sizes, strict=True))
        ]
        self._copiers = dict[KVCaches, tuple[Copier, Copier]]()
        self._copiers_of(like)
        self._pinned = PinnedMemory(cache)
        tokens = next((group.block_size for group in cache.groups if group.counts_tokens), block_tokens or 1)
        super().__init__(
            tokens, shelves, sizes, guess=_GUESS, threads=threads, most_jobs=most_jobs, most_bytes=most_bytes
        )

    def _copiers_of(self, cache: KVCaches) -> tuple[Copier, Copier]:
        """Return what copies from a cache into the tier, and what copies back."""
        found = self._copiers.get(cache)
        if found is None:
            found = self._copier(cache, self.cache), self._copier(self.cache, cache)
            self._copiers[cache] = found
        return found

    def _hook(self, group: int) -> Evict:
        def leaving(evicted: Evicted) -> "Future[Moved] | None":
            if self.keep_elsewhere is None:
                return None
            keys = PrefixKeys(self.block_tokens, evicted.digests, evicted.proofs)
            nothing = np.zeros(0, np.int64)
            tables = tuple(evicted.blocks if number == group else nothing for number in range(len(self._shelves)))
            places = tuple(np.arange(len(table), dtype=np.int64) for table in tables)
            hashes = tuple(evicted.contents if number == group else () for number in range(len(self._shelves)))
            known = known_contents(places, hashes)
            side = Side(self.cache, tables, of_tier=True, hold=Held.BY_CALLER, contents=known)
            return self.keep_elsewhere(keys, side, places)

        return leaving  # type: ignore[return-value]  # a Future of anything

    def hold(self, keys: PrefixKeys, places: Sequence[Int64s]) -> ShelfLease:
        """Pin blocks as lookup() does, for the tier's own ends: that is no use of them, and nothing is missed."""
        return self._find(keys, places, use=False)

    def contents(self) -> "Iterator[tuple[PrefixKeys, tuple[Int64s, ...]]]":
        """Yield what each group holds now, as keys and places for hold()."""
        for group, shelf in enumerate(self._shelves):
            entries = shelf.entries()
            here = np.arange(len(entries.digests), dtype=np.int64)
            places = tuple(here if number == group else here[:0] for number in range(len(self._shelves)))
            yield PrefixKeys(self.block_tokens, entries.digests, entries.proofs), places

    def store(
        self,
        keys: PrefixKeys,
        source: Side,
        places: Sequence[Int64s],
        fence: Fence,
        *,
        patience_s: float = WRITE_BACK_S,
    ) -> "Future[Moved]":
        """Take copies of blocks, see Tier. patience_s: to wait for what they drive out to be kept elsewhere."""
        return self._store(keys, source, places, fence, patience_s=patience_s)

    def _get_ready(self, side: Side) -> None:
        self._copiers_of(side.cache)

    def _move_in(self, source: Side, wanted: Wanted, done: Outcome) -> Bools:
        copier, _ = self._copiers_of(source.cache)
        return done.copy(copier, wanted.group, wanted.places, wanted.rows, wanted.held[:, None], self.cache)

    def _move_out(self, into: Side, wanted: Wanted, done: Outcome) -> None:
        _, copier = self._copiers_of(into.cache)
        copied = np.zeros(len(wanted.rows), bool)
        try:
            copied = done.copy(copier, wanted.group, wanted.places, wanted.held[:, None], wanted.rows, self.cache)
        finally:
            into.cache.poison(wanted.group, wanted.rows[~copied].reshape(-1))

    def usage(self) -> TierUsage:
        """Return what the tier holds, see Tier. details: "memory", "pin time" where it was pinned, "NUMA node"."""
        shared = ", shared" if shared_file(self.cache.buffers[0].memory) is not None else ""
        details = {"memory": self._pinned.state + shared}
        if self._pinned.is_pinned:
            details["pin time"] = f"{self._pinned.seconds:.3f} s"
        details["NUMA node"] = numa_nodes(self.cache)
        groups = tuple(shelf.usage() for shelf in self._shelves)
        return TierUsage(self.name, groups, self._asked, self.cache.nbytes, details)

    def close(self) -> None:
        """Finish what is under way, see Tier; waits CLOSE_S at most."""
        if self._close_workers(CLOSE_S):
            self._pinned.close()
