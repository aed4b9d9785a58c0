"""What engines need of a pool of blocks, as protocols; and blocks that the caller's own scheduler owns."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pdtx.arguments import shown
from pdtx.cache.allocator import Blocks
from pdtx.cache.group_allocator import GroupBlocks
from pdtx.cache.groups import CacheGroup
from pdtx.errors import CacheError, InputError, StaleBlocks
from pdtx.plan import NULL_BLOCK
from pdtx.plan.runs import Int64s

logger = logging.getLogger(__name__)

BlockTables = Sequence[Sequence[int] | Int64s]
"""A block table for each group, in the groups' order: ids in the order of positions, the null block where none is."""


class BlockPool(Protocol):
    """What an engine needs to know of blocks that it has been given. Every method may be called from any thread.

    names: of the groups, in their order.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The groups, in the order of tables and ids."""

    def check(self, blocks: GroupBlocks) -> None:
        """Raise StaleBlocks unless blocks are still the request's that they were given to."""

    def hold(self, blocks: GroupBlocks) -> None:
        """Keep blocks from being used for anything else until unhold. Raises StaleBlocks if they were freed."""

    def unhold(self, blocks: GroupBlocks) -> None:
        """End one hold: release_hold(), then put_back()."""

    def release_hold(self, blocks: GroupBlocks) -> tuple[Int64s, ...]:
        """End one hold, and return as retire() does."""

    def free(self, blocks: GroupBlocks) -> None:
        """End a request's use of its blocks: retire(), then put_back(). Raises StaleBlocks if that was done before."""

    def retire(self, blocks: GroupBlocks) -> tuple[Int64s, ...]:
        """End a request's use of its blocks; those that are held follow when their last hold ends.

        Returns, for each group, ids that are free of use, may be poisoned, and must then be put_back(). None of blocks
        that somebody else owns: their owner is notified at once and may go on using what they hold.
        Raises StaleBlocks if that was done before.
        """

    def put_back(self, ids: Sequence[Int64s]) -> None:
        """Let blocks that retire() or release_hold() returned be handed out again."""


