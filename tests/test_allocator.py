import random
import threading
from collections.abc import Callable

import pytest

from pdtx.cache import BlockAllocator, Blocks, GroupAllocator
from pdtx.errors import OutOfBlocks, StaleBlocks
from pdtx.plan.runs import Int64s


def test_hands_out_every_block_but_the_null_block_once() -> None:
    pool = BlockAllocator(9)
    assert pool.num_free == 8
    blocks = pool.allocate(8)
    assert sorted(blocks.ids.tolist()) == list(range(1, 9))
    assert len(blocks) == 8
    assert pool.num_free == 0
    pool.check(blocks)
    assert len(pool.allocate(0)) == 0


def test_a_pool_of_the_null_block_alone_is_refused() -> None:
    with pytest.raises(OutOfBlocks, match="2 or more blocks"):
        BlockAllocator(1)


def test_out_of_blocks_hands_out_none() -> None:
    pool = BlockAllocator(5)
    pool.allocate(1)
    with pytest.raises(OutOfBlocks, match="4 blocks asked for, 3 of 4 are free"):
        pool.allocate(4)
    assert pool.num_free == 3
    assert len(pool.allocate(3)) == 3


def test_freeing_raises_the_generation() -> None:
    pool = BlockAllocator(2)
    first = pool.allocate(1)
    pool.free(first)
    second = pool.allocate(1)
    assert first.ids.tolist() == second.ids.tolist() == [1]
    assert second.generations.tolist() == [first.generations[0] + 1]
    pool.check(second)


def test_stale_blocks_are_found_out() -> None:
    pool = BlockAllocator(3)
    old = pool.allocate(2)
    pool.free(old)
    with pytest.raises(StaleBlocks, match=r"block \d was handed out in generation 0 and is now in 1"):
        pool.check(old)
    pool.allocate(2)  # the same blocks, now somebody else's
    for use in (pool.check, pool.free, pool.hold):
        with pytest.raises(StaleBlocks):
            use(old)
    assert pool.num_free == 0


def test_double_free_gives_back_none() -> None:
    pool = BlockAllocator(5)
    kept, freed = pool.allocate(2), pool.allocate(2)
    pool.free(freed)
    with pytest.raises(StaleBlocks):
        pool.free(kept + freed)
    pool.check(kept)
    assert pool.num_free == 2
    with pytest.raises(StaleBlocks):
        pool.free(freed)
    assert pool.num_free == 2


def test_one_block_named_twice_in_one_free_comes_back_once() -> None:
    """Doubled ids in one call must not put the block into the pool twice: two requests would then share it."""
    pool = BlockAllocator(4)
    blocks = pool.allocate(1)
    with pytest.raises(StaleBlocks):
        pool.free(blocks + blocks)
    pool.free(blocks)
    assert sorted(pool.allocate(3).ids.tolist()) == [1, 2, 3]


def test_untouched_are_those_not_handed_out_since() -> None:
    pool = BlockAllocator(6)
    before = pool.free_blocks()
    assert before.ids.tolist() == [1, 2, 3, 4, 5]
    kept, freed = pool.allocate(2), pool.allocate(1)
    pool.free(freed)
    busy = {*kept.ids.tolist(), *freed.ids.tolist()}
    assert set(pool.untouched(before).tolist()) == {1, 2, 3, 4, 5} - busy
    assert set(pool.untouched(pool.free_blocks()).tolist()) == {1, 2, 3, 4, 5} - set(kept.ids.tolist())


class TestHolds:
    def test_a_held_block_returns_only_when_its_last_hold_ends(self) -> None:
        pool = BlockAllocator(3)
        blocks = pool.allocate(2)
        pool.hold(blocks)
        pool.hold(blocks)
        pool.free(blocks)
        assert pool.num_free == 0
        with pytest.raises(StaleBlocks):
            pool.check(blocks)
        pool.unhold(blocks)
        assert pool.num_free == 0
        with pytest.raises(OutOfBlocks):
            pool.allocate(1)
        pool.unhold(blocks)
        assert pool.num_free == 2

    def test_ending_a_hold_on_a_block_in_use_frees_nothing(self) -> None:
        pool = BlockAllocator(3)
        blocks = pool.allocate(2)
        pool.hold(blocks)
        pool.unhold(blocks)
        assert pool.num_free == 0
        pool.check(blocks)
        pool.free(blocks)
        assert pool.num_free == 2

    def test_only_the_held_ones_wait(self) -> None:
        pool = BlockAllocator(4)
        held, free = pool.allocate(1), pool.allocate(2)
        pool.hold(held)
        pool.free(held + free)
        assert pool.num_free == 2
        pool.unhold(held)
        assert pool.num_free == 3

    def test_freed_blocks_cannot_be_held(self) -> None:
        pool = BlockAllocator(3)
        blocks = pool.allocate(1)
        pool.free(blocks)
        with pytest.raises(StaleBlocks):
            pool.hold(blocks)


