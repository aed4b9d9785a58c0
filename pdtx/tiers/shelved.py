"""What the CPU tier and the disk tier have in common: shelves to find blocks on, pins, and work in the background."""

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pdtx.errors import TierError
from pdtx.plan.runs import Int64s
from pdtx.tiers.base import Bools, Fence, Lease, Moved, Side, Tier, check_fence
from pdtx.tiers.contents import NO_HASH
from pdtx.tiers.copies import compact
from pdtx.tiers.holds import take_hold
from pdtx.tiers.keys import PrefixKeys
from pdtx.tiers.outcome import Outcome, named, rows_of, sum_up
from pdtx.tiers.rates import Rate
from pdtx.tiers.shelf import WRITE_BACK_S, Shelf
from pdtx.tiers.worker import Worker


@dataclass(frozen=True)
class Wanted:
    """One group's blocks that are to be moved.

    places: in the prompt. rows: the other side's blocks of each place, shape (places, k). held: the tier's own.
    contents: of a store, the content hash of each place, b"" where it has none.
    """

    group: int
    keys: PrefixKeys
    places: Int64s
    rows: Int64s
    held: Int64s
    contents: tuple[bytes, ...] = ()


class ShelvedTier(Tier):
    """A tier with a shelf for each group. A subclass moves the blocks of one group at a time.

    title: of the tier, in messages.
    """

    title: ClassVar[str]

    def __init__(
        self,
        block_tokens: int,
        shelves: Sequence[Shelf],
        nbytes: Sequence[int],
        *,
        guess: float,
        threads: int,
        most_jobs: int,
        most_bytes: int,
    ) -> None:
        """nbytes: payload of a block of each group. guess: bytes a second, before the first load. See Worker."""
        self.block_tokens, self._shelves, self._nbytes = block_tokens, tuple(shelves), tuple(nbytes)
        self._rate = Rate(guess)
        # Two, so that no load waits for the fence of a store.
        self._storing, self._loading = (
            Worker(f"the {self.title} tier's {what}", threads=threads, most_jobs=most_jobs, most_bytes=most_bytes)
            for what in ("stores", "loads")
        )

    # -- finding ----------------------------------------------------------------------------------------------------

    def lookup(self, keys: PrefixKeys, places: Sequence[Int64s]) -> "ShelfLease":
        """Find and pin blocks, see Tier."""
        return self._find(keys, places, use=True)

    def _find(self, keys: PrefixKeys, places: Sequence[Int64s], *, use: bool) -> "ShelfLease":
        asked = self._check(keys, places)
        blocks = tuple(
            shelf.lookup(*self._named(keys, each), use=use) for shelf, each in zip(self._shelves, asked, strict=True)
        )
        return ShelfLease(self, keys, asked, blocks)

    def _named(self, keys: PrefixKeys, places: Int64s) -> tuple[list[bytes], list[bytes]]:
        """Return the digests and the proofs of places, as the shelves have them."""
        return named(keys, places)

    def _check(self, keys: PrefixKeys, places: Sequence[Int64s]) -> tuple[Int64s, ...]:
        if keys.block_tokens != self.block_tokens:
            raise TierError(
                f"keys of blocks of {keys.block_tokens} tokens; the {self.title} tier's have {self.block_tokens}"
            )
        if len(places) != len(self._shelves):
            raise TierError(f"places for {len(places)} groups; the {self.title} tier has {len(self._shelves)}")
        arrays = tuple(np.asarray(each, np.int64) for each in places)
        for each in arrays:
            if len(each) and (each.min() < 0 or each.max() >= len(keys)):
                raise TierError(f"places {each.min()}..{each.max()} of a prompt of {len(keys)} whole blocks")
        return arrays

    def _compact(self, side: Side, places: Sequence[Int64s]) -> list[tuple[Int64s, Bools]]:
        """Return the side's blocks of places as a row for each, and which places have all of theirs."""
        if len(side.tables) != len(self._shelves):
            raise TierError(f"tables for {len(side.tables)} groups; the {self.title} tier has {len(self._shelves)}")
        found = [compact(side, group, each, self.block_tokens) for group, each in enumerate(places)]
        return [(rows_of(blocks, len(whole)), whole) for blocks, whole in found]

    def _bytes_of(self, places: Sequence[Int64s]) -> int:
        return sum(len(each) * size for each, size in zip(places, self._nbytes, strict=True))

    # -- storing ----------------------------------------------------------------------------------------------------

    def _store(
        self,
        keys: PrefixKeys,
        source: Side,
        places: Sequence[Int64s],
        fence: Fence,
        *,
        patience_s: float = WRITE_BACK_S,
        stored: Callable[[], None] = lambda: None,
    ) -> "Future[Moved]":
        """Store blocks, see Tier. patience_s: see Shelf.reserve. stored: called at the end of the job."""
        check_fence(fence)
        asked = self._check(keys, places)
        self._get_ready(source)
        tables = self._compact(source, asked)
        let_go = take_hold(source.hold, source.tables, [shelf.name for shelf in self._shelves])

        def job(waited: float) -> Moved:
            begun = time.monotonic()
            try:
                fence()
                done = [
                    self._store_group(group, keys, source, each, *tables[group], patience_s)
                    for group, each in enumerate(asked)
                ]
            finally:
                let_go()  # before the result is there, so that whoever sees it sees this too
            stored()
            return sum_up(done, time.monotonic() - begun, waited)

        try:
            future = self._storing.submit(job, self._bytes_of(asked))
        except TierError:
            let_go()
            raise
        future.add_done_callback(lambda _: let_go())  # where it was refused or cancelled
        return future

    def _get_ready(self, side: Side) -> None:
        """Raise what makes it impossible to move blocks to or from a side; by default that is found out later."""

    def _store_group(
        self,
        group: int,
        keys: PrefixKeys,
        source: Side,
        places: Int64s,
        rows: Int64s,
        whole: Bools,
        patience_s: float,
    ) -> Outcome:
        shelf = self._shelves[group]
        done = Outcome(shelf.name)
        done.fail(places[~whole], "a part of it is the null block, or beyond the table")
        places, rows = places[whole], rows[whole]
        names = self._named(keys, places)
        hashes = self._hashes(shelf, group, source, places, *names)
        given = shelf.reserve(*names, seconds=patience_s)
        done.present = int(given.present.sum())
        done.fail(places[given.full], "the tier is full of blocks that are pinned or being written")
        done.fail(places[given.clash], "other tokens have its digest")
        taken = given.blocks > 0
        contents = tuple(each for each, use in zip(hashes, taken.tolist(), strict=True) if use)
        wanted = Wanted(group, keys, places[taken], rows[taken], given.blocks[taken], contents)
        moved = np.zeros(len(wanted.held), bool)
        try:
            moved = self._move_in(source, wanted, done)
        finally:
            shelf.cancel(wanted.held[~moved])
        shelf.commit(wanted.held[moved], [each for each, use in zip(contents, moved.tolist(), strict=True) if use])
        return done

    def _hashes(
        self,
        shelf: Shelf,
        group: int,
        source: Side,
        places: Int64s,
        digests: Sequence[bytes],
        proofs: Sequence[bytes],
    ) -> list[bytes]:
        """Return content hashes of a store's blocks, NO_HASH for those of which none is needed or known.

        What is here without a hash is dropped where there is one now, so that it is stored again.
        """
        hashes = [NO_HASH] * len(places)
        if source.contents is None:
            return hashes
        at = np.flatnonzero(shelf.unhashed(digests)).tolist()
        for index, content in zip(at, source.contents(group, places[at]), strict=True):
            hashes[index] = content
        known = [index for index in at if hashes[index]]
        shelf.forget_unhashed([digests[index] for index in known], [proofs[index] for index in known])
        return hashes

    @abstractmethod
    def _move_in(self, source: Side, wanted: Wanted, done: Outcome) -> Bools:
        """Fill blocks that are reserved from a side; return which were, and note them and the others in done."""

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(self, lease: "ShelfLease", into: Side, places: Sequence[Int64s]) -> "Future[Moved]":
        """See Lease.load()."""
        asked = tuple(np.asarray(each, np.int64) for each in places)
        tables, held = self._compact(into, asked), lease.blocks_of(asked)
        self._get_ready(into)
        pins = Pins(self._shelves, held)

        def job(waited: float) -> Moved:
            begun = time.monotonic()
            try:
                done = [
                    self._load_group(group, lease.keys, into, each, *tables[group], held[group])
                    for group, each in enumerate(asked)
                ]
            finally:
                pins.release()  # before the result is there, so that whoever sees it sees this too
            moved = sum_up(done, time.monotonic() - begun, waited)
            self._rate.note(moved.nbytes, moved.seconds)
            return moved

        try:
            future = self._loading.submit(job, self._bytes_of(asked))
        except TierError:
            pins.release()
            raise
        future.add_done_callback(lambda _: pins.release())  # where it was refused or cancelled
        return future

    def _load_group(
        self, group: int, keys: PrefixKeys, into: Side, places: Int64s, rows: Int64s, whole: Bools, held: Int64s
    ) -> Outcome:
        shelf = self._shelves[group]
        done = Outcome(shelf.name)
        done.fail(places[~whole], "it has no blocks to go to")
        self._move_out(into, Wanted(group, keys, places[whole], rows[whole], held[whole]), done)
        shelf.count_loaded(len(done.places))
        shelf.count_failed(len(done.failed))
        return done

    @abstractmethod
    def _move_out(self, into: Side, wanted: Wanted, done: Outcome) -> None:
        """Copy blocks to a side; note those that were in done, and the others, of which nothing may be left there."""

    # -- the rest -----------------------------------------------------------------------------------------------------

    def seconds_for(self, nbytes: int, num_runs: int) -> float:
        """Estimate the time of a load, see Tier."""
        return self._rate.seconds_for(nbytes, num_runs)

    def contents_of(self, group: int, blocks: Int64s) -> list[bytes]:
        """Return the content hashes of the tier's own blocks, which are pinned; b"" where there is none."""
        return self._shelves[group].contents(blocks)

    def group_name(self, group: int) -> str:
        """Return the name of a group by its number."""
        return self._shelves[group].name

    def pins_on(self, blocks: Sequence[Int64s]) -> "Pins":
        """Return the pins that a lookup has put on blocks."""
        return Pins(self._shelves, [each[each > 0] for each in blocks], taken=True)

    def _close_workers(self, seconds: float, *others: Worker) -> bool:
        """Let all workers finish what is under way; whether they have."""
        end = time.monotonic() + seconds
        workers = (self._storing, self._loading, *others)
        ended = [worker.close(max(0.0, end - time.monotonic())) for worker in workers]
        return all(ended)


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