class AllocatingBlockPool(BlockPool, Protocol):
    """A BlockPool that hands out blocks by itself. GroupAllocator is one."""

    @property
    def num_free(self) -> tuple[int, ...]:
        """Blocks of each group that can be handed out now."""

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether so many blocks of each group can be handed out now."""

    def check_possible(self, counts: Sequence[int]) -> None:
        """Raise OutOfBlocks, naming the group, if so many can never be handed out at once."""

    def allocate(self, counts: Sequence[int]) -> GroupBlocks:
        """Hand out so many blocks of each group. Raises OutOfBlocks, handing out none, if one has fewer."""

    def free_blocks(self) -> GroupBlocks:
        """The blocks that can be handed out now."""

    def untouched(self, blocks: GroupBlocks) -> tuple[Int64s, ...]:
        """For each group the ids among free_blocks() of before that were not handed out since."""


@dataclass(frozen=True)
class CallerTables(GroupBlocks):
    """Blocks of a request whose tables its caller gave: groups[i].ids is the table of group i, null blocks included.

    lease: which take() they come from; the same in all that extend() makes of them.
    """

    lease: int


@dataclass
class _Lease:
    tables: CallerTables
    holds: int = 0
    freed: bool = False


class CallerBlocks:
    """Blocks that the caller's own scheduler owns and counts: a BlockPool that hands out none. Safe from all threads.

    A request's blocks are one lease, from take() to free(). Several leases may name the same block, as requests with
    one cached prefix do: the caller counts the uses of each block.
    groups: a cache's, in their order. on_free: called once for each lease, with its last tables, when it was freed
    and its last hold has ended: nothing here reads or writes them any more. It runs on the thread that ended the last
    use, outside of every lock, and must be short. What it raises is logged and counted (num_failed_calls), and
    changes nothing else.
    """

    def __init__(self, groups: Sequence[CacheGroup], on_free: Callable[[CallerTables], None] | None = None) -> None:
        self.groups, self._on_free = tuple(groups), on_free
        self.num_failed_calls = 0
        self._leases, self._next, self._lock = dict[int, _Lease](), 0, threading.Lock()

    def require_for(self, groups: Sequence[CacheGroup]) -> None:
        """Raise InputError unless these are blocks of a cache of such groups."""
        if self.groups != tuple(groups):
            mine, theirs = ([f"{each.name} of {each.num_blocks} blocks" for each in of] for of in (self.groups, groups))
            raise InputError(
                f"these CallerBlocks are of another cache, with {', '.join(mine)}; this one has {', '.join(theirs)}: "
                "give CallerBlocks(cache.groups)"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The groups, in the order of tables."""
        return tuple(group.name for group in self.groups)

    @property
    def num_leases(self) -> int:
        """Leases that have not ended, held ones included."""
        with self._lock:
            return len(self._leases)

    def take(self, tables: BlockTables) -> CallerTables:
        """Begin a lease on the blocks of one request's tables, which may be empty as yet.

        Raises CacheError for another number of tables than groups, ids that no block has, or a block named twice.
        """
        ids = self._checked(tables)
        with self._lock:
            lease, self._next = self._next, self._next + 1
            taken = _caller_tables(ids, lease)
            self._leases[lease] = _Lease(taken)
        return taken

    def extend(self, blocks: GroupBlocks, tables: BlockTables) -> CallerTables:
        """Return a lease's blocks after its tables have grown; its holds go on.

        tables: whole ones, not what was added. They begin with what they were, but for the null block where a block is
        not needed any more (a window has passed it). Raises StaleBlocks if the lease was freed, CacheError as take()
        does or if tables begin otherwise.
        """
        ids = self._checked(tables)
        with self._lock:
            lease = self._lease(blocks)
            for name, before, now in zip(self.names, lease.tables.groups, ids, strict=True):
                _check_grown(name, before.ids, now)
            lease.tables = _caller_tables(ids, lease.tables.lease)
            return lease.tables

    def _checked(self, tables: BlockTables) -> list[Int64s]:
        try:
            given = list(tables)
        except TypeError:
            raise CacheError(f"block tables are {shown(tables)}; give a list of them, one for each group") from None
        if len(given) != len(self.groups):
            raise CacheError(f"{len(given)} block tables were given, there are {len(self.groups)} groups")
        ids = [_check_table(group, table) for group, table in zip(self.groups, given, strict=True)]
        by_pool = dict[str, list[Int64s]]()
        for group, own in zip(self.groups, ids, strict=True):
            by_pool.setdefault(f"pool {group.pool}" if group.pool else f"group {group.name}", []).append(own)
        for name, each in by_pool.items():
            _check_distinct(name, np.concatenate(each))
        return ids

    def _lease(self, blocks: GroupBlocks) -> _Lease:
        """Return the lease that blocks belong to. Raises StaleBlocks if it was freed. Under the lock."""
        lease = self._leases.get(blocks.lease) if isinstance(blocks, CallerTables) else None
        if lease is None or lease.freed:
            raise StaleBlocks("these blocks were given back to their owner, or were never taken here")
        return lease

    def check(self, blocks: GroupBlocks) -> None:
        """Raise StaleBlocks if the lease was freed."""
        with self._lock:
            self._lease(blocks)

    def hold(self, blocks: GroupBlocks) -> None:
        """Put off the end of a lease until unhold. Raises StaleBlocks if it was freed."""
        with self._lock:
            self._lease(blocks).holds += 1

    def unhold(self, blocks: GroupBlocks) -> None:
        """End one hold; the last one of a freed lease calls on_free. Raises StaleBlocks for a lease without holds."""
        self.release_hold(blocks)

    def release_hold(self, blocks: GroupBlocks) -> tuple[Int64s, ...]:
        """End one hold, see unhold. Returns no ids: the blocks are their owner's, with all that they contain."""
        with self._lock:
            lease = self._leases.get(blocks.lease) if isinstance(blocks, CallerTables) else None
            if lease is None or not lease.holds:
                raise StaleBlocks("a hold was ended on blocks that are not held")
            lease.holds -= 1
        return self._end(lease)

    def free(self, blocks: GroupBlocks) -> None:
        """End a lease; calls on_free now, or when its last hold ends. Raises StaleBlocks if it was freed before."""
        self.retire(blocks)

    def retire(self, blocks: GroupBlocks) -> tuple[Int64s, ...]:
        """End a lease, see free. Returns no ids: the blocks are their owner's, with all that they contain."""
        with self._lock:
            lease = self._lease(blocks)
            lease.freed = True
        return self._end(lease)

    def put_back(self, ids: Sequence[Int64s]) -> None:
        """Do nothing, for retire() and release_hold() return nothing. Raises StaleBlocks for any id."""
        if any(len(own) for own in ids):
            raise StaleBlocks("blocks that their caller owns are not put back here")

    def _end(self, lease: _Lease) -> tuple[Int64s, ...]:
        with self._lock:
            over = lease.freed and not lease.holds and self._leases.pop(lease.tables.lease, None) is not None
        if over and self._on_free is not None:
            self._tell(self._on_free, lease.tables)
        return tuple(np.empty(0, np.int64) for _ in self.groups)

    def _tell(self, on_free: Callable[[CallerTables], None], tables: CallerTables) -> None:
        try:
            on_free(tables)
        except BaseException as error:
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C, which is not on_free's
            self.num_failed_calls += 1
            logger.exception("on_free failed; the blocks are the caller's all the same")


