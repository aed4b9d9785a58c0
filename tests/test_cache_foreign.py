"""Caches over memory that others have allocated: what is refused, what is read, and that nothing else is written."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pdtx.cache import (
    POISON,
    BufferShape,
    ForeignBuffer,
    KVCaches,
    Memory,
    PagedBuffer,
    PagedKVCache,
    PagedLatentCache,
    PagedStateCache,
)
from pdtx.cache.foreign import AnyMemory
from pdtx.errors import CacheError, LayoutError
from pdtx.kvspec import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec
from pdtx.layout import ELEMENT_ORDERS, PARTED_ORDERS, STATE_ORDERS, any_layout
from tests.foreign_scenes import Pages, group_of, ids

LAYERS, BLOCKS, HEADS, CHANNELS, BLOCK = 2, 6, 4, 8, 4
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=CHANNELS, dtype="bfloat16")
LATENT = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=24, dtype="bfloat16")
STATES = MambaSpec(block_size=1, shapes=((3, 10), (6, 5, 2)), dtypes=("bfloat16", "float32"))

Given = AnyMemory | Sequence[AnyMemory]

KINDS = [
    *((FULL, name) for name in (*ELEMENT_ORDERS, *PARTED_ORDERS)),
    *((LATENT, name) for name in ("mla", "mla_lbnhc", "mla_blnhc")),
    *((STATES, name) for name in STATE_ORDERS),
]


def nbytes_of(spec: KVCacheSpec, layout: str) -> int:
    return any_layout(layout, spec, num_layers=LAYERS, num_blocks=BLOCKS).size_bytes


def foreign(spec: KVCacheSpec, layout: str, memory: Given, **others: Any) -> ForeignBuffer:  # noqa: ANN401
    return ForeignBuffer("b", "g", spec, layout, [f"layers.{i}" for i in range(LAYERS)], BLOCKS, memory, **others)


def over(spec: KVCacheSpec, layout: str, memory: Given, **others: Any) -> KVCaches:  # noqa: ANN401
    return KVCaches.over([group_of(spec)], [foreign(spec, layout, memory, **others)])


def owned(spec: KVCacheSpec, layout: str) -> KVCaches:
    shape = BufferShape("b", "g", spec, layout, [f"layers.{i}" for i in range(LAYERS)], BLOCKS)
    return KVCaches.allocate([group_of(spec)], [shape])


class TestWhatIsRead:
    @pytest.mark.parametrize(("spec", "layout"), KINDS)
    def test_every_kind_reads_as_memory_of_its_own_and_nothing_is_written(self, spec: KVCacheSpec, layout: str) -> None:
        pages = Pages(nbytes_of(spec, layout) + 128)
        there = over(spec, layout, pages.memory, offset=64)
        (buffer,), (mine,) = there.buffers, owned(spec, layout).buffers
        mine.memory.copy_(pages.memory.bytes[64 : 64 + mine.memory.numel()])
        table = ids(4, 1, 3)
        for layer in range(LAYERS):
            stop = 3 * buffer.block_size
            assert torch.equal(buffer.canonical(layer, table, 0, stop), mine.canonical(layer, table, 0, stop))
        assert not there.owned
        assert there.nbytes == nbytes_of(spec, layout)
        assert pages.changed() == set()

    def test_it_is_the_class_that_the_layout_needs(self) -> None:
        expected: list[tuple[KVCacheSpec, str, type[PagedBuffer]]] = [
            (FULL, "vllm_lbhnc", PagedKVCache),
            (LATENT, "mla", PagedLatentCache),
            (STATES, "mamba_sd", PagedStateCache),
        ]
        for spec, layout, kind in expected:
            (buffer,) = over(spec, layout, Pages(nbytes_of(spec, layout)).memory).buffers
            assert type(buffer) is kind
            assert type(owned(spec, layout).buffers[0]) is kind

    def test_an_owners_own_view(self) -> None:
        """vLLM's (block, head, token, K then V) of each layer, as its owner sees it: no layout of pdtx is asked."""
        theirs = torch.randn(LAYERS, BLOCKS, HEADS, BLOCK, 2 * CHANNELS).to(torch.bfloat16)
        (buffer,) = over(FULL, "vllm_lbhnc", theirs).buffers
        assert isinstance(buffer, PagedKVCache)
        key, value = buffer.read(1, ids(5, 2), 0, 2 * BLOCK)
        for token in range(2 * BLOCK):
            block, at = (5, 2)[token // BLOCK], token % BLOCK
            for head in range(HEADS):
                assert torch.equal(key[token, head], theirs[1, block, head, at, :CHANNELS])
                assert torch.equal(value[token, head], theirs[1, block, head, at, CHANNELS:])
        buffer.write(0, ids(3), 0, key[:1], value[:1])
        assert torch.equal(theirs[0, 3, :, 0, :CHANNELS], key[0])

    def test_ranks_of_one_process(self) -> None:
        size = any_layout(
            "flashinfer_hnd", replace(FULL, num_kv_heads=HEADS // 2), num_layers=LAYERS, num_blocks=BLOCKS
        ).size_bytes
        pages = [Pages(size, seed) for seed in range(2)]
        cache = over(FULL, "flashinfer_hnd", [one.memory for one in pages], tp_size=2)
        (buffer,) = cache.buffers
        assert isinstance(buffer, PagedKVCache)
        assert (cache.tp_size, cache.nbytes) == (2, 2 * size)
        key = torch.randn(3, HEADS, CHANNELS).to(torch.bfloat16)
        buffer.write(0, ids(2), 0, key, -key)
        assert torch.equal(buffer.read(0, ids(2), 0, 3)[0], key)
        assert all(one.changed() for one in pages)


class TestMemory:
    def test_a_tensor_of_any_dtype_and_shape(self) -> None:
        size = nbytes_of(FULL, "flash_attn_nhd")
        for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn):
            tensor = torch.zeros(size, dtype=torch.uint8).view(dtype).reshape(LAYERS, -1)
            cache = over(FULL, "flash_attn_nhd", tensor)
            assert cache.buffers[0].memory.data_ptr() == tensor.data_ptr()

    def test_a_permuted_tensor_is_given_by_its_storage(self) -> None:
        size = nbytes_of(FULL, "flash_attn_nhd")
        whole = torch.zeros(size // 2 + 32, dtype=torch.bfloat16)
        view = whole[32:].view(LAYERS, 2, BLOCKS, BLOCK, HEADS, CHANNELS).permute(0, 2, 1, 4, 3, 5)
        with pytest.raises(LayoutError, match=r"is not contiguous; give Memory\.storage_of\(tensor\), and the offset"):
            over(FULL, "flash_attn_nhd", view)
        cache = over(FULL, "flash_attn_nhd", Memory.storage_of(view), offset=64)
        assert cache.buffers[0].memory.data_ptr() == view.data_ptr()

    def test_memory_by_address_keeps_its_owner(self) -> None:
        owner = np.zeros(nbytes_of(FULL, "flash_attn_nhd") + 64, np.uint8)
        alive = weakref.ref(owner)
        address = owner.ctypes.data + -owner.ctypes.data % 64
        cache = over(FULL, "flash_attn_nhd", Memory.at(address, nbytes_of(FULL, "flash_attn_nhd"), keep=owner))
        del owner
        gc.collect()
        assert alive() is not None
        assert cache.buffers[0].memory.data_ptr() == address
        del cache
        gc.collect()
        assert alive() is None

    @pytest.mark.parametrize(("address", "nbytes"), [(0, 8), (-1, 8), (4096, 0), ((1 << 63) - 4, 8)])
    def test_what_is_no_memory(self, address: int, nbytes: int) -> None:
        with pytest.raises(LayoutError, match="are no memory"):
            Memory.at(address, nbytes)

    def test_tensors_without_memory(self) -> None:
        for tensor in (torch.zeros(1 << 14, device="meta"), torch.eye(4).to_sparse()):
            for make in (Memory.of, Memory.storage_of):
                with pytest.raises(LayoutError, match="no memory that a cache can lie in"):
                    make(tensor)

    def test_odd_addresses_of_one_byte_elements(self) -> None:
        spec = replace(FULL, dtype="float8_e4m3fn")
        pages = Pages(nbytes_of(spec, "flash_attn_nhd") + 1)
        cache = over(spec, "flash_attn_nhd", pages.memory, offset=1)
        cache.poison(0, np.array([2]))
        assert cache.buffers[0].unpoisoned(ids(2)) == 0
        assert len(pages.changed()) <= LAYERS * 2 * BLOCK * HEADS * CHANNELS


class TestRefusals:
    @pytest.mark.parametrize(
        ("layout", "layer", "block"),
        [
            ("vllm_lbhnc", 6 * 512, 512),
            ("flash_attn_nhd", 6 * 512, 256),
            ("vllm_blhnc", 512, 1024),
            ("cpu_attn_lbhnc", 6 * 512, 512),
        ],
    )
    def test_strides_are_held_against_the_layouts(self, layout: str, layer: int, block: int) -> None:
        """512 bytes: a page of 4 tokens, 4 heads, K and V of 8 channels, 2 bytes each."""
        memory = Pages(nbytes_of(FULL, layout)).memory
        over(FULL, layout, memory, layer_stride=layer, block_stride=block)
        with pytest.raises(LayoutError, match=rf"buffer b: from layer to layer its owner has 77 bytes.* has {layer};"):
            over(FULL, layout, memory, layer_stride=77, block_stride=block)
        with pytest.raises(LayoutError, match=rf"from block to block its owner has {block * 2} bytes.* has {block};"):
            over(FULL, layout, memory, layer_stride=layer, block_stride=block * 2)

    def test_a_stride_of_an_axis_with_one_step_puts_nothing_anywhere(self) -> None:
        memory = Pages(nbytes_of(FULL, "vllm_lbhnc")).memory
        buffer = replace(foreign(FULL, "vllm_lbhnc", memory, layer_stride=77), layer_names=["layers.0"])
        assert len(KVCaches.over([group_of(FULL)], [buffer]).buffers) == 1

    def test_kernel_blocks_count_as_the_managers(self) -> None:
        memory = Pages(nbytes_of(FULL, "vllm_lbhnc")).memory
        over(FULL, "vllm_lbhnc", memory, block_stride=512, kernel_block_size=2)
        with pytest.raises(LayoutError, match=r"256 bytes.* has 512"):
            over(FULL, "vllm_lbhnc", memory, block_stride=256, kernel_block_size=2)

    def test_memory_that_is_too_small_or_begins_elsewhere(self) -> None:
        size = nbytes_of(FULL, "vllm_lbhnc")
        with pytest.raises(LayoutError, match=rf"takes {size} bytes from byte 0 on; its memory has {size - 1}"):
            over(FULL, "vllm_lbhnc", Pages(size - 1).memory)
        with pytest.raises(LayoutError, match=rf"takes {size} bytes from byte 2 on; its memory has {size}"):
            over(FULL, "vllm_lbhnc", Pages(size).memory, offset=2)
        with pytest.raises(LayoutError, match="from byte -2 on"):
            over(FULL, "vllm_lbhnc", Pages(size).memory, offset=-2)
        with pytest.raises(LayoutError, match="not at a multiple of its elements' 2 bytes"):
            over(FULL, "vllm_lbhnc", Pages(size + 1).memory, offset=1)
        with pytest.raises(LayoutError, match="not at a multiple of its elements' 4 bytes"):
            over(STATES, "mamba_sd", Pages(nbytes_of(STATES, "mamba_sd") + 2).memory, offset=2)

    def test_ranks_that_there_are_not(self) -> None:
        memory = Pages(nbytes_of(FULL, "vllm_lbhnc")).memory
        one = over(FULL, "vllm_lbhnc", memory, tp_size=2, tp_rank=1)
        assert (one.tp_ranks, one.tp_size) == (range(1, 2), 2)
        for others in ({"tp_size": 2, "tp_rank": 2}, {"tp_rank": 1}, {"tp_size": 2, "tp_rank": -1}):
            with pytest.raises(LayoutError, match="a cache has one for each rank of this process"):
                over(FULL, "vllm_lbhnc", memory, **others)
        with pytest.raises(CacheError, match="ranks of buffer b share bytes"):
            over(FULL, "vllm_lbhnc", [memory, memory], tp_size=2)

    def test_groups_that_are_not_there_or_do_not_fit(self) -> None:
        memory = Pages(nbytes_of(FULL, "vllm_lbhnc")).memory
        with pytest.raises(CacheError, match="buffer b is of group 'g', which is none of other"):
            KVCaches.over([group_of(FULL, name="other")], [foreign(FULL, "vllm_lbhnc", memory)])
        with pytest.raises(CacheError, match="buffer b has 6 blocks, group g 7"):
            KVCaches.over([group_of(FULL, 7)], [foreign(FULL, "vllm_lbhnc", memory)])

    def test_two_layers_of_one_name(self) -> None:
        spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="bfloat16")
        memory = torch.zeros(1 << 16, dtype=torch.uint8)
        buffer = ForeignBuffer("kv", "g", spec, "vllm_lbhnc", ["a", "b", "a"], 6, memory)
        with pytest.raises(CacheError, match="buffer kv has two layers of one name: a, b, a"):
            KVCaches.over([group_of(spec)], [buffer])
        assert not memory.any()

    def test_layouts_that_no_buffer_has(self) -> None:
        with pytest.raises(LayoutError, match="unknown layout 'vllm_magic'"):
            over(FULL, "vllm_magic", Pages(1 << 14).memory)
        with pytest.raises(LayoutError):
            over(FULL, "mla", Pages(1 << 14).memory)


@pytest.mark.gpu
def test_memory_of_a_gpu() -> None:
    """What the host's tests show, once more on a CUDA device: read, poisoned by block, probed."""
    theirs = torch.zeros(LAYERS, BLOCKS, HEADS, BLOCK, 2 * CHANNELS, dtype=torch.bfloat16, device="cuda")
    cache = over(FULL, "vllm_lbhnc", theirs)
    assert cache.device == theirs.device
    assert not theirs.any()

    def write(name: str, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
        page = theirs[int(name.rpartition(".")[2]), block]
        page[..., :CHANNELS], page[..., CHANNELS:] = key.transpose(0, 1), value.transpose(0, 1)

    cache.probe(write, 3)
    assert not theirs.any()
    with pytest.raises(LayoutError, match=r"K token 0 head 0 channel 0 .* holds what was written to .* V token 0"):
        cache.probe(lambda name, block, key, value: write(name, block, value, key), 3)
    cache.poison(0, np.array([0, 2]))
    assert theirs.view(torch.int16).ne(0).any(-1).any(-1).any(-1).any(0).tolist() == [i == 2 for i in range(BLOCKS)]
    assert cache.buffers[0].unpoisoned(torch.tensor([2], device="cuda")) == 0


class TestPoison:
    @pytest.mark.parametrize(("spec", "layout"), KINDS)
    def test_only_named_blocks_and_never_the_null_block(self, spec: KVCacheSpec, layout: str) -> None:
        pages = Pages(nbytes_of(spec, layout))
        cache = over(spec, layout, pages.memory)
        (buffer,) = cache.buffers
        others = [[buffer.read_block(layer, block) for layer in range(LAYERS)] for block in (0, 1, 2, 4)]
        cache.poison(0, np.array([0, 3, 5, 0]))
        assert buffer.unpoisoned(ids(3, 5)) == 0
        kept = [[buffer.read_block(layer, block) for layer in range(LAYERS)] for block in (0, 1, 2, 4)]
        for before, after in zip(others, kept, strict=True):
            for one, other in zip(before, after, strict=True):
                assert all(
                    torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True)
                )
        named = {at for at in pages.changed() if 0 <= at < pages.nbytes}
        assert named == pages.changed(), "a guard was written"
        assert len(named) <= 2 * LAYERS * buffer.layout.bytes_per_block

    @pytest.mark.parametrize(("cached", "kept"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (12, 3), (99, 3)])
    def test_a_requests_blocks_but_for_those_of_its_cached_beginning(self, cached: int, kept: int) -> None:
        """A block with a cached token may be another request's, too."""
        pages = Pages(nbytes_of(FULL, "vllm_lbhnc"))
        cache = over(FULL, "vllm_lbhnc", pages.memory)
        table = np.array([5, 2, 4])
        cache.poison_request([table], cached)
        page = 2 * HEADS * CHANNELS * 2 * BLOCK
        assert {at // page % BLOCKS for at in pages.changed()} == set(table[kept:].tolist())

    def test_a_requests_null_blocks_and_states(self) -> None:
        """A window has passed its first block; a state is written whole, whatever is cached."""
        pages = Pages(nbytes_of(FULL, "vllm_lbhnc"))
        over(FULL, "vllm_lbhnc", pages.memory).poison_request([np.array([0, 0, 4])], 0)
        page = 2 * HEADS * CHANNELS * 2 * BLOCK
        assert {at // page % BLOCKS for at in pages.changed()} == {4}
        pages = Pages(nbytes_of(STATES, "mamba_sd"))
        cache = over(STATES, "mamba_sd", pages.memory)
        cache.poison_request([np.array([2])], 8)
        assert cache.buffers[0].unpoisoned(ids(2)) == 0

    def test_everything_and_what_is_no_block_are_refused(self) -> None:
        pages = Pages(nbytes_of(FULL, "vllm_lbhnc"))
        cache = over(FULL, "vllm_lbhnc", pages.memory)
        (buffer,) = cache.buffers
        with pytest.raises(CacheError, match="only blocks that a request names are poisoned"):
            buffer.poison()
        for block in (-1, BLOCKS):
            with pytest.raises(CacheError, match=rf"block {block} is none of 1\.\.5"):
                cache.poison(0, np.array([2, block]))
        with pytest.raises(CacheError, match=r"block 0 is none of 1\.\.5"):
            buffer.poison(ids(0))
        cache.poison(0, np.array([0]))
        assert pages.changed() == set()

    def test_memory_of_its_own_is_poisoned_from_the_start(self) -> None:
        cache = owned(FULL, "vllm_lbhnc")
        assert cache.owned
        assert bool((cache.buffers[0].memory.view(torch.int16) == POISON).all())
