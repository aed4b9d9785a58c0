"""Caches over memory that others have allocated: what is refused, what is read, and that nothing else is written."""

import gc
import mmap
import resource
import weakref
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdtx import kvspec
from pdtx.cache import (
    POISON,
    BufferShape,
    CacheGroup,
    ForeignBuffer,
    KVCaches,
    Memory,
    PagedBuffer,
    PagedKVCache,
    PagedLatentCache,
    PagedStateCache,
    group_kind,
)
from pdtx.cache.foreign import AnyMemory
from pdtx.engine.registering import regions_of, register_cache, unions
from pdtx.errors import CacheError, LayoutError
from pdtx.kvspec import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec
from pdtx.layout import ELEMENT_ORDERS, PARTED_ORDERS, STATE_ORDERS, any_layout
from pdtx.transports import Region, Registration, make_mover
from tests.engine_pair import WrappedMover
from tests.foreign_scenes import NAMES, Pages, hybrid_bytes, hybrid_groups, hybrid_over, hybrid_specs
from tests.vectors import Case, load_cases

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


def group_of(spec: KVCacheSpec, num_blocks: int = BLOCKS, name: str = "g") -> CacheGroup:
    kind = group_kind(spec)
    return CacheGroup(name, kind, 1 if kind == "state" else spec.block_size, num_blocks, spec)


def nbytes_of(spec: KVCacheSpec, layout: str) -> int:
    return any_layout(layout, spec, num_layers=LAYERS, num_blocks=BLOCKS).size_bytes


def foreign(spec: KVCacheSpec, layout: str, memory: Given, **others: Any) -> ForeignBuffer:  # noqa: ANN401
    return ForeignBuffer("b", "g", spec, layout, [f"layers.{i}" for i in range(LAYERS)], BLOCKS, memory, **others)


def over(spec: KVCacheSpec, layout: str, memory: Given, **others: Any) -> KVCaches:  # noqa: ANN401
    return KVCaches.over([group_of(spec)], [foreign(spec, layout, memory, **others)])


def owned(spec: KVCacheSpec, layout: str) -> KVCaches:
    shape = BufferShape("b", "g", spec, layout, [f"layers.{i}" for i in range(LAYERS)], BLOCKS)
    return KVCaches.allocate([group_of(spec)], [shape])


def ids(*block_ids: int) -> torch.Tensor:
    return torch.tensor(block_ids, dtype=torch.int64)


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

    def test_ranks_that_are_not_all_here(self) -> None:
        memory = Pages(nbytes_of(FULL, "vllm_lbhnc")).memory
        for others in ({"tp_size": 2}, {"tp_size": 2, "tp_rank": 1}, {"tp_rank": 1}):
            with pytest.raises(LayoutError, match="a cache needs the memory of every rank, one each, from rank 0 on"):
                over(FULL, "vllm_lbhnc", memory, **others)
        with pytest.raises(CacheError, match="ranks of buffer b share bytes"):
            over(FULL, "vllm_lbhnc", [memory, memory], tp_size=2)

    def test_groups_that_are_not_there_or_do_not_fit(self) -> None:
        memory = Pages(nbytes_of(FULL, "vllm_lbhnc")).memory
        with pytest.raises(CacheError, match="buffer b is of group 'g', which is none of other"):
            KVCaches.over([group_of(FULL, name="other")], [foreign(FULL, "vllm_lbhnc", memory)])
        with pytest.raises(CacheError, match="buffer b has 6 blocks, group g 7"):
            KVCaches.over([group_of(FULL, 7)], [foreign(FULL, "vllm_lbhnc", memory)])

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


class Registering(WrappedMover):
    """A mover that registers memory, and says so."""

    def __init__(self) -> None:
        super().__init__(make_mover("inproc"), lambda connection: connection)
        self.regions = list[Region]()

    def register(self, region: Region) -> Registration | None:
        self.regions.append(region)
        return Registration(region.nbytes, 0.0)


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


# -- pools of vLLM 0.32 ------------------------------------------------------------------------------------------------


def spec_032(case: Case) -> KVCacheSpec:
    """A spec of vLLM 0.32 by the fields that both versions have."""
    cls = getattr(kvspec, case["spec_class"])
    given = case["fields"]
    known = {field.name for field in fields(cls)}
    mine = {name: value for name, value in given.items() if name in known and name != "mamba_type"}
    if "shapes" in mine:
        mine |= {"shapes": tuple(map(tuple, mine["shapes"])), "dtypes": tuple(mine["dtypes"])}
    if cls is MLAAttentionSpec:
        mine = {
            name: value
            for name, value in mine.items()
            if name in ("block_size", "num_kv_heads", "head_size", "dtype", "page_size_padded", "cache_dtype_str")
        }
    made: KVCacheSpec = cls(**mine)
    return made


def layout_032(spec: KVCacheSpec, name: str, order: str) -> str:
    if isinstance(spec, MambaSpec):
        return "mamba_sd"
    if isinstance(spec, MLAAttentionSpec):
        return f"{'deepseek_indexer' if 'indexer' in name else 'mla'}_{order}"
    return f"vllm_{order}"


