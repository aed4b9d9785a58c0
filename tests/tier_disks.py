"""Caches with codes, and what the tests of the disk tier and the stack do with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pdtx.cache import KVCaches, PagedBuffer, compare
from pdtx.kvspec import FullAttentionSpec, SlidingWindowSpec
from pdtx.plan.runs import Int64s
from pdtx.testing.codes import code_rows, codes_for
from pdtx.tiers import Moved, PrefixKeys, Side, Tier, prefix_keys
from pdtx.tiers.disk import DiskTier
from tests.engine_pair import attention, join, states
from tests.tier_scenes import FENCE, KEPT

TOKENS = 64
"""Of a block of the tiers."""
WAIT_S = 20.0
MOST_REQUESTS = 64
FINGERPRINT = b"f" * 32


def plain(layout: str = "flash_attn_nhd", block_size: int = 16, *, num_blocks: int = 40, tp_size: int = 1) -> KVCaches:
    """Full attention alone. Its pool has other blocks than those of the others, so that ids agree by chance only."""
    return join([attention(FullAttentionSpec, "full", layout, block_size, num_blocks=num_blocks, tp_size=tp_size)])


def hybrid(
    layout: str = "flash_attn_nhd", block_size: int = 16, state_layout: str = "mamba_sd", tp_size: int = 1
) -> KVCaches:
    """Full attention, a window, and states."""
    kinds: dict[str, Any] = {"layout": layout, "block_size": block_size, "tp_size": tp_size}
    full = attention(FullAttentionSpec, "full", num_blocks=40, **kinds)
    window = attention(SlidingWindowSpec, "window", num_blocks=35, layers=("layers.2",), sliding_window=TOKENS, **kinds)
    return join([full], [window], [states(state_layout, layers=("layers.3",), tp_size=tp_size)])


def keys_of(num_blocks: int, seed: int = 0) -> PrefixKeys:
    tokens = np.random.default_rng(seed).integers(0, 50_000, num_blocks * TOKENS)
    return prefix_keys(tokens.tolist(), TOKENS, FINGERPRINT)


def tables_of(cache: KVCaches, num_blocks: int, seed: int = 0) -> tuple[Int64s, ...]:
    """Block tables of a request of so many tier blocks, scattered over the pools."""
    chance = np.random.default_rng(seed)
    return tuple(
        chance.permutation(np.arange(1, group.num_blocks))[
            : 1 if group.kind == "state" else num_blocks * TOKENS // group.block_size
        ].astype(np.int64)
        for group in cache.groups
    )


def every(cache: KVCaches, num_blocks: int) -> tuple[Int64s, ...]:
    """All places; of states the last."""
    whole = np.arange(num_blocks, dtype=np.int64)
    return tuple(whole[-1:] if group.kind == "state" else whole for group in cache.groups)


def positions_of(cache: KVCaches, group: int, num_blocks: int) -> int:
    return 1 if cache.groups[group].kind == "state" else num_blocks * TOKENS


def rows_of(buffer: PagedBuffer, layer: int, positions: range, total: int, seed: int) -> torch.Tensor:
    """The codes of a request's positions: every request (seed) has others."""
    codes, first = codes_for(buffer, MOST_REQUESTS * total), seed * total
    return code_rows(codes, layer, range(first + positions.start, first + positions.stop), buffer.rows_shape(1)[0])


def fill(cache: KVCaches, tables: Sequence[Int64s], num_blocks: int, seed: int = 0) -> None:
    for buffer in cache.buffers:
        total, blocks = positions_of(cache, buffer.group, num_blocks), torch.from_numpy(tables[buffer.group])
        for layer in range(buffer.num_layers):
            buffer.write_canonical(layer, blocks, 0, rows_of(buffer, layer, range(total), total, seed))


def check(
    cache: KVCaches,
    tables: Sequence[Int64s],
    num_blocks: int,
    places: Sequence[Int64s] | None = None,
    *,
    seed: int = 0,
) -> None:
    """Check that every element of places is there, and that nothing else of the cache was written to."""
    places = every(cache, num_blocks) if places is None else places
    for buffer in cache.buffers:
        group, table = cache.groups[buffer.group], tables[buffer.group]
        total = positions_of(cache, buffer.group, num_blocks)
        blocks, tokens = (1, 1) if group.kind == "state" else (TOKENS // group.block_size, TOKENS)
        touched = set[int]()
        for place in places[buffer.group].tolist():
            at = 0 if group.kind == "state" else place
            touched |= set(table[at * blocks : (at + 1) * blocks].tolist())
            positions = range(at * tokens, (at + 1) * tokens)
            for layer in range(buffer.num_layers):
                found = buffer.canonical(layer, torch.from_numpy(table), positions.start, positions.stop)
                expected = rows_of(buffer, layer, positions, total, seed)
                result = compare(found, expected, layer=layer, start=positions.start, itemsize=buffer.itemsize)
                assert not result.wrong, f"{buffer.name} place {place}: {result.first}"
        assert set(torch.nonzero(buffer.written_blocks()).flatten().tolist()) == touched, buffer.name


def open_disk(
    folder: Path,
    like: KVCaches,
    *,
    nbytes: int = 64 << 20,
    layouts: tuple[str, ...] | None = None,
    most_jobs: int = 64,
    silence_s: float = 20.0,
    direct: bool = True,
    threads: int = 4,
) -> DiskTier:
    return DiskTier(
        folder,
        like=like,
        block_tokens=TOKENS,
        nbytes=nbytes,
        fingerprint=FINGERPRINT,
        layouts=layouts,
        most_jobs=most_jobs,
        silence_s=silence_s,
        threads=threads,
        direct=direct,
    )


def store(tier: Tier, cache: KVCaches, num_blocks: int, seed: int = 0) -> Moved:
    """Store a request's blocks, of which the cache holds the codes from now on."""
    tables = tables_of(cache, num_blocks, seed)
    fill(cache, tables, num_blocks, seed)
    return tier.store(
        keys_of(num_blocks, seed), Side(cache, tables, hold=KEPT), every(cache, num_blocks), FENCE
    ).result(WAIT_S)


def load(tier: Tier, cache: KVCaches, num_blocks: int, seed: int = 0, table_seed: int = 7) -> tuple[Moved, bool]:
    """Load what is here of a request into a poisoned cache, and check it. Returns what was moved, and if it is all."""
    cache_poison(cache)
    tables, asked = tables_of(cache, num_blocks, table_seed), every(cache, num_blocks)
    with tier.lookup(keys_of(num_blocks, seed), asked) as lease:
        places = tuple(each[found] for each, found in zip(asked, lease.found, strict=True))
        moved = lease.load(Side(cache, tables), places).result(WAIT_S)
    check(cache, tables, num_blocks, moved.places, seed=seed)
    return moved, all(len(one) == len(two) for one, two in zip(moved.places, asked, strict=True))


def cache_poison(cache: KVCaches) -> None:
    for buffer in cache.buffers:
        buffer.poison()
