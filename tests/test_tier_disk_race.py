"""Lookup, then eviction, then load: what is pinned stays on disk, whatever other threads store meanwhile."""

import threading
from pathlib import Path

import numpy as np

from pdtx.tiers import Side
from pdtx.tiers.disk import DiskTier
from tests.engine_pair import wait_until
from tests.tier_disks import WAIT_S, cache_poison, check, every, keys_of, open_disk, plain, store, tables_of

BLOCKS, REQUESTS, ROOM = 2, 6, 5
FILE_BYTES = 64 * 2 * 2 * 2 * 8 * 2 + 4096


def drive_out(tier: DiskTier, stop: threading.Event, number: int, stored: list[int]) -> None:
    """Store one request after another until told to stop. stored: blocks of each thread, of which this is a number."""
    cache, chance = plain(), np.random.default_rng(number)
    while not stop.is_set():
        stored[number] += store(tier, cache, BLOCKS, int(chance.integers(REQUESTS))).num_blocks


def test_lookup_evict_load(tmp_path: Path) -> None:
    tier, stop, stored = open_disk(tmp_path, plain(), nbytes=ROOM * FILE_BYTES), threading.Event(), [0, 0]
    threads = [threading.Thread(target=drive_out, args=(tier, stop, number, stored)) for number in range(2)]
    for thread in threads:
        thread.start()
    into, chance, loaded = plain("flashinfer_hnd", 32), np.random.default_rng(9), 0
    try:
        wait_until(lambda: sum(stored) >= ROOM, "the tier is full", WAIT_S)
        for _ in range(150):
            seed = int(chance.integers(REQUESTS))
            cache_poison(into)
            tables, (asked,) = tables_of(into, BLOCKS, 3), every(into, BLOCKS)
            with tier.lookup(keys_of(BLOCKS, seed), [asked]) as lease:
                found, before = asked[lease.found[0]], sum(stored)
                if len(found):
                    wait_until(lambda before=before: sum(stored) >= before + 2, "others come between", WAIT_S)  # type: ignore[misc]
                moved = lease.load(Side(into, tables), [found]).result(WAIT_S)
            assert moved.failed == ()
            assert moved.places[0].tolist() == found.tolist()
            check(into, tables, BLOCKS, moved.places, seed=seed)
            loaded += moved.num_blocks
    finally:
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
        tier.close()
    (group,) = tier.usage().groups
    assert loaded > 50
    assert group.evicted.blocks > 100
    assert (group.failed.blocks, group.pinned.blocks) == (0, 0)
    assert len(list(tmp_path.rglob("*.kv"))) == group.used.blocks <= ROOM
