"""All tiers in a row, between two nodes, layouts and block sizes: every coordinate is where it was."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pdtx.cache import KVCaches
from pdtx.engine import PeerTier, TierServer, describe_cache
from pdtx.tiers import Side
from pdtx.tiers.cpu import CpuTier
from pdtx.tiers.geometry import tier_caches
from pdtx.tiers.stack import TierStack
from pdtx.transports import make_mover
from tests.engine_pair import OPEN
from tests.tier_disks import TOKENS, WAIT_S, every, hybrid, keys_of, load, open_disk, store, tables_of
from tests.tier_scenes import FENCE, KEPT

BLOCKS = 3


def memory_of(cache: KVCaches) -> CpuTier:
    return CpuTier(tier_caches(cache, block_tokens=TOKENS, nbytes=4 << 20, tokens_per_state=TOKENS), like=cache)


def describe(cache: KVCaches) -> Any:  # noqa: ANN401 - a description
    return describe_cache(cache, model="a model", fingerprint="same")


@pytest.mark.parametrize("mover", ["tcp", "shm"])
def test_cache_memory_peer_disk_memory_cache(mover: str, tmp_path: Path) -> None:
    """One node's cache, its memory, another node's cache and disk, that one's memory after a restart, and its cache."""
    first, second = hybrid("flash_attn_nhd", 16, "mamba_sd"), hybrid("flashinfer_hnd", 32, "mamba_ds")
    with ExitStack() as stack:
        memory = memory_of(first)
        stack.callback(memory.close)
        assert store(memory, first, BLOCKS).num_blocks == sum(map(len, every(first, BLOCKS)))

        server = TierServer(memory, describe(memory.cache), make_mover(mover))
        stack.callback(server.close)
        address = server.listen("127.0.0.1:0", security=OPEN)
        peer = PeerTier(address, second, describe(second), make_mover(mover), block_tokens=TOKENS, security=OPEN)
        stack.callback(peer.close)
        moved, whole = load(peer, second, BLOCKS)
        assert whole
        assert not moved.failed

        disk = open_disk(tmp_path, second)
        stack.callback(disk.close)
        tables = tables_of(second, BLOCKS, 7)  # where load() has put it
        kept = disk.store(keys_of(BLOCKS), Side(second, tables, hold=KEPT), every(second, BLOCKS), FENCE).result(WAIT_S)
        assert not kept.failed

    third = hybrid("flash_attn_hnd", 16, "mamba_sd")
    again = TierStack([memory_of(third), open_disk(tmp_path, third)])
    try:
        sources = list[set[str]]()
        for table_seed in (1, 2):  # from disk, and then from the memory that it was kept in on the way
            moved, whole = load(again, third, BLOCKS, table_seed=table_seed)
            assert whole
            sources.append(set(moved.sources))
            assert again.drain(time.monotonic() + WAIT_S)
        assert sources == [{"disk"}, {"cpu"}]
    finally:
        again.close()
