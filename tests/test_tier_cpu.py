"""The CPU tier: what goes in comes out in any layout, block size and number of ranks; fences, races, failures."""

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from pdtx.cache import KVCaches, PagedBuffer, PagedKVCache, PagedLatentCache
from pdtx.cache.shared import shared_file
from pdtx.errors import TierBusy, TierError
from pdtx.kvspec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from pdtx.plan.runs import Int64s
from pdtx.testing.codes import check_codes, codes_for, fill_codes
from pdtx.testing.receivers import Gate
from pdtx.tiers import CpuTier, Moved, PrefixKeys, ShelfLease, Side, prefix_keys, tier_caches
from pdtx.tiers.copies import Copier
from pdtx.tiers.geometry import block_nbytes
from pdtx.tiers.memory import PinnedMemory, numa_nodes, pieces_of
from pdtx.tiers.shelf import Shelf
from tests.engine_pair import attention, join, latent, states
from tests.tier_scenes import FENCE, FINGERPRINT, KEPT, SECONDS, Contents, Target, full, ids, one_block_prompts, tier_of

KEYS = 6


@contextmanager
def closing(tier: CpuTier) -> Iterator[CpuTier]:
    try:
        yield tier
    finally:
        tier.close()


@pytest.mark.parametrize("tier_layout", [None, "flash_attn_nhd", "vllm_lhbnc"])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("factors", [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)])
def test_any_layout_block_size_and_number_of_ranks_on_either_side(
    factors: tuple[int, int], ranks: tuple[int, int], tier_layout: str | None
) -> None:
    """The tier's blocks have 32 tokens, and its ranks are the source's."""
    src_size, dst_size = (32 // factor for factor in factors)
    source = Contents.of(full(KEYS * factors[0] + 3, "flash_attn_nhd", src_size, tp_size=ranks[0]), KEYS, 32)
    buffer = full(KEYS * factors[1] + 3, "flashinfer_hnd", dst_size, tp_size=ranks[1])
    target, keys = Target.of(buffer, KEYS, 32), one_block_prompts(KEYS, 32)
    with closing(tier_of(source.cache, KEYS, 32, layouts=(tier_layout,) if tier_layout else None)) as tier:
        stored = tier.store(keys, source.side, (ids(4, 0, 5, 2),), FENCE).result(SECONDS)
        assert (stored.places[0].tolist(), stored.failed) == ([4, 0, 5, 2], ())
        with tier.lookup(keys, (np.arange(KEYS),)) as lease:
            assert lease.found[0].nonzero()[0].tolist() == [0, 2, 4, 5]
            loaded = lease.load(target.side, (ids(5, 0, 2),)).result(SECONDS)
    assert (loaded.places[0].tolist(), loaded.failed) == ([5, 0, 2], ())
    assert target.wrong([0, 2, 5]) == 0
    assert target.written() == {0, 2, 5}
    assert buffer.replicas_differ(0, torch.from_numpy(target.table), 0, 32) == 0
    assert loaded.nbytes == 3 * 32 * 2 * 2 * 2 * 4 * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "uint8"])
def test_any_type_of_element(dtype: str) -> None:
    def cache(layout: str) -> PagedKVCache:
        spec = FullAttentionSpec(block_size=16, num_kv_heads=3, head_size=6, dtype=dtype)
        return PagedKVCache(spec, layout=layout, num_layers=2, num_blocks=9)

    source, target, keys = Contents.of(cache("sglang"), 4), Target.of(cache("vllm_lbhnc"), 4), one_block_prompts(4)
    with closing(tier_of(source.cache, 4)) as tier:
        tier.store(keys, source.side, (np.arange(4),), FENCE).result(SECONDS)
        with tier.lookup(keys, (np.arange(4),)) as lease:
            lease.load(target.side, (np.arange(4),)).result(SECONDS)
    assert target.wrong(range(4)) == 0


def diffkv(layout: str, block_size: int) -> PagedBuffer:
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=4, head_size_v=6, dtype="bfloat16")
    return PagedKVCache(spec, layout=layout, num_layers=2, num_blocks=40)


