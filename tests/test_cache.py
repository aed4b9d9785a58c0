import numpy as np
import pytest
import torch

from pdtx.cache import POISON, PagedKVCache, open_device, record_fence, torch_dtype
from pdtx.errors import CacheError, InputError, LayoutError, SpecError
from pdtx.kvspec import FullAttentionSpec
from pdtx.layout import LAYOUT_ORDERS

PRESETS = tuple(LAYOUT_ORDERS)
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")
HEADS, CHANNELS, BLOCK = 3, 8, 4


def make(layout: str = "flash_attn_nhd", dtype: str = "bfloat16", *, num_blocks: int = 9) -> PagedKVCache:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=CHANNELS, dtype=dtype)
    return PagedKVCache(spec, layout=layout, num_layers=2, num_blocks=num_blocks)


def values(dtype: str, tokens: int, seed: int = 0) -> torch.Tensor:
    """Random bits as elements: shape (tokens, heads, channels)."""
    itemsize = torch_dtype(dtype).itemsize
    bits = np.random.default_rng(seed).integers(0, 256, (tokens, HEADS, CHANNELS * itemsize), np.uint8)
    return torch.from_numpy(bits).view(torch_dtype(dtype))


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def ids(*block_ids: int) -> torch.Tensor:
    return torch.tensor(block_ids, dtype=torch.int64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", PRESETS)
class TestWriteAndRead:
    """What is written is read back bit for bit, through any layout."""

    def test_round_trip_over_shuffled_blocks(self, layout: str, dtype: str) -> None:
        cache, blocks = make(layout, dtype), ids(7, 2, 5)
        for layer in range(2):
            key, value = values(dtype, 11, layer), values(dtype, 11, layer + 10)
            cache.write(layer, blocks, 0, key, value)
        for layer in range(2):
            key, value = cache.read(layer, blocks, 0, 11)
            assert same_bits(key, values(dtype, 11, layer))
            assert same_bits(value, values(dtype, 11, layer + 10))
            assert key.is_contiguous()

    def test_in_pieces_equals_at_once(self, layout: str, dtype: str) -> None:
        key, value = values(dtype, 11, 1), values(dtype, 11, 2)
        whole, pieces, blocks = make(layout, dtype), make(layout, dtype), ids(3, 8, 1)
        whole.write(1, blocks, 0, key, value)
        for start, stop in ((0, 1), (1, 4), (4, 9), (9, 11)):
            pieces.write(1, blocks, start, key[start:stop], value[start:stop])
        assert torch.equal(whole.memory, pieces.memory)

    def test_view_shows_the_blocks(self, layout: str, dtype: str) -> None:
        cache, key, value = make(layout, dtype), values(dtype, 8, 1), values(dtype, 8, 2)
        cache.write(1, ids(6, 2), 0, key, value)
        view = cache.view(1)
        assert view.shape == (2, 9, BLOCK, HEADS, CHANNELS)
        assert same_bits(view[0, 6], key[:BLOCK])
        assert same_bits(view[1, 2], value[BLOCK:])

    def test_canonical_is_the_same_in_all_layouts(self, layout: str, dtype: str) -> None:
        key, value = values(dtype, 9, 1), values(dtype, 9, 2)
        rows = []
        for cache, blocks in ((make(layout, dtype), ids(6, 2, 4)), (make("flash_attn_nhd", dtype), ids(1, 5, 0))):
            cache.write(0, blocks, 0, key, value)
            rows.append(cache.canonical(0, blocks, 2, 9))
        itemsize = torch_dtype(dtype).itemsize
        assert rows[0].shape == (2, 7, HEADS, CHANNELS * itemsize)
        assert rows[0].dtype == torch.uint8
        assert torch.equal(rows[0], rows[1])
        assert torch.equal(rows[0], torch.stack((key[2:], value[2:])).view(torch.uint8))

    def test_an_element_lies_where_the_layout_says(self, layout: str, dtype: str) -> None:
        """By the layout's strides alone, in the raw memory: what a mover will read."""
        cache = make(layout, dtype)
        value = values(dtype, 1)
        cache.write(1, ids(4, 7), 5, values(dtype, 1, 9), value)
        at = {"layer": 1, "kv": 1, "block": 7, "token": 1, "head": 2, "channel": 3}
        (part,) = cache.layout.parts
        start = sum(part.layout.stride(axis) * step for axis, step in at.items())
        found = cache.memory[start : start + cache.itemsize]
        assert torch.equal(found, value[0, 2, 3:4].view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", PRESETS)
class TestPoison:
    def test_a_new_cache_is_poisoned(self, layout: str, dtype: str) -> None:
        cache = make(layout, dtype)
        assert set(cache.memory.view(torch.int16).tolist()) == {POISON}
        assert cache.memory[:2].tolist() == [0xAD, 0xDE]
        assert cache.unpoisoned(torch.arange(9)) == 0

    def test_counts_the_words_that_were_written(self, layout: str, dtype: str) -> None:
        cache, blocks = make(layout, dtype), ids(7, 2)
        zeros = torch.zeros(5, HEADS, CHANNELS).to(torch_dtype(dtype))
        cache.write(1, blocks, 0, zeros, zeros)
        words_per_token = 2 * HEADS * CHANNELS * cache.itemsize // 2
        assert cache.unpoisoned(blocks) == 5 * words_per_token
        assert cache.unpoisoned(ids(7)) == 4 * words_per_token
        assert cache.unpoisoned(ids(2)) == words_per_token
        assert cache.unpoisoned(ids(2), from_position=1) == 0
        assert cache.unpoisoned(ids(0, 1, 3, 4, 5, 6, 8)) == 0

    def test_poisons_the_blocks_asked_for_only(self, layout: str, dtype: str) -> None:
        cache = make(layout, dtype)
        cache.memory.zero_()
        cache.poison(ids(7, 2))
        assert cache.unpoisoned(ids(2, 7)) == 0
        assert cache.unpoisoned(ids(3)) == 2 * cache.spec.page_size_bytes // 2
        poisoned = int((cache.memory.view(torch.int16) == POISON).sum())
        assert poisoned == 2 * 2 * cache.spec.page_size_bytes // 2
        cache.poison()
        assert cache.unpoisoned(torch.arange(9)) == 0


def test_refuses_tokens_beyond_the_blocks() -> None:
    cache = make()
    with pytest.raises(CacheError, match=r"tokens 7\.\.9 do not fit into 2 blocks of 4 tokens"):
        cache.write(0, ids(1, 2), 7, values("bfloat16", 2), values("bfloat16", 2))
    with pytest.raises(CacheError, match=r"tokens 0\.\.9 do not fit"):
        cache.read(0, ids(1, 2), 0, 9)
    assert cache.unpoisoned(torch.arange(9)) == 0


def test_no_tokens_are_fine() -> None:
    cache = make()
    nothing = values("bfloat16", 1)[:0]
    cache.write(0, ids(1), 3, nothing, nothing)
    key, value = cache.read(0, ids(), 0, 0)
    assert key.shape == value.shape == (0, HEADS, CHANNELS)
    assert cache.canonical(0, ids(1), 2, 2).shape == (2, 0, HEADS, 2 * CHANNELS)


def test_memory_is_one_region_that_starts_on_a_page() -> None:
    cache = make()
    assert cache.memory.data_ptr() % 4096 == 0
    assert (cache.memory.dtype, cache.memory.numel()) == (torch.uint8, cache.layout.size_bytes)
    assert cache.memory.numel() == 2 * 9 * cache.spec.page_size_bytes


def test_refuses_what_cannot_be() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float16")
    with pytest.raises(LayoutError, match="unknown layout"):
        PagedKVCache(spec, layout="nhd", num_layers=1, num_blocks=4)
    with pytest.raises(InputError, match=r"device 'abacus' cannot be used"):
        PagedKVCache(spec, layout="flash_attn_nhd", num_layers=1, num_blocks=4, device="abacus")
    with pytest.raises(InputError, match=r"no memory for a cache of \d+ bytes on cpu"):
        PagedKVCache(spec, layout="flash_attn_nhd", num_layers=1, num_blocks=1 << 55)
    with pytest.raises(SpecError, match="unknown dtype"):
        torch_dtype("float12")


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_and_the_spec_agree_on_element_sizes(dtype: str) -> None:
    assert (
        torch_dtype(dtype).itemsize
        == FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=1, dtype=dtype).page_size_bytes // 2
    )


def test_a_fence_on_the_cpu_waits_for_nothing() -> None:
    record_fence(open_device("cpu"))()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", PRESETS)
def test_round_trip_on_a_gpu(layout: str) -> None:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=CHANNELS, dtype="bfloat16")
    cache = PagedKVCache(spec, layout=layout, num_layers=2, num_blocks=9, device="cuda")
    blocks, key, value = ids(7, 2, 5).cuda(), values("bfloat16", 11, 1), values("bfloat16", 11, 2)
    cache.write(1, blocks, 0, key.cuda(), value.cuda())
    record_fence(cache.device)()
    assert torch.equal(cache.canonical(1, blocks, 0, 11), torch.stack((key, value)).view(torch.uint8))