def test_on_return_comes_before_the_block_can_be_had_again() -> None:
    """That is where a block is poisoned: after it, nobody else's bytes may be overwritten."""
    returned, free_then = list[int](), list[int]()

    def on_return(ids: Int64s) -> None:
        returned.extend(ids.tolist())
        free_then.append(pool.num_free)

    pool = BlockAllocator(4, on_return)
    blocks = pool.allocate(3)
    pool.free(blocks)
    assert returned == blocks.ids.tolist()
    assert free_then == [0]
    held = pool.allocate(1)
    pool.hold(held)
    pool.free(held)
    assert len(returned) == 3
    pool.unhold(held)
    assert returned[3:] == held.ids.tolist()


def test_a_hold_of_several_groups_takes_all_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who ends a request frees its blocks while others begin to hold them; a hold that fails must leave nothing."""
    allocator = GroupAllocator({"full": 4, "window": 4})
    blocks = allocator.allocate([2, 2])
    ender = threading.Thread(target=allocator.free, args=(blocks,))
    second = allocator.pools[1]
    hold = second.hold

    def hold_late(own: Blocks) -> None:
        ender.start()
        ender.join(0.3)  # as long as it has to wait for this
        hold(own)

    monkeypatch.setattr(second, "hold", hold_late)
    try:
        allocator.hold(blocks)
    except StaleBlocks:
        pass
    else:
        allocator.unhold(blocks)
    ender.join()
    assert allocator.num_free == (3, 3)


class Model:
    """What a pool must do, written with sets: the oracle of the random operations."""

    def __init__(self, pool: BlockAllocator) -> None:
        self.pool = pool
        self.live, self.dead = list[Blocks](), list[Blocks]()
        self.holds = list[Blocks]()

    def free_ids(self) -> set[int]:
        """Blocks neither in use nor held."""
        busy = {i for blocks in (*self.live, *self.holds) for i in blocks.ids.tolist()}
        return set(range(1, self.pool.num_blocks)) - busy

    def allocate(self, chance: random.Random) -> None:
        count, free = chance.randrange(6), self.free_ids()
        if count > len(free):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert set(blocks.ids.tolist()) <= free
        assert len(set(blocks.ids.tolist())) == count
        if count:
            self.live.append(blocks)

    def free(self, chance: random.Random) -> None:
        if self.live:
            blocks = self.live.pop(chance.randrange(len(self.live)))
            self.pool.free(blocks)
            self.dead.append(blocks)

    def hold(self, chance: random.Random) -> None:
        if self.live:
            blocks = chance.choice(self.live)
            self.pool.hold(blocks)
            self.holds.append(blocks)

    def unhold(self, chance: random.Random) -> None:
        if self.holds:
            self.pool.unhold(self.holds.pop(chance.randrange(len(self.holds))))

    def misuse(self, chance: random.Random) -> None:
        if self.dead:
            use: Callable[[Blocks], None] = chance.choice([self.pool.check, self.pool.free, self.pool.hold])
            with pytest.raises(StaleBlocks):
                use(chance.choice(self.dead))


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_against_a_model(seed: int) -> None:
    """2,000 operations; after each, free blocks and live requests are what the model says."""
    chance, model = random.Random(seed), Model(BlockAllocator(17))
    for _ in range(2_000):
        operation = chance.choice([model.allocate, model.allocate, model.free, model.hold, model.unhold, model.misuse])
        operation(chance)
        assert set(model.pool.free_blocks().ids.tolist()) == model.free_ids()
        assert model.pool.num_free == len(model.free_ids())
        for blocks in model.live:
            model.pool.check(blocks)


def test_threads_never_share_a_block() -> None:
    pool, owners, clashes = BlockAllocator(33), [0] * 33, list[int]()

    def work(me: int) -> None:
        chance = random.Random(me)
        for _ in range(300):
            try:
                blocks = pool.allocate(chance.randrange(1, 9))
            except OutOfBlocks:
                continue
            for block in blocks.ids.tolist():
                clashes.extend([block] if owners[block] else [])
                owners[block] = me
            held = chance.random() < 0.5
            if held:
                pool.hold(blocks)
            pool.check(blocks)
            for block in blocks.ids.tolist():
                clashes.extend([block] if owners[block] != me else [])
                owners[block] = 0
            pool.free(blocks)
            if held:
                pool.unhold(blocks)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    assert pool.num_free == 32