def vectors(layout: str, block_size: int, **fields: Any) -> PagedBuffer:  # noqa: ANN401  # of the spec's class
    spec = MLAAttentionSpec(block_size=block_size, num_kv_heads=1, **fields)
    return PagedLatentCache(spec, layout=layout, num_layers=2, num_blocks=40)


ENTRIES = {"head_size": 12, "dtype": "bfloat16", "compress_ratio": 4}
SCALED = {"head_size": 132, "dtype": "uint8"}

PAIRS: dict[str, tuple[PagedBuffer, PagedBuffer]] = {
    "values of another size": (diffkv("flash_attn_diffkv_nhd", 16), diffkv("diffkv_lhbnc", 8)),
    "latent": (
        vectors("mla", 8, head_size=20, dtype="bfloat16"),
        vectors("mla_blhnc", 32, head_size=20, dtype="bfloat16"),
    ),
    "a vector for four tokens": (vectors("mla", 16, **ENTRIES), vectors("mla_lbnhc", 8, **ENTRIES)),
    "data before scales": (vectors("deepseek_indexer", 16, **SCALED), vectors("deepseek_indexer", 16, **SCALED)),
    "transposed keys": (full(40, "cpu_attn_lbhnc"), full(40, "sglang", 8)),
    "window": (
        attention(SlidingWindowSpec, "window", sliding_window=24, num_blocks=40),
        attention(SlidingWindowSpec, "window", "vllm_lhbnc", 32, sliding_window=24, num_blocks=40),
    ),
    "chunk": (
        attention(ChunkedLocalAttentionSpec, "chunk", attention_chunk_size=32, num_blocks=40),
        attention(ChunkedLocalAttentionSpec, "chunk", "flashinfer_hnd", 8, attention_chunk_size=32, num_blocks=40),
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_any_kind_of_layer(kind: str) -> None:
    """Tier blocks of 32 tokens."""
    source, target, keys = (
        Contents.of(PAIRS[kind][0], 4, 32),
        Target.of(PAIRS[kind][1], 4, 32),
        one_block_prompts(4, 32),
    )
    with closing(tier_of(source.cache, 4, 32)) as tier:
        stored = tier.store(keys, source.side, (ids(3, 0, 2),), FENCE).result(SECONDS)
        assert stored.failed == ()
        with tier.lookup(keys, (ids(0, 3),)) as lease:
            assert lease.load(target.side, (ids(0, 3),)).result(SECONDS).failed == ()
    assert target.wrong([0, 3]) == 0
    assert target.written() == {0, 3}


# -- hybrid caches ----------------------------------------------------------------------------------------------------


def hybrid(layout: str = "flash_attn_nhd", block_size: int = 16, state_layout: str = "mamba_sd") -> KVCaches:
    window = attention(
        SlidingWindowSpec, "window", layout, block_size, sliding_window=24, layers=("layers.2",), num_blocks=20
    )
    kept = latent("latent", 20, block_size, num_blocks=20)
    cross = attention(CrossAttentionSpec, "cross", layout, block_size, num_blocks=4)
    attend = attention(FullAttentionSpec, "full", layout, block_size, num_blocks=20)
    return join([attend, kept], [window], [states(state_layout)], [cross], encoder_positions=21)


def tables(cache: KVCaches, tokens: int, kept_from: int, seed: int) -> tuple[Int64s, ...]:
    """A request's tables: the window's are null before kept_from."""
    found, chance = list[Int64s](), np.random.default_rng(seed)
    for group in cache.groups:
        if group.kind == "state":
            found.append(ids(2 + seed))
        elif group.kind == "cross":
            found.append(ids(1, 2))
        else:
            table = chance.permutation(np.arange(1, group.num_blocks))[: tokens // group.block_size]
            if group.kind == "window":
                table[: kept_from // group.block_size] = 0
            found.append(table)
    return tuple(found)


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_groups_are_stored_and_counted_apart_and_null_blocks_not_at_all(block_tokens: int) -> None:
    tokens, kept_from = 128, 96
    src, dst = hybrid(), hybrid("flashinfer_hnd", 8, "mamba_ds")
    theirs, ours = tables(src, tokens, kept_from, 0), tables(dst, tokens, kept_from, 1)
    for buffer in src.buffers:
        if (kind := src.groups[buffer.group].kind) != "cross":
            fill_codes(
                buffer,
                theirs[buffer.group],
                codes_for(buffer, 1 if kind == "state" else tokens),
                tokens=range(kept_from, tokens) if kind == "window" else None,
            )
    keys, blocks = prefix_keys(range(tokens), block_tokens, FINGERPRINT), tokens // block_tokens
    every, state, nothing = np.arange(blocks), ids(blocks - 1), ids()
    tail = every[kept_from // block_tokens :]
    with closing(tier_of(src, blocks, block_tokens, tokens_per_state=tokens)) as tier:
        stored = tier.store(keys, Side(src, theirs, hold=KEPT), (every, every, state, nothing), FENCE).result(SECONDS)
        assert [places.tolist() for places in stored.places] == [every.tolist(), tail.tolist(), state.tolist(), []]
        assert [(one.group, one.place) for one in stored.failed] == [
            ("window", place) for place in range(kept_from // block_tokens)
        ]
        with tier.lookup(keys, (every, every, state, nothing)) as lease:
            assert [found.sum() for found in lease.found] == [blocks, len(tail), 1, 0]
            loaded = lease.load(Side(dst, ours), (every, tail, state, nothing)).result(SECONDS)
        assert loaded.failed == ()
        usage = tier.usage()
    sizes = block_nbytes(tier.cache)
    for group, count in zip(usage.groups, (blocks, len(tail), 1, 0), strict=True):
        size = sizes[[g.name for g in tier.cache.groups].index(group.name)]
        assert [group.stored.blocks, group.used.blocks, group.loaded.blocks] == [count] * 3
        assert [group.stored.nbytes, group.used.nbytes, group.loaded.nbytes] == [count * size] * 3
    assert usage.groups[1].missed.blocks == blocks - len(tail)
    assert stored.nbytes == loaded.nbytes == usage.used
    for buffer in dst.buffers:
        kind, table = dst.groups[buffer.group].kind, ours[buffer.group]
        written = set(buffer.written_blocks().nonzero()[:, 0].tolist())
        if kind == "cross":
            assert not written
            continue
        window = range(kept_from, tokens) if kind == "window" else None
        codes = codes_for(buffer, 1 if kind == "state" else tokens)
        assert check_codes(buffer, table, codes, tokens=window).wrong == 0
        assert written == set(table[table > 0].tolist())


def test_what_a_tier_takes_is_told_beside_what_it_was_to_have() -> None:
    like = hybrid()
    with closing(CpuTier(tier_caches(like, block_tokens=16, nbytes=100_000), like=like, asked=100_000)) as tier:
        usage = tier.usage()
    assert usage.asked == 100_000
    assert usage.mapped == tier.cache.nbytes <= usage.asked
    assert usage.used == 0
    assert usage.groups[3].capacity.blocks == 0
    assert usage.details["memory"].startswith("pageable") or torch.cuda.is_available()
    assert usage.details["NUMA node"]


# -- fences, races, failures ------------------------------------------------------------------------------------------


class Simple:
    """One full group, a tier of 4 blocks, and keys of one-block prompts."""

    def __init__(self, blocks: int = 4, copier: type[Copier] = Copier, threads: int = 1, most_jobs: int = 64) -> None:
        self.source = Contents.of(full(KEYS + 5), KEYS)
        self.tier = tier_of(self.source.cache, blocks, copier=copier, threads=threads, most_jobs=most_jobs)
        self.keys = one_block_prompts(KEYS)
        self.target = Target.of(full(KEYS + 5, "flashinfer_hnd"), KEYS)


def store_waits_for_its_fence(patience_s: float = 0.1) -> None:
    """The source is written only while the fence waits. patience_s: for a store that does not wait to be done."""
    here, open_ = Simple(), threading.Event()
    buffer = here.source.cache.buffers[0]
    codes = codes_for(buffer, KEYS * 16)
    buffer.poison()

    def fence() -> None:
        assert open_.wait(SECONDS)

    future = here.tier.store(here.keys, here.source.side, (np.arange(4),), fence)
    assert not wait([future], patience_s).done
    assert not here.tier.lookup(here.keys, (np.arange(4),)).found[0].any()
    fill_codes(buffer, here.source.table, codes)
    open_.set()
    future.result(SECONDS)
    with here.tier.lookup(here.keys, (np.arange(4),)) as lease:
        lease.load(here.target.side, (np.arange(4),)).result(SECONDS)
    assert here.target.wrong(range(4)) == 0
    here.tier.close()


def test_a_store_reads_nothing_before_its_fence() -> None:
    store_waits_for_its_fence()


def test_tooth_a_store_that_does_not_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CpuTier.store
    monkeypatch.setattr(
        CpuTier, "store", lambda self, keys, source, places, fence: store(self, keys, source, places, FENCE)
    )
    with pytest.raises(AssertionError):
        store_waits_for_its_fence(SECONDS)


def test_no_load_waits_for_the_fence_of_a_store() -> None:
    here, open_ = Simple(), threading.Event()
    here.tier.store(here.keys, here.source.side, (ids(0),), FENCE).result(SECONDS)

    def fence() -> None:
        assert open_.wait(SECONDS)

    storing = here.tier.store(here.keys, here.source.side, (ids(1),), fence)
    with here.tier.lookup(here.keys, (ids(0),)) as lease:
        lease.load(here.target.side, (ids(0),)).result(SECONDS / 2)
    assert not storing.done()
    open_.set()
    assert storing.result(SECONDS).num_blocks == 1
    here.tier.close()


def test_a_fence_that_fails_stores_nothing_and_says_why() -> None:
    here = Simple()

    def fence() -> None:
        raise RuntimeError("CUDA error: the stream is gone")

    with pytest.raises(RuntimeError, match="the stream is gone"):
        here.tier.store(here.keys, here.source.side, (ids(0),), fence).result(SECONDS)
    assert not here.tier.lookup(here.keys, (ids(0),)).found[0].any()
    assert here.tier.usage().groups[0].used.blocks == 0
    here.tier.close()


class Broken(Copier):
    """Raises in the middle of what it was told to, when it is on."""

    error: BaseException | None = None

    def copy(self, group: int, src_table: Int64s, dst_table: Int64s, positions: range) -> tuple[int, int]:
        if Broken.error is None:
            return super().copy(group, src_table, dst_table, positions)
        super().copy(group, src_table, dst_table, range(positions.stop // 2))
        raise Broken.error


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyError("a defect")])
def test_a_store_that_fails_in_the_middle_leaves_no_half_block(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Simple(copier=Broken)
    monkeypatch.setattr(Broken, "error", error)
    future = here.tier.store(here.keys, here.source.side, (np.arange(3),), FENCE)
    if isinstance(error, OSError):
        assert [one.place for one in future.result(SECONDS).failed] == [0, 1, 2]
    else:
        with pytest.raises(KeyError):
            future.result(SECONDS)
    assert not here.tier.lookup(here.keys, (np.arange(3),)).found[0].any()
    monkeypatch.setattr(Broken, "error", None)
    assert here.tier.store(here.keys, here.source.side, (np.arange(4),), FENCE).result(SECONDS).num_blocks == 4
    assert here.tier.usage().groups[0].evicted.blocks == 0
    here.tier.close()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyError("a defect")])
def test_a_load_that_fails_in_the_middle_leaves_poison_and_no_pins(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Simple(copier=Broken)
    here.tier.store(here.keys, here.source.side, (np.arange(3),), FENCE).result(SECONDS)
    monkeypatch.setattr(Broken, "error", error)
    with here.tier.lookup(here.keys, (np.arange(3),)) as lease:
        future = lease.load(here.target.side, (np.arange(3),))
        if isinstance(error, OSError):
            assert [one.place for one in future.result(SECONDS).failed] == [0, 1, 2]
        else:
            with pytest.raises(KeyError):
                future.result(SECONDS)
    assert here.target.written() == set()
    assert here.tier.usage().groups[0].pinned.blocks == 0
    here.tier.close()


class Slow(Copier):
    """Waits before each copy."""

    gate = threading.Event()
    begun = threading.Event()

    def copy(self, group: int, src_table: Int64s, dst_table: Int64s, positions: range) -> tuple[int, int]:
        Slow.begun.set()
        assert Slow.gate.wait(SECONDS)
        return super().copy(group, src_table, dst_table, positions)


@pytest.fixture
def gates() -> Iterator[None]:
    Slow.gate.set()
    yield
    Slow.gate.set()


@pytest.mark.usefixtures("gates")
def test_blocks_stay_pinned_while_a_load_is_under_way_though_the_lease_is_released() -> None:
    here = Simple(copier=Slow, threads=2)
    here.tier.store(here.keys, here.source.side, (np.arange(4),), FENCE).result(SECONDS)
    lease = here.tier.lookup(here.keys, (ids(0, 1),))
    Slow.gate.clear()
    Slow.begun.clear()
    loading = lease.load(here.target.side, (ids(0, 1),))
    assert Slow.begun.wait(SECONDS)
    lease.release()
    assert here.tier.usage().groups[0].pinned.blocks == 2
    Slow.gate.set()
    loading.result(SECONDS)
    assert here.tier.usage().groups[0].pinned.blocks == 0
    assert here.target.wrong([0, 1]) == 0
    with pytest.raises(TierError, match="the lease was released"):
        lease.load(here.target.side, (ids(0),))
    here.tier.close()


@pytest.mark.usefixtures("gates")
def test_a_busy_tier_says_so_and_leaves_no_pins() -> None:
    here = Simple(copier=Slow, most_jobs=1)
    here.tier.store(here.keys, here.source.side, (ids(0),), FENCE).result(SECONDS)
    for begin in ("store", "load"):
        Slow.gate.clear()
        Slow.begun.clear()
        lease = here.tier.lookup(here.keys, (ids(0),))

        def ask(place: int, begin: str = begin, lease: ShelfLease = lease) -> "Future[Moved]":
            if begin == "store":
                return here.tier.store(here.keys, here.source.side, (ids(place),), FENCE)
            return lease.load(here.target.side, (ids(0),))

        under_way = ask(1)
        assert Slow.begun.wait(SECONDS)
        waiting = ask(2)
        with pytest.raises(TierBusy, match=f"the CPU tier's {begin}s: 1 jobs"):
            ask(3)
        lease.release()
        Slow.gate.set()
        assert under_way.result(SECONDS).num_blocks == waiting.result(SECONDS).num_blocks == 1
        assert here.tier.usage().groups[0].pinned.blocks == 0
    here.tier.close()


@pytest.mark.usefixtures("gates")
def test_closing_refuses_waiting_loads_and_gives_their_pins_back() -> None:
    here = Simple(copier=Slow)
    here.tier.store(here.keys, here.source.side, (ids(0),), FENCE).result(SECONDS)
    Slow.gate.clear()
    Slow.begun.clear()
    with here.tier.lookup(here.keys, (ids(0),)) as lease:
        under_way = lease.load(here.target.side, (ids(0),))
        assert Slow.begun.wait(SECONDS)
        waiting = lease.load(here.target.side, (ids(0),))
    waiting.add_done_callback(lambda _: Slow.gate.set())
    here.tier.close()
    here.tier.close()
    assert under_way.result(0).num_blocks == 1
    with pytest.raises(TierError, match="closed"):
        waiting.result(0)
    assert here.tier.usage().groups[0].pinned.blocks == 0
    with pytest.raises(TierError, match="closed"):
        here.tier.store(here.keys, here.source.side, (ids(0),), FENCE)


class Hurry(Copier):
    """Lets others run between the plan and the bytes, as a large copy does."""

    def copy(self, group: int, src_table: Int64s, dst_table: Int64s, positions: range) -> tuple[int, int]:
        time.sleep(0.0002)
        return super().copy(group, src_table, dst_table, positions)


EVICTIONS = 150


def test_threads_that_evict_each_others_blocks_load_the_right_ones() -> None:
    """Four threads store, look up and load six keys in a tier of four blocks.

    Its teeth are not left to chance: without pins see (a) of test_tier_h12.py, found too early see below.
    """
    here, end = Simple(copier=Hurry, threads=2), time.monotonic() + SECONDS
    wrong, loads = list[str](), list[int]()

    def evicted() -> int:
        return here.tier.usage().groups[0].evicted.blocks

    def work(seed: int) -> None:
        chance, target = np.random.default_rng(seed), Target.of(full(KEYS + 5), KEYS)
        while evicted() < EVICTIONS and not wrong and time.monotonic() < end:
            some = chance.permutation(KEYS).astype(np.int64)
            here.tier.store(here.keys, here.source.side, (some[:2],), FENCE).result(SECONDS)
            with here.tier.lookup(here.keys, (some[1:3],)) as lease:
                found = some[1:3][lease.found[0]]
                moved = lease.load(target.side, (found,)).result(SECONDS)
            loads.append(len(found))
            if moved.failed or target.wrong(found.tolist()):
                wrong.append(f"{found.tolist()}: {moved.failed}")

    def guarded(seed: int) -> None:
        try:
            work(seed)
        except Exception as error:  # noqa: BLE001  # counted like any other
            wrong.append(str(error))

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    here.tier.close()
    assert not wrong
    assert evicted() >= EVICTIONS
    assert sum(loads) > EVICTIONS // 2
    assert here.tier.usage().groups[0].pinned.blocks == 0


def wrong_while_stored() -> int:
    """Elements that are wrong of what can be loaded of a block while it is being stored."""
    gate = Gate()

    class Held(Copier):
        """Waits before the first copy, the store's."""

        copies = itertools.count()

        def copy(self, group: int, src_table: Int64s, dst_table: Int64s, positions: range) -> tuple[int, int]:
            if next(Held.copies) == 0:
                gate.hold()
            return super().copy(group, src_table, dst_table, positions)

    here = Simple(copier=Held)
    storing = here.tier.store(here.keys, here.source.side, (ids(0),), FENCE)
    gate.wait_reached(SECONDS)
    with here.tier.lookup(here.keys, (ids(0),)) as lease:
        found = ids(0)[lease.found[0]]
        lease.load(here.target.side, (found,)).result(SECONDS)
    assert not storing.done()
    gate.open()
    assert storing.result(SECONDS).num_blocks == 1
    here.tier.close()
    return here.target.wrong(found.tolist())


def test_what_is_being_written_is_not_loaded() -> None:
    assert wrong_while_stored() == 0


def test_tooth_what_is_found_before_it_is_written_is_loaded_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that is ready as soon as it has a block."""
    reserve, commit = Shelf.reserve, Shelf.commit

    def early(shelf: Shelf, *args: list[bytes], seconds: float) -> object:
        reservation = reserve(shelf, *args, seconds=seconds)
        commit(shelf, reservation.blocks[reservation.blocks > 0])
        return reservation

    monkeypatch.setattr(Shelf, "reserve", early)
    monkeypatch.setattr(Shelf, "commit", lambda *_: None)
    monkeypatch.setattr(Shelf, "cancel", lambda *_: None)
    assert wrong_while_stored() > 0


# -- what is asked for wrongly ----------------------------------------------------------------------------------------


def test_wrong_questions_are_refused() -> None:
    here = Simple()
    other = PrefixKeys(32, here.keys.digests, here.keys.proofs)
    with pytest.raises(TierError, match="keys of blocks of 32 tokens"):
        here.tier.lookup(other, (ids(0),))
    with pytest.raises(TierError, match="keys of blocks of 32 tokens"):
        here.tier.store(other, here.source.side, (ids(0),), FENCE)
    with pytest.raises(TierError, match="places for 2 groups; the CPU tier has 1"):
        here.tier.lookup(here.keys, (ids(0), ids(0)))
    for place in (-1, KEYS):
        with pytest.raises(TierError, match=f"of a prompt of {KEYS} whole blocks"):
            here.tier.lookup(here.keys, (ids(place),))
    with here.tier.lookup(here.keys, (ids(0),)) as lease, pytest.raises(TierError, match="group full block 0 was not"):
        lease.load(here.target.side, (ids(0),))
    with pytest.raises(TierError, match="tables for 0 groups"):
        here.tier.store(here.keys, Side(here.source.cache, (), hold=KEPT), (ids(0),), FENCE)
    with pytest.raises(TierError, match="groups differ"):
        here.tier.store(here.keys, Side(join([states()]), (ids(1),), hold=KEPT), (ids(0),), FENCE)
    here.tier.close()


def test_what_has_nowhere_to_go_fails_by_name_and_the_rest_is_loaded() -> None:
    here = Simple()
    here.tier.store(here.keys, here.source.side, (np.arange(4),), FENCE).result(SECONDS)
    table = here.target.table.copy()
    table[1] = 0
    with here.tier.lookup(here.keys, (np.arange(4),)) as lease:
        moved = lease.load(Side(here.target.cache, (table,)), (np.arange(4),)).result(SECONDS)
    assert [one.place for one in moved.failed] == [1]
    assert here.target.wrong([0, 2, 3]) == 0
    assert here.target.written() == {0, 2, 3}
    here.tier.close()


def test_what_is_here_is_not_stored_again() -> None:
    here = Simple()
    here.tier.store(here.keys, here.source.side, (ids(0, 1),), FENCE).result(SECONDS)
    moved = here.tier.store(here.keys, here.source.side, (ids(0, 1, 2),), FENCE).result(SECONDS)
    assert (moved.places[0].tolist(), moved.present, moved.failed) == ([2], 2, ())
    here.tier.close()


# -- other tiers and peers --------------------------------------------------------------------------------------------


def test_a_peer_can_read_straight_from_the_tiers_memory() -> None:
    here = Simple()
    here.tier.store(here.keys, here.source.side, (np.arange(4),), FENCE).result(SECONDS)
    with here.tier.lookup(here.keys, (ids(3, 1),)) as lease:
        table = lease.tables(0)
        assert [place for place, block in enumerate(table.tolist()) if block] == [1, 3]
        there = here.target.table[[1, 3]]
        Copier(here.tier.cache, here.target.cache).copy(0, table[[1, 3]], there, range(32))
    assert here.target.wrong([1, 3]) == 0
    here.tier.close()


def test_what_is_evicted_can_be_kept_in_another_tier() -> None:
    here = Simple(2)
    lower = tier_of(here.source.cache, KEYS, layouts=("flashinfer_hnd",))
    here.tier.keep_elsewhere = partial(lower.store, fence=FENCE)
    for place in range(KEYS):
        here.tier.store(here.keys, here.source.side, (ids(place),), FENCE).result(SECONDS)
    with lower.lookup(here.keys, (np.arange(KEYS),)) as lease:
        found = lease.found[0].nonzero()[0]
        assert found.tolist() == [0, 1, 2, 3]
        lease.load(here.target.side, (found,)).result(SECONDS)
    assert here.target.wrong(found.tolist()) == 0
    here.tier.close()
    lower.close()


def test_states_pass_from_tier_to_tier_by_place() -> None:
    src, dst = join([states()]), join([states("mamba_ds")])
    keys = one_block_prompts(3)
    upper, lower = (
        CpuTier(tier_caches(src, block_tokens=16, nbytes=4096), like=src, block_tokens=16) for _ in range(2)
    )
    for block in (1, 2, 3):
        fill_codes(src.buffers[0], ids(block), codes_for(src.buffers[0], 1))
        upper.store(keys, Side(src, (ids(block),), hold=KEPT), (ids(block - 1),), FENCE).result(SECONDS)
    with upper.lookup(keys, (np.arange(3),)) as lease:
        assert lease.found[0].all()
        side = Side(upper.cache, (lease.tables(0),), of_tier=True, hold=KEPT)
        assert lower.store(keys, side, (np.arange(3),), FENCE).result(SECONDS).num_blocks == 3
    with lower.lookup(keys, (ids(2),)) as lease:
        assert lease.load(Side(dst, (ids(4),)), (ids(2),)).result(SECONDS).failed == ()
    assert check_codes(dst.buffers[0], ids(4), codes_for(dst.buffers[0], 1)).wrong == 0
    upper.close()
    lower.close()


# -- memory -----------------------------------------------------------------------------------------------------------


def test_memory_can_be_shared_and_says_so() -> None:
    like = KVCaches.single(full(4))
    with closing(CpuTier(tier_caches(like, block_tokens=16, nbytes=1 << 20, shared=True), like=like)) as tier:
        assert tier.usage().details["memory"].endswith(", shared")
        assert shared_file(tier.cache.buffers[0].memory) is not None


def test_memory_is_registered_in_pieces() -> None:
    cache = KVCaches.single(full(4, tp_size=2))
    pieces = list(pieces_of(cache, 1000))
    assert sum(nbytes for _, nbytes in pieces) == cache.nbytes
    assert max(nbytes for _, nbytes in pieces) == 1000
    for rank in cache.buffers[0].ranks:
        begin = rank.memory.data_ptr()
        mine = sorted(piece for piece in pieces if begin <= piece[0] < begin + rank.memory.numel())
        ends = [address + nbytes for address, nbytes in mine]
        assert [address for address, _ in mine] == [begin, *ends[:-1]]
        assert ends[-1] == begin + rank.memory.numel()


def test_memory_that_cannot_be_pinned_is_pageable_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[tuple[str, int]]()

    class Runtime:
        def cudaHostRegister(self, address: int, _nbytes: int, _flags: int) -> int:
            calls.append(("register", address))
            return 0 if len(calls) == 1 else 2

        def cudaHostUnregister(self, address: int) -> int:
            calls.append(("undo", address))
            return 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    cache = KVCaches.single(full(4, tp_size=2))
    pinned = PinnedMemory(cache)
    assert pinned.state == "pageable: CUDA error 2 when it was to be pinned"
    first, second = (rank.memory.data_ptr() for rank in cache.buffers[0].ranks)
    assert calls == [("register", first), ("register", second), ("undo", first)]


def test_the_numa_node_is_a_number_or_unknown() -> None:
    nodes = numa_nodes(KVCaches.single(full(4)))
    assert nodes == "unknown" or all(node.isdigit() for node in nodes.split(", "))


def test_estimates_follow_what_was_measured() -> None:
    big = PagedKVCache(
        FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=64, dtype="bfloat16"), num_layers=4, num_blocks=40
    )
    source, keys = Contents.of(big, 30), one_block_prompts(30)
    with closing(tier_of(source.cache, 30)) as tier:
        before = tier.seconds_for(10**9, 0)
        tier.store(keys, source.side, (np.arange(30),), FENCE).result(SECONDS)
        with tier.lookup(keys, (np.arange(30),)) as lease:
            moved = lease.load(source.side, (np.arange(30),)).result(SECONDS)
        assert tier.seconds_for(moved.nbytes, 0) == pytest.approx(moved.seconds)
    assert before == pytest.approx(0.2)
    assert tier.seconds_for(0, 1000) > 0


@pytest.mark.gpu
def test_a_cache_on_the_gpu_is_stored_and_loaded() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=4, dtype="bfloat16")

    def cache(layout: str) -> PagedKVCache:
        return PagedKVCache(spec, layout=layout, num_layers=2, num_blocks=12, device="cuda")

    source, target, keys = (
        Contents.of(cache("flash_attn_nhd"), KEYS),
        Target.of(cache("flashinfer_hnd"), KEYS),
        one_block_prompts(KEYS),
    )
    with closing(tier_of(source.cache, KEYS)) as tier:
        tier.store(keys, source.side, (np.arange(KEYS),), FENCE).result(SECONDS)
        with tier.lookup(keys, (np.arange(KEYS),)) as lease:
            lease.load(target.side, (np.arange(KEYS),)).result(SECONDS)
        details = tier.usage().details
    assert target.wrong(range(KEYS)) == 0
    assert details["memory"] == "pinned"
    assert details["pin time"].endswith(" s")
