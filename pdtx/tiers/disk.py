"""The disk tier: a file for each block, in the tier's layouts, with a checksum that every load must pass."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from pdtx.cache import KVCaches
from pdtx.errors import TierError
from pdtx.plan.runs import Int64s
from pdtx.tiers.base import Bools, Failed, Fence, Lease, Moved, Side, Tier, written
from pdtx.tiers.block_flow import Block, BlockFlow, Failures
from pdtx.tiers.checksum import CHECKSUM_BYTES
from pdtx.tiers.copies import compact
from pdtx.tiers.counters import TierUsage
from pdtx.tiers.cpu import Pins
from pdtx.tiers.direct_io import takes_direct_io
from pdtx.tiers.disk_start import byte_order, own_folder, take_in
from pdtx.tiers.extents import Extents
from pdtx.tiers.files import BlockFolder, Header, file_bytes, short_proof
from pdtx.tiers.geometry import check_block_tokens, share_out
from pdtx.tiers.keys import PrefixKeys
from pdtx.tiers.outcome import Outcome, named, poison_blocks, rows_of, sum_up
from pdtx.tiers.owner import FolderOwner
from pdtx.tiers.rates import Rate
from pdtx.tiers.shelf import Evicted, Shelf
from pdtx.tiers.worker import MOST_BYTES, MOST_JOBS, Worker
from pdtx.units import format_bytes

logger = logging.getLogger(__name__)

CLOSE_S = 30.0
SILENCE_S = 30.0
"""How long the disk may do nothing."""
_GUESS = 1e9
"""Bytes a second, before the first load."""
_NO_CHECKSUM = bytes(CHECKSUM_BYTES)


class DiskTier(Tier):
    """Blocks in files of a folder that no other process uses meanwhile, and that are there again after a restart.

    See Tier. A block that cannot be read, or is not what was written, is a miss, and its file is deleted; nothing of it
    reaches the cache it was to be loaded into.
    """

    name: ClassVar[str] = "disk"

    def __init__(
        self,
        directory: str | Path,
        *,
        like: KVCaches,
        block_tokens: int,
        nbytes: int,
        fingerprint: bytes,
        policy: str = "lru",
        layouts: tuple[str, ...] | None = None,
        tokens_per_state: int | None = None,
        fsync: bool = False,
        direct: bool = True,
        threads: int = 4,
        most_jobs: int = MOST_JOBS,
        most_bytes: int = MOST_BYTES,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Open the tier for caches like `like`, with what is in the folder of them.

        nbytes: of all files. fingerprint: see fingerprint_of. layouts, tokens_per_state: see tier_caches. fsync:
        whether blocks survive a power cut for certain. direct: go past the page cache where that is possible.
        threads: that read and write. silence_s: how long the disk may do nothing before blocks are given up.
        Raises TierInUse, and TierError for a folder that cannot be used or nbytes that hold no block.
        """
        self.block_tokens, self.directory, self._asked = block_tokens, Path(directory), nbytes
        check_block_tokens(like, block_tokens)
        self._owner = FolderOwner(self.directory)
        try:
            root, stagings = own_folder(
                self.directory, like=like, block_tokens=block_tokens, fingerprint=fingerprint, layouts=layouts
            )
            self._describe(stagings)
            self._shelves = self._make_shelves(like, policy, nbytes, tokens_per_state)
            self._files = BlockFolder(root, direct=direct and takes_direct_io(root), fsync=fsync)
            begun = time.monotonic()
            take_in(self._files, self._shelves, self._layouts)
            self._scan_s = time.monotonic() - begun
        except BaseException as error:
            self._owner.release()
            if isinstance(error, OSError):
                raise TierError(f"cannot keep blocks in {directory}: {error}; give another folder") from None
            raise
        self._io = Worker("the disk tier's files", threads=threads, most_jobs=1 << 20)
        self._flows = [BlockFlow(self._files, staging, self._io, silence_s=silence_s) for staging in stagings]
        self._workers = [
            Worker(f"the disk tier's {what}", most_jobs=most_jobs, most_bytes=most_bytes)
            for what in ("stores", "loads")
        ]
        self._rate, self._lock, self._not_stored = Rate(_GUESS), threading.Lock(), Counter[str]()

    def _describe(self, stagings: Sequence[KVCaches]) -> None:
        """Note what a block of each group is."""
        self._groups, self._staged = stagings[0].groups, sum(staging.nbytes for staging in stagings)
        numbers = range(len(self._groups))
        self._nbytes = tuple(Extents(stagings[0], number).nbytes for number in numbers)
        self._layouts = tuple(
            tuple(byte_order(buffer) for buffer in stagings[0].buffers if buffer.group == number) for number in numbers
        )

    def _make_shelves(
        self, like: KVCaches, policy: str, nbytes: int, tokens_per_state: int | None
    ) -> tuple[Shelf, ...]:
        sizes = [file_bytes(each) for each in self._nbytes]
        shares = share_out(
            like, sizes, block_tokens=self.block_tokens, nbytes=nbytes, tokens_per_state=tokens_per_state
        )
        return tuple(
            Shelf(group.name, count, policy, block_nbytes=each, on_evict=partial(self._evicted, number))
            for number, (group, count, each) in enumerate(zip(self._groups, shares, self._nbytes, strict=True))
        )

    def _evicted(self, group: int, evicted: Evicted) -> None:
        """Take the names from what leaves: its files are written over with what comes."""
        for digest in evicted.digests:
            try:
                self._files.evict(self._groups[group].name, digest, self._nbytes[group])
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.warning("%s: a file that is not used any more stays: %s", self._files.root, error)

    def _remove(self, group: str, digest: bytes) -> None:
        try:
            self._files.remove(group, digest)
        except OSError as error:
            logger.warning("%s: a bad file stays: %s", self._files.root, error)

    def group_name(self, group: int) -> str:
        """Return the name of a group by its number."""
        return self._groups[group].name

    # -- finding ----------------------------------------------------------------------------------------------------

    def _check(self, keys: PrefixKeys, places: Sequence[Int64s]) -> tuple[Int64s, ...]:
        if keys.block_tokens != self.block_tokens:
            raise TierError(f"keys of blocks of {keys.block_tokens} tokens; the disk tier's have {self.block_tokens}")
        if len(places) != len(self._groups):
            raise TierError(f"places for {len(places)} groups; the disk tier has {len(self._groups)}")
        arrays = tuple(np.asarray(each, np.int64) for each in places)
        for each in arrays:
            if len(each) and (each.min() < 0 or each.max() >= len(keys)):
                raise TierError(f"places {each.min()}..{each.max()} of a prompt of {len(keys)} whole blocks")
        return arrays

    def lookup(self, keys: PrefixKeys, places: Sequence[Int64s]) -> "DiskLease":
        """Find and pin blocks, see Tier. No file is looked at: a load tells of those that have gone."""
        asked = self._check(keys, places)
        blocks = [shelf.lookup(*_named(keys, each)) for shelf, each in zip(self._shelves, asked, strict=True)]
        pins = Pins(self._shelves, [each[each > 0] for each in blocks], taken=True)
        return DiskLease(self, keys, asked, blocks, pins)

    def _blocks(self, group: int, keys: PrefixKeys, places: Int64s, table: Int64s, chosen: Bools) -> list[Block]:
        """Return what is to be moved of chosen ones among places. table: the cache's blocks of each place."""
        name, layouts, nbytes = self._groups[group].name, self._layouts[group], self._nbytes[group]
        rows = rows_of(table, len(places))
        found = []
        for at in np.flatnonzero(chosen).tolist():
            place = int(places[at])
            header = Header(keys.digests[place], short_proof(keys.proofs[place]), name, layouts, nbytes, _NO_CHECKSUM)
            found.append(Block(place, header, rows[at]))
        return found

    # -- storing ----------------------------------------------------------------------------------------------------

    def store(
        self, keys: PrefixKeys, source: Side, places: Sequence[Int64s], fence: Fence = written
    ) -> "Future[Moved]":
        """Write copies of blocks, see Tier."""
        asked = self._check(keys, places)
        tables = self._compact(source, asked)

        def job(waited: float) -> Moved:
            begun = time.monotonic()
            fence()
            done = [self._store_group(group, keys, source, each, *tables[group]) for group, each in enumerate(asked)]
            self._drop_spares()
            return sum_up(done, time.monotonic() - begun, waited)

        return self._workers[0].submit(job, self._bytes_of(asked))

    def _compact(self, side: Side, places: Sequence[Int64s]) -> list[tuple[Int64s, Bools]]:
        if len(side.tables) != len(self._groups):
            raise TierError(f"tables for {len(side.tables)} groups; the disk tier has {len(self._groups)}")
        return [compact(side, group, each, self.block_tokens) for group, each in enumerate(places)]

    def _bytes_of(self, places: Sequence[Int64s]) -> int:
        return sum(len(each) * size for each, size in zip(places, self._nbytes, strict=True))

    def _store_group(
        self, group: int, keys: PrefixKeys, source: Side, places: Int64s, table: Int64s, whole: Bools
    ) -> Outcome:
        shelf, done = self._shelves[group], Outcome(self._groups[group].name)
        done.fail(places[~whole], "a part of it is the null block, or beyond the table")
        rows = rows_of(table, len(whole))[whole]
        places = places[whole]
        given = shelf.reserve(*_named(keys, places))
        done.present = int(given.present.sum())
        done.fail(places[given.full], "the tier is full of blocks that are pinned or being written")
        done.fail(places[given.clash], "other tokens have its digest")
        taken = given.blocks > 0
        stored = np.zeros(len(places), bool)
        try:
            blocks = self._blocks(group, keys, places, rows.reshape(-1), taken)
            failed = self._flows[0].store(source.cache, group, blocks, of_tier=source.of_tier)
            stored = taken & ~np.isin(places, list(failed))
        finally:
            shelf.cancel(given.blocks[taken & ~stored])
        shelf.commit(given.blocks[stored])
        self._note(failed)
        return self._finish(done, group, places[stored], failed)

    def _drop_spares(self) -> None:
        try:
            self._files.drop_spares()
        except OSError as error:
            logger.warning("%s: a file that is not used any more stays: %s", self._files.root, error)

    def _note(self, failed: Failures) -> None:
        with self._lock:
            self._not_stored.update(failure.reason for failure in failed.values())

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(self, lease: "DiskLease", into: Side, places: Sequence[Int64s]) -> "Future[Moved]":
        """See Lease.load()."""
        asked = tuple(np.asarray(each, np.int64) for each in places)
        tables, held = self._compact(into, asked), lease.blocks_of(asked)
        pins = Pins(self._shelves, held)

        def job(waited: float) -> Moved:
            begun = time.monotonic()
            try:
                done = [
                    self._load_group(group, lease.keys, into, each, held[group], *tables[group])
                    for group, each in enumerate(asked)
                ]
            finally:
                pins.release()  # before the result is there, so that whoever sees it sees this too
            moved = sum_up(done, time.monotonic() - begun, waited)
            self._rate.note(moved.nbytes, moved.seconds)
            return moved

        try:
            future = self._workers[1].submit(job, self._bytes_of(asked))
        except TierError:
            pins.release()
            raise
        future.add_done_callback(lambda _: pins.release())  # where it was refused or cancelled
        return future

    def _load_group(
        self,
        group: int,
        keys: PrefixKeys,
        into: Side,
        places: Int64s,
        held: Int64s,
        table: Int64s,
        whole: Bools,
    ) -> Outcome:
        shelf, done = self._shelves[group], Outcome(self._groups[group].name)
        done.fail(places[~whole], "it has no blocks to go to")
        blocks = self._blocks(group, keys, places, table, whole)
        failed = self._flows[1].load(into.cache, group, blocks, of_tier=into.of_tier)
        bad = {place for place, failure in failed.items() if failure.bad_file}
        for at in np.flatnonzero(np.isin(places, list(bad))).tolist():
            logger.warning(
                "%s: group %s block %d: %s", self._files.root, shelf.name, places[at], failed[places[at]].reason
            )
            # First the file: once the entry is forgotten, another store may make the file anew.
            self._remove(shelf.name, keys.digests[places[at]])
            shelf.forget(held[at : at + 1])
        # What a copy that failed has left where it should have gone.
        torn = np.isin(places, [place for place in failed if place not in bad])
        poison_blocks(into.cache, group, rows_of(table, len(places))[torn])
        self._finish(done, group, places[whole & ~np.isin(places, list(failed))], failed)
        shelf.count_loaded(len(done.places))
        shelf.count_failed(len(done.failed))
        return done

    def _finish(self, done: Outcome, group: int, places: Int64s, failed: Failures) -> Outcome:
        done.places, done.nbytes = places, len(places) * self._nbytes[group]
        done.failed += [Failed(done.group, place, failure.reason) for place, failure in sorted(failed.items())]
        return done

    # -- the rest -----------------------------------------------------------------------------------------------------

    def usage(self) -> TierUsage:
        """Return what the tier holds, see Tier.

        details: "I/O", "start" and "not stored". mapped: bytes of the files, header and padding included.
        """
        groups = tuple(shelf.usage() for shelf in self._shelves)
        mapped = sum(
            group.capacity.blocks * file_bytes(each) for group, each in zip(groups, self._nbytes, strict=True)
        )  # fmt: skip
        with self._lock:
            failures = "; ".join(f"{count} blocks: {reason}" for reason, count in self._not_stored.most_common())
        details = {
            "folder": str(self._files.root),
            "I/O": "O_DIRECT" if self._files.direct else "through the page cache",
            "staging": format_bytes(self._staged),
            "start": f"{self._scan_s:.3f} s to read what was there",
        }
        if failures:
            details["not stored"] = failures
        return TierUsage(self.name, groups, self._asked, mapped, details)

    def seconds_for(self, nbytes: int, num_runs: int) -> float:
        """Estimate the time of a load, see Tier."""
        return self._rate.seconds_for(nbytes, num_runs)

    def close(self) -> None:
        """Finish what is under way, see Tier; waits CLOSE_S at most. The folder is then another's to use."""
        end = time.monotonic() + CLOSE_S
        ended = [worker.close(max(0.0, end - time.monotonic())) for worker in (*self._workers, self._io)]
        if all(ended):
            self._owner.release()
        else:
            logger.warning("%s: the disk does not answer; the folder stays locked until it does", self.directory)


