"""Plans between every two plain layouts, and part by part where keys and values are laid out apart."""

import itertools

import numpy as np
import pytest
import torch

from pdtx.cache import PagedKVCache
from pdtx.engine.describe import describe_cache, layout_of
from pdtx.kvspec import FullAttentionSpec
from pdtx.layout import ELEMENT_ORDERS, KVCacheLayout, PartedLayout, any_layout, make_layout
from pdtx.plan.build import Endpoint, build_plan

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=3, head_size=6, dtype="float16")
LAYERS, TOKENS = 2, 10
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def coordinates(layout: KVCacheLayout, block_ids: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The byte at which each element of a request lies, by layer, kv, token, head, channel."""
    steps = np.array(layout.block_steps(block_ids))
    token = np.arange(TOKENS)
    place = steps[token // layout.block_size] * layout.stride("block") + token % layout.block_size * layout.stride(
        "token"
    )
    axes = [np.arange(layout.extent(a)) * layout.stride(a) for a in ("layer", "kv", "head", "channel")]
    layer, kv, head, channel = axes
    grid = np.add.outer(np.add.outer(np.add.outer(np.add.outer(layer, kv), place), head), channel)
    return grid.reshape(-1)


def carry(src: KVCacheLayout, dst: KVCacheLayout, memory: Bytes, target: Bytes) -> None:
    """Plan 10 tokens, copy as planned, and compare each element by its coordinates."""
    blocks = [4, 1, 3], [0, 5, 2]
    ends = [Endpoint.of(side, side.block_steps(ids)) for side, ids in zip((src, dst), blocks, strict=True)]
    plan = build_plan(ends[0], ends[1], range(TOKENS))
    flat, before = plan.flat, int((target != 255).sum())
    for start, to, size in zip(flat.src.tolist(), flat.dst.tolist(), flat.nbytes.tolist(), strict=True):
        target[to : to + size] = memory[start : start + size]
    places = [coordinates(side, ids) for side, ids in zip((src, dst), blocks, strict=True)]
    for byte in range(2):
        assert (target[places[1] + byte] == memory[places[0] + byte]).all()
    assert int((target != 255).sum()) - before == len(places[1]) * 2, "nothing else may be written"


def memory_of(layout: KVCacheLayout | PartedLayout) -> tuple[Bytes, Bytes]:
    rng = np.random.default_rng(1)
    return rng.integers(0, 255, layout.size_bytes, np.uint8), np.full(layout.size_bytes, 255, np.uint8)


def build(name: str, kernel: int | None = None, padded: int | None = None) -> KVCacheLayout:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=3, head_size=6, dtype="float16", page_size_padded=padded)
    return make_layout(name, spec, num_layers=LAYERS, num_blocks=6, kernel_block_size=kernel)


@pytest.mark.parametrize("src", ELEMENT_ORDERS)
def test_every_pair_of_plain_layouts(src: str) -> None:
    for dst in ELEMENT_ORDERS:
        from_, to = build(src), build(dst)
        carry(from_, to, memory_of(from_)[0], memory_of(to)[1])


@pytest.mark.parametrize(
    ("src", "dst"), list(itertools.permutations(["flash_attn_nhd", "flashinfer_hnd", "vllm_lbnhc"], 2))
)
def test_kernel_blocks_and_padding(src: str, dst: str) -> None:
    """Block ids are given as steps of the block axis; padding is only a larger stride."""
    for from_, to in (
        (build(src, kernel=2), build(dst)),
        (build(src), build(dst, kernel=2)),
        (build(src, kernel=2), build(dst, kernel=1)),
        (build("triton_nhd", padded=512), build(dst)),
        (build(src), build("vllm_blhnc", padded=512)),
    ):
        carry(from_, to, memory_of(from_)[0], memory_of(to)[1])


@pytest.mark.parametrize("name", ["cpu_attn_lbhnc", "diffkv_lbnhc", "flash_attn_diffkv_hnd_cross_layer"])
@pytest.mark.parametrize("other", ["flash_attn_nhd", "vllm_lbhnc", "sglang"])
def test_parts_are_carried_one_by_one(name: str, other: str) -> None:
    """A parted layout needs two plans in its parts' own coordinates, from and to the parts of a plain one."""
    parted = any_layout(name, SPEC, num_layers=LAYERS, num_blocks=6)
    assert isinstance(parted, PartedLayout)
    plain = PartedLayout.of(build(other))
    for sides in ((parted, plain), (plain, parted)):
        memory, target = memory_of(sides[0])[0], memory_of(sides[1])[1]
        for src, dst in zip(sides[0].parts, sides[1].parts, strict=True):
            carry(src.layout, dst.layout, memory[src.offset :], target[dst.offset :])


@pytest.mark.parametrize("name", ELEMENT_ORDERS)
def test_a_cache_keeps_what_is_written_and_is_described(name: str) -> None:
    """The paged cache and the handshake take every plain layout as they are."""
    cache = PagedKVCache(SPEC, layout=name, num_layers=LAYERS, num_blocks=6)
    blocks = torch.tensor([4, 1, 3])
    key, value = torch.rand(2, TOKENS, 3, 6).to(torch.float16)
    cache.write(1, blocks, 0, key, value)
    assert torch.equal(torch.stack(cache.read(1, blocks, 0, TOKENS)), torch.stack((key, value)))
    assert cache.written_blocks().nonzero().flatten().tolist() == [1, 3, 4]
    assert layout_of(describe_cache(cache, model="m", fingerprint="f")) == cache.layout
