"""Blocks on their way between a cache and files: some are copied while others are written, read or checked.

In between they lie in a few blocks of host memory in the tier's layouts, unless the cache is memory of another tier
whose blocks have the same bytes in the same order: then files are written from there, and read into it.
"""

import contextlib
import errno
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from pdtx.cache import KVCaches
from pdtx.errors import PdtxError, TierBusy, TierError
from pdtx.plan.runs import Int64s
from pdtx.tiers.checksum import checksum
from pdtx.tiers.copies import Copier, tier_positions
from pdtx.tiers.direct_io import SECTOR
from pdtx.tiers.extents import Extents, same_blocks
from pdtx.tiers.files import BlockFolder, Header
from pdtx.tiers.worker import Worker

logger = logging.getLogger(__name__)

_MOST_UNDER_WAY = 16
"""Files being read or written for one job, where no memory of the tier's own limits that."""


@dataclass(frozen=True)
class Failure:
    """Why a block was not moved. bad_file: because of its file, which is of no use to anybody."""

    reason: str
    bad_file: bool = False


_BATCH_BYTES = 8 << 20
"""Copied at once, so that files are written meanwhile, and the processor's caches hold what is to be summed up."""

Failures = dict[int, Failure]
"""Blocks that were not moved, by place."""

_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN})
"""Errors that say nothing about the file."""


@dataclass(frozen=True)
class Block:
    """A block to be moved: its place in the prompt, its file's header, and the cache's blocks that make it up.

    header: without the checksum. blocks: int64, shape (k,).
    """

    place: int
    header: Header
    blocks: Int64s


@dataclass
class _Job:
    """What one call is about. copier: None where files are written from the cache's own memory, or read into it.

    writes: whether it stores.
    """

    group: int
    todo: deque[Block]
    extents: Extents
    copier: Copier | None
    writes: bool
    under_way: dict[Future[None], tuple[Block, int]] = field(default_factory=dict)
    failed: Failures = field(default_factory=dict)
    door: "_Door" = field(default_factory=lambda: _Door())


class _Door:
    """The way into a job's cache: closed once the job has been given up, when the cache is somebody else's."""

    def __init__(self) -> None:
        self._changed, self._inside, self._closed = threading.Condition(), 0, False

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Write to the cache within this. Raises TierBusy where it is too late."""
        with self._changed:
            if self._closed:
                raise TierBusy("the job was given up before")
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more, and wait for who is inside: what is done there takes no longer than a copy."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._inside)


class _Slots:
    """The free blocks of one group's staging memory."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self._free, self._lock = list(blocks), threading.Lock()

    def take(self, most: int) -> list[int]:
        with self._lock:
            taken, self._free = self._free[:most], self._free[most:]
        return taken

    def give(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)


