"""Keys: chained, equal everywhere, and never those of other tokens, sizes or caches."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from pdtx.cache import CacheGroup, KVCaches, PagedKVCache
from pdtx.errors import TierError
from pdtx.kvspec import FullAttentionSpec
from pdtx.tiers import fingerprint_of, prefix_keys

TOKENS = st.lists(st.integers(0, 5), max_size=40)


def test_keys_by_hand() -> None:
    ids = [1, 2, 3, 4, 5, (1 << 32) - 1, 7]
    start = b"print" + (3).to_bytes(8, "little")
    blocks = [np.array(block, "<u4").tobytes() for block in (ids[:3], ids[3:6])]
    first = blake3(blake3(start).digest() + blocks[0]).digest()
    before = xxhash.xxh3_128(start).digest()
    keys = prefix_keys(ids, 3, b"print")
    assert keys.digests == (first, blake3(first + blocks[1]).digest())
    assert keys.proofs == (blocks[0] + before, blocks[1] + xxhash.xxh3_128(before + blocks[0]).digest())
    assert len(keys) == 2
    assert keys.block_tokens == 3


@given(TOKENS, TOKENS, st.sampled_from([1, 2, 3, 16]))
def test_blocks_have_one_key_just_where_all_tokens_up_to_their_end_are_one(
    one: list[int], other: list[int], size: int
) -> None:
    keys = [prefix_keys(ids, size, b"f") for ids in (one, other)]
    assert [len(each) for each in keys] == [len(one) // size, len(other) // size]
    for block, names in enumerate(zip(*(each.digests for each in keys), strict=False)):
        same = one[: (block + 1) * size] == other[: (block + 1) * size]
        assert (names[0] == names[1]) is same
        assert (keys[0].proofs[block] == keys[1].proofs[block]) is same


def test_fingerprint_and_block_size_are_part_of_every_key() -> None:
    plain = set(prefix_keys([1] * 32, 16, b"f").digests)
    assert not plain & set(prefix_keys([1] * 32, 16, b"g").digests)
    assert not plain & set(prefix_keys([1] * 32, 8, b"f").digests)
    assert not plain & set(prefix_keys([1] * 32, 32, b"f").digests)


def test_any_sequence_of_whole_numbers_has_the_same_keys() -> None:
    ids = list(range(100, 164))
    expected = prefix_keys(ids, 16, b"f")
    for form in (tuple(ids), np.array(ids), np.array(ids, np.uint32), np.array(ids, np.int16), np.array(ids, ">i8")):
        assert prefix_keys(form, 16, b"f") == expected


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 1, -1, 2], r"token 2 has the id -1"),
        ([0, 1 << 32, 1, 2], r"token 1 has the id 4294967296"),
        ([0, 1, 1 << 64, 2], "whole numbers|less than"),
        ([0, 1, 2, (1 << 64) - 1], "less than"),
        ([0, 1.5, 1, 2], "whole numbers"),
        (["a", "b", "c", "d"], "whole numbers"),
    ],
)
def test_ids_that_are_no_uint32_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(TierError, match=message):
        prefix_keys(ids, 2, b"f")


def test_what_is_in_no_whole_block_is_not_looked_at() -> None:
    assert len(prefix_keys([1, 2, -1], 2, b"f")) == 1
    assert len(prefix_keys([], 2, b"f")) == len(prefix_keys([1], 2, b"f")) == 0


@pytest.mark.parametrize("size", [0, -1])
def test_blocks_without_tokens_are_refused(size: int) -> None:
    with pytest.raises(TierError, match="use 1 or more"):
        prefix_keys([1], size, b"f")


_IN_ANOTHER_PROCESS = """
from tests.test_tier_keys import cache
from pdtx.tiers import fingerprint_of, prefix_keys
print(b"".join(prefix_keys(range(64), 16, fingerprint_of(cache(), model="m")).digests).hex())
"""


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_keys_are_the_same_in_every_process(seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", _IN_ANOTHER_PROCESS]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    ours = prefix_keys(range(64), 16, fingerprint_of(cache(), model="m"))
    assert ran.stdout.strip() == b"".join(ours.digests).hex()


SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=4, dtype="bfloat16")


def cache(
    spec: FullAttentionSpec = SPEC,
    *,
    layout: str = "flash_attn_nhd",
    group: str = "full",
    buffer: str = "full",
    layers: tuple[str, ...] = ("layers.0", "layers.1"),
    tp_size: int = 1,
    num_blocks: int = 4,
) -> KVCaches:
    made = PagedKVCache(
        spec,
        layout=layout,
        num_layers=len(layers),
        num_blocks=num_blocks,
        name=buffer,
        layer_names=layers,
        tp_size=tp_size,
    )
    return KVCaches([CacheGroup(group, "full", spec.block_size, num_blocks, spec)], [(0, made)])


def test_the_fingerprint_tells_what_is_kept_and_not_how_it_lies() -> None:
    plain = fingerprint_of(cache(), model="m")
    assert len(plain) == 32
    for same in (
        cache(layout="flashinfer_hnd"),
        cache(tp_size=2),
        cache(num_blocks=7),
        cache(replace(SPEC, block_size=32)),
        cache(replace(SPEC, page_size_padded=1024), layout="flashinfer_nhd"),
    ):
        assert fingerprint_of(same, model="m") == plain
    for other in (
        cache(group="other"),
        cache(buffer="other"),
        cache(layers=("layers.0", "layers.2")),
        cache(layers=("layers.0",)),
        cache(replace(SPEC, num_kv_heads=4)),
        cache(replace(SPEC, head_size=8, head_size_v=8)),
        cache(replace(SPEC, dtype="float16")),
        cache(replace(SPEC, sliding_window=16)),
    ):
        assert fingerprint_of(other, model="m") != plain
    assert fingerprint_of(cache(), model="other") != plain


def test_keys_of_a_long_prompt_take_milliseconds() -> None:
    ids = list(range(8192 * 16))
    best = 1.0
    for _ in range(3):
        begun = time.perf_counter()
        prefix_keys(ids, 16, b"f")
        best = min(best, time.perf_counter() - begun)
    assert best < 0.2, f"{best * 1e3:.1f} ms for 8,192 blocks; usually less than 20"
