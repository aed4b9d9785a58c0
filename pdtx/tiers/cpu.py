"""The CPU tier: a cache in the host's memory."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import ClassVar

import numpy as np

from pdtx.cache import KVCaches
from pdtx.cache.shared import shared_file
from pdtx.errors import TierError
from pdtx.plan.runs import Int64s
from pdtx.tiers.base import Bools, Fence, Lease, Moved, Side, Tier, written
from pdtx.tiers.copies import Copier, compact
from pdtx.tiers.counters import TierUsage
from pdtx.tiers.geometry import block_nbytes, capacities, counts_tokens
from pdtx.tiers.keys import PrefixKeys
from pdtx.tiers.memory import PinnedMemory, numa_nodes
from pdtx.tiers.outcome import Outcome, named, poison_blocks, rows_of, sum_up
from pdtx.tiers.rates import Rate
from pdtx.tiers.shelf import WRITE_BACK_S, Evict, Evicted, Shelf
from pdtx.tiers.worker import MOST_BYTES, MOST_JOBS, Worker

CopierFactory = Callable[[KVCaches, KVCaches], Copier]

KeepElsewhere = Callable[[PrefixKeys, Side, Sequence[Int64s]], "Future[Moved] | None"]
"""Takes blocks that are leaving, as Tier.store() does, until its Future is done; None: it does not want them."""

CLOSE_S = 30.0
_GUESS = 5e9
"""Bytes a second, before the first load."""


class CpuTier(Tier):
    """Blocks in a cache of their own, from tier_caches(). See Tier."""

    name: ClassVar[str] = "cpu"

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
        self.block_tokens = next(
            (group.block_size for group in cache.groups if counts_tokens(group)), block_tokens or 1
        )
        self.keep_elsewhere: KeepElsewhere | None = None
        self._asked, self._copier = cache.nbytes if asked is None else asked, copier
        self._nbytes = block_nbytes(cache)
        self._shelves = tuple(
            Shelf(group.name, capacity, policy, block_nbytes=nbytes, on_evict=self._hook(number))
            for number, (group, capacity, nbytes) in enumerate(
                zip(cache.groups, capacities(cache), self._nbytes, strict=True)
            )
        )
        self._copiers = dict[KVCaches, tuple[Copier, Copier]]()
        self._copiers_of(like)
        self._pinned = PinnedMemory(cache)
        self._rate = Rate(_GUESS)
        # Two, so that no load waits for the fence of a store.
        self._storing, self._loading = (
            Worker(f"the CPU tier's {what}", threads=threads, most_jobs=most_jobs, most_bytes=most_bytes)
            for what in ("stores", "loads")
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
            return self.keep_elsewhere(keys, Side(self.cache, tables, of_tier=True), places)

        return leaving  # type: ignore[return-value]  # a Future of anything

    def _check(self, keys: PrefixKeys, places: Sequence[Int64s]) -> tuple[Int64s, ...]:
        if keys.block_tokens != self.block_tokens:
            raise TierError(f"keys of blocks of {keys.block_tokens} tokens; the CPU tier's have {self.block_tokens}")
        if len(places) != len(self._shelves):
            raise TierError(f"places for {len(places)} groups; the CPU tier has {len(self._shelves)}")
        arrays = tuple(np.asarray(each, np.int64) for each in places)
        for each in arrays:
            if len(each) and (each.min() < 0 or each.max() >= len(keys)):
                raise TierError(f"places {each.min()}..{each.max()} of a prompt of {len(keys)} whole blocks")
        return arrays

    def lookup(self, keys: PrefixKeys, places: Sequence[Int64s]) -> "CpuLease":
        """Find and pin blocks, see Tier."""
        return self._find(keys, places, use=True)

    def hold(self, keys: PrefixKeys, places: Sequence[Int64s]) -> "CpuLease":
        """Pin blocks as lookup() does, for the tier's own ends: that is no use of them, and nothing is missed."""
        return self._find(keys, places, use=False)

    def contents(self) -> "Iterator[tuple[PrefixKeys, tuple[Int64s, ...]]]":
        """Yield what each group holds now, as keys and places for hold()."""
        for group, shelf in enumerate(self._shelves):
            entries = shelf.entries()
            here = np.arange(len(entries.digests), dtype=np.int64)
            places = tuple(here if number == group else here[:0] for number in range(len(self._shelves)))
            yield PrefixKeys(self.block_tokens, entries.digests, entries.proofs), places

    def _find(self, keys: PrefixKeys, places: Sequence[Int64s], *, use: bool) -> "CpuLease":
        asked = self._check(keys, places)
        blocks = tuple(
            shelf.lookup(*named(keys, each), use=use) for shelf, each in zip(self._shelves, asked, strict=True)
        )
        return CpuLease(self, asked, blocks, Pins(self._shelves, [each[each > 0] for each in blocks], taken=True))

    def store(
        self,
        keys: PrefixKeys,
        source: Side,
        places: Sequence[Int64s],
        fence: Fence = written,
        *,
        patience_s: float = WRITE_BACK_S,
    ) -> "Future[Moved]":
        """Take copies of blocks, see Tier. patience_s: to wait for what they drive out to be kept elsewhere."""
        asked = self._check(keys, places)
        copier, _ = self._copiers_of(source.cache)
        tables = self._compact(source, asked)
        nbytes = sum(len(each) * size for each, size in zip(asked, self._nbytes, strict=True))

        def job(waited: float) -> Moved:
            begun = time.monotonic()
            fence()
            done = [
                self._store_group(group, keys, each, tables[group], copier, patience_s)
                for group, each in enumerate(asked)
            ]
            return sum_up(done, time.monotonic() - begun, waited)

        return self._storing.submit(job, nbytes)

    def _compact(self, side: Side, places: Sequence[Int64s]) -> list[tuple[Int64s, Bools]]:
        if len(side.tables) != len(self._shelves):
            raise TierError(f"tables for {len(side.tables)} groups; the CPU tier has {len(self._shelves)}")
        return [compact(side, group, each, self.block_tokens) for group, each in enumerate(places)]

    def _store_group(
        self,
        group: int,
        keys: PrefixKeys,
        places: Int64s,
        table: tuple[Int64s, Bools],
        copier: Copier,
        patience_s: float,
    ) -> Outcome:
        name, shelf = self.cache.groups[group].name, self._shelves[group]
        done, (blocks, whole) = Outcome(name), table
        done.fail(places[~whole], "a part of it is the null block, or beyond the table")
        places, source = places[whole], rows_of(blocks, len(whole))[whole]
        given = shelf.reserve(*named(keys, places), seconds=patience_s)
        done.present = int(given.present.sum())
        done.fail(places[given.full], "the tier is full of blocks that are pinned or being written")
        done.fail(places[given.clash], "other tokens have its digest")
        taken = given.blocks > 0
        target = given.blocks[taken]
        copied = np.zeros(len(target), bool)
        try:
            copied = done.copy(copier, group, places[taken], source[taken], target[:, None], self.cache)
        finally:
            shelf.cancel(target[~copied])
        shelf.commit(target[copied])
        return done

    def load(self, lease: "CpuLease", into: Side, places: Sequence[Int64s]) -> "Future[Moved]":
        """See Lease.load()."""
        asked = tuple(np.asarray(each, np.int64) for each in places)
        tables = self._compact(into, asked)
        blocks = lease.blocks_of(asked)
        _, copier = self._copiers_of(into.cache)
        nbytes = sum(len(each) * size for each, size in zip(asked, self._nbytes, strict=True))
        pins = Pins(self._shelves, blocks)

        def job(waited: float) -> Moved:
            begun = time.monotonic()
            try:
                done = [
                    self._load_group(group, each, blocks[group], tables[group], copier, into)
                    for group, each in enumerate(asked)
                ]
            finally:
                pins.release()  # before the result is there, so that whoever sees it sees this too
            moved = sum_up(done, time.monotonic() - begun, waited)
            self._rate.note(moved.nbytes, moved.seconds)
            return moved

        try:
            future = self._loading.submit(job, nbytes)
        except TierError:
            pins.release()
            raise
        future.add_done_callback(lambda _: pins.release())  # where it was refused or cancelled
        return future

    def _load_group(
        self, group: int, places: Int64s, blocks: Int64s, table: tuple[Int64s, Bools], copier: Copier, into: Side
    ) -> Outcome:
        done, (target, whole) = Outcome(self.cache.groups[group].name), table
        done.fail(places[~whole], "it has no blocks to go to")
        rows = rows_of(target, len(whole))[whole]
        copied = np.zeros(len(rows), bool)
        try:
            copied = done.copy(copier, group, places[whole], blocks[whole][:, None], rows, self.cache)
        finally:
            poison_blocks(into.cache, group, rows[~copied])
        self._shelves[group].count_loaded(int(copied.sum()))
        self._shelves[group].count_failed(len(done.failed))
        return done

    def usage(self) -> TierUsage:
        """Return what the tier holds, see Tier. details: "memory", "pin time" where it was pinned, "NUMA node"."""
        shared = ", shared" if shared_file(self.cache.buffers[0].memory) is not None else ""
        details = {"memory": self._pinned.state + shared}
        if self._pinned.is_pinned:
            details["pin time"] = f"{self._pinned.seconds:.3f} s"
        details["NUMA node"] = numa_nodes(self.cache)
        groups = tuple(shelf.usage() for shelf in self._shelves)
        return TierUsage(self.name, groups, self._asked, self.cache.nbytes, details)

    def seconds_for(self, nbytes: int, num_runs: int) -> float:
        """Estimate the time of a load, see Tier."""
        return self._rate.seconds_for(nbytes, num_runs)

    def close(self) -> None:
        """Finish what is under way, see Tier; waits CLOSE_S at most."""
        end = time.monotonic() + CLOSE_S
        ended = [worker.close(max(0.0, end - time.monotonic())) for worker in (self._storing, self._loading)]
        if all(ended):
            self._pinned.close()


