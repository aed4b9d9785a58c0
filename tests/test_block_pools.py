"""Blocks of engines: the two steps of a return, groups that share a pool, and blocks that their caller owns."""

import queue
import random
import threading

import numpy as np
import pytest

from pdtx.cache import (
    AllocatingBlockPool,
    BlockAllocator,
    BlockPool,
    CacheGroup,
    CallerBlocks,
    CallerTables,
    GroupAllocator,
    GroupBlocks,
)
from pdtx.errors import CacheError, OutOfBlocks, StaleBlocks
from pdtx.kvspec import FullAttentionSpec
from pdtx.plan.runs import Int64s

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="bfloat16")


def groups(*names: str, num_blocks: int = 9, pool: str = "") -> list[CacheGroup]:
    return [CacheGroup(name, "full", 4, num_blocks, SPEC, pool=pool) for name in names]


def lists(ids: tuple[Int64s, ...]) -> list[list[int]]:
    return [own.tolist() for own in ids]


def test_both_are_what_engines_know() -> None:
    """mypy checks what these lines say."""
    allocating: AllocatingBlockPool = GroupAllocator({"full": 4})
    pools: list[BlockPool] = [allocating, CallerBlocks(groups("full"))]
    assert [pool.names for pool in pools] == [("full",), ("full",)]


class TestTwoSteps:
    def test_retired_blocks_cannot_be_had_until_they_are_put_back(self) -> None:
        poisoned = list[tuple[int, list[int], tuple[int, ...]]]()
        pool = GroupAllocator(
            {"full": 4, "state": 3}, lambda group, ids: poisoned.append((group, ids.tolist(), pool.num_free))
        )
        blocks = pool.allocate([3, 1])
        ids = pool.retire(blocks)
        assert lists(ids) == [own.ids.tolist() for own in blocks.groups]
        assert pool.num_free == (0, 1)
        assert not poisoned, "retire() is called where nothing may take long"
        with pytest.raises(StaleBlocks):
            pool.check(blocks)
        with pytest.raises(StaleBlocks):
            pool.retire(blocks)
        scrubber = threading.Thread(target=pool.put_back, args=(ids,))
        scrubber.start()
        scrubber.join()
        assert pool.num_free == (3, 2)
        assert [(group, own, free[group]) for group, own, free in poisoned] == [
            (0, blocks.groups[0].ids.tolist(), 0),
            (1, blocks.groups[1].ids.tolist(), 1),
        ]

    def test_a_held_block_comes_back_with_its_last_hold(self) -> None:
        pool = GroupAllocator({"full": 4, "state": 3})
        blocks = pool.allocate([2, 1])
        pool.hold(blocks)
        pool.hold(blocks)
        assert lists(pool.retire(blocks)) == [[], []]
        assert lists(pool.release_hold(blocks)) == [[], []]
        ids = pool.release_hold(blocks)
        assert lists(ids) == [own.ids.tolist() for own in blocks.groups]
        assert pool.num_free == (1, 1)
        pool.put_back(ids)
        assert pool.num_free == (3, 2)

    def test_a_hold_that_ends_on_blocks_in_use_returns_nothing(self) -> None:
        pool = BlockAllocator(4)
        blocks = pool.allocate(2)
        pool.hold(blocks)
        assert pool.release_hold(blocks).tolist() == []
        pool.check(blocks)

    def test_nothing_is_put_back_twice_or_while_in_use(self) -> None:
        """It would be handed out to two requests, and poisoned under one of them."""
        poisoned = list[int]()
        pool = GroupAllocator({"full": 6}, lambda _, ids: poisoned.extend(ids.tolist()))
        blocks, used = pool.allocate([2]), pool.allocate([1])
        ids = pool.retire(blocks)
        for wrong in (used.groups[0].ids, np.append(ids[0], used.groups[0].ids), np.repeat(ids[0], 2), np.array([0])):
            with pytest.raises(StaleBlocks, match="cannot be put back"):
                pool.put_back([wrong])
        assert not poisoned
        pool.put_back(ids)
        with pytest.raises(StaleBlocks, match="cannot be put back"):
            pool.put_back(ids)
        assert poisoned == ids[0].tolist()
        assert pool.num_free == (4,)

    def test_random_requests_between_three_threads(self) -> None:
        """One thread serves requests, one ends holds, one scrubs: each block is in one place at any time."""
        work = Sharing()
        threads = [threading.Thread(target=one) for one in (work.end_holds, work.scrub, work.serve)]
        for thread in threads:
            thread.start()
        threads[2].join(30)
        work.held.put(None)
        threads[0].join(30)
        work.dirty.put(None)
        threads[1].join(30)
        assert not work.clashes
        assert work.pool.num_free == (32,)


