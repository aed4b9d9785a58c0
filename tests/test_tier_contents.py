"""Content hashes: the same in every layout, changed by every byte, and carried along wherever a block goes."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import xxhash

from pdtx.cache import GroupAllocator, KVCaches
from pdtx.engine.peer_tier import PeerTier
from pdtx.errors import ProtocolError
from pdtx.kvspec import FullAttentionSpec, SlidingWindowSpec
from pdtx.plan.runs import Int64s
from pdtx.protocol import TierFound
from pdtx.tiers import Side, Tier, contents, hash_contents
from pdtx.tiers.cpu import CpuTier
from pdtx.tiers.disk import DiskTier
from pdtx.tiers.files import Header, file_bytes
from pdtx.tiers.geometry import tier_caches
from pdtx.tiers.outcome import Outcome
from pdtx.tiers.prefix import PrefixCache, Request
from pdtx.tiers.shelved import Wanted
from pdtx.tiers.stack import TierStack
from tests.engine_pair import attention, join, latent, make_cache, states
from tests.test_tier_peer import keys, served
from tests.tier_scenes import FENCE, KEPT

BLOCK, BLOCKS = 32, 3
FINGERPRINT = b"f" * 32
PLACES = np.arange(BLOCKS)
TOKENS = list(range(BLOCK * BLOCKS + 5))


def caches(layout: str = "flash_attn_nhd", size: int = 16, tp_size: int = 1) -> KVCaches:
    return join(
        [
            attention(FullAttentionSpec, "full", layout, size, num_blocks=40, tp_size=tp_size),
            latent("l", 24, size, num_blocks=40, tp_size=tp_size),
        ],
        [attention(SlidingWindowSpec, "window", layout, size, num_blocks=40, sliding_window=500, tp_size=tp_size)],
    )


def rows_of(cache: KVCaches) -> list[list[torch.Tensor]]:
    """Contents of each buffer and layer, the same every time."""
    made = torch.Generator().manual_seed(5)
    return [
        [
            torch.randint(256, buffer.rows_shape(BLOCK * BLOCKS), dtype=torch.uint8, generator=made)
            for _ in range(buffer.num_layers)
        ]
        for buffer in cache.buffers
    ]


def tables_of(cache: KVCaches, seed: int = 0) -> tuple[Int64s, ...]:
    """Blocks for the prompt, of a group that does not count tokens one."""
    random = np.random.default_rng(seed)
    counts = [1 if group.kind == "state" else BLOCK * BLOCKS // group.block_size for group in cache.groups]
    return tuple(
        random.permutation(np.arange(1, group.num_blocks))[:count].astype(np.int64)
        for group, count in zip(cache.groups, counts, strict=True)
    )


def filled(cache: KVCaches, seed: int = 0) -> Side:
    tables = tables_of(cache, seed)
    for buffer, layers in zip(cache.buffers, rows_of(cache), strict=True):
        for layer, rows in enumerate(layers):
            buffer.write_canonical(layer, torch.as_tensor(tables[buffer.group]), 0, rows)
    return Side(cache, tables, hold=KEPT)


def hashed(side: Side) -> Side:
    return replace(side, contents=partial(hash_contents, side, BLOCK))


def meant(cache: KVCaches, group: int) -> list[bytes]:
    """The hashes of a group's blocks, from its contents alone: layer, K and V, position, head, byte in this order."""
    found = []
    for block in range(BLOCKS):
        positions = slice(block * BLOCK, (block + 1) * BLOCK)
        parts = [
            b"".join(bytes(rows[:, positions].contiguous().numpy()) for rows in layers)
            for buffer, layers in zip(cache.buffers, rows_of(cache), strict=True)
            if buffer.group == group
        ]
        found.append(b"".join(xxhash.xxh3_128(part).digest() for part in parts))
    return found


