"""Buffers of every kind, their groups, and the pools that requests take blocks of."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdtx.cache import (
    POISON,
    CacheGroup,
    GroupAllocator,
    KVCaches,
    PagedBuffer,
    PagedKVCache,
    PagedLatentCache,
    PagedStateCache,
    group_kind,
    torch_dtype,
)
from pdtx.errors import CacheError, LayoutError, OutOfBlocks, ParallelError, StaleBlocks
from pdtx.kvspec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from pdtx.layout import ELEMENT_ORDERS, PARTED_ORDERS
from pdtx.plan.runs import Int64s

HEADS, KEY, VALUE, BLOCK, BLOCKS, LAYERS = 4, 8, 8, 4, 9, 2
DIFFERING = tuple(name for name in PARTED_ORDERS if name != "cpu_attn_lbhnc")
SHAPES = ((3, 10), (6, 5, 2))


def full(dtype: str = "bfloat16", value: int = VALUE, heads: int = HEADS) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=heads, head_size=KEY, head_size_v=value, dtype=dtype)


def key_values(
    layout: str, *, spec: FullAttentionSpec | None = None, tp_size: int = 1, kernel_block_size: int | None = None
) -> PagedKVCache:
    return PagedKVCache(
        spec or full(),
        layout=layout,
        num_layers=LAYERS,
        num_blocks=BLOCKS,
        tp_size=tp_size,
        kernel_block_size=kernel_block_size,
    )


def latent(layout: str = "mla", dtype: str = "bfloat16", tp_size: int = 1) -> PagedLatentCache:
    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=24, dtype=dtype)
    return PagedLatentCache(spec, layout=layout, num_layers=LAYERS, num_blocks=BLOCKS, tp_size=tp_size)


def states(layout: str = "mamba_sd", dtypes: tuple[str, ...] = ("bfloat16", "float32")) -> PagedStateCache:
    spec = MambaSpec(block_size=1, shapes=SHAPES, dtypes=dtypes)
    return PagedStateCache(spec, layout=layout, num_layers=LAYERS, num_blocks=BLOCKS)


def bits(*shape: int, dtype: str = "bfloat16", seed: int = 0) -> torch.Tensor:
    """Random bits as elements."""
    item = torch_dtype(dtype).itemsize
    found = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] * item), np.uint8)
    return torch.from_numpy(found).view(torch_dtype(dtype))


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def ids(*block_ids: int) -> torch.Tensor:
    return torch.tensor(block_ids, dtype=torch.int64)


TABLE = ids(7, 2, 5)


class TestKeysAndValues:
    @pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
    @pytest.mark.parametrize("layout", [*ELEMENT_ORDERS, *PARTED_ORDERS])
    def test_round_trip_in_every_layout_over_ranks(self, layout: str, tp_size: int) -> None:
        cache = key_values(layout, tp_size=tp_size)
        key, value = bits(11, HEADS, KEY, seed=1), bits(11, HEADS, VALUE, seed=2)
        cache.write(1, TABLE, 0, key[:5], value[:5])
        cache.write(1, TABLE, 5, key[5:], value[5:])
        found = cache.read(1, TABLE, 2, 11)
        assert same_bits(found[0], key[2:])
        assert same_bits(found[1], value[2:])
        assert torch.equal(cache.canonical(1, TABLE, 2, 11), torch.stack((key[2:], value[2:])).view(torch.uint8))
        assert cache.canonical(1, TABLE, 2, 11).shape == cache.rows_shape(9)
        assert cache.written_blocks().tolist() == [block in TABLE.tolist() for block in range(BLOCKS)]
        assert cache.unpoisoned(ids(0, 1, 3, 4, 6, 8)) == 0
        # The last block holds three of four tokens; every rank holds its share or a copy.
        copies = max(1, tp_size // HEADS)
        assert cache.unpoisoned(ids(5), from_position=2) == copies * 2 * HEADS * KEY
        assert cache.unpoisoned(ids(5), from_position=3) == 0

    @pytest.mark.parametrize("layout", DIFFERING)
    def test_value_heads_of_another_size(self, layout: str) -> None:
        cache = key_values(layout, spec=full(value=6))
        key, value = bits(9, HEADS, KEY, seed=1), bits(9, HEADS, 6, seed=2)
        cache.write(0, TABLE, 0, key, value)
        assert all(same_bits(*pair) for pair in zip(cache.read(0, TABLE, 0, 9), (key, value), strict=True))
        rows = cache.canonical(0, TABLE, 0, 9)
        assert rows.shape == cache.rows_shape(9) == (1, 9, HEADS, 2 * (KEY + 6))
        assert torch.equal(rows[0, 3, 1, : 2 * KEY], key[3, 1].view(torch.uint8))
        assert torch.equal(rows[0, 3, 1, 2 * KEY :], value[3, 1].view(torch.uint8))
        again = key_values(DIFFERING[0], spec=full(value=6))
        again.write_canonical(0, ids(1, 4, 3), 0, rows)
        assert torch.equal(again.canonical(0, ids(1, 4, 3), 0, 9), rows)

    @pytest.mark.parametrize("layout", ["flash_attn_nhd", "flashinfer_hnd", "cpu_attn_lbhnc"])
    def test_kernel_blocks_are_steps_inside_a_block(self, layout: str) -> None:
        split, whole = key_values(layout, kernel_block_size=2), key_values(layout)
        assert (split.block_size, split.layout.block_size, split.layout.blocks_per_manager_block) == (BLOCK, 2, 2)
        key, value = bits(7, HEADS, KEY, seed=1), bits(7, HEADS, VALUE, seed=2)
        for cache in (split, whole):
            cache.write(0, ids(6, 3), 1, key, value)
        assert torch.equal(split.canonical(0, ids(6, 3), 1, 8), whole.canonical(0, ids(6, 3), 1, 8))
        assert split.unpoisoned(ids(6)) == whole.unpoisoned(ids(6))
        assert split.unpoisoned(ids(3), from_position=3) == whole.unpoisoned(ids(3), from_position=3) > 0
        assert split.written_blocks().tolist() == whole.written_blocks().tolist()
        part = split.layout.parts[0]
        axes = part.layout.by_name
        assert axes["block"].extent == 2 * BLOCKS
        # Token 5 is place 1 of block 3, which is its first kernel block: step 6 of the block axis.
        start = part.offset + 6 * axes["block"].stride + 1 * axes["token"].stride
        assert torch.equal(split.memory[start : start + 2], key[4, 0, :1].view(torch.uint8))

    @pytest.mark.parametrize(
        "spec",
        [
            SlidingWindowSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=KEY, dtype="float16", sliding_window=6),
            ChunkedLocalAttentionSpec(
                block_size=BLOCK, num_kv_heads=HEADS, head_size=KEY, dtype="float16", attention_chunk_size=6
            ),
            SinkFullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=KEY, dtype="float16", sink_len=4),
            CrossAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=KEY, dtype="float16"),
        ],
    )
    def test_every_spec_of_keys_and_values(
        self, spec: SlidingWindowSpec | ChunkedLocalAttentionSpec | SinkFullAttentionSpec | CrossAttentionSpec
    ) -> None:
        cache = PagedKVCache(spec, layout="flashinfer_hnd", num_layers=1, num_blocks=BLOCKS)
        key, value = bits(9, HEADS, KEY, dtype="float16", seed=1), bits(9, HEADS, KEY, dtype="float16", seed=2)
        cache.write(0, TABLE, 0, key, value)
        assert all(same_bits(*pair) for pair in zip(cache.read(0, TABLE, 0, 9), (key, value), strict=True))

    def test_ranks_hold_their_heads_in_their_own_memory(self) -> None:
        cache = key_values("flash_attn_nhd", tp_size=2)
        key, value = bits(4, HEADS, KEY, seed=1), bits(4, HEADS, VALUE, seed=2)
        cache.write(0, ids(3), 0, key, value)
        alone = key_values("flash_attn_nhd", spec=full(heads=2))
        assert [rank.memory.numel() for rank in cache.ranks] == [alone.memory.numel()] * 2
        for rank, heads in enumerate((slice(0, 2), slice(2, 4))):
            alone.write(0, ids(3), 0, key[:, heads], value[:, heads])
            assert torch.equal(cache.ranks[rank].memory, alone.memory)

    def test_copies_that_differ_are_counted(self) -> None:
        cache = key_values("flash_attn_nhd", tp_size=8)
        cache.write(0, TABLE, 0, bits(11, HEADS, KEY), bits(11, HEADS, VALUE))
        assert cache.replicas_differ(0, TABLE, 0, 11) == 0
        cache.ranks[5].memory[: cache.layout.size_bytes] ^= 1
        # Rank 5 holds head 2, as rank 4 does: 11 tokens of keys and values.
        assert cache.replicas_differ(0, TABLE, 0, 11) == 2 * 11 * KEY
        assert cache.replicas_differ(0, TABLE, 3, 4) == 2 * KEY
        cache.ranks[5].memory.zero_()
        assert same_bits(cache.read(0, TABLE, 0, 11)[0], bits(11, HEADS, KEY)), "the first rank speaks for a head"

    def test_what_lies_before_is_not_read(self) -> None:
        """A table of a window holds the null block where it has forgotten."""
        cache = key_values("flashinfer_nhd")
        cache.write(0, ids(0, 0, 5), 9, bits(2, HEADS, KEY), bits(2, HEADS, VALUE))
        cache.memory.view(torch.int16)[cache.memory.view(torch.int16) == POISON] = 77
        assert same_bits(cache.read(0, ids(0, 0, 5), 9, 11)[0], bits(2, HEADS, KEY))

    def test_impossible(self) -> None:
        with pytest.raises(ParallelError, match="4 KV heads cannot be divided over tensor_parallel_size 3"):
            key_values("flash_attn_nhd", tp_size=3)
        with pytest.raises(LayoutError, match="head_size 8 and head_size_v 6 differ"):
            key_values("flash_attn_nhd", spec=full(value=6))
        with pytest.raises(LayoutError):
            key_values("mla")
        with pytest.raises(CacheError, match="2 layers and 1 names"):
            PagedKVCache(full(), layout="sglang", num_layers=2, num_blocks=3, layer_names=["one"])


class TestLatents:
    @pytest.mark.parametrize("tp_size", [1, 3])
    @pytest.mark.parametrize("layout", ["mla", "mla_lbhnc", "mla_blhnc", "deepseek_indexer"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_round_trip_on_every_rank(self, layout: str, dtype: str, tp_size: int) -> None:
        cache, rows = latent(layout, dtype, tp_size), bits(10, 24, dtype=dtype)
        cache.write(1, TABLE, 0, rows[:3])
        cache.write(1, TABLE, 3, rows[3:])
        assert same_bits(cache.read(1, TABLE, 1, 10), rows[1:])
        found = cache.canonical(1, TABLE, 1, 10)
        assert found.shape == cache.rows_shape(9)
        assert torch.equal(found[0, :, 0], rows[1:].view(torch.uint8))
        assert all(torch.equal(rank.memory, cache.memory) for rank in cache.ranks)
        assert cache.replicas_differ(1, TABLE, 0, 10) == 0
        cache.ranks[-1].memory[:] ^= 1
        assert cache.replicas_differ(1, TABLE, 0, 10) == (240 if tp_size > 1 else 0)
        other = latent(dtype=dtype)
        other.write_canonical(0, ids(1, 2, 3), 1, found)
        assert torch.equal(other.canonical(0, ids(1, 2, 3), 1, 10), found)

    def test_records_of_another_making_are_bytes(self) -> None:
        spec = MLAAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=576, dtype="uint8", cache_dtype_str="fp8_ds_mla"
        )
        cache = PagedLatentCache(spec, num_layers=1, num_blocks=4)
        assert (cache.channels, cache.itemsize) == (656, 1)
        cache.write(0, ids(3, 1), 2, bits(3, 656, dtype="uint8"))
        assert torch.equal(cache.read(0, ids(3, 1), 2, 5), bits(3, 656, dtype="uint8"))


class TestCompressedEntries:
    """One vector for every 2 tokens: a block of 4 tokens holds 2."""

    def cache(self, tp_size: int = 1, channels: int = 6, dtype: str = "float16", ratio: int = 2) -> PagedLatentCache:
        spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=channels, dtype=dtype, compress_ratio=ratio)
        return PagedLatentCache(spec, layout="mla", num_layers=LAYERS, num_blocks=BLOCKS, tp_size=tp_size)

    def test_entries_by_their_tokens(self) -> None:
        cache, rows = self.cache(tp_size=2), bits(5, 6, dtype="float16")
        cache.write(1, TABLE, 0, rows[:1])
        cache.write(1, TABLE, 2, rows[1:])
        assert same_bits(cache.read(1, TABLE, 2, 10), rows[1:])
        assert cache.rows_shape(3) == (1, 3, 1, 6)
        whole = cache.canonical(1, TABLE, 0, 10)
        assert torch.equal(whole[0, :, 0].reshape(5, 12), rows.view(torch.uint8))
        assert torch.equal(cache.canonical(1, TABLE, 3, 8), whole[:, 3:8])
        assert cache.replicas_differ(1, TABLE, 3, 8) == 0
        cache.ranks[1].memory[:] ^= 1
        assert cache.replicas_differ(1, TABLE, 3, 8) == 5 * 3
        other = self.cache()
        other.write_canonical(0, ids(1, 2, 3), 0, whole)
        assert torch.equal(other.canonical(0, ids(1, 2, 3), 0, 10), whole)
        assert other.unpoisoned(ids(3)) == 6
        assert other.unpoisoned(ids(3), from_position=1) == 0

    def test_tokens_inside_an_entry_are_refused(self) -> None:
        cache = self.cache()
        with pytest.raises(CacheError, match="token 3 lies inside a vector for 2 tokens"):
            cache.write(0, TABLE, 3, bits(1, 6, dtype="float16"))
        with pytest.raises(CacheError, match="token 5 lies inside"):
            cache.read(0, TABLE, 0, 5)
        with pytest.raises(CacheError, match=r"tokens 0\.\.14 do not fit"):
            cache.write(0, TABLE, 0, bits(7, 6, dtype="float16"))
        with pytest.raises(LayoutError, match="no equal share for each of 4 tokens"):
            self.cache(channels=7, dtype="int8", ratio=4)

    def test_whole_entries_are_shipped(self) -> None:
        cache = self.cache()
        one = CacheGroup("compressed2", "full", BLOCK, BLOCKS, cache.spec)
        assert one.positions(7) == range(6)
        assert [one.ready(7, *span) for span in ((0, 3), (3, 4), (4, 7))] == [range(2), range(2, 4), range(4, 6)]
        assert not one.ready(7, 6, 7)


class TestStates:
    def values(self, seed: int = 0, dtypes: Sequence[str] = ("bfloat16", "float32")) -> list[torch.Tensor]:
        return [
            bits(*shape, dtype=dtype, seed=seed + i)
            for i, (shape, dtype) in enumerate(zip(SHAPES, dtypes, strict=True))
        ]

    def test_round_trip_and_the_same_canonical_form_in_both_layouts(self) -> None:
        rows = []
        for layout in ("mamba_sd", "mamba_ds"):
            cache = states(layout)
            cache.write(1, 4, self.values())
            cache.write(1, 3, self.values(7))
            assert all(same_bits(*pair) for pair in zip(cache.read(1, 4), self.values(), strict=True))
            rows.append(cache.canonical(1, ids(4), 0, 1))
            assert rows[-1].shape == cache.rows_shape(1) == (1, 1, 1, 2 * 30 + 4 * 60)
            assert cache.written_blocks().nonzero().flatten().tolist() == [3, 4]
            assert cache.unpoisoned(ids(4)) == (2 * 30 + 4 * 60) // 2
            assert cache.unpoisoned(ids(4), from_position=1) == 0
        assert torch.equal(rows[0], rows[1])
        assert torch.equal(rows[0][0, 0, 0, :60], self.values()[0].view(torch.uint8).flatten())
        other = states("mamba_ds")
        other.write_canonical(0, ids(8), 0, rows[0])
        assert torch.equal(other.canonical(0, ids(8), 0, 1), rows[0])

    def test_channels_lie_together_in_sd_and_steps_in_ds(self) -> None:
        value = self.values()
        for layout, place in (("mamba_sd", 1 * 10 + 2), ("mamba_ds", 2 * 3 + 1)):
            cache = states(layout)
            cache.write(0, 4, value)
            start = 4 * cache.spec.page_size_bytes + 2 * place
            assert torch.equal(cache.memory[start : start + 2], value[0][1, 2:3].view(torch.uint8))

    def test_other_shapes_and_types_are_refused(self) -> None:
        cache = states()
        with pytest.raises(CacheError, match=r"states of shapes \(\(10, 3\)"):
            cache.write(0, 1, [self.values()[0].T, self.values()[1]])
        with pytest.raises(CacheError, match="types"):
            cache.write(0, 1, [self.values()[0].float(), self.values()[1]])
        with pytest.raises(CacheError, match="do not fit"):
            cache.canonical(0, ids(), 0, 1)


def test_bytes_that_make_no_words_are_poisoned_too() -> None:
    """Seven channels of one byte: where a head begins at an odd address, poison begins with its other byte."""
    spec = FullAttentionSpec(block_size=3, num_kv_heads=3, head_size=7, dtype="int8")
    cache = PagedKVCache(spec, layout="flash_attn_nhd", num_layers=1, num_blocks=3)
    assert cache.unpoisoned(torch.arange(3)) == 0
    cache.write(0, ids(2), 0, torch.zeros(2, 3, 7, dtype=torch.int8), torch.zeros(2, 3, 7, dtype=torch.int8))
    assert cache.unpoisoned(ids(2)) == 2 * 2 * 3 * 7
    assert cache.unpoisoned(ids(2), from_position=1) == 2 * 3 * 7
    assert cache.written_blocks().tolist() == [False, False, True]
    cache.poison(ids(2))
    assert cache.unpoisoned(torch.arange(3)) == 0
    fresh = PagedKVCache(spec, layout="flash_attn_nhd", num_layers=1, num_blocks=3)
    assert torch.equal(cache.memory, fresh.memory)


def group(kind: str, **changes: int) -> CacheGroup:
    sizes: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
    specs: dict[str, Callable[[], KVCacheSpec]] = {
        "full": lambda: FullAttentionSpec(**sizes),
        "window": lambda: SlidingWindowSpec(**sizes, sliding_window=changes.get("size", 6)),
        "chunk": lambda: ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=changes.get("size", 6)),
        "state": lambda: MambaSpec(block_size=1, shapes=SHAPES, dtypes=("float32", "float32")),
        "cross": lambda: CrossAttentionSpec(**sizes),
    }
    spec = specs[kind]()
    block_size = 1 if kind == "state" else BLOCK
    return CacheGroup(kind, group_kind(spec), block_size, BLOCKS, spec, 10 if kind == "cross" else 0)


KINDS = ("full", "window", "chunk", "state", "cross")


class TestGroups:
    @pytest.mark.parametrize(
        ("kind", "positions"),
        [
            ("full", range(20)),
            ("window", range(15, 20)),
            ("chunk", range(18, 20)),
            ("state", range(1)),
            ("cross", range(10)),
        ],
    )
    def test_what_a_decoder_needs(self, kind: str, positions: range) -> None:
        assert group(kind).positions(20) == positions

    @given(st.sampled_from(KINDS), st.integers(1, 40), st.integers(1, 9), st.lists(st.integers(0, 40)))
    def test_chunks_make_up_what_is_needed(self, kind: str, tokens: int, size: int, cuts: list[int]) -> None:
        one = group(kind, size=size)
        edges = sorted({0, tokens, *(cut for cut in cuts if cut < tokens)})
        shipped = [p for start, stop in pairwise(edges) for p in one.ready(tokens, start, stop)]
        assert shipped == list(one.positions(tokens))

    def test_blocks_of_a_table(self) -> None:
        assert group("full").table_blocks(9) == range(3)
        assert group("window").table_blocks(20, first_position=15) == range(3, 5)
        assert group("state").table_blocks(999) == range(1)
        assert group("cross").table_blocks(1) == range(3)
        # A prompt that ends with its chunk needs nothing of it, and a block for what comes.
        chunk = group("chunk")
        assert chunk.table_blocks(14, chunk.positions(12).start) == range(3, 4)

    @pytest.mark.parametrize("kind", ["full", "window", "chunk"])
    def test_a_pass_reads_what_was_shipped_and_nothing_before(self, kind: str) -> None:
        one = group(kind)
        for tokens in range(1, 30):
            assert one.first_read(tokens) == one.positions(tokens).start

    def test_caches(self) -> None:
        first, second = key_values("flash_attn_nhd"), states()
        caches = KVCaches([group("full"), group("state")], [(0, first), (1, second)])
        assert (first.group, second.group, caches.tp_size) == (0, 1, 1)
        assert caches.buffer("state") is second
        assert caches.nbytes == first.memory.numel() + second.memory.numel()
        with pytest.raises(CacheError, match="no buffer 'window'; one of full, state"):
            caches.buffer("window")
        with pytest.raises(CacheError, match="buffer state has 1 positions in a block, group full 4"):
            KVCaches([group("full")], [(0, second)])
        with pytest.raises(CacheError, match="two buffers have one name"):
            KVCaches([group("full")], [(0, first), (0, key_values("sglang"))])

    @pytest.mark.parametrize(
        ("make", "kind"),
        [(lambda: key_values("sglang"), "full"), (latent, "full"), (states, "state")],
    )
    def test_a_single_buffer(self, make: Callable[[], PagedBuffer], kind: str) -> None:
        cache = make()
        (one,) = KVCaches.single(cache).groups
        assert (one.kind, one.name, one.block_size, one.num_blocks) == (kind, cache.name, cache.block_size, BLOCKS)


class TestGroupAllocator:
    def test_all_or_nothing(self) -> None:
        pools = GroupAllocator({"full": 5, "state": 3})
        taken = pools.allocate([2, 1])
        assert [len(blocks) for blocks in taken.groups] == [2, 1]
        assert len(taken) == 3
        with pytest.raises(OutOfBlocks, match="group state: 2 blocks asked for, 1 of 2 are free"):
            pools.allocate([1, 2])
        assert pools.num_free == (2, 1)
        assert pools.fits([2, 1])
        assert not pools.fits([3, 0])
        pools.check(taken)
        pools.free(taken)
        assert pools.num_free == (4, 2)
        with pytest.raises(StaleBlocks):
            pools.free(taken)
        with pytest.raises(OutOfBlocks, match="group full: 5 blocks needed, its pool has 4"):
            pools.check_possible([5, 1])

    def test_a_group_that_is_stale_keeps_all_groups_as_they_are(self) -> None:
        pools = GroupAllocator({"full": 5, "state": 3})
        taken = pools.allocate([2, 1])
        pools.pools[1].free(taken.groups[1])
        for use in (pools.check, pools.free, pools.hold):
            with pytest.raises(StaleBlocks):
                use(taken)
        assert pools.num_free == (2, 2)

    def test_holds_and_what_returns(self) -> None:
        returned = list[tuple[int, list[int]]]()

        def on_free(at: int, block_ids: Int64s) -> None:
            returned.append((at, block_ids.tolist()))

        pools = GroupAllocator({"full": 5, "state": 3}, on_free)
        before = pools.free_blocks()
        taken = pools.allocate([2, 1])
        assert [len(own) for own in pools.untouched(before)] == [2, 1]
        pools.hold(taken)
        pools.free(taken)
        assert (pools.num_free, returned) == ((2, 1), [])
        pools.unhold(taken)
        assert pools.num_free == (4, 2)
        assert returned == [(0, taken.groups[0].ids.tolist()), (1, taken.groups[1].ids.tolist())]
