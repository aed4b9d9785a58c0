"""Copies between caches of one host, and the tables they are made from."""

import numpy as np
import pytest
import torch

from pdtx.cache import KVCaches, PagedBuffer
from pdtx.errors import PlanError, TierError
from pdtx.kvspec import FullAttentionSpec, SlidingWindowSpec
from pdtx.plan.runs import Int64s
from pdtx.testing.codes import check_codes, codes_for, fill_codes
from pdtx.tiers import Side
from pdtx.tiers.copies import Copier, compact
from tests.engine_pair import attention, join, latent, states
from tests.tier_scenes import full, ids


def one(buffer: PagedBuffer) -> KVCaches:
    return KVCaches.single(buffer)


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("layout", ["flash_attn_nhd", "vllm_bhlnc", "cpu_attn_lbhnc"])
def test_with_and_without_the_library_every_element_is_copied(
    native: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDTX_NATIVE", native)
    src, dst = full(12, "flashinfer_hnd"), full(12, layout, 32)
    codes = codes_for(src, 96)
    fill_codes(src, ids(3, 9, 1, 7, 5, 11), codes)
    nbytes, _ = Copier(one(src), one(dst)).copy(0, ids(3, 9, 1, 7, 5, 11), ids(8, 2, 4), range(96))
    assert check_codes(dst, ids(8, 2, 4), codes).wrong == 0
    assert dst.written_blocks().nonzero()[:, 0].tolist() == [2, 4, 8]
    assert nbytes == 96 * 2 * 2 * 2 * 4 * 2


def test_all_blocks_of_a_buffer_are_one_plan() -> None:
    src, dst = full(40), full(40)
    copier = Copier(one(src), one(dst))
    run = np.arange(1, 31)
    _, num_runs = copier.copy(0, run, run, range(480))
    assert copier._plans.hits + copier._plans.misses == 1
    assert num_runs == 4, "K and V of each layer, of which all blocks are one run"


def test_a_group_takes_all_its_buffers_and_no_other_groups() -> None:
    def caches() -> KVCaches:
        window = attention(SlidingWindowSpec, "window", sliding_window=24)
        return join([latent("latent", 20), latent("indexer", 6)], [window])

    src, dst = caches(), caches()
    for buffer in src.buffers:
        fill_codes(buffer, ids(1, 2), codes_for(buffer, 32))
    Copier(src, dst).copy(0, ids(1, 2), ids(5, 4), range(32))
    for buffer in dst.buffers[:2]:
        assert check_codes(buffer, ids(5, 4), codes_for(buffer, 32)).wrong == 0
    assert not dst.buffers[2].written_blocks().any()


def test_the_null_block_is_refused_before_anything_is_written() -> None:
    src, dst = full(6), full(6)
    fill_codes(src, ids(1, 2), codes_for(src, 32))
    for tables in ((ids(1, 0), ids(1, 2)), (ids(1, 2), ids(0, 1))):
        with pytest.raises(PlanError, match="null block"):
            Copier(one(src), one(dst)).copy(0, *tables, range(32))
    assert not dst.written_blocks().any()


def test_caches_of_other_groups_or_layers_are_refused() -> None:
    other = attention(FullAttentionSpec, "other")
    with pytest.raises(TierError, match="groups differ: full and other"):
        Copier(one(full(4)), one(other))
    with pytest.raises(TierError, match="buffer full has not the same layers"):
        Copier(one(full(4)), one(full(4, layers=3)))


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 2)], ids=str)
def test_states_are_copied_between_any_numbers_of_ranks(ranks: tuple[int, int]) -> None:
    src, dst = states("mamba_sd", tp_size=ranks[0]), states("mamba_ds", tp_size=ranks[1])
    fill_codes(src, ids(4, 2), codes_for(src, 2))
    nbytes, _ = Copier(one(src), one(dst)).copy(0, ids(4, 2), ids(1, 3), range(2))
    assert check_codes(dst, ids(1, 3), codes_for(src, 2)).wrong == 0
    assert not dst.replicas_differ(0, torch.tensor([1, 3]), 0, 2)
    assert nbytes == 2 * (3 * 4 * 2 + ranks[1] * 3 * 2 * 2 + 2 * 4 * 5 * 4), "B goes to every rank"


def test_states_that_ranks_share_in_another_way_are_refused() -> None:
    src, dst = states(tp_size=2), states()
    dst.sharding = None
    with pytest.raises(TierError, match="ranks share the states of buffer state in another way on either side"):
        Copier(one(src), one(dst))


TABLE = ids(7, 8, 0, 3, 5)


@pytest.mark.parametrize(
    ("places", "blocks", "whole"),
    [
        (ids(0), [7, 8], [True]),
        (ids(1, 0), [0, 3, 7, 8], [False, True]),
        (ids(2), [5, 0], [False]),
        (ids(9, 0), [0, 0, 7, 8], [False, True]),
        (ids(), [], []),
    ],
)
def test_tables_of_places(places: Int64s, blocks: list[int], whole: list[bool]) -> None:
    found, complete = compact(Side(one(full(9)), (TABLE,)), 0, places, 32)
    assert (found.tolist(), complete.tolist()) == (blocks, whole)


def test_an_empty_table_has_nothing_whole() -> None:
    found, complete = compact(Side(one(full(9)), (ids(),)), 0, ids(0, 1), 16)
    assert (found.tolist(), complete.tolist()) == ([0, 0], [False, False])


@pytest.mark.parametrize("block_tokens", [8, 24])
def test_blocks_larger_than_the_tiers_or_cut_by_them_are_refused(block_tokens: int) -> None:
    with pytest.raises(TierError, match="tiers need a multiple"):
        compact(Side(one(full(9)), (TABLE,)), 0, ids(0), block_tokens)


def test_a_request_has_one_state_whatever_the_place() -> None:
    caches = join([states()])
    found, whole = compact(Side(caches, (ids(4),)), 0, ids(17), 32)
    assert (found.tolist(), whole.tolist()) == ([4], [True])
    with pytest.raises(TierError, match="one state a request"):
        compact(Side(caches, (ids(4),)), 0, ids(1, 2), 32)
    found, whole = compact(Side(caches, (ids(0, 3, 4),), of_tier=True), 0, ids(2, 1, 0), 32)
    assert (found.tolist(), whole.tolist()) == ([4, 3, 0], [True, True, False])