class Pins:
    """One more pin on each of some blocks, until release()."""

    def __init__(self, shelves: Sequence[Shelf], blocks: Sequence[Int64s], *, taken: bool = False) -> None:
        """blocks: for each shelf. taken: whether the pins are there already."""
        self._pinned, self._lock = list(zip(shelves, blocks, strict=True)), threading.Lock()
        if not taken:
            for shelf, each in self._pinned:
                shelf.pin(each)

    def release(self) -> None:
        """Give the pins back. Idempotent."""
        with self._lock:
            pinned, self._pinned = self._pinned, []
        for shelf, blocks in pinned:
            shelf.unpin(blocks)


class CpuLease(Lease):
    """Blocks of a CPU tier. See Lease."""

    def __init__(self, tier: CpuTier, places: Sequence[Int64s], blocks: Sequence[Int64s], pins: Pins) -> None:
        """places, blocks: for each group, what was asked for and where it is: 0 where it is not."""
        self._tier, self._places, self._blocks, self._pins = tier, tuple(places), tuple(blocks), pins
        self._lock, self._released = threading.Lock(), False
        self.found: tuple[Bools, ...] = tuple(each > 0 for each in blocks)

    def tables(self, group: int) -> Int64s:
        """Return the tier's own block table of a group: for each place the block that is pinned, or the null block.

        With the tier's cache it is what a plan reads from, for as long as the lease is held.
        """
        places, blocks = self._places[group], self._blocks[group]
        table = np.zeros(int(places.max(initial=-1)) + 1, np.int64)
        table[places] = blocks
        return table

    def blocks_of(self, places: Sequence[Int64s]) -> tuple[Int64s, ...]:
        """Return the blocks of some places of each group. Raises TierError for one that was not found."""
        found = list[Int64s]()
        for group, each in enumerate(places):
            table = self.tables(group)
            inside = (each >= 0) & (each < len(table))
            blocks = np.where(inside, table[np.where(inside, each, 0)], 0) if len(table) else np.zeros_like(each)
            if not blocks.all():
                name = self._tier.cache.groups[group].name
                raise TierError(f"group {name} block {each[blocks == 0][0]} was not found, and cannot be loaded")
            found.append(blocks)
        return tuple(found)

    def load(self, into: Side, places: Sequence[Int64s]) -> "Future[Moved]":
        """Copy blocks into a cache, see Lease. Raises TierError too once the lease was released."""
        with self._lock:
            if self._released:
                raise TierError("the lease was released: its blocks may be others' by now; look them up again")
            return self._tier.load(self, into, places)

    def release(self) -> None:
        """Let the blocks be evicted, see Lease."""
        with self._lock:
            self._released = True
        self._pins.release()
