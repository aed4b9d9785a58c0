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
from pdtx.tiers.base import Bools, Failed, Fence, Moved, Side
from pdtx.tiers.block_flow import BlockFlow
from pdtx.tiers.block_job import Block, Failures
from pdtx.tiers.checksum import CHECKSUM_BYTES
from pdtx.tiers.contents import NO_HASH
from pdtx.tiers.counters import TierUsage
from pdtx.tiers.direct_io import takes_direct_io
from pdtx.tiers.disk_start import own_folder, take_in
from pdtx.tiers.extents import Extents, byte_order
from pdtx.tiers.files import BlockFolder, Header, file_bytes, short_proof
from pdtx.tiers.geometry import check_block_tokens, share_out
from pdtx.tiers.keys import PrefixKeys
from pdtx.tiers.outcome import Outcome
from pdtx.tiers.owner import FolderOwner
from pdtx.tiers.shelf import Evicted, Shelf
from pdtx.tiers.shelved import ShelvedTier, Wanted
from pdtx.tiers.worker import MOST_BYTES, MOST_JOBS, Worker
from pdtx.units import format_bytes

logger = logging.getLogger(__name__)

THREADS = 8
"""That read, and that write: while some of them sum up and copy, the disk has enough to do."""
CLOSE_S = 30.0
SILENCE_S = 30.0
"""How long the disk may do nothing."""
_GUESS = 1e9
"""Bytes a second, before the first load."""
_MOST_WAITING = 1 << 20
"""Of a job's threads; what bounds them is how many jobs may wait."""
_NO_CHECKSUM = bytes(CHECKSUM_BYTES)


