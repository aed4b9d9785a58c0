"""Caches, keys and contents for the tests of tiers: block k of the contents belongs to key k."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pdtx.cache import KVCaches, PagedBuffer, PagedKVCache, record_fence
from pdtx.cache.verify import Verification
from pdtx.kvspec import FullAttentionSpec
from pdtx.plan.runs import Int64s
from pdtx.testing.codes import check_codes, codes_for, fill_codes
from pdtx.tiers import CpuTier, Held, PrefixKeys, Side, prefix_keys, tier_caches
from pdtx.tiers.copies import Copier
from pdtx.tiers.cpu import CopierFactory
from pdtx.tiers.geometry import block_nbytes
from pdtx.tiers.keys import Hash, strong_digest

BLOCK = 16
FINGERPRINT = b"f" * 32
SECONDS = 20.0
"""Deadline of every wait."""
KEPT = Held.BY_CALLER
"""The tests' caches have no pools."""
FENCE = record_fence(torch.device("cpu"))


def full(
    num_blocks: int, layout: str = "flash_attn_nhd", block_size: int = BLOCK, *, tp_size: int = 1, layers: int = 2
) -> PagedKVCache:
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=4, dtype="bfloat16")
    return PagedKVCache(spec, layout=layout, num_layers=layers, num_blocks=num_blocks, tp_size=tp_size)


def one_block_prompts(
    count: int, block_tokens: int = BLOCK, *, first: int = 0, digest: Hash = strong_digest
) -> PrefixKeys:
    """Keys of which each is a prompt of its own, of one block."""
    found = [prefix_keys([first + number] * block_tokens, block_tokens, FINGERPRINT, digest) for number in range(count)]
    return PrefixKeys(
        block_tokens, tuple(keys.digests[0] for keys in found), tuple(keys.proofs[0] for keys in found)
    )  # fmt: skip


def ids(*numbers: int) -> Int64s:
    return np.array(numbers, np.int64)


def tier_of(
    like: KVCaches,
    blocks: int,
    block_tokens: int = BLOCK,
    *,
    policy: str = "lru",
    layouts: tuple[str, ...] | None = None,
    tokens_per_state: int | None = None,
    copier: CopierFactory = Copier,
    threads: int = 1,
    most_jobs: int = 64,
) -> CpuTier:
    """A CPU tier of just so many blocks in each group that counts tokens."""

    def cache(nbytes: int) -> KVCaches:
        return tier_caches(
            like, block_tokens=block_tokens, nbytes=nbytes, layouts=layouts, tokens_per_state=tokens_per_state
        )

    # A tier that is large tells what a block costs.
    sizes = block_nbytes(cache(1 << 20))
    made = cache(sum(sizes) * (blocks + 1) + sum(sizes) // 2)
    while token_blocks(made) > blocks:
        made = cache(made.nbytes - 1)
    assert token_blocks(made) == blocks
    return CpuTier(made, like=like, policy=policy, copier=copier, threads=threads, most_jobs=most_jobs)


def token_blocks(cache: KVCaches) -> int:
    return max(group.num_blocks - 1 for group in cache.groups if group.counts_tokens)


@dataclass(frozen=True)
class Contents:
    """A cache of one group whose block table[k] holds what belongs to key k, and blocks of poison besides."""

    cache: KVCaches
    table: Int64s
    num_keys: int

    @classmethod
    def of(cls, buffer: PagedBuffer, num_keys: int, block_tokens: int = BLOCK, seed: int = 0) -> "Contents":
        """Fill blocks, not in order, with the codes of num_keys tier blocks."""
        count = num_keys * block_tokens // buffer.block_size
        table = np.random.default_rng(seed).permutation(np.arange(1, buffer.num_blocks))[:count].astype(np.int64)
        fill_codes(buffer, table, codes_for(buffer, num_keys * block_tokens))
        return cls(KVCaches.single(buffer), table, num_keys)

    @property
    def side(self) -> Side:
        return Side(self.cache, (self.table,), hold=KEPT)


@dataclass(frozen=True)
class Target:
    """A poisoned cache of one group, to load into."""

    buffer: PagedBuffer
    cache: KVCaches
    num_keys: int
    block_tokens: int = BLOCK

    @classmethod
    def of(cls, buffer: PagedBuffer, num_keys: int, block_tokens: int = BLOCK) -> "Target":
        return cls(buffer, KVCaches.single(buffer), num_keys, block_tokens)

    @property
    def table(self) -> Int64s:
        """Of a place for each key: its blocks, last first, so that no two tables are alike by chance."""
        count = self.num_keys * self.block_tokens // self.buffer.block_size
        return np.arange(count, 0, -1, dtype=np.int64)

    @property
    def side(self) -> Side:
        return Side(self.cache, (self.table,), hold=KEPT)

    def wrong(self, keys: Sequence[int]) -> int:
        """Elements that are not what belongs to keys, at their places."""
        codes, found = codes_for(self.buffer, self.num_keys * self.block_tokens), Verification(0, 0, None)
        for key in keys:
            tokens = range(key * self.block_tokens, (key + 1) * self.block_tokens)
            found += check_codes(self.buffer, self.table, codes, tokens=tokens)
        assert found.compared or not keys
        return found.wrong

    def written(self) -> set[int]:
        """The keys at whose places anything but poison lies, and -1 for any block beside them."""
        blocks = self.buffer.written_blocks().nonzero()[:, 0].tolist()
        per_key = self.block_tokens // self.buffer.block_size
        places = {block: place // per_key for place, block in enumerate(self.table.tolist())}
        return {places.get(block, -1) for block in blocks}

    def poison(self) -> None:
        self.buffer.poison(torch.from_numpy(self.table))
