"""What a tier's memory looks like, made from a cache."""

import numpy as np
import pytest

from pdtx.cache import KVCaches, PagedKVCache, PagedLatentCache, PagedStateCache
from pdtx.errors import TierError
from pdtx.kvspec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from pdtx.layout import ELEMENT_ORDERS
from pdtx.tiers import tier_caches
from pdtx.tiers.geometry import block_nbytes, capacities, share_out
from tests.engine_pair import attention, join, latent, states
from tests.tier_scenes import full

MIB = 1 << 20


def hybrid() -> KVCaches:
    window = attention(SlidingWindowSpec, "window", block_size=8, sliding_window=24, layers=("layers.2",))
    return join([attention(FullAttentionSpec, "full")], [window], [states()])


def test_groups_buffers_and_layers_are_the_caches() -> None:
    like = hybrid()
    made = tier_caches(like, block_tokens=32, nbytes=MIB)
    assert [group.name for group in made.groups] == ["full", "window", "state"]
    assert [group.block_size for group in made.groups] == [32, 32, 1]
    assert [buffer.layer_names for buffer in made.buffers] == [buffer.layer_names for buffer in like.buffers]
    assert [type(buffer) for buffer in made.buffers] == [type(buffer) for buffer in like.buffers]
    assert made.tp_size == like.tp_size


@pytest.mark.parametrize("block_tokens", [0, 8, 24, 100])
def test_blocks_that_are_no_whole_number_of_the_caches_are_refused(block_tokens: int) -> None:
    with pytest.raises(TierError, match="choose a multiple of 16"):
        tier_caches(hybrid(), block_tokens=block_tokens, nbytes=MIB)


