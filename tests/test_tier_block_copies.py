"""Copies of single tier blocks: the same elements as ever, wherever the blocks are."""

import numpy as np
import pytest
import torch

from pdtx.cache import KVCaches, PagedBuffer
from pdtx.errors import PlanError
from pdtx.plan.runs import Int64s
from pdtx.testing.codes import check_codes, codes_for, fill_codes
from pdtx.tiers.block_copies import BlockCopier
from tests.engine_pair import join, latent, states
from tests.tier_scenes import full, ids

TOKENS = 32
"""Of a tier block."""


def one(buffer: PagedBuffer) -> KVCaches:
    return KVCaches.single(buffer)


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("layout", ["flash_attn_nhd", "vllm_bhlnc", "cpu_attn_lbhnc", "flashinfer_hnd"])
def test_every_element_of_scattered_blocks_is_copied_both_ways(
    native: str, tp_size: int, block_size: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDTX_NATIVE", native)
    count = TOKENS // block_size
    cache = full(3 * count + 2, layout, block_size, tp_size=tp_size)
    tier, again = full(5, "flash_attn_hnd", TOKENS), full(3 * count + 2, layout, block_size, tp_size=tp_size)
    codes = codes_for(cache, 2 * TOKENS)
    table = np.random.default_rng(count).permutation(np.arange(1, 3 * count + 2))[: 2 * count].astype(np.int64)
    fill_codes(cache, table, codes)
    down, up = BlockCopier(one(cache), one(tier)), BlockCopier(one(tier), one(again))
    for row, block in zip(table.reshape(2, -1), (4, 2), strict=True):
        down.copy_block(0, row, ids(block), TOKENS)
    assert check_codes(tier, ids(4, 2), codes).wrong == 0
    assert tier.written_blocks().nonzero()[:, 0].tolist() == [2, 4]
    there = table[::-1].copy()
    for row, block in zip(there.reshape(2, -1), (4, 2), strict=True):
        up.copy_block(0, ids(block), row, TOKENS, past_caches=True)
    assert check_codes(again, there, codes).wrong == 0
    assert sorted(again.written_blocks().nonzero()[:, 0].tolist()) == sorted(there.tolist())


def test_blocks_next_to_each_other_and_turned_round() -> None:
    """Where the planned blocks touch, the copied ones need not, and the other way round."""
    cache, tier = full(9, "flash_attn_nhd", 16), full(4, "sglang", TOKENS)
    codes = codes_for(cache, TOKENS)
    copier = BlockCopier(one(cache), one(tier))
    for row, block in ((ids(1, 2), 1), (ids(8, 7), 2), (ids(3, 8), 3)):
        cache.poison()
        fill_codes(cache, row, codes)
        copier.copy_block(0, row, ids(block), TOKENS)
        assert check_codes(tier, ids(block), codes).wrong == 0


def test_pools_of_a_single_block() -> None:
    cache, tier = full(2, "flash_attn_nhd", TOKENS), full(2, "sglang", TOKENS)
    codes = codes_for(cache, TOKENS)
    fill_codes(cache, ids(1), codes)
    BlockCopier(one(cache), one(tier)).copy_block(0, ids(1), ids(1), TOKENS)
    assert check_codes(tier, ids(1), codes).wrong == 0


@pytest.mark.parametrize("tp_size", [1, 2])
def test_all_buffers_of_the_group_and_states(tp_size: int) -> None:
    def caches() -> KVCaches:
        vectors = [latent(name, channels, tp_size=tp_size) for name, channels in (("latent", 20), ("indexer", 6))]
        return join(vectors, [states(num_blocks=6, tp_size=tp_size)])

    src, dst = caches(), caches()
    for buffer in src.buffers[:2]:
        fill_codes(buffer, ids(5), codes_for(buffer, 16))
    fill_codes(src.buffers[2], ids(4), codes_for(src.buffers[2], 1))
    copier = BlockCopier(src, dst)
    copier.copy_block(0, ids(5), ids(3), 16)
    assert not dst.buffers[2].written_blocks().any()
    copier.copy_block(1, ids(4), ids(5), 1)
    for buffer, block, positions in zip(dst.buffers, (3, 3, 5), (16, 16, 1), strict=True):
        assert check_codes(buffer, ids(block), codes_for(buffer, positions)).wrong == 0
        assert not buffer.replicas_differ(0, torch.tensor([block]), 0, positions)


@pytest.mark.parametrize("row", [ids(0, 1), ids(1, 9), ids(-1, 2), ids(3, 3)])
def test_blocks_that_cannot_be_are_refused_before_anything_is_written(row: Int64s) -> None:
    cache, tier = full(9, block_size=16), full(4, block_size=TOKENS)
    fill_codes(cache, ids(1, 2), codes_for(cache, TOKENS))
    fill_codes(tier, ids(1), codes_for(tier, TOKENS))
    empty, into = full(4, block_size=TOKENS), full(9, block_size=16)
    with pytest.raises(PlanError, match=r"each must be one of 1\.\.8, and none twice"):
        BlockCopier(one(cache), one(empty)).copy_block(0, row, ids(1), TOKENS)
    with pytest.raises(PlanError, match=r"each must be one of 1\.\.8, and none twice"):
        BlockCopier(one(tier), one(into)).copy_block(0, ids(1), row, TOKENS)
    assert not empty.written_blocks().any()
    assert not into.written_blocks().any()