class BlockFlow:
    """One direction's way between caches and files, for one job after another.

    staging: host memory in the tier's layouts. io: the threads that read and write. silence_s: how long the disk may
    do nothing before a job is given up.
    """

    def __init__(self, files: BlockFolder, staging: KVCaches, io: Worker, *, silence_s: float) -> None:
        self._files, self._staging, self._io, self._silence_s = files, staging, io, silence_s
        self._extents = tuple(Extents(staging, group) for group in range(len(staging.groups)))
        self._slots = tuple(_Slots(range(1, group.num_blocks)) for group in staging.groups)
        self._lent = weakref.WeakKeyDictionary[KVCaches, tuple[Extents | None, ...]]()
        self._copiers = weakref.WeakKeyDictionary[KVCaches, Copier]()

    def store(self, cache: KVCaches, group: int, blocks: Sequence[Block], *, of_tier: bool) -> Failures:
        """Write blocks of a group of a cache; return what failed, of which no file is left.

        of_tier: the cache is another tier's, and stays as it is until this returns. Raises TierError where the cache is
        another model's.
        """
        job = self._job(cache, group, blocks, of_tier, lambda: Copier(cache, self._staging), writes=True)
        while job.todo or job.under_way:
            taken = self._take(job)
            if self._packed(job, taken):
                self._start(job, taken, self._write)
            if job.under_way and (job.todo or not taken):
                self._give(job, self._finished(job))
            elif not taken:
                self._starve(job)
        return job.failed

    def load(self, cache: KVCaches, group: int, blocks: Sequence[Block], *, of_tier: bool) -> Failures:
        """Read blocks into a cache; return what failed, of which nothing was written there.

        of_tier: the cache is another tier's, and the blocks are such as nobody finds before this has returned: to those
        that failed something may have been written. Raises TierError as store() does.
        """
        job = self._job(cache, group, blocks, of_tier, lambda: Copier(self._staging, cache), writes=False)
        while job.todo or job.under_way:
            taken = self._take(job)
            self._start(job, taken, self._read)
            if job.under_way:
                self._give(job, self._finished(job))
            elif not taken:
                self._starve(job)
        return job.failed

    # -- a job's steps ------------------------------------------------------------------------------------------------

    def _job(
        self,
        cache: KVCaches,
        group: int,
        blocks: Sequence[Block],
        of_tier: bool,
        make: Callable[[], Copier],
        *,
        writes: bool,
    ) -> _Job:
        lent = self._lent_by(cache)[group] if of_tier else None
        if lent is not None:
            return _Job(group, deque(blocks), lent, None, writes)
        copier = self._copiers.get(cache)
        if copier is None:
            copier = self._copiers[cache] = make()
        return _Job(group, deque(blocks), self._extents[group], copier, writes)

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

    def _take(self, job: _Job) -> list[tuple[Block, int]]:
        """Give the next blocks a place in host memory, as many as there is room for now."""
        if job.copier is None:
            count = min(len(job.todo), _MOST_UNDER_WAY - len(job.under_way))
            taken = [job.todo.popleft() for _ in range(count)]
            return [(block, int(block.blocks[0])) for block in taken]
        batch = max(1, _BATCH_BYTES // max(1, job.extents.nbytes))
        slots = self._slots[job.group].take(min(len(job.todo), batch))
        return [(job.todo.popleft(), slot) for slot in slots]

    def _give(self, job: _Job, blocks: Sequence[tuple[Block, int]]) -> None:
        if job.copier is not None:
            for _, slot in blocks:
                self._slots[job.group].give(slot)

    def _packed(self, job: _Job, blocks: Sequence[tuple[Block, int]]) -> bool:
        """Copy blocks from the cache into the staging memory; those of a copy that fails have failed."""
        if job.copier is None or not blocks:
            return True
        try:
            self._copy(job, job.copier, [block for block, _ in blocks], [slot for _, slot in blocks])
        except (PdtxError, RuntimeError) as error:
            self._fail(job, blocks, error)
            return False
        return True

    def _copy(self, job: _Job, copier: Copier, blocks: Sequence[Block], slots: Sequence[int]) -> None:
        theirs, ours = np.concatenate([block.blocks for block in blocks]), np.array(slots, np.int64)
        src, dst = (theirs, ours) if job.writes else (ours, theirs)
        copier.copy(job.group, src, dst, tier_positions(self._staging, job.group, len(blocks)))

    def _start(
        self, job: _Job, blocks: Sequence[tuple[Block, int]], move: Callable[[_Job, Block, int, bool], None]
    ) -> None:
        direct = job.extents.aligned(SECTOR)
        for block, slot in blocks:
            try:
                future = self._io.submit(lambda _, block=block, slot=slot: move(job, block, slot, direct))  # type: ignore[misc]
            except PdtxError as error:
                self._fail(job, [(block, slot)], error)
            else:
                job.under_way[future] = block, slot

    def _write(self, job: _Job, block: Block, slot: int, direct: bool) -> None:
        ranges = job.extents.of(slot)
        header = msgspec.structs.replace(block.header, checksum=checksum(ranges))
        self._files.write(header, ranges, direct=direct)

    def _read(self, job: _Job, block: Block, slot: int, direct: bool) -> None:
        self._files.read(block.header, job.extents.of(slot), direct=direct)
        if job.copier is not None:
            # By who has read and summed it up, and has it in its processor's caches.
            with job.door.passing():
                self._copy(job, job.copier, [block], [slot])

    def _finished(self, job: _Job) -> list[tuple[Block, int]]:
        """Wait for a file; return the blocks whose files went well. Gives the job up where the disk is silent."""
        done = wait(job.under_way, self._silence_s, FIRST_COMPLETED).done
        if not done:
            self._give_up(job)
        good = []
        for future in done:
            moved = job.under_way.pop(future)
            error = future.exception()
            if error is None:
                good.append(moved)
            else:
                self._fail(job, [moved], error, bad_file=_is_bad(error))
        return good

    def _fail(
        self, job: _Job, blocks: Sequence[tuple[Block, int]], error: BaseException, *, bad_file: bool = False
    ) -> None:
        job.failed |= {block.place: Failure(_reason(error), bad_file) for block, _ in blocks}
        self._give(job, blocks)

    def _give_up(self, job: _Job) -> None:
        job.door.close()
        failure = Failure(f"the disk has done nothing for {self._silence_s:g} s")
        logger.warning(
            "%s: %s; giving up %d blocks", self._files.root, failure.reason, len(job.under_way) + len(job.todo)
        )
        for future, moved in job.under_way.items():
            job.failed[moved[0].place] = failure
            future.cancel()
            future.add_done_callback(partial(self._late, job, moved))
        job.failed |= {block.place: failure for block in job.todo}
        job.under_way, job.todo = {}, deque()

    def _late(self, job: _Job, moved: tuple[Block, int], _: "Future[None]") -> None:
        """Use memory again that a file had still when its job was given up; what was written is nobody's."""
        if job.writes:
            with contextlib.suppress(OSError):
                self._files.remove(moved[0].header.group, moved[0].header.digest)
        self._give(job, [moved])

    def _starve(self, job: _Job) -> None:
        """End a job for which there is no memory: the disk has it all, for jobs that were given up."""
        failure = Failure("the disk has not let go of the tier's memory")
        job.failed |= {block.place: failure for block in job.todo}
        job.todo.clear()


def _is_bad(error: BaseException) -> bool:
    return isinstance(error, TierError) or (isinstance(error, OSError) and error.errno not in _PASSING)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
