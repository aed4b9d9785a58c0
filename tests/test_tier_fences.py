"""What a store needs: the fence of what writes its blocks, and a hold that keeps them until they are copied."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pdtx.cache import GroupAllocator, GroupBlocks, KVCaches
from pdtx.errors import OutOfBlocks, StaleBlocks, TierError
from pdtx.tiers import Hold, PrefixKeys, Side, Tier, shelved, unfenced
from pdtx.tiers.disk import DiskTier
from pdtx.tiers.prefix import PrefixCache, Request
from pdtx.tiers.stack import TierStack
from tests.engine_pair import wait_until
from tests.tier_scenes import BLOCK, FENCE, FINGERPRINT, SECONDS, full, ids, one_block_prompts, tier_of

PLACES = (np.arange(3),)
KEYS: PrefixKeys = one_block_prompts(8)


class Pool:
    """A cache of 4 blocks in the hands of an allocator, and what is written to it."""

    def __init__(self) -> None:
        self.buffer = full(5)
        self.cache = KVCaches.single(self.buffer)
        self.allocator = GroupAllocator.of(self.cache.groups)

    def request(self, count: int = 3) -> tuple[GroupBlocks, Side, torch.Tensor]:
        """Blocks with random contents; the contents are of layer 0 and 1 alike."""
        blocks = self.allocator.allocate([count])
        table = blocks.groups[0].ids
        return blocks, Side(self.cache, (table,), hold=Hold(blocks, self.allocator)), self.write(blocks)

    def write(self, blocks: GroupBlocks) -> torch.Tensor:
        table = torch.as_tensor(blocks.groups[0].ids)
        rows = torch.randint(256, self.buffer.rows_shape(len(table) * BLOCK), dtype=torch.uint8)
        for layer in range(self.buffer.num_layers):
            self.buffer.write_canonical(layer, table, 0, rows)
        return rows

    def loaded(self, tier: Tier, places: tuple[np.ndarray, ...] = PLACES) -> torch.Tensor:
        into = full(9, "flashinfer_hnd")
        table = np.arange(1, 4, dtype=np.int64)
        with tier.lookup(KEYS, places) as lease:
            assert lease.found[0].all()
            assert not lease.load(Side(KVCaches.single(into), (table,)), places).result(SECONDS).failed
        return into.canonical(1, torch.as_tensor(table), 0, 3 * BLOCK)

    def num_free(self) -> int:
        return self.allocator.num_free[0]


def cpu(cache: KVCaches, _: Path) -> Tier:
    return tier_of(cache, 6)


def disk(cache: KVCaches, folder: Path) -> Tier:
    return DiskTier(folder, like=cache, block_tokens=BLOCK, nbytes=1 << 20, fingerprint=FINGERPRINT)


def stack(cache: KVCaches, folder: Path) -> Tier:
    return TierStack([cpu(cache, folder), disk(cache, folder)])


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture(params=[cpu, disk, stack])
def tier(request: pytest.FixtureRequest, pool: Pool, tmp_path: Path) -> Iterator[Tier]:
    """Each kind of tier, of the pool's cache."""
    tier = request.param(pool.cache, tmp_path)
    yield tier
    tier.close()


only_cpu = pytest.mark.parametrize("tier", [cpu], indirect=True)


def stored(tier: Tier) -> int:
    return sum(group.stored.blocks for group in tier.usage().groups)


def test_a_store_without_a_fence_is_an_error_and_copies_nothing(pool: Pool, tier: Tier) -> None:
    blocks, side, _ = pool.request()
    with pytest.raises(TierError, match="without a fence copies nothing"):
        tier.store(KEYS, side, PLACES, unfenced)
    with pytest.raises(TypeError, match="fence"):
        tier.store(KEYS, side, PLACES)  # type: ignore[call-arg]
    late = tier.store(KEYS, side, PLACES, lambda: unfenced())
    with pytest.raises(TierError, match="without a fence copies nothing"):
        late.result(SECONDS)
    assert stored(tier) == 0
    assert not tier.lookup(KEYS, PLACES).found[0].any()
    pool.allocator.free(blocks)
    assert pool.num_free() == 4


@only_cpu
def test_a_prefix_cache_keeps_nothing_without_a_fence(pool: Pool, tier: Tier) -> None:
    blocks, side, _ = pool.request()
    prefix = PrefixCache(pool.cache, tier, FINGERPRINT)
    request = Request(KEYS, side.tables, blocks, pool.allocator)
    with pytest.raises(TierError, match="without a fence"):
        prefix.keep(request, [0], 3 * BLOCK, unfenced)
    assert stored(tier) == 0