@pytest.mark.parametrize("batch", [1, 16 << 20])
@pytest.mark.parametrize("size", [8, 16, 32])
@pytest.mark.parametrize("layout", ["flash_attn_nhd", "flashinfer_hnd"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_equal_contents_have_equal_hashes_in_every_layout(
    layout: str, size: int, tp_size: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "_BATCH_BYTES", batch)
    cache = caches(layout, size, tp_size)
    side = filled(cache, seed=size)
    for group in range(len(cache.groups)):
        assert hash_contents(side, BLOCK, group, PLACES) == meant(cache, group)
        assert hash_contents(side, BLOCK, group, PLACES[2:0:-1]) == meant(cache, group)[2:0:-1]


def test_every_byte_counts() -> None:
    cache = join([attention(FullAttentionSpec, "full", "flashinfer_hnd", 8, heads=2, channels=2)])
    (buffer,) = cache.buffers
    table = np.array([3, 1], np.int64)
    side = Side(cache, (table,))
    for layer in range(buffer.num_layers):
        rows = torch.randint(256, buffer.rows_shape(16), dtype=torch.uint8)
        buffer.write_canonical(layer, torch.as_tensor(table), 0, rows)
    first = hash_contents(side, 16, 0, np.arange(1))
    seen = set(first)
    for layer in range(buffer.num_layers):
        rows = buffer.canonical(layer, torch.as_tensor(table), 0, 16)
        for at in range(rows.numel()):
            changed = rows.clone()
            changed.view(-1)[at] ^= 1
            buffer.write_canonical(layer, torch.as_tensor(table), 0, changed)
            seen |= set(hash_contents(side, 16, 0, np.arange(1)))
        buffer.write_canonical(layer, torch.as_tensor(table), 0, rows)
    assert len(seen) == 1 + buffer.num_layers * rows.numel()
    assert hash_contents(side, 16, 0, np.arange(1)) == first


def test_blocks_that_are_not_whole_and_states_have_no_hash() -> None:
    cache = join([attention(FullAttentionSpec, "full")], [states()])
    side = Side(cache, (np.array([1, 2, 0, 4], np.int64), np.array([2], np.int64)))
    found = hash_contents(side, BLOCK, 0, np.arange(3))
    assert [len(each) for each in found] == [16, 0, 0]
    assert hash_contents(side, BLOCK, 1, np.array([0])) == [b""]


def request_of(prefix: PrefixCache) -> Request:
    """A request for the prompt, with blocks of a pool of its own."""
    pool = GroupAllocator.of(prefix.cache.groups)
    blocks = pool.allocate([7])
    return Request(prefix.keys(TOKENS), blocks.tables([range(7)]), blocks, pool)


def plain() -> KVCaches:
    return KVCaches.single(make_cache(num_blocks=20))


def cpu(cache: KVCaches, _: Path, nbytes: int = 1 << 20) -> CpuTier:
    return CpuTier(tier_caches(cache, block_tokens=BLOCK, nbytes=nbytes), like=cache)


def disk(cache: KVCaches, folder: Path) -> DiskTier:
    return DiskTier(folder, like=cache, block_tokens=BLOCK, nbytes=1 << 20, fingerprint=FINGERPRINT)


def known(tier: Tier, cache: KVCaches) -> list[bytes]:
    """The hashes that a tier has of the blocks; each block must be found."""
    with tier.lookup(PrefixCache(cache, tier, FINGERPRINT).keys(TOKENS), (PLACES,)) as lease:
        assert lease.found[0].all()
        return lease.contents(0, PLACES)


def put(tier: Tier, side: Side) -> None:
    names = PrefixCache(side.cache, tier, FINGERPRINT).keys(TOKENS)
    assert not tier.store(names, side, (PLACES,), FENCE).result(20).failed


@pytest.mark.parametrize("make", [cpu, disk])
def test_a_tier_has_the_hashes_that_were_stored(make: Callable[[KVCaches, Path], Tier], tmp_path: Path) -> None:
    cache = plain()
    tier = make(cache, tmp_path)
    put(tier, filled(cache))
    assert known(tier, cache) == [b""] * BLOCKS
    put(tier, hashed(filled(cache)))  # stored again, for now there is something to verify them with
    assert known(tier, cache) == meant(cache, 0)
    before = sum(group.stored.blocks for group in tier.usage().groups)
    put(tier, hashed(filled(cache)))
    put(tier, filled(cache))
    assert known(tier, cache) == meant(cache, 0)
    assert sum(group.stored.blocks for group in tier.usage().groups) == before == 2 * BLOCKS
    tier.close()


def test_hashes_are_there_after_a_restart(tmp_path: Path) -> None:
    cache = plain()
    tier = disk(cache, tmp_path)
    put(tier, hashed(filled(cache)))
    tier.close()
    again = disk(plain(), tmp_path)
    assert known(again, cache) == meant(cache, 0)
    again.close()


@pytest.mark.parametrize("write", ["through", "back"])
def test_hashes_go_down_and_come_up_with_their_blocks_and_are_not_made_anew(tmp_path: Path, write: str) -> None:
    cache = plain()
    stack = TierStack([cpu(cache, tmp_path), disk(cache, tmp_path)], write=write)  # type: ignore[arg-type]
    put(stack, hashed(filled(cache)))
    assert known(stack, cache) == meant(cache, 0)
    stack.close()
    upper, lower = cpu(cache, tmp_path), disk(cache, tmp_path)
    assert known(lower, cache) == meant(cache, 0)
    again, target = TierStack([upper, lower]), Side(cache, tables_of(cache, 9))
    with again.lookup(PrefixCache(cache, again, FINGERPRINT).keys(TOKENS), (PLACES,)) as lease:
        # What arrives is not what was stored: the memory must not take its hash for right.
        move = lower._move_out

        def spoil(into: Side, wanted: Wanted, done: Outcome) -> None:
            move(into, wanted, done)
            buffer, table = cache.buffers[0], torch.as_tensor(into.tables[0])
            rows = buffer.canonical(0, table, 0, BLOCK)
            buffer.write_canonical(0, table, 0, rows ^ 1)

        lower._move_out = spoil  # type: ignore[method-assign]
        assert not lease.load(target, (PLACES,)).result(20).failed
    assert sum(group.stored.blocks for group in upper.usage().groups) == BLOCKS
    assert known(upper, cache) == meant(cache, 0)
    assert hash_contents(target, BLOCK, 0, PLACES)[0] != meant(cache, 0)[0]
    again.close()


def test_what_is_evicted_takes_its_hash_along(tmp_path: Path) -> None:
    cache = plain()
    per_block = cache.buffers[0].bytes_per_position * cache.buffers[0].num_layers * BLOCK
    memory, below = cpu(cache, tmp_path, nbytes=(BLOCKS + 1) * per_block), disk(cache, tmp_path)
    stack = TierStack([memory, below], write="back")
    put(stack, hashed(filled(cache)))
    others = PrefixCache(cache, stack, FINGERPRINT).keys([7, *TOKENS[1:]])
    assert not stack.store(others, filled(cache), (PLACES,), FENCE).result(20).failed
    assert sum(group.evicted.blocks for group in memory.usage().groups) == BLOCKS
    assert known(below, cache) == meant(cache, 0)
    stack.close()


def older(folder: Path) -> int:
    """Make files what the version before has written: no content hash in the header."""
    count = 0
    for path in folder.rglob("*.kv"):
        data = path.read_bytes()
        header = Header.from_bytes(data[:4096])
        body = msgspec.msgpack.encode(list(msgspec.structs.astuple(header))[:-1])
        start = b"pdtx-blk" + (1).to_bytes(2, "little") + len(body).to_bytes(2, "little") + bytes(4)
        sector = start + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + body
        path.write_bytes(sector.ljust(4096, b"\0") + data[4096:])
        assert path.stat().st_size == file_bytes(header.nbytes)
        count += 1
    return count


def test_blocks_of_an_older_folder_are_loaded_but_not_where_they_would_be_verified(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = plain()
    tier = disk(cache, tmp_path)
    put(tier, hashed(filled(cache)))
    tier.close()
    assert older(tmp_path) == BLOCKS
    again = disk(cache, tmp_path)
    prefix = PrefixCache(cache, again, FINGERPRINT)

    def fetched(*, checked: bool) -> int:
        deadline = time.monotonic() + 20
        return prefix.fetch(request_of(prefix), len(TOKENS), deadline, resume=False, checked=checked).num_tokens

    assert fetched(checked=False) == BLOCK * BLOCKS
    assert "content hash" not in caplog.text
    assert fetched(checked=True) == 0
    assert "3 blocks of tier disk have no content hash to verify them with, and count as misses" in caplog.text
    put(again, hashed(filled(cache)))
    assert fetched(checked=True) == BLOCK * BLOCKS
    again.close()


@pytest.mark.parametrize("hashes", [False, True], ids=["stored without", "stored with"])
def test_what_was_loaded_gets_no_hash_of_its_own_when_it_is_kept_again(tmp_path: Path, hashes: bool) -> None:
    """A node that computes does not verify what it loads: a hash of that would let readers take it for verified."""
    cache = plain()
    here, there = cpu(cache, tmp_path), cpu(cache, tmp_path)
    put(here, hashed(filled(cache)) if hashes else filled(cache))
    assert isinstance(here, CpuTier)
    here.cache.buffers[0].memory[:] ^= 1  # a bit of every byte has changed meanwhile
    reader = PrefixCache(cache, here, FINGERPRINT)
    request = request_of(reader)
    found = reader.fetch(request, len(TOKENS), time.monotonic() + 20, resume=True)
    assert found.num_tokens == BLOCK * BLOCKS
    # Evicted from one tier, it is kept again in another.
    keeper = PrefixCache(cache, there, FINGERPRINT, hashed=True)
    kept = keeper.keep(request, [0], len(TOKENS), FENCE, fetched=found)
    assert kept is not None
    assert kept.result(20).num_blocks == BLOCKS
    assert known(there, cache) == (meant(cache, 0) if hashes else [b""] * BLOCKS)
    reader.close()
    keeper.close()


def test_what_fetch_returns_names_the_hash_of_each_block(tmp_path: Path) -> None:
    cache = plain()
    prefix = PrefixCache(cache, cpu(cache, tmp_path), FINGERPRINT)
    assert prefix.tier is not None
    put(prefix.tier, hashed(filled(cache)))
    found = prefix.fetch(request_of(prefix), len(TOKENS), time.monotonic() + 20, resume=False, checked=True)
    assert (found.num_tokens, found.block_tokens) == (BLOCK * BLOCKS, BLOCK)
    assert list(found.contents[0]) == meant(cache, 0)
    prefix.close()


def test_a_peer_gives_its_hashes_and_those_of_other_buffers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as one:
        asked = [np.arange(2), np.arange(2), np.zeros(0, np.int64)]
        answers = list[TierFound]()
        known_of = PeerTier._known

        def watch(tier: PeerTier, answer: TierFound) -> object:
            answers.append(answer)
            return known_of(tier, answer)

        monkeypatch.setattr(PeerTier, "_known", watch)
        with one.peer.lookup(keys(), asked) as lease:
            assert lease.contents(0, np.arange(2)) == [b"", b""]
        (answer,) = answers
        wrong = msgspec.structs.replace(answer, contents=[[b"h" * 15, b""], *answer.contents[1:]])
        with pytest.raises(ProtocolError, match=r"a content hash of 15 bytes for group full, not (16|32)"):
            known_of(one.peer, wrong)


def test_an_answer_must_have_a_hash_for_each_block_or_none() -> None:
    with pytest.raises(ValueError, match="content hashes of 1 blocks for 2 that were found"):
        TierFound(request_id="l", places=[[1, 2]], contents=[[b"h" * 16]])
