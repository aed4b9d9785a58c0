"""The order of a plan's stream: the destination's memory decides, and both sides derive the same."""

import numpy as np
import pytest

from pdtx.kvspec import FullAttentionSpec
from pdtx.layout import ELEMENT_ORDERS, KVCacheLayout, make_layout
from pdtx.plan import Endpoint, Slices, TransferPlan, build_plan
from tests.plan_oracle import byte_indices

HEADS, CHANNELS, TOKEN = 8, 128, 256
"""Llama-3-8B: a head's vector of one token has 256 bytes."""


def layout(name: str, block_size: int = 16) -> KVCacheLayout:
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=HEADS, head_size=CHANNELS, dtype="bfloat16")
    return make_layout(name, spec, num_layers=4, num_blocks=64)


def plan(
    src: tuple[str, int], dst: tuple[str, int], tokens: range, layers: range = range(4), **more: bool
) -> TransferPlan:
    here = Endpoint.of(layout(*src), np.arange(63, 0, -2))
    there = Endpoint.of(layout(*dst), np.arange(1, 64, 2))
    return build_plan(here, there, tokens, layers, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dst", "ranges"),
    [
        (("flash_attn_hnd", 16), 4 * 2 * 8),  # a plane of K or V of each block
        (("flashinfer_hnd", 16), 4 * 8),  # whole pages
        (("flashinfer_hnd", 32), 4 * 4),
        (("flash_attn_hnd", 8), 4 * 2 * 16),
        (("flash_attn_nhd", 16), 4 * 2 * 8),
    ],
)
def test_whole_blocks_arrive_in_one_piece(dst: tuple[str, int], ranges: int) -> None:
    found = plan(("flash_attn_nhd", 16), dst, range(128))
    assert found.num_destination_ranges == len(found.destination()) == ranges


def test_heads_of_a_partial_block_arrive_in_one_piece_each() -> None:
    found = plan(("flash_attn_nhd", 16), ("flash_attn_hnd", 16), range(21), range(1))
    assert sorted(found.destination().nbytes.tolist()) == [5 * TOKEN] * 16 + [16 * HEADS * TOKEN] * 2


def test_a_chunk_that_begins_inside_a_larger_block() -> None:
    """Source blocks 1 and 2 of two destination blocks: the one in between is whole, the others come by head."""
    found = plan(("flash_attn_nhd", 16), ("flashinfer_hnd", 32), range(16, 80), range(1))
    assert sorted(found.destination().nbytes.tolist()) == [16 * TOKEN] * 32 + [2 * 32 * HEADS * TOKEN]


@pytest.mark.parametrize("dst_size", [8, 16, 32])
@pytest.mark.parametrize("dst", ELEMENT_ORDERS)
@pytest.mark.parametrize("src", ["flash_attn_nhd", "flashinfer_hnd", "vllm_bhlnc"])
def test_inside_a_block_the_stream_only_goes_forward(src: str, dst: str, dst_size: int) -> None:
    """And no order has fewer ranges than the destination's own."""
    found = plan((src, 16), (dst, dst_size), range(64))
    there = layout(dst, dst_size)
    flat = found.flat
    pages = flat.dst // there.stride("block")
    same = pages[1:] == pages[:-1]
    assert (flat.dst[1:] > flat.dst[:-1])[same].all()
    ascending = np.sort(flat.dst)
    order = np.argsort(flat.dst)
    least = 1 + int((ascending[1:] != ascending[:-1] + flat.nbytes[order][:-1]).sum())
    assert found.num_destination_ranges == least


@pytest.mark.parametrize("name", ELEMENT_ORDERS)
def test_equal_layouts_go_through_both_memories_alike(name: str) -> None:
    """Neither side has more ranges than the plan has runs."""
    found = plan((name, 16), (name, 16), range(75))
    assert len(found.source()) <= found.num_runs
    assert len(found.destination()) <= found.num_runs


def test_a_wrong_layout_keeps_the_stream_and_misplaces_it() -> None:
    """A receiver that takes its own layout for another one still reads the stream that both have agreed on."""
    right = layout("flashinfer_hnd")
    wrong = right.with_swapped("token", "head")
    here, ids = Endpoint.of(layout("flash_attn_nhd"), [5, 9]), [3, 8]
    meant = build_plan(here, Endpoint.of(right, ids), range(20), merge=False)
    faulty = build_plan(here, Endpoint.of(wrong, ids, agreed=right), range(20), merge=False)
    ours, theirs = (byte_indices(Slices(found.flat.src, found.flat.nbytes)) for found in (meant, faulty))
    assert np.array_equal(ours, theirs), "byte i of the stream is the same source byte"
    assert not np.array_equal(meant.destination().offsets, faulty.destination().offsets)
