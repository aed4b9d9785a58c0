"""Which block belongs to whom: a pool with a generation for every block."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pdtx.errors import OutOfBlocks, StaleBlocks
from pdtx.plan import NULL_BLOCK
from pdtx.plan.runs import Int64s


@dataclass(frozen=True)
class Blocks:
    """Blocks handed out together, in token order, with the generation each had then; both int64, shape (n,)."""

    ids: Int64s
    generations: Int64s

    def __len__(self) -> int:
        return len(self.ids)

    def __add__(self, other: "Blocks") -> "Blocks":
        return Blocks(np.concatenate((self.ids, other.ids)), np.concatenate((self.generations, other.generations)))


class BlockAllocator:
    """A pool of num_blocks blocks, of which block 0 is the null block. Safe to use from several threads.

    Freeing a block raises its generation, so whoever still names the old one is found out by check(). A block
    that something may still write is held (hold, unhold): it can be freed but returns to the pool only when
    the last hold has ended. on_return is called with the ids of returning blocks before they can be handed out.
    free() and unhold() are two steps each: retire() or release_hold(), then put_back(). Poisoning, which takes as long
    as the memory does, can be done between the two by another thread.
    """

    def __init__(self, num_blocks: int, on_return: Callable[[Int64s], None] | None = None) -> None:
        if num_blocks < 2:
            raise OutOfBlocks(f"a pool needs 2 or more blocks (block 0 is the null block), not {num_blocks}")
        self.num_blocks = num_blocks
        self._on_return = on_return
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._generations = np.zeros(num_blocks, np.int64)
        self._used = np.zeros(num_blocks, bool)
        self._holds = np.zeros(num_blocks, np.int64)
        self._returning = np.zeros(num_blocks, bool)  # retired and not put back yet
        self._lock = threading.Lock()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        with self._lock:
            return len(self._free)

    def free_blocks(self) -> Blocks:
        """The blocks that can be handed out now, in the order of their ids, each in its present generation."""
        with self._lock:
            ids = np.array(sorted(self._free), np.int64)
            return Blocks(ids, self._generations[ids])

    def untouched(self, blocks: Blocks) -> Int64s:
        """The ids among free_blocks() of before that were not handed out since."""
        with self._lock:
            same = ~self._used[blocks.ids] & (self._generations[blocks.ids] == blocks.generations)
        ids: Int64s = blocks.ids[same]
        return ids

    def allocate(self, count: int) -> Blocks:
        """Hand out count blocks. Raises OutOfBlocks, handing out none, if fewer are free."""
        with self._lock:
            if count > len(self._free):
                raise OutOfBlocks(f"{count} blocks asked for, {len(self._free)} of {self.num_blocks - 1} are free")
            ids = np.array([self._free.pop() for _ in range(count)], np.int64)
            self._used[ids] = True
            return Blocks(ids, self._generations[ids])

    def check(self, blocks: Blocks) -> None:
        """Raise StaleBlocks unless every block is still in use in the generation that blocks names."""
        with self._lock:
            self._check(blocks)

    def _check(self, blocks: Blocks) -> None:
        stale = np.flatnonzero(~self._used[blocks.ids] | (self._generations[blocks.ids] != blocks.generations))
        if len(stale):
            at = int(stale[0])
            block = int(blocks.ids[at])
            raise StaleBlocks(
                f"block {block} was handed out in generation {int(blocks.generations[at])} and is now in "
                f"{int(self._generations[block])}"
            )

    def free(self, blocks: Blocks) -> None:
        """Give blocks back; those that are held follow when their last hold ends.

        Raises StaleBlocks, giving back none, if one of them was given back before or is named twice.
        """
        self.put_back(self.retire(blocks))

    def retire(self, blocks: Blocks) -> Int64s:
        """Do the first half of free(): nobody can use or hold blocks any more. Return the ids to be put_back()."""
        with self._lock:
            self._check(blocks)
            if len(np.unique(blocks.ids)) < len(blocks):
                raise StaleBlocks(f"a block is named twice in one free: {blocks.ids.tolist()}")
            self._generations[blocks.ids] += 1
            self._used[blocks.ids] = False
            returning: Int64s = blocks.ids[self._holds[blocks.ids] == 0]
            self._returning[returning] = True
        return returning

    def hold(self, blocks: Blocks) -> None:
        """Keep blocks out of the pool, even when freed, until unhold. Raises StaleBlocks if they are not in use."""
        with self._lock:
            self._check(blocks)
            self._holds[blocks.ids] += 1

    def unhold(self, blocks: Blocks) -> None:
        """End one hold on each of blocks."""
        self.put_back(self.release_hold(blocks))

    def release_hold(self, blocks: Blocks) -> Int64s:
        """Do the first half of unhold(): end one hold on each of blocks. Return the ids to be put_back()."""
        with self._lock:
            self._holds[blocks.ids] -= 1
            returning: Int64s = blocks.ids[(self._holds[blocks.ids] == 0) & ~self._used[blocks.ids]]
            self._returning[returning] = True
        return returning

    def put_back(self, ids: Int64s, before: Callable[[Int64s], None] | None = None) -> None:
        """Do the second half of free() or unhold(): let blocks be handed out again, from any thread.

        ids: int64, shape (n,), as retire() or release_hold() returned them; each may be put back once.
        before: called with ids before they can be handed out, in place of on_return.
        Raises StaleBlocks, putting back none, for a block that is not on its way back.
        """
        if not len(ids):
            return
        with self._lock:
            wrong = ids[~self._returning[ids]]
            if len(wrong) or len(np.unique(ids)) < len(ids):
                raise StaleBlocks(f"blocks {ids.tolist()} cannot be put back: they were not retired, or were put back")
            self._returning[ids] = False
        before = before or self._on_return
        if before is not None:
            before(ids)
        with self._lock:
            self._free.extend(ids.tolist())