class DiskTier(ShelvedTier):
    """Blocks in files of a folder that no other process uses meanwhile, and that are there again after a restart.

    See Tier. A block that cannot be read, or is not what was written, is a miss, and its file is deleted; nothing of it
    reaches the cache it was to be loaded into.
    """

    name: ClassVar[str] = "disk"
    title: ClassVar[str] = "disk"

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
        threads: int = THREADS,
        most_jobs: int = MOST_JOBS,
        most_bytes: int = MOST_BYTES,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Open the tier for caches like `like`, with what is in the folder of them.

        nbytes: of all files. fingerprint: see fingerprint_of. layouts, tokens_per_state: see tier_caches. fsync:
        whether blocks survive a power cut for certain. direct: go past the page cache where that is possible.
        threads: that read, and as many that write. silence_s: how long the disk may do nothing before blocks are given
        up. Raises TierInUse, and TierError for a folder that cannot be used or nbytes that hold no block.
        """
        self.directory, self._asked = Path(directory), nbytes
        check_block_tokens(like, block_tokens)
        self._owner = FolderOwner(self.directory)
        try:
            root, stagings = own_folder(
                self.directory,
                like=like,
                block_tokens=block_tokens,
                fingerprint=fingerprint,
                layouts=layouts,
                threads=threads,
            )
            sizes = self._describe(stagings)
            shares = share_out(
                like,
                [file_bytes(each) for each in sizes],
                block_tokens=block_tokens,
                nbytes=nbytes,
                tokens_per_state=tokens_per_state,
            )
            shelves = [
                Shelf(group.name, count, policy, block_nbytes=each, on_evict=partial(self._evicted, number))
                for number, (group, count, each) in enumerate(zip(like.groups, shares, sizes, strict=True))
            ]
            self._files = BlockFolder(root, direct=direct and takes_direct_io(root), fsync=fsync)
            begun = time.monotonic()
            take_in(self._files, shelves, self._layouts)
            self._scan_s = time.monotonic() - begun
        except BaseException as error:
            self._owner.release()
            if isinstance(error, OSError):
                raise TierError(f"cannot keep blocks in {directory}: {error}; give another folder") from None
            raise
        self._flows = [
            BlockFlow(
                self._files,
                staging,
                Worker(f"the disk tier's {what}", threads=threads, most_jobs=_MOST_WAITING),
                threads,
                silence_s=silence_s,
            )
            for staging, what in zip(stagings, ("writing", "reading"), strict=True)
        ]
        self._lock, self._not_stored = threading.Lock(), Counter[str]()
        super().__init__(
            block_tokens, shelves, sizes, guess=_GUESS, threads=1, most_jobs=most_jobs, most_bytes=most_bytes
        )

    def _describe(self, stagings: Sequence[KVCaches]) -> tuple[int, ...]:
        """Note what a block of each group is; return its payload."""
        self._staged, numbers = sum(staging.nbytes for staging in stagings), range(len(stagings[0].groups))
        self._layouts = tuple(
            tuple(byte_order(buffer) for buffer in stagings[0].buffers_of(number)) for number in numbers
        )
        return tuple(Extents(stagings[0], number).nbytes for number in numbers)

    def _evicted(self, group: int, evicted: Evicted) -> None:
        """Take the names from what leaves: its files are written over with what comes."""
        for digest in evicted.digests:
            try:
                self._files.evict(self.group_name(group), digest, self._nbytes[group])
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.warning("%s: a file that is not used any more stays: %s", self._files.root, error)

    def _remove(self, group: str, digest: bytes) -> None:
        try:
            self._files.remove(group, digest)
        except OSError as error:
            logger.warning("%s: a bad file stays: %s", self._files.root, error)

    def _named(self, keys: PrefixKeys, places: Int64s) -> tuple[list[bytes], list[bytes]]:
        digests, proofs = super()._named(keys, places)
        return digests, [short_proof(proof) for proof in proofs]

    def _blocks(self, wanted: Wanted) -> list[Block]:
        """Return what is to be moved, with the headers of the files."""
        name, layouts = self.group_name(wanted.group), self._layouts[wanted.group]
        nbytes, keys, found = self._nbytes[wanted.group], wanted.keys, list[Block]()
        contents = wanted.contents or (NO_HASH,) * len(wanted.places)  # of a load, which does not ask for them
        for place, row, content in zip(wanted.places.tolist(), wanted.rows, contents, strict=True):
            proof = short_proof(keys.proofs[place])
            header = Header(keys.digests[place], proof, name, layouts, nbytes, _NO_CHECKSUM, content)
            found.append(Block(place, header, row))
        return found

    # -- storing ----------------------------------------------------------------------------------------------------

    def store(self, keys: PrefixKeys, source: Side, places: Sequence[Int64s], fence: Fence) -> "Future[Moved]":
        """Write copies of blocks, see Tier."""
        return self._store(keys, source, places, fence, stored=self._drop_spares)

    def _move_in(self, source: Side, wanted: Wanted, done: Outcome) -> Bools:
        flow = self._flows[0]
        failed = flow.store(source.cache, wanted.group, self._blocks(wanted), of_tier=source.of_tier)
        self._note(failed)
        return self._finish(done, wanted, failed)

    def _drop_spares(self) -> None:
        try:
            self._files.drop_spares()
        except OSError as error:
            logger.warning("%s: a file that is not used any more stays: %s", self._files.root, error)

    def _note(self, failed: Failures) -> None:
        with self._lock:
            self._not_stored.update(failure.reason for failure in failed.values())

    # -- loading ----------------------------------------------------------------------------------------------------

    def _move_out(self, into: Side, wanted: Wanted, done: Outcome) -> None:
        shelf, places = self._shelves[wanted.group], wanted.places
        failed = self._flows[1].load(into.cache, wanted.group, self._blocks(wanted))
        bad = {place for place, failure in failed.items() if failure.bad_file}
        for at in np.flatnonzero(np.isin(places, list(bad))).tolist():
            logger.warning(
                "%s: group %s block %d: %s", self._files.root, shelf.name, places[at], failed[places[at]].reason
            )
            # First the file: once the entry is forgotten, another store may make the file anew.
            if shelf.is_ready(int(wanted.held[at])):
                self._remove(shelf.name, wanted.keys.digests[places[at]])
                shelf.forget(wanted.held[at : at + 1])
        # What a copy that failed has left where it should have gone.
        torn = np.isin(places, [place for place in failed if place not in bad])
        into.cache.poison(wanted.group, wanted.rows[torn].reshape(-1))
        self._finish(done, wanted, failed)

    def _finish(self, done: Outcome, wanted: Wanted, failed: Failures) -> Bools:
        """Note what became of blocks; return which were moved."""
        moved = ~np.isin(wanted.places, list(failed))
        done.places = wanted.places[moved]
        done.nbytes = len(done.places) * self._nbytes[wanted.group]
        done.failed += [Failed(done.group, place, failure.reason) for place, failure in sorted(failed.items())]
        return moved

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

    def close(self) -> None:
        """Finish what is under way, see Tier; waits CLOSE_S at most. The folder is then another's to use."""
        if self._close_workers(CLOSE_S, *(flow.io for flow in self._flows)):
            self._owner.release()
        else:
            logger.warning("%s: the disk does not answer; the folder stays locked until it does", self.directory)
