"""Blocks on their way between a cache and files: a few threads, each of which has one block of host memory.

A thread copies a block from the cache into its own block, in the tier's layouts, sums it up and writes it; or reads,
sums up and copies into the cache, all while the processor's caches hold it. To read scattered ranges of the cache
itself takes a disk longer than the copy takes. From the memory of another tier whose blocks have the same bytes in the
same order files are written as it lies.
"""

import contextlib
import errno
import logging
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import msgspec
import numpy as np

from pdtx.cache import KVCaches
from pdtx.errors import PdtxError, TierError
from pdtx.tiers.block_copies import BlockCopier
from pdtx.tiers.block_job import Block, BlockJob, Failure, Failures
from pdtx.tiers.checksum import checksum
from pdtx.tiers.copies import PAST_CACHES, tier_positions
from pdtx.tiers.direct_io import SECTOR
from pdtx.tiers.extents import Extents, same_blocks
from pdtx.tiers.files import BlockFolder, Frame
from pdtx.tiers.worker import Worker

logger = logging.getLogger(__name__)

_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN})
"""Errors that say nothing about the file."""


class _Slot:
    """A block of the staging memory, for one thread at a time. number: int64, shape (1,)."""

    def __init__(self, extents: Extents, block: int) -> None:
        self.number, self.frame = np.array([block], np.int64), Frame(extents.of(block))


_Move = Callable[[Block, _Slot], None]
"""Moves a block, by way of the staging memory."""


class BlockFlow:
    """One direction's way between caches and files, for one job after another.

    io: the threads that read and write, so many; who made the flow closes them. staging: host memory in the tier's
    layouts, a block for each of them. silence_s: how long the disk may do nothing before a job is given up.
    """

    def __init__(self, files: BlockFolder, staging: KVCaches, io: Worker, threads: int, *, silence_s: float) -> None:
        self.io, self._threads, self._files, self._silence_s = io, threads, files, silence_s
        self._staging = staging
        self._extents = tuple(Extents(staging, group) for group in range(len(staging.groups)))
        self._slots = [
            [_Slot(extents, block) for block in range(1, group.num_blocks)]
            for extents, group in zip(self._extents, staging.groups, strict=True)
        ]
        self._lent = weakref.WeakKeyDictionary[KVCaches, tuple[Extents | None, ...]]()
        self._copiers = weakref.WeakKeyDictionary[KVCaches, BlockCopier]()

    def store(self, cache: KVCaches, group: int, blocks: Sequence[Block], *, of_tier: bool) -> Failures:
        """Write blocks of a group of a cache; return what failed, of which no file is left.

        of_tier: the cache is another tier's, and stays as it is until this returns. Raises TierError where the cache is
        another model's.
        """
        job = BlockJob(blocks, min(self._threads, len(blocks)))
        lent = self._lent_by(cache)[group] if of_tier else None
        if lent is not None:
            move = partial(self._write_lent, job, lent)
        else:
            move = partial(self._write, job, self._copier(cache, cache, self._staging), group)
        return self._work_off(job, group, move, late=self._remove)

    def load(self, cache: KVCaches, group: int, blocks: Sequence[Block]) -> Failures:
        """Read blocks into a cache; return what failed, of which nothing was written there unless the copy failed.

        Raises TierError as store() does.
        """
        job = BlockJob(blocks, min(self._threads, len(blocks)))
        past_caches = len(blocks) * self._extents[group].nbytes > PAST_CACHES
        move = partial(self._read, job, self._copier(cache, self._staging, cache), group, past_caches)
        return self._work_off(job, group, move, late=lambda _: None)

    def _copier(self, cache: KVCaches, src: KVCaches, dst: KVCaches) -> BlockCopier:
        copier = self._copiers.get(cache)
        if copier is None:
            copier = self._copiers[cache] = BlockCopier(src, dst)
        return copier

    def _lent_by(self, cache: KVCaches) -> tuple[Extents | None, ...]:
        """Return where another tier's blocks lie, of each group; None where they are not like those of this tier."""
        known = self._lent.get(cache)
        if known is None:
            groups = range(len(self._staging.groups))
            alike = len(cache.groups) == len(groups)
            known = self._lent[cache] = tuple(
                Extents(cache, group) if alike and same_blocks(self._staging, cache, group) else None
                for group in groups
            )
        return known

    # -- in the caller's thread ---------------------------------------------------------------------------------------

    def _work_off(self, job: BlockJob, group: int, move: _Move, *, late: Callable[[Block], None]) -> Failures:
        """Have the threads move all blocks. late: called for each that was moved when the job had been given up."""
        running = list[Future[None]]()
        for _ in range(job.threads):
            try:
                future = self.io.submit(lambda _: self._run(job, group, move, late))
            except PdtxError as error:
                job.left(str(error))
            else:
                future.add_done_callback(partial(_left, job))
                running.append(future)
        if not job.wait(self._silence_s):
            reason = f"the disk has done nothing for {self._silence_s:g} s"
            count = job.give_up(reason)
            for future in running:
                future.cancel()
            logger.warning("%s: %s; giving up %d blocks", self._files.root, reason, count)
        return job.failed

    # -- in the threads of io -----------------------------------------------------------------------------------------

    def _run(self, job: BlockJob, group: int, move: _Move, late: Callable[[Block], None]) -> None:
        try:
            slot = self._slots[group].pop()
        except IndexError:
            raise TierError(
                "the disk has not let go of the tier's memory, which jobs have that were given up"
            ) from None
        try:
            while (block := job.take()) is not None:
                failure = None
                try:
                    move(block, slot)
                except Exception as error:  # noqa: BLE001  # whatever it is, it is this block's
                    failure = Failure(_reason(error), _is_bad(error))
                if not job.ended(block, failure):
                    late(block)
        finally:
            self._slots[group].append(slot)

    def _write(self, job: BlockJob, copier: BlockCopier, group: int, block: Block, slot: _Slot) -> None:
        with job.at_cache():
            copier.copy_block(group, block.blocks, slot.number, self._positions(group))
        self._write_file(job, block, slot.frame, self._extents[group])

    def _write_lent(self, job: BlockJob, lent: Extents, block: Block, _: _Slot) -> None:
        self._write_file(job, block, Frame(lent.of(int(block.blocks[0]))), lent)

    def _write_file(self, job: BlockJob, block: Block, frame: Frame, extents: Extents) -> None:
        header = msgspec.structs.replace(block.header, checksum=checksum(frame.payload))
        # Once a job is given up, lent memory may hold another block, of which the checksum would be right as well.
        self._files.write(header, frame, direct=extents.aligned(SECTOR), check=job.check_wanted)

    def _read(
        self, job: BlockJob, copier: BlockCopier, group: int, past_caches: bool, block: Block, slot: _Slot
    ) -> None:
        self._files.read(block.header, slot.frame, direct=self._extents[group].aligned(SECTOR))
        with job.at_cache():
            positions = self._positions(group)
            copier.copy_block(group, slot.number, block.blocks, positions, past_caches=past_caches)

    def _positions(self, group: int) -> int:
        return len(tier_positions(self._staging, group, 1))

    def _remove(self, block: Block) -> None:
        """Delete the file of a block that counts as failed by now."""
        with contextlib.suppress(OSError):
            self._files.remove(block.header.group, block.header.digest)


def _left(job: BlockJob, future: "Future[None]") -> None:
    error = None if future.cancelled() else future.exception()
    job.left(str(error or "the tier's threads have ended"))


def _is_bad(error: Exception) -> bool:
    return isinstance(error, TierError) or (isinstance(error, OSError) and error.errno not in _PASSING)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