class Sharing:
    """What three threads do with one pool. owners: the request that has each block, 0 between two."""

    def __init__(self) -> None:
        self.pool = GroupAllocator({"full": 33})
        self.owners, self.clashes = [0] * 33, list[int]()
        self.held = queue.Queue[GroupBlocks | None]()
        self.dirty = queue.Queue[tuple[Int64s, ...] | None]()

    def end_holds(self) -> None:
        while (blocks := self.held.get(timeout=10)) is not None:
            self.dirty.put(self.pool.release_hold(blocks))

    def scrub(self) -> None:
        while (ids := self.dirty.get(timeout=10)) is not None:
            for block in ids[0].tolist():
                self.owners[block] = 0
            self.pool.put_back(ids)

    def serve(self) -> None:
        chance = random.Random(2)
        for request in range(1, 2_000):
            try:
                blocks = self.pool.allocate([chance.randrange(1, 6)])
            except OutOfBlocks:
                continue
            for block in blocks.groups[0].ids.tolist():
                self.clashes.extend([block] if self.owners[block] else [])
                self.owners[block] = request
            if chance.random() < 0.5:
                self.pool.hold(blocks)
                self.held.put(blocks)
            self.dirty.put(self.pool.retire(blocks))


class TestOnePool:
    def test_a_block_is_handed_out_to_one_group_at_a_time(self) -> None:
        pool = GroupAllocator.of(groups("full", "window", pool="one") + groups("state", num_blocks=4))
        blocks = pool.allocate([3, 4, 2])
        full, window, state = (own.ids.tolist() for own in blocks.groups)
        assert len({*full, *window}) == 7
        assert len(state) == 2
        assert pool.num_free == (1, 1, 1)
        pool.free(blocks)
        assert pool.num_free == (8, 8, 3)

    def test_needs_are_added_up(self) -> None:
        pool = GroupAllocator.of(groups("full", "window", pool="one"))
        assert pool.fits([4, 4])
        assert not pool.fits([4, 5])
        with pytest.raises(OutOfBlocks, match="groups full, window: 9 blocks asked for, 8 of 8 are free"):
            pool.allocate([4, 5])
        with pytest.raises(OutOfBlocks, match="groups full, window: 9 blocks needed, its pool has 8"):
            pool.check_possible([4, 5])
        assert pool.num_free == (8, 8)

    def test_returning_blocks_are_told_by_group(self) -> None:
        returned = list[tuple[int, list[int]]]()
        pool = GroupAllocator.of(
            groups("full", "window", pool="one"), lambda group, ids: returned.append((group, ids.tolist()))
        )
        blocks = pool.allocate([2, 1])
        pool.free(blocks)
        assert returned == [(0, blocks.groups[0].ids.tolist()), (1, blocks.groups[1].ids.tolist())]

    def test_the_same_block_in_two_groups_cannot_be_freed(self) -> None:
        pool = GroupAllocator.of(groups("full", "window", pool="one"))
        own = pool.allocate([2, 0]).groups[0]
        with pytest.raises(StaleBlocks, match="named twice"):
            pool.free(GroupBlocks((own, own)))
        assert pool.num_free == (6, 6)

    def test_a_pool_has_one_size(self) -> None:
        with pytest.raises(CacheError, match="group window has 9 blocks, and the pool it shares has 8"):
            GroupAllocator({"full": 8, "window": 9}, pool_names={"full": "one", "window": "one"})


