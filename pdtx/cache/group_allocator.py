"""Blocks for requests that need some in every group."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pdtx.cache.allocator import BlockAllocator, Blocks
from pdtx.cache.groups import CacheGroup
from pdtx.errors import CacheError, OutOfBlocks, StaleBlocks
from pdtx.plan import NULL_BLOCK
from pdtx.plan.runs import Int64s


@dataclass(frozen=True)
class GroupBlocks:
    """Blocks handed out together: those of each group, in the groups' order."""

    groups: tuple[Blocks, ...]

    def __len__(self) -> int:
        """Blocks of all groups."""
        return sum(len(blocks) for blocks in self.groups)

    def tables(self, places: Sequence[range]) -> tuple[Int64s, ...]:
        """Return a block table for each group: its blocks at places, which are as many; the null block before them."""
        tables = tuple(np.full(place.stop, NULL_BLOCK, np.int64) for place in places)
        for table, place, taken in zip(tables, places, self.groups, strict=True):
            table[place.start :] = taken.ids
        return tables


class GroupAllocator:
    """Pools of blocks for the groups named in num_blocks. Safe to use from several threads. An AllocatingBlockPool.

    Everything else is as in BlockAllocator. on_free: called with a group's index and ids of blocks that return to its
    pool, before they can be handed out. pool_names: the pool of each group, where groups share one (its block ids are
    then handed out to one group at a time); a group that is not in it has a pool of its own.
    pools: the pool of each group, in the order of names. Raises CacheError if groups of one pool differ in num_blocks.
    """

    def __init__(
        self,
        num_blocks: Mapping[str, int],
        on_free: Callable[[int, Int64s], None] | None = None,
        pool_names: Mapping[str, str] | None = None,
    ) -> None:
        self.names, self._on_free = tuple(num_blocks), on_free
        shared, own = dict[str, BlockAllocator](), list[BlockAllocator]()
        for name, count in num_blocks.items():
            pool = shared.setdefault((pool_names or {}).get(name) or f"group {name}", BlockAllocator(count))
            if pool.num_blocks != count:
                raise CacheError(f"group {name} has {count} blocks, and the pool it shares has {pool.num_blocks}")
            own.append(pool)
        self.pools = tuple(own)
        self._lock = threading.Lock()

    @classmethod
    def of(cls, groups: Sequence[CacheGroup], on_free: Callable[[int, Int64s], None] | None = None) -> "GroupAllocator":
        """Return pools for a cache's groups, one for all groups that name the same."""
        counts = {group.name: group.num_blocks for group in groups}
        return cls(counts, on_free, {group.name: group.pool for group in groups if group.pool})

    @property
    def num_free(self) -> tuple[int, ...]:
        """Blocks of each group that can be handed out now; groups of one pool count the same blocks."""
        return tuple(pool.num_free for pool in self.pools)

    def _needs(self, counts: Sequence[int]) -> list[tuple[BlockAllocator, int, str]]:
        """Each pool once, with what its groups need together, and what to call them in messages."""
        needs = dict[int, tuple[BlockAllocator, int, list[str]]]()
        for name, pool, count in zip(self.names, self.pools, counts, strict=True):
            _, before, names = needs.get(id(pool), (pool, 0, []))
            needs[id(pool)] = pool, before + count, [*names, name]
        return [
            (pool, count, f"group{'s' if len(names) > 1 else ''} {', '.join(names)}")
            for pool, count, names in needs.values()
        ]

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether so many blocks of each group can be handed out now."""
        return all(count <= pool.num_free for pool, count, _ in self._needs(counts))

    def check_possible(self, counts: Sequence[int]) -> None:
        """Raise OutOfBlocks, naming the group, if the pools can never hand out so many at once."""
        for pool, count, names in self._needs(counts):
            if count > pool.num_blocks - 1:
                raise OutOfBlocks(
                    f"{names}: {count} blocks needed, its pool has {pool.num_blocks - 1}; give more --num-blocks"
                )

    def allocate(self, counts: Sequence[int]) -> GroupBlocks:
        """Hand out so many blocks of each group. Raises OutOfBlocks, handing out none, if one has fewer."""
        with self._lock:  # blocks come back at any time, but nobody else takes any between the look and the take
            for pool, count, names in self._needs(counts):
                if count > (free := pool.num_free):
                    raise OutOfBlocks(f"{names}: {count} blocks asked for, {free} of {pool.num_blocks - 1} are free")
            return GroupBlocks(tuple(pool.allocate(count) for pool, count in zip(self.pools, counts, strict=True)))

    def free_blocks(self) -> GroupBlocks:
        """The blocks that can be handed out now, see BlockAllocator.free_blocks."""
        return GroupBlocks(tuple(pool.free_blocks() for pool in self.pools))

    def untouched(self, blocks: GroupBlocks) -> tuple[Int64s, ...]:
        """For each group the ids among free_blocks() of before that were not handed out since."""
        return tuple(pool.untouched(own) for pool, own in zip(self.pools, blocks.groups, strict=True))

    def check(self, blocks: GroupBlocks) -> None:
        """Raise StaleBlocks unless every block is still in use in the generation that blocks names."""
        for pool, own in zip(self.pools, blocks.groups, strict=True):
            pool.check(own)

    def free(self, blocks: GroupBlocks) -> None:
        """Give blocks back, see BlockAllocator.free. Raises StaleBlocks before any is given back."""
        self.put_back(self.retire(blocks))

    def retire(self, blocks: GroupBlocks) -> tuple[Int64s, ...]:
        """Do the first half of free(): nothing can use or hold blocks any more.

        Returns, for each group, the ids to be put_back(): int64, shape (n,). Raises StaleBlocks, retiring none.
        """
        with self._lock:  # who holds them meanwhile gets hold of all or none
            self.check(blocks)
            self._check_distinct(blocks)
            return tuple(pool.retire(own) for pool, own in zip(self.pools, blocks.groups, strict=True))

    def _check_distinct(self, blocks: GroupBlocks) -> None:
        """Raise StaleBlocks for a block that is named twice, by one group or by two of one pool."""
        by_pool = dict[int, list[Int64s]]()
        for pool, own in zip(self.pools, blocks.groups, strict=True):
            by_pool.setdefault(id(pool), []).append(own.ids)
        for ids in map(np.concatenate, by_pool.values()):
            if len(np.unique(ids)) < len(ids):
                raise StaleBlocks(f"a block is named twice in one free: {ids.tolist()}")

    def put_back(self, ids: Sequence[Int64s]) -> None:
        """Do the second half of free() or unhold(): let blocks of each group be handed out again, from any thread.

        ids: as retire() or release_hold() returned them. on_free, where there is one, is called here.
        Raises StaleBlocks for a block that is not on its way back.
        """
        for group, (pool, own) in enumerate(zip(self.pools, ids, strict=True)):
            pool.put_back(own, partial(self._on_free, group) if self._on_free is not None else None)

    def hold(self, blocks: GroupBlocks) -> None:
        """Keep blocks out of the pools until unhold. Raises StaleBlocks if they are not in use."""
        with self._lock:
            self.check(blocks)
            for pool, own in zip(self.pools, blocks.groups, strict=True):
                pool.hold(own)

    def unhold(self, blocks: GroupBlocks) -> None:
        """End one hold on each of blocks."""
        self.put_back(self.release_hold(blocks))

    def release_hold(self, blocks: GroupBlocks) -> tuple[Int64s, ...]:
        """Do the first half of unhold(). Returns, for each group, the ids to be put_back(): int64, shape (n,)."""
        return tuple(pool.release_hold(own) for pool, own in zip(self.pools, blocks.groups, strict=True))
