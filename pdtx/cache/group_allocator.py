"""Blocks for requests that need some in every group."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pdtx.cache.allocator import BlockAllocator, Blocks
from pdtx.errors import OutOfBlocks
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
    """A pool of blocks for each group, named in num_blocks. Safe to use from several threads.

    Everything else is as in BlockAllocator. on_free: called with a group's index and ids of blocks that return to its
    pool, before they can be handed out.
    """

    def __init__(self, num_blocks: Mapping[str, int], on_free: Callable[[int, Int64s], None] | None = None) -> None:
        self.names = tuple(num_blocks)
        self.pools = tuple(
            BlockAllocator(count, partial(on_free, index) if on_free is not None else None)
            for index, count in enumerate(num_blocks.values())
        )
        self._lock = threading.Lock()

    @property
    def num_free(self) -> tuple[int, ...]:
        """Blocks of each group that can be handed out now."""
        return tuple(pool.num_free for pool in self.pools)

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether so many blocks of each group can be handed out now."""
        return all(count <= free for count, free in zip(counts, self.num_free, strict=True))

    def check_possible(self, counts: Sequence[int]) -> None:
        """Raise OutOfBlocks, naming the group, if the pools can never hand out so many at once."""
        for name, pool, count in zip(self.names, self.pools, counts, strict=True):
            if count > pool.num_blocks - 1:
                raise OutOfBlocks(
                    f"group {name}: {count} blocks needed, its pool has {pool.num_blocks - 1}; give more --num-blocks"
                )

    def allocate(self, counts: Sequence[int]) -> GroupBlocks:
        """Hand out so many blocks of each group. Raises OutOfBlocks, handing out none, if one has fewer."""
        with self._lock:  # blocks come back at any time, but nobody else takes any between the look and the take
            for name, pool, count in zip(self.names, self.pools, counts, strict=True):
                if count > pool.num_free:
                    raise OutOfBlocks(
                        f"group {name}: {count} blocks asked for, {pool.num_free} of {pool.num_blocks - 1} are free"
                    )
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
        """Do the first half of free(), see BlockAllocator.retire; return for each group the ids to be put_back()."""
        with self._lock:  # who holds them meanwhile gets hold of all or none
            self.check(blocks)
            return tuple(pool.retire(own) for pool, own in zip(self.pools, blocks.groups, strict=True))

    def put_back(self, ids: Sequence[Int64s]) -> None:
        """Do the second half of free(): let blocks of each group that were retired be handed out again."""
        for pool, own in zip(self.pools, ids, strict=True):
            pool.put_back(own)

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
        """Do the first half of unhold(); return for each group the ids to be put_back()."""
        return tuple(pool.release_hold(own) for pool, own in zip(self.pools, blocks.groups, strict=True))