class ShelfLease(Lease):
    """Blocks of a tier with shelves, of which nothing is evicted meanwhile. See Lease."""

    def __init__(self, tier: ShelvedTier, keys: PrefixKeys, places: Sequence[Int64s], blocks: Sequence[Int64s]) -> None:
        """places, blocks: for each group, what was asked for and where it is, pinned: 0 where it is not."""
        self._tier, self.keys, self._pins = tier, keys, tier.pins_on(blocks)
        self._tables = tuple(np.zeros(int(each.max(initial=-1)) + 1, np.int64) for each in places)
        for table, where, there in zip(self._tables, places, blocks, strict=True):
            table[where] = there
        self._lock, self._released = threading.Lock(), False
        self.found: tuple[Bools, ...] = tuple(each > 0 for each in blocks)

    def tables(self, group: int) -> Int64s:
        """Return the tier's own block table of a group: for each place the block that is pinned, or the null block.

        With a tier's cache it is what a plan reads from, for as long as the lease is held.
        """
        return self._tables[group]

    def blocks_of(self, places: Sequence[Int64s]) -> tuple[Int64s, ...]:
        """Return the blocks of some places of each group. Raises TierError for one that was not found."""
        for group, (table, each) in enumerate(zip(self._tables, places, strict=True)):
            inside = (each >= 0) & (each < len(table))
            lacking = each[~inside] if not inside.all() else each[table[each] == 0]
            if len(lacking):
                name = self._tier.group_name(group)
                raise TierError(f"group {name} block {lacking[0]} was not found, and cannot be loaded")
        return tuple(table[each] for table, each in zip(self._tables, places, strict=True))

    def contents(self, group: int, places: Int64s) -> list[bytes]:
        """Return the content hashes of found blocks of a group, see Lease."""
        nothing = np.zeros(0, np.int64)
        wanted = [places if number == group else nothing for number in range(len(self._tables))]
        return self._tier.contents_of(group, self.blocks_of(wanted)[group])

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
