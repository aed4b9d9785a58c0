"""Several buffers in one memory: counted and registered once, and no block shares a byte with another in use."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdtx.cache import BufferShape, CacheGroup, ForeignBuffer, KVCaches, Memory
from pdtx.engine.registering import regions_of, register_cache, unions
from pdtx.errors import CacheError
from pdtx.kvspec import FullAttentionSpec
from pdtx.transports import Region
from tests.foreign_scenes import (
    NAMES,
    Pages,
    Registering,
    group_of,
    hybrid_bytes,
    hybrid_groups,
    hybrid_over,
    hybrid_specs,
    ids,
)


def touched(groups: list[CacheGroup], buffer: ForeignBuffer) -> tuple[list[frozenset[int]], int]:
    """The bytes of the buffer's memory that are each block's, and how far apart its blocks are."""
    found = list[frozenset[int]]()
    for block in range(buffer.num_blocks):
        memory = torch.zeros(1 << 12, dtype=torch.uint8)
        (rank,) = KVCaches.over(groups, [replace(buffer, memory=memory)]).buffers[0].ranks
        for part in rank.poisoned:
            part.fill(ids(block))
        found.append(frozenset(memory.nonzero().reshape(-1).tolist()))
    return found, min(found[1]) - min(found[0])


ORDERS = st.sampled_from(("vllm_lbhnc", "vllm_blhnc", "vllm_lhbnc", "flash_attn_nhd"))


class TestOneMemory:
    def test_a_hybrids_groups_count_once(self) -> None:
        pages = Pages(hybrid_bytes(8))
        cache = hybrid_over(pages.memory, num_blocks=8)
        assert cache.nbytes == hybrid_bytes(8)
        assert sum(buffer.nbytes for buffer in cache.buffers) == hybrid_bytes(8) * 8 // 3
        assert pages.changed() == set()

    def test_it_is_registered_once(self) -> None:
        pages = Pages(hybrid_bytes(8))
        cache = hybrid_over(pages.memory, num_blocks=8, layers=(2, 3, 1))
        mover = Registering()
        total = register_cache(mover, cache)
        assert total.nbytes == cache.nbytes == hybrid_bytes(8)
        assert [(one.address, one.nbytes) for one in mover.regions] == [(pages.address, hybrid_bytes(8))]
        regions = regions_of(cache)
        assert all(ranks[0] is regions[0][0] for ranks in regions)

    def test_buffers_that_begin_at_different_addresses_are_registered_as_one(self) -> None:
        """A block holds the pages of three layers, each a buffer of its own; the last page's padding is not there."""
        spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="bfloat16", page_size_padded=3 * 256)
        for kind in ("one tensor", "by address"):
            pages = Pages(8 * 3 * 256)
            memories = [pages.memory] * 3 if kind == "one tensor" else [pages.memory for _ in range(3)]
            buffers = [
                ForeignBuffer(f"b{at}", "g", spec, "vllm_lbhnc", ["a"], 8, memory, block_stride=768, offset=256 * at)
                for at, memory in enumerate(memories)
            ]
            cache = KVCaches.over([group_of(spec, 8)], buffers)
            mover = Registering()
            assert register_cache(mover, cache).nbytes == cache.nbytes == pages.nbytes
            assert [(one.address, one.nbytes) for one in mover.regions] == [(pages.address, pages.nbytes)]
            cache.poison(0, np.array([2]))
            assert {at // 768 for at in pages.changed()} == {2}
            with pytest.raises(CacheError, match="buffers b0 and b1 share bytes of blocks"):
                KVCaches.over([group_of(spec, 8)], [buffers[0], replace(buffers[1], offset=128)])

    def test_memories_that_no_tensor_reaches_over(self) -> None:
        """Two pieces of one allocation, given by address: the union reaches over both, and keeps both."""
        pages = Pages(4096)
        parts = [Memory.at(pages.address + first, 2048, keep=pages).bytes for first in (0, 1024)]
        apart = Region(torch.zeros(64, dtype=torch.uint8))
        found = {one.address: one.nbytes for one in unions([*map(Region, parts), apart])}
        assert found == {pages.address: 3072, apart.address: 64}

    def test_a_block_is_poisoned_for_one_group_alone(self) -> None:
        """Block 3 is the window's; block 5, which full attention uses, stays, though all lie in the same bytes."""
        pages = Pages(hybrid_bytes(8))
        cache = hybrid_over(pages.memory, num_blocks=8)
        full, window = cache.buffers[0], cache.buffers[1]
        before = [[tensor.clone() for tensor in full.read_block(layer, 5)] for layer in range(3)]
        cache.poison(1, np.array([0, 3]))
        assert window.unpoisoned(ids(3)) == 0
        for layer in range(3):
            for one, other in zip(before[layer], full.read_block(layer, 5), strict=True):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        page = 256
        assert {at % (8 * page) // page for at in pages.changed()} == {3}

    def test_groups_with_pools_of_their_own_cannot_share_bytes(self) -> None:
        pages = Pages(hybrid_bytes(8))
        specs = hybrid_specs()
        buffers = [
            ForeignBuffer(name, name, spec, "vllm_lbhnc", ["layers.0"], 8, pages.memory)
            for name, spec in zip(NAMES, specs, strict=True)
        ]
        with pytest.raises(
            CacheError, match=r"buffers full and window\.0 share bytes of blocks that can be in use at o"
        ):
            KVCaches.over(hybrid_groups(specs, 8, pool=""), buffers)
        assert len(KVCaches.over(hybrid_groups(specs, 8), buffers).buffers) == 3

    @pytest.mark.parametrize("kernel", [None, 2])
    @pytest.mark.parametrize("offset", [256, 128, -128 + 2048])
    def test_a_block_of_one_group_must_not_lie_in_another_block_of_another(
        self, offset: int, kernel: int | None
    ) -> None:
        pages = Pages(2 * hybrid_bytes(8))
        specs = hybrid_specs()
        buffers = [
            ForeignBuffer(
                name,
                name,
                spec,
                "vllm_lbhnc",
                ["a", "b"],
                8,
                pages.memory,
                offset=offset if at else 0,
                kernel_block_size=kernel,
            )
            for at, (name, spec) in enumerate(zip(NAMES[:2], specs[:2], strict=True))
        ]
        with pytest.raises(CacheError, match="share bytes of blocks that can be in use at once"):
            KVCaches.over(hybrid_groups(specs, 8), buffers)

    def test_one_layer_further_on_is_the_same_block(self) -> None:
        pages = Pages(2 * hybrid_bytes(8))
        specs = hybrid_specs()
        buffers = [
            ForeignBuffer(name, name, spec, "vllm_lbhnc", ["a", "b"], 8, pages.memory, offset=8 * 256 if at else 0)
            for at, (name, spec) in enumerate(zip(NAMES[:2], specs[:2], strict=True))
        ]
        cache = KVCaches.over(hybrid_groups(specs, 8), buffers)
        assert cache.nbytes == 3 * 8 * 256

    def test_two_buffers_of_one_group_lie_apart(self) -> None:
        pages = Pages(4 * hybrid_bytes(8))
        spec = hybrid_specs()[0]
        group = replace(group_of(spec, 8), pool="one")
        first = ForeignBuffer("a", "g", spec, "vllm_lbhnc", ["a"], 8, pages.memory)
        with pytest.raises(CacheError, match="buffers a and b share bytes"):
            KVCaches.over([group], [first, replace(first, name="b", layer_names=["b"])])
        beside = replace(first, name="b", layer_names=["b"], offset=8 * 256)
        assert KVCaches.over([group], [first, beside]).nbytes == 2 * 8 * 256

    def test_blocks_of_other_sizes_cannot_share_bytes(self) -> None:
        pages = Pages(hybrid_bytes(16))
        specs = [hybrid_specs()[0], hybrid_specs(2)[1]]
        groups = [replace(group_of(spec, 8, name), pool="one") for name, spec in zip(NAMES, specs, strict=False)]
        buffers = [
            ForeignBuffer(name, name, spec, "vllm_lbhnc", ["a"], 8, pages.memory)
            for name, spec in zip(NAMES, specs, strict=False)
        ]
        with pytest.raises(CacheError, match="their blocks lie 256 and 128 bytes apart"):
            KVCaches.over(groups, buffers)

    @given(
        layouts=st.one_of(ORDERS.map(lambda name: (name, name)), st.tuples(ORDERS, ORDERS)),
        layers=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        steps=st.one_of(st.integers(0, 40), st.integers(0, 10).map(lambda pages: 4 * pages)),
        pools=st.sampled_from([("one", "one"), ("one", "two"), ("", "")]),
        one_group=st.booleans(),
    )
    def test_two_buffers_at_any_offset(
        self,
        layouts: tuple[str, str],
        layers: tuple[int, int],
        steps: int,
        pools: tuple[str, str],
        one_group: bool,
    ) -> None:
        """Oracle: the bytes that change when each block of each buffer alone is poisoned."""
        spec = FullAttentionSpec(block_size=2, num_kv_heads=2, head_size=2, dtype="bfloat16")
        groups = [replace(group_of(spec, 4, name), pool=pool) for name, pool in zip("gh", pools, strict=True)]
        memory = torch.zeros(1 << 12, dtype=torch.uint8)
        buffers = [
            ForeignBuffer(
                name,
                "g" if one_group else name,
                spec,
                layout,
                [f"layers.{i}" for i in range(count)],
                4,
                memory,
                offset=8 * steps if name == "h" else 0,
            )
            for name, layout, count in zip("gh", layouts, layers, strict=True)
        ]
        (one, stride), (other, also) = (touched(groups, buffer) for buffer in buffers)
        sharing = pools == ("one", "one") and not one_group
        clash = any((i != j or not sharing) and one[i] & other[j] for i in range(4) for j in range(4))
        try:
            KVCaches.over(groups, buffers)
        except CacheError:
            assert clash or stride != also, "strides that differ are refused without a closer look"
        else:
            assert not clash

    def test_a_pool_has_one_size(self) -> None:
        specs = hybrid_specs()
        groups = [replace(group, num_blocks=8 + at) for at, group in enumerate(hybrid_groups(specs, 8))]
        shapes = [BufferShape(g.name, g.name, g.spec, "vllm_lbhnc", ["a"], g.num_blocks) for g in groups]
        with pytest.raises(CacheError, match=r"groups full and window\.0 share pool one and have 8 and 9 blocks"):
            KVCaches.allocate(groups, shapes)