@pytest.mark.parametrize("nbytes", [MIB, 3 * MIB + 1234, 200_000])
def test_a_tier_takes_what_it_is_given_and_no_more(nbytes: int) -> None:
    made = tier_caches(hybrid(), block_tokens=16, nbytes=nbytes, tokens_per_state=64)
    full_blocks, window_blocks, state_blocks = capacities(made)
    assert full_blocks == window_blocks
    assert state_blocks == -(-full_blocks * 16 // 64)
    one_more = sum(buffer.nbytes // buffer.num_blocks for buffer in made.buffers)
    assert nbytes - one_more < made.nbytes <= nbytes


def test_a_block_is_counted_with_all_layers_and_ranks() -> None:
    one = KVCaches.single(full(4, layers=3, tp_size=2))
    assert block_nbytes(tier_caches(one, block_tokens=32, nbytes=MIB)) == (32 * 3 * 2 * 2 * 4 * 2,)


def test_memory_for_no_block_is_refused_with_what_a_block_needs() -> None:
    with pytest.raises(TierError, match=r"a tier of 1000 bytes holds no block of 16 tokens, which needs 2048"):
        tier_caches(KVCaches.single(full(4, layers=2)), block_tokens=16, nbytes=1000)
    tier_caches(KVCaches.single(full(4, layers=2)), block_tokens=16, nbytes=2048)


def test_cross_attention_is_there_and_not_kept() -> None:
    cross = attention(CrossAttentionSpec, "cross", block_size=8)
    made = tier_caches(
        join([attention(FullAttentionSpec, "full")], [cross], encoder_positions=21), block_tokens=32, nbytes=MIB
    )
    assert [group.num_blocks for group in made.groups][1] == 2
    assert made.groups[1].block_size == 8
    assert capacities(made)[1] == 0
    assert capacities(made)[0] > 10


@pytest.mark.parametrize("name", ELEMENT_ORDERS)
def test_a_block_of_all_layers_lies_in_one_piece(name: str) -> None:
    made = tier_caches(KVCaches.single(full(9, name)), block_tokens=32, nbytes=MIB)
    layout = made.buffers[0].layout
    (part,) = layout.parts
    assert part.layout.axes[0].name == "block"
    assert part.layout.stride("block") == layout.size_bytes // made.groups[0].num_blocks


@pytest.mark.parametrize(
    ("source", "chosen"),
    [
        ("flash_attn_nhd", "flash_attn_nhd_cross_layer"),
        ("flashinfer_nhd", "flash_attn_nhd_cross_layer"),
        ("vllm_lbhnc", "vllm_blhnc"),
        ("vllm_lbnhc", "vllm_blnhc"),
        ("vllm_bhlnc", "vllm_bhlnc"),
    ],
)
def test_the_layout_is_that_to_which_a_copy_has_the_fewest_runs(source: str, chosen: str) -> None:
    made = tier_caches(KVCaches.single(full(9, source)), block_tokens=32, nbytes=MIB)
    assert made.buffers[0].layout.name == chosen


@pytest.mark.parametrize("tp_size", [1, 2])
def test_states_have_the_ranks_of_the_cache(tp_size: int) -> None:
    like = join([states(tp_size=tp_size)])
    made = tier_caches(like, block_tokens=16, nbytes=4096).buffers[0]
    assert (made.tp_size, made.sharding) == (tp_size, like.buffers[0].sharding)
    assert block_nbytes(like) == (3 * 4 * 2 + tp_size * 3 * 2 * 2 + 2 * 4 * 5 * 4,), "B is on every rank"


def test_a_layout_can_be_chosen() -> None:
    made = tier_caches(hybrid(), block_tokens=32, nbytes=MIB, layouts=("flashinfer_hnd", "mamba_ds"))
    assert [buffer.layout.name for buffer in made.buffers] == ["flashinfer_hnd", "flashinfer_hnd", "mamba_ds"]


def test_kinds_without_such_a_layout_keep_their_own() -> None:
    made = tier_caches(join([states("mamba_ds")], [latent("latent", 20)]), block_tokens=16, nbytes=MIB)
    assert made.buffers[0].layout.name == "mamba_ds"
    assert made.buffers[1].layout.parts[0].layout.axes[0].name == "block"


def test_padding_of_the_caches_pages_is_not_kept() -> None:
    padded = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=4, dtype="bfloat16", page_size_padded=4096)
    state = MambaSpec(block_size=16, shapes=((3, 6),), dtypes=("bfloat16",), page_size_padded=4096)
    like = join(
        [PagedKVCache(padded, layout="flashinfer_nhd", num_layers=2, num_blocks=4)],
        [PagedStateCache(state, num_layers=1, num_blocks=3)],
    )
    made = tier_caches(like, block_tokens=16, nbytes=MIB)
    payload = sum(
        count * size for count, size in zip((g.num_blocks for g in made.groups), block_nbytes(made), strict=True)
    )
    assert made.nbytes == payload


def test_blocks_whose_tokens_stay_together_are_made_of_the_caches_pages() -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=132, dtype="uint8")
    like = KVCaches.single(PagedLatentCache(spec, layout="deepseek_indexer", num_layers=2, num_blocks=5))
    made = tier_caches(like, block_tokens=64, nbytes=MIB)
    assert made.groups[0].block_size == 64
    assert made.buffers[0].layout.block_size == 16
    assert made.buffers[0].layout.blocks_per_manager_block == 4


def test_a_chunk_and_two_buffers_of_one_group_fit() -> None:
    chunk = attention(ChunkedLocalAttentionSpec, "chunk", attention_chunk_size=32)
    made = tier_caches(join([latent("latent", 20), latent("indexer", 6)], [chunk]), block_tokens=48, nbytes=MIB)
    assert len(made.buffers) == 3
    assert len(set(capacities(made))) == 1


def test_blocks_are_shared_out_by_their_bytes() -> None:
    like = hybrid()
    sizes = (100, 50, 1000)
    kept = share_out(like, sizes, block_tokens=16, nbytes=20_000, tokens_per_state=160)
    assert kept == (80, 80, 8)
    assert sum(np.multiply(kept, sizes)) == 20_000
    assert share_out(like, sizes, block_tokens=16, nbytes=19_999, tokens_per_state=160) == (79, 79, 8)