class DiskLease(Lease):
    """Blocks of a disk tier, whose files are not deleted meanwhile, unless they turn out to be bad. See Lease."""

    def __init__(
        self, tier: DiskTier, keys: PrefixKeys, places: Sequence[Int64s], blocks: Sequence[Int64s], pins: Pins
    ) -> None:
        """places, blocks: for each group, what was asked for and its entry: 0 where it is not here."""
        self._tier, self.keys, self._pins = tier, keys, pins
        self._tables = tuple(np.zeros(len(keys), np.int64) for _ in places)
        for table, where, entries in zip(self._tables, places, blocks, strict=True):
            table[where] = entries
        self._lock, self._released = threading.Lock(), False
        self.found: tuple[Bools, ...] = tuple(each > 0 for each in blocks)

    def blocks_of(self, places: Sequence[Int64s]) -> tuple[Int64s, ...]:
        """Return the entries of some places of each group. Raises TierError for one that was not found."""
        for group, (table, each) in enumerate(zip(self._tables, places, strict=True)):
            inside = (each >= 0) & (each < len(table))
            lacking = each[~inside] if not inside.all() else each[table[each] == 0]
            if len(lacking):
                name = self._tier.group_name(group)
                raise TierError(f"group {name} block {lacking[0]} was not found, and cannot be loaded")
        return tuple(table[each] for table, each in zip(self._tables, places, strict=True))

    def load(self, into: Side, places: Sequence[Int64s]) -> "Future[Moved]":
        """Read blocks into a cache, see Lease. Raises TierError too once the lease was released."""
        with self._lock:
            if self._released:
                raise TierError("the lease was released: its blocks may be gone by now; look them up again")
            return self._tier.load(self, into, places)

    def release(self) -> None:
        """Let the blocks be evicted, see Lease."""
        with self._lock:
            self._released = True
        self._pins.release()


def _named(keys: PrefixKeys, places: Int64s) -> tuple[list[bytes], list[bytes]]:
    digests, proofs = named(keys, places)
    return digests, [short_proof(proof) for proof in proofs]
