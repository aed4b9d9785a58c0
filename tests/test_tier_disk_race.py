"""Lookup, then eviction, then load: what is pinned stays on disk, whatever other threads store meanwhile."""

import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from pdtx.cache import KVCaches
from pdtx.tiers import Side
from pdtx.tiers.block_job import Block, Failures
from pdtx.tiers.disk import DiskTier
from tests.engine_pair import wait_until
from tests.tier_disks import WAIT_S, cache_poison, check, every, keys_of, load, open_disk, plain, store, tables_of

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


def test_a_block_found_bad_twice_does_not_take_the_file_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests have it; the first deletes it, somebody stores it anew, and the second has yet to act."""
    cache, into = plain(), plain()
    tables, places = tables_of(into, 1), every(into, 1)
    with closing(open_disk(tmp_path, cache)) as tier:
        store(tier, cache, 1)
        first, second = tier.lookup(keys_of(1), places), tier.lookup(keys_of(1), places)
        (path,) = tmp_path.rglob("*.kv")
        path.write_bytes(b"not what it was")
        assert len(first.load(Side(into, tables), places).result(WAIT_S).failed) == 1
        flow = tier._flows[1]
        read = flow.load

        def overtaken(cache_: KVCaches, group: int, blocks: Sequence[Block]) -> Failures:
            failed = read(cache_, group, blocks)
            store(tier, cache, 1)
            return failed

        monkeypatch.setattr(flow, "load", overtaken)
        assert len(second.load(Side(into, tables), places).result(WAIT_S).failed) == 1
        monkeypatch.undo()
        first.release()
        second.release()
        assert load(tier, into, 1)[1]