def test_a_store_without_a_hold_on_its_blocks_is_an_error(pool: Pool, tier: Tier) -> None:
    _, side, _ = pool.request()
    with pytest.raises(TierError, match="without a hold on its blocks copies nothing"):
        tier.store(KEYS, Side(pool.cache, side.tables), PLACES, FENCE)
    assert stored(tier) == 0


def test_blocks_that_are_not_held_cannot_be_stored_under_a_hold_on_others(pool: Pool, tier: Tier) -> None:
    blocks, side, _ = pool.request()
    (other,) = pool.allocator.allocate([1]).groups[0].ids
    table = side.tables[0].copy()
    table[1] = other
    with pytest.raises(TierError, match=f"block {other} of the table is none of those that are held"):
        tier.store(KEYS, Side(pool.cache, (table,), hold=Hold(blocks, pool.allocator)), PLACES, FENCE)
    assert stored(tier) == 0


def test_blocks_that_were_freed_are_not_stored(pool: Pool, tier: Tier) -> None:
    blocks, side, _ = pool.request()
    pool.allocator.free(blocks)
    with pytest.raises(StaleBlocks):
        tier.store(KEYS, side, PLACES, FENCE)
    pool.request()  # the same blocks again, with other contents
    with pytest.raises(StaleBlocks):
        tier.store(KEYS, side, PLACES, FENCE)
    assert stored(tier) == 0


def reuse_during_a_store(pool: Pool, tier: Tier) -> None:
    """The request ends while its store waits, and another one asks for blocks at once."""
    gate = threading.Event()
    blocks, side, rows = pool.request()
    storing = tier.store(KEYS, side, PLACES, lambda: (gate.wait(SECONDS), None)[1])
    behind = tier.store(one_block_prompts(8, first=50), side, PLACES, FENCE)  # and one that is only queued
    pool.allocator.free(blocks)
    try:
        for count in (3, 2, 1):
            try:
                pool.request(count)
            except OutOfBlocks:
                continue
    finally:
        gate.set()
    assert storing.result(SECONDS).num_blocks == 3
    assert behind.result(SECONDS).num_blocks == 3
    assert torch.equal(pool.loaded(tier), rows)
    # The other one has the fourth; of the three none was left out or given twice.
    wait_until(lambda: pool.num_free() == 3, "the blocks back")


def test_blocks_of_a_store_under_way_are_not_reused_whoever_calls(pool: Pool, tier: Tier) -> None:
    reuse_during_a_store(pool, tier)


def test_tooth_a_store_that_holds_nothing_copies_anothers_bytes(
    pool: Pool, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelved, "take_hold", lambda *_: lambda: None)
    with pytest.raises(AssertionError):
        reuse_during_a_store(pool, tier)


def test_a_store_that_fails_is_refused_or_never_begins_gives_its_blocks_back(pool: Pool) -> None:
    gate, begun = threading.Event(), threading.Event()
    _, side, _ = pool.request()

    def fence() -> None:
        begun.set()
        assert gate.wait(SECONDS)
        raise OSError("the device is gone")

    tier = tier_of(pool.cache, 6, most_jobs=1)
    first = tier.store(KEYS, side, PLACES, fence)
    assert begun.wait(SECONDS)
    second = tier.store(KEYS, side, PLACES, FENCE)
    with pytest.raises(TierError, match="waiting"):
        tier.store(KEYS, side, PLACES, FENCE)
    assert second.cancel()
    assert isinstance(side.hold, Hold)
    pool.allocator.free(side.hold.blocks)
    assert pool.num_free() == 1
    gate.set()
    with pytest.raises(OSError, match="the device is gone"):
        first.result(SECONDS)
    wait_until(lambda: pool.num_free() == 4, "the blocks back")
    tier.close()


@only_cpu
def test_the_null_block_needs_no_hold(pool: Pool, tier: Tier) -> None:
    blocks, side, _ = pool.request()
    table = np.concatenate([ids(0), side.tables[0]])
    moved = tier.store(
        KEYS, Side(pool.cache, (table,), hold=Hold(blocks, pool.allocator)), (np.arange(4),), FENCE
    ).result(SECONDS)
    assert (moved.num_blocks, len(moved.failed)) == (3, 1)