class TestCallerBlocks:
    def test_tables_are_the_callers(self) -> None:
        pool = CallerBlocks(groups("full", "window"))
        blocks = pool.take([[3, 1], np.array([0, 0, 4])])
        assert lists(tuple(own.ids for own in blocks.groups)) == [[3, 1], [0, 0, 4]]
        assert lists(blocks.tables([range(2), range(3)])) == [[3, 1], [0, 0, 4]]
        pool.check(blocks)

    def test_tables_are_copies(self) -> None:
        table = np.array([3, 1])
        blocks = CallerBlocks(groups("full")).take([table])
        table[0] = 7
        assert blocks.groups[0].ids.tolist() == [3, 1]
        with pytest.raises(ValueError, match="read-only"):
            blocks.groups[0].ids[0] = 7

    def test_free_reports_once_after_the_last_hold(self) -> None:
        freed = list[CallerTables]()
        pool = CallerBlocks(groups("full"), freed.append)
        blocks = pool.take([[3, 1]])
        pool.hold(blocks)
        pool.hold(blocks)
        pool.free(blocks)
        assert (freed, pool.num_leases) == ([], 1)
        pool.unhold(blocks)
        assert not freed
        assert lists(pool.release_hold(blocks)) == [[]], "these are not for poisoning: their owner may cache them"
        assert freed == [blocks]
        assert pool.num_leases == 0
        for call in (pool.free, pool.hold, pool.check, pool.unhold, pool.retire, pool.release_hold):
            with pytest.raises(StaleBlocks):
                call(blocks)
        assert len(freed) == 1

    def test_free_without_holds_reports_at_once(self) -> None:
        freed = list[CallerTables]()
        pool = CallerBlocks(groups("full"), freed.append)
        blocks = pool.take([[3, 1]])
        assert lists(pool.retire(blocks)) == [[]]
        pool.put_back(pool_nothing(1))
        assert freed == [blocks]

    def test_no_hold_can_begin_on_what_was_freed(self) -> None:
        pool = CallerBlocks(groups("full"))
        blocks = pool.take([[3]])
        pool.hold(blocks)
        pool.free(blocks)
        with pytest.raises(StaleBlocks):
            pool.hold(blocks)
        pool.unhold(blocks)

    def test_requests_share_the_blocks_of_a_cached_prefix(self) -> None:
        freed = list[CallerTables]()
        pool = CallerBlocks(groups("full"), freed.append)
        one, other = pool.take([[3, 1]]), pool.take([[3, 2]])
        pool.hold(one)
        pool.free(other)
        assert freed == [other]
        pool.check(one)
        pool.free(one)
        pool.unhold(one)
        assert freed == [other, one]

    def test_tables_grow_and_holds_go_on(self) -> None:
        freed = list[CallerTables]()
        pool = CallerBlocks(groups("full", "window"), freed.append)
        blocks = pool.take([[], []])
        pool.hold(blocks)
        grown = pool.extend(blocks, [[3, 1], [4, 5]])
        # The window has passed block 4: its owner has taken it back.
        last = pool.extend(blocks, [[3, 1, 2], [0, 5, 6]])
        pool.check(blocks)
        pool.free(grown)
        with pytest.raises(StaleBlocks):
            pool.extend(last, [[3, 1, 2, 7], [0, 5, 6]])
        pool.unhold(blocks)
        assert freed == [last]
        assert lists(tuple(own.ids for own in freed[0].groups)) == [[3, 1, 2], [0, 5, 6]]

    @pytest.mark.parametrize(
        ("table", "reason"),
        [
            ([3], "had 2 blocks and now has 1; tables only grow"),
            ([1, 3], "had block 3 at 0 and now has 1; give the whole table"),
            ([4], "tables only grow"),
        ],
    )
    def test_tables_that_do_not_grow(self, table: list[int], reason: str) -> None:
        pool = CallerBlocks(groups("full"))
        blocks = pool.take([[3, 1]])
        with pytest.raises(CacheError, match=f"group full: .*{reason}"):
            pool.extend(blocks, [table])

    @pytest.mark.parametrize(
        ("tables", "reason"),
        [
            ([[1], [2], [3]], "3 block tables were given, there are 2 groups"),
            ([[9], []], "group full: block id 9 is outside its pool of 9 blocks"),
            ([[-1], []], "group full: block id -1 is outside"),
            ([[1, 2, 1], []], "group full: block 1 stands twice"),
            ([[1.5], []], "group full: a block table is a list of ids, not float64 of shape"),
            ([[[1]], []], r"group full: a block table is a list of ids, not int64 of shape \(1, 1\)"),
        ],
    )
    def test_tables_that_are_none(self, tables: list[list[int]], reason: str) -> None:
        pool = CallerBlocks(groups("full", "window"))
        with pytest.raises(CacheError, match=reason):
            pool.take(tables)
        assert pool.num_leases == 0

    def test_groups_of_one_pool_do_not_name_a_block_at_once(self) -> None:
        with pytest.raises(CacheError, match="pool one: block 2 stands twice in the block tables of one request"):
            CallerBlocks(groups("full", "window", pool="one")).take([[1, 2], [0, 2]])
        CallerBlocks(groups("full", "window")).take([[1, 2], [0, 2]])

    def test_blocks_of_another_pool(self) -> None:
        pool = CallerBlocks(groups("full"))
        with pytest.raises(StaleBlocks, match="were never taken here"):
            pool.free(GroupAllocator({"full": 4}).allocate([1]))
        with pytest.raises(StaleBlocks, match="not put back here"):
            pool.put_back([np.array([1])])

    def test_a_lease_ends_once_whoever_ends_it(self) -> None:
        """Two threads end the last hold and the request at the same time, many times."""
        freed = list[CallerTables]()
        pool = CallerBlocks(groups("full"), freed.append)
        for _ in range(300):
            blocks = pool.take([[1]])
            pool.hold(blocks)
            ender = threading.Thread(target=pool.free, args=(blocks,))
            ender.start()
            pool.unhold(blocks)
            ender.join()
        assert len(freed) == 300
        assert pool.num_leases == 0


def pool_nothing(count: int) -> list[Int64s]:
    return [np.empty(0, np.int64) for _ in range(count)]