def _caller_tables(ids: Sequence[Int64s], lease: int) -> CallerTables:
    return CallerTables(tuple(Blocks(own, np.zeros(len(own), np.int64)) for own in ids), lease)


def _check_table(group: CacheGroup, table: Sequence[int] | Int64s) -> Int64s:
    """Return a table as an array of its own, int64, that cannot be changed. Raises CacheError for ids of no block."""
    try:
        given = np.asarray(table)
    except (TypeError, ValueError, RuntimeError) as error:  # lists of other lengths inside; memory of another device
        raise CacheError(f"group {group.name}: a block table is a list of ids, not {shown(table)}: {error}") from None
    if given.ndim != 1 or (given.size and not np.issubdtype(given.dtype, np.integer)):
        raise CacheError(
            f"group {group.name}: a block table is a list of ids, not {given.dtype} of shape {given.shape}"
        )
    outside = given[(given < NULL_BLOCK) | (given >= group.num_blocks)]
    if len(outside):
        raise CacheError(f"group {group.name}: block id {outside[0]} is outside its pool of {group.num_blocks} blocks")
    ids: Int64s = given.astype(np.int64)
    ids.setflags(write=False)
    return ids


def _check_distinct(name: str, ids: Int64s) -> None:
    """Raise CacheError for a block that stands twice in one request's tables of one pool."""
    named, counts = np.unique(ids[ids != NULL_BLOCK], return_counts=True)
    if len(named) and int(counts.max()) > 1:
        raise CacheError(f"{name}: block {named[counts.argmax()]} stands twice in the block tables of one request")


def _check_grown(name: str, before: Int64s, now: Int64s) -> None:
    """Raise CacheError unless a table begins with what it was, but for blocks that became the null block."""
    if len(now) < len(before):
        raise CacheError(
            f"group {name}: its block table had {len(before)} blocks and now has {len(now)}; tables only grow"
        )
    same = now[: len(before)]
    changed = np.flatnonzero((same != before) & (same != NULL_BLOCK))
    if len(changed):
        at = int(changed[0])
        raise CacheError(
            f"group {name}: its block table had block {int(before[at])} at {at} and now has {int(same[at])}; give the "
            "whole table, with what was added behind what it was"
        )