def caches_032(case: Case, memory: Memory) -> KVCaches:
    """A worker's groups and tensors, as vLLM has planned them."""
    worker = case["workers"][0]
    order = case["settings"].get("kv_cache_layout", "LBHNC").lower()
    if "layout" in case["name"]:
        order = case["name"].rpartition(" ")[2].lower()
    specs = [spec_032(spec) for spec in case["distinct_specs"]]
    of_layer = {name: specs[at] for name, at in case["layer_to_spec_index_per_worker"][0].items()}
    for group in worker["groups"]:
        if group["spec"]["spec_class"] != "UniformTypeKVCacheSpecs":
            of_layer |= dict.fromkeys(group["layer_names"], spec_032(group["spec"]))
    groups, buffers = list[CacheGroup](), list[ForeignBuffer]()
    for index, group in enumerate(worker["groups"]):
        name, spec = f"group{index}", of_layer[group["layer_names"][0]]
        size = 1 if isinstance(spec, MambaSpec) else spec.block_size
        groups.append(CacheGroup(name, group_kind(spec), size, worker["num_blocks"], spec, pool="one"))
        for at, tensor in enumerate(worker["tensors"]):
            if tensor["layers"][0] in group["layer_names"]:
                own = of_layer[tensor["layers"][0]]
                buffers.append(
                    ForeignBuffer(
                        f"{name}.{at}",
                        name,
                        own,
                        layout_032(own, tensor["layers"][0], order),
                        tensor["layers"],
                        worker["num_blocks"],
                        memory,
                        layer_stride=tensor["layer_stride_bytes"],
                        block_stride=tensor["block_stride_bytes"],
                        offset=tensor["offset_bytes"],
                    )
                )
    assert len(buffers) == len(worker["tensors"])
    return KVCaches.over(groups, buffers)


def untouched_memory(nbytes: int) -> Memory:
    """So many bytes of addresses, of which no page exists until somebody touches it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which mmap has since Python 3.12
    pages = mmap.mmap(-1, nbytes, flags=flags)
    array = np.frombuffer(pages, np.uint8)
    return Memory.at(array.ctypes.data, nbytes, keep=array)


def test_vector_pools_of_vllm_in_one_memory() -> None:
    """Every pool of several tensors: tens of GiB in one memory, of which not one page comes to be."""
    counted, refused = 0, list[str]()
    for case in load_cases("pools_0.32.json"):
        if "workers" not in case or len(case["workers"][0]["tensors"]) < 2:
            continue
        if "DeepSeek-V4" in case["name"]:  # pages of several sizes in each block: no preset has such a stride
            continue
        tensors = case["workers"][0]["tensors"]
        size = tensors[0]["backing_allocation_size_bytes"]
        memory = untouched_memory(size)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            cache = caches_032(case, memory)
        except LayoutError as error:
            # A block that holds other buffers' pages beside the layout's own: not a stride that a preset has.
            refused.append(f"{case['case_id']}: {error}")
            continue
        assert cache.nbytes == size, case["case_id"]
        if all(tensor["offset_bytes"] == 0 for tensor in tensors):
            assert len({id(region) for ranks in regions_of(cache) for region in ranks}) == 1
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "memory came to be"
        counted += 1
    assert counted >= 20
    (only,) = refused  # with all layers in one buffer; see below
    assert only.startswith("pool-095: buffer group0.0: from block to block its owner has 3076352 bytes")


def test_vector_pool_whose_blocks_hold_the_pages_of_several_buffers() -> None:
    """DeepSeek V3.2 in BLNHC: a buffer for each layer, whose pages are padded to the whole block."""
    (case,) = (case for case in load_cases("pools_0.32.json") if case["case_id"] == "pool-095")
    worker = case["workers"][0]
    specs = [spec_032(spec) for spec in case["distinct_specs"]]
    of_layer = case["layer_to_spec_index_per_worker"][0]
    size = worker["tensors"][0]["backing_allocation_size_bytes"]
    memory, buffers = untouched_memory(size), list[ForeignBuffer]()
    for tensor in worker["tensors"]:
        for at, name in enumerate(tensor["layers"]):
            block, spec = tensor["block_stride_bytes"], specs[of_layer[name]]
            assert isinstance(spec, MLAAttentionSpec)
            padded: KVCacheSpec = replace(spec, page_size_padded=block)
            offset, layout = tensor["offset_bytes"] + at * tensor["layer_stride_bytes"], layout_032(spec, name, "blnhc")
            buffers.append(
                ForeignBuffer(
                    name, "g", padded, layout, [name], worker["num_blocks"], memory, block_stride=block, offset=offset
                )
            )
    cache = KVCaches.over([group_of(specs[0], worker["num_blocks"])], buffers)
    assert len(cache.buffers) == 122
    assert cache.nbytes == size
    mover = Registering()
    assert register_cache(mover, cache).nbytes == size
    assert [(region.address, region.nbytes) for region in mover.regions] == [(memory.bytes.data_ptr(), size)]
