"""The disk tier: every coordinate comes back, and whatever is wrong with a file is a miss that names the block."""

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from pdtx.cache import KVCaches, PagedStateCache
from pdtx.errors import TierBusy, TierError, TierInUse
from pdtx.kvspec import FullAttentionSpec, Segment, StateSharding
from pdtx.ranges import preadv, pwritev
from pdtx.tiers import Side, direct_io
from pdtx.tiers.disk import DiskTier
from pdtx.tiers.files import BlockFolder, file_bytes
from tests.engine_pair import attention, join, states, wait_until
from tests.tier_disks import (
    TOKENS,
    WAIT_S,
    every,
    fill,
    hybrid,
    keys_of,
    load,
    open_disk,
    plain,
    store,
    tables_of,
)
from tests.tier_scenes import FENCE, KEPT


@contextmanager
def opened(*args: object, **options: object) -> Iterator[DiskTier]:
    tier = open_disk(*args, **options)  # type: ignore[arg-type]
    try:
        yield tier
    finally:
        tier.close()


def hush(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, name: str, silent: Callable[[int, int, int, int], int]
) -> None:
    """Let preadv or pwritev be silent, and the tier not wait for long, until undo(): honest calls may take longer."""
    monkeypatch.setattr(direct_io, name, silent)
    for flow in tier._flows:
        monkeypatch.setattr(flow, "_silence_s", 0.3)


def blocks_on_disk(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


LIKES: dict[str, tuple[KVCaches, KVCaches]] = {
    "same": (plain(), plain()),
    "other layout and blocks": (plain("flash_attn_nhd", 16), plain("flashinfer_hnd", 32)),
    "one block a tier block": (plain("sglang", TOKENS), plain("flashinfer_nhd", 16)),
    "ranks": (plain("flash_attn_nhd", 16, tp_size=2), plain("flashinfer_hnd", 32)),
    "ranks and states": (hybrid(tp_size=2), hybrid("flashinfer_hnd", 32, "mamba_ds")),
    "groups": (hybrid(), hybrid("flashinfer_hnd", 32, "mamba_ds")),
}


@pytest.mark.parametrize("case", LIKES)
@pytest.mark.parametrize("layouts", [None, "own"])
def test_every_coordinate_comes_back(tmp_path: Path, case: str, layouts: str | None) -> None:
    source, destination = LIKES[case]
    own = ("flash_attn_hnd", "mamba_sd") if layouts else None
    with opened(tmp_path, source, layouts=own) as tier:
        moved = store(tier, source, 5)
        assert (moved.failed, moved.present) == ((), 0)
        assert [places.tolist() for places in moved.places] == [each.tolist() for each in every(source, 5)]
        again, whole = load(tier, destination, 5)
        assert (whole, again.failed) == (True, ())
        assert again.nbytes == moved.nbytes > 0
        assert store(tier, source, 5).present == moved.num_blocks
        for group in tier.usage().groups:
            assert group.stored == group.loaded == group.used
            assert group.pinned.blocks == group.missed.blocks == 0


def test_blocks_are_there_after_a_restart_in_other_layouts_and_blocks(tmp_path: Path) -> None:
    source, destination = hybrid(), hybrid("flashinfer_hnd", 32, "mamba_ds")
    with opened(tmp_path, source) as tier:
        moved = store(tier, source, 5)
    with opened(tmp_path, destination) as tier:
        again, whole = load(tier, destination, 5)
        assert whole
        assert again.nbytes == moved.nbytes
        assert [group.used.blocks for group in tier.usage().groups] == [5, 5, 1]


def test_what_is_too_much_after_a_restart_goes_the_oldest_first(tmp_path: Path) -> None:
    cache = plain()
    with opened(tmp_path, cache) as tier:
        for seed in range(3):
            store(tier, cache, 2, seed)
    for seed in range(3):
        for place, digest in enumerate(keys_of(2, seed).digests):
            (file,) = tmp_path.rglob(f"{digest.hex()}*.kv")
            os.utime(file, ns=(seed * 10 + place, seed * 10 + place))
    size = blocks_on_disk(tmp_path)[0].stat().st_size
    with opened(tmp_path, cache, nbytes=3 * size) as tier:
        found = [load(tier, plain(), 2, seed)[0].places[0].tolist() for seed in range(3)]
    assert found == [[], [1], [0, 1]]
    assert len(blocks_on_disk(tmp_path)) == 3


def test_the_files_stay_within_the_bytes(tmp_path: Path) -> None:
    cache = plain()
    size = file_bytes(TOKENS * 2 * 2 * 2 * 8 * 2)
    with opened(tmp_path, cache, nbytes=4 * size + size // 2) as tier:
        for seed in range(6):
            store(tier, cache, 3, seed)
            assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= 4 * size
        (group,) = tier.usage().groups
        assert (group.stored.blocks, group.evicted.blocks, group.used.blocks) == (18, 14, 4)
        assert tier.usage().mapped == 4 * size
        assert load(tier, plain(), 3, 5)[1]
        assert not load(tier, plain(), 3, 0)[0].num_blocks


def test_what_is_pinned_is_not_evicted(tmp_path: Path) -> None:
    cache, into = plain(), plain()
    size = file_bytes(TOKENS * 2 * 2 * 2 * 8 * 2)
    with opened(tmp_path, cache, nbytes=4 * size) as tier:
        store(tier, cache, 2, 0)
        tables = tables_of(into, 2)
        with tier.lookup(keys_of(2, 0), every(into, 2)) as lease:
            for seed in range(1, 5):
                store(tier, cache, 3, seed)
            moved = lease.load(Side(into, tables), every(into, 2)).result(WAIT_S)
            assert (moved.num_blocks, moved.failed) == (2, ())
        assert load(tier, plain(), 2, 0)[1]
        refused = store(tier, cache, 6, 9)
        assert {failed.reason for failed in refused.failed} == {
            "the tier is full of blocks that are pinned or being written"
        }


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)


def swap(path: Path) -> None:
    other = next(file for file in blocks_on_disk(path.parents[3]) if file != path)
    path.write_bytes(other.read_bytes())


def _to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte": (flip, "checksum does not match"),
    "cut": (lambda path: os.truncate(path, 6000), "short read"),
    "empty": (lambda path: os.truncate(path, 0), "short read"),
    "gone": (Path.unlink, "No such file"),
    "another block's": (swap, "another block"),
    "a folder": (_to_folder, ""),
    "a link": (lambda path: path.symlink_to(path.rename(path.with_suffix(".x"))), "symbolic links"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("direct", [True, False])
def test_a_bad_file_is_a_miss_that_names_the_block(tmp_path: Path, fault: str, direct: bool) -> None:
    cache, into = plain(), plain("flashinfer_hnd", 32)
    spoil, reason = FAULTS[fault]
    with opened(tmp_path, cache, direct=direct) as tier:
        store(tier, cache, 4)
        (path,) = tmp_path.rglob(f"{keys_of(4).digests[2].hex()}*.kv")
        spoil(path)
        moved, _ = load(tier, into, 4)  # which checks that all but the blocks of moved.places is poison still
        assert moved.places[0].tolist() == [0, 1, 3]
        (failed,) = moved.failed
        assert (failed.group, failed.place) == ("full", 2)
        assert reason in failed.reason
        (group,) = tier.usage().groups
        assert (group.loaded.blocks, group.failed.blocks, group.used.blocks, group.pinned.blocks) == (3, 1, 3, 0)
        assert load(tier, into, 4)[0].failed == ()
        if fault != "a folder":
            assert store(tier, cache, 4).places[0].tolist() == [2]
            assert load(tier, into, 4)[1]


def test_a_full_disk_fails_the_block_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, into = plain(), plain()
    writes = 0

    def full(fd: int, iovecs: int, count: int, offset: int) -> int:
        nonlocal writes
        writes += 1
        if writes > 2:
            raise OSError(28, os.strerror(28))
        return pwritev(fd, iovecs, count, offset)

    with opened(tmp_path, cache) as tier:
        store(tier, cache, 2, 1)
        monkeypatch.setattr(direct_io, "pwritev", full)
        moved = store(tier, cache, 4, 2)
        assert len(moved.places[0]) == len(moved.failed) == 2
        assert {failed.reason for failed in moved.failed} == {"No space left on device"}
        assert tier.usage().details["not stored"] == "2 blocks: No space left on device"
        assert not list(tmp_path.rglob("*.part"))
        monkeypatch.undo()
        assert load(tier, into, 2, 1)[1]
        assert load(tier, into, 4, 2)[0].places[0].tolist() == moved.places[0].tolist()
        assert store(tier, cache, 4, 2).num_blocks == 2
        assert load(tier, into, 4, 2)[1]


def test_null_blocks_are_not_stored(tmp_path: Path) -> None:
    cache = hybrid()
    tables = tables_of(cache, 4)
    fill(cache, tables, 4)
    tables[1][: 4 + 1] = 0
    with opened(tmp_path, cache) as tier:
        moved = tier.store(keys_of(4), Side(cache, tables, hold=KEPT), every(cache, 4), FENCE).result(WAIT_S)
        assert [places.tolist() for places in moved.places] == [[0, 1, 2, 3], [2, 3], [3]]
        assert [(failed.group, failed.place) for failed in moved.failed] == [("window", 0), ("window", 1)]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("proof", [b"others", b"y" * 5000])
def test_other_tokens_of_an_equal_digest_are_a_miss(tmp_path: Path, proof: bytes, restarted: bool) -> None:
    cache = plain()
    other = dataclasses.replace(keys_of(3), proofs=(proof,) * 3)
    with ExitStack() as stack:
        tier = stack.enter_context(opened(tmp_path, cache))
        assert store(tier, cache, 3).num_blocks == 3
        if restarted:
            tier.close()
            tier = stack.enter_context(opened(tmp_path, cache))
        assert not tier.lookup(other, every(cache, 3)).found[0].any()
        moved = tier.store(other, Side(cache, tables_of(cache, 3), hold=KEPT), every(cache, 3), FENCE).result(WAIT_S)
        assert {failed.reason for failed in moved.failed} == {"other tokens have its digest"}
        assert load(tier, cache, 3)[1]


def test_long_proofs_are_believed_after_a_restart(tmp_path: Path) -> None:
    cache = plain()
    keys = keys_of(2)
    long = dataclasses.replace(keys, proofs=(b"a" * 5000, b"b" * 5000))
    tables = tables_of(cache, 2)
    with opened(tmp_path, cache) as tier:
        assert tier.store(long, Side(cache, tables, hold=KEPT), every(cache, 2), FENCE).result(WAIT_S).num_blocks == 2
    with opened(tmp_path, cache) as tier:
        assert tier.lookup(long, every(cache, 2)).found[0].all()
        assert not tier.lookup(keys, every(cache, 2)).found[0].any()


def test_one_tier_a_folder(tmp_path: Path) -> None:
    message = f"{tmp_path} is in use by another tier, of the process {os.getpid()}"
    with opened(tmp_path, plain()), pytest.raises(TierInUse, match=message):
        open_disk(tmp_path, plain())
    with opened(tmp_path, plain()):
        pass


def test_other_caches_files_are_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path, plain(), layouts=("sglang",)) as tier:
        store(tier, plain(), 2)
    with opened(tmp_path, plain(tp_size=2)) as tier:
        assert not load(tier, plain(), 2)[0].num_blocks
    with opened(tmp_path, plain()) as tier:
        assert load(tier, plain(), 2)[0].num_blocks == 2
    with opened(tmp_path, plain(), layouts=("flash_attn_hnd",)) as tier:
        assert not load(tier, plain(), 2)[0].num_blocks
    with opened(tmp_path, plain(), layouts=("sglang",)) as tier:
        assert load(tier, plain(), 2)[0].num_blocks == 2


def test_files_of_states_that_ranks_share_in_another_way_are_left_alone(tmp_path: Path) -> None:
    def caches(conv: tuple[Segment, ...]) -> KVCaches:
        kept, sharding = states(), StateSharding(conv=(conv,), heads=2)
        other = PagedStateCache(kept.spec, num_layers=1, num_blocks=5, tp_size=2, sharding=sharding)
        return join([attention(FullAttentionSpec, "full", num_blocks=9, tp_size=2)], [other])

    x, b = Segment(name="x", channels=4, units=2), Segment(name="B", channels=2, units=1)
    with opened(tmp_path, caches((x, b))) as tier:
        store(tier, caches((x, b)), 2)
    with opened(tmp_path, caches((b, x))) as tier:
        assert not load(tier, caches((b, x)), 2)[0].num_blocks
    with opened(tmp_path, caches((x, b))) as tier:
        assert load(tier, caches((x, b)), 2)[1]


def test_bad_files_are_deleted_at_the_start_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path, plain()) as tier:
        store(tier, plain(), 3)
    first, second, _ = blocks_on_disk(tmp_path)
    os.truncate(first, 5000)
    second.with_name(f".{second.name}.4.part").write_bytes(b"half")
    with caplog.at_level(logging.WARNING), opened(tmp_path, plain()) as tier:
        assert load(tier, plain(), 3)[0].num_blocks == 2
    assert "deleted 1 files of stores that had not ended" in caplog.text
    assert f"deleting {first}: it has 5000 bytes, not" in caplog.text
    assert not list(tmp_path.rglob("*.part"))
    assert len(blocks_on_disk(tmp_path)) == 2


def test_a_silent_disk_ends_jobs_and_blocks_no_lookup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, go = plain(), threading.Event()

    def silent(fd: int, iovecs: int, count: int, offset: int) -> int:
        assert go.wait(WAIT_S)
        return pwritev(fd, iovecs, count, offset)

    with opened(tmp_path, cache, most_jobs=2) as tier:
        store(tier, cache, 2, 1)
        hush(tier, monkeypatch, "pwritev", silent)
        tables = tables_of(cache, 5)
        jobs = [tier.store(keys_of(5, 2), Side(cache, tables, hold=KEPT), every(cache, 5), FENCE)]
        with pytest.raises(TierBusy, match="waiting"):
            jobs.extend(
                tier.store(keys_of(5, seed), Side(cache, tables, hold=KEPT), every(cache, 5), FENCE)
                for seed in range(3, 9)
            )
        assert tier.lookup(keys_of(2, 1), every(cache, 2)).found[0].all()
        failed = jobs[0].result(WAIT_S).failed
        assert {one.reason for one in failed} == {"the disk has done nothing for 0.3 s"}
        assert {one.place for one in failed} == set(range(5))
        go.set()
        assert all(job.result(WAIT_S) for job in jobs)
        wait_until(
            lambda: len(blocks_on_disk(tmp_path)) == tier.usage().groups[0].used.blocks,
            "no file is left of what failed",
        )
        monkeypatch.undo()
        assert store(tier, cache, 5, 20).num_blocks == 5
        assert load(tier, plain(), 5, 20)[1]


def test_what_is_read_after_a_load_was_given_up_goes_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache's blocks are another request's by then."""
    cache, into, go, read = plain(), plain(), threading.Event(), threading.Semaphore(0)

    def silent(fd: int, iovecs: int, count: int, offset: int) -> int:
        assert go.wait(WAIT_S)
        moved = preadv(fd, iovecs, count, offset)
        read.release()
        return moved

    with opened(tmp_path, cache) as tier:
        store(tier, cache, 3, 1)
        hush(tier, monkeypatch, "preadv", silent)
        with tier.lookup(keys_of(3, 1), every(cache, 3)) as lease:
            moved = lease.load(Side(into, tables_of(into, 3)), every(into, 3)).result(WAIT_S)
        assert {one.reason for one in moved.failed} == {"the disk has done nothing for 0.3 s"}
        go.set()
        assert all(read.acquire(timeout=WAIT_S) for _ in range(3))
        monkeypatch.undo()
        assert load(tier, plain(), 3, 1)[1]  # with the memory that the late ones have given back
        assert not into.buffers[0].written_blocks().any()


def test_no_file_of_a_store_that_was_given_up_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was written from may be another block's memory by then, which its checksum would not tell."""
    cache, go, written, named = plain(), threading.Event(), threading.Semaphore(0), list[Path]()
    rename = BlockFolder._rename

    def silent(fd: int, iovecs: int, count: int, offset: int) -> int:
        assert go.wait(WAIT_S)
        moved = pwritev(fd, iovecs, count, offset)
        written.release()
        return moved

    def naming(self: BlockFolder, temporary: Path, path: Path) -> None:
        named.append(path)
        rename(self, temporary, path)

    with opened(tmp_path, cache) as tier:
        monkeypatch.setattr(BlockFolder, "_rename", naming)
        with monkeypatch.context() as quiet:
            hush(tier, quiet, "pwritev", silent)
            assert len(store(tier, cache, 3).failed) == 3
            go.set()
            assert all(written.acquire(timeout=WAIT_S) for _ in range(3))
        assert store(tier, cache, 3, 2).num_blocks == 3  # behind them, in the same threads
        assert len(named) == 3
    assert not list(tmp_path.rglob("*.part"))


def test_no_load_waits_for_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, go = plain(), threading.Event()

    def slow(fd: int, iovecs: int, count: int, offset: int) -> int:
        assert go.wait(WAIT_S)
        return pwritev(fd, iovecs, count, offset)

    with opened(tmp_path, cache) as tier:
        store(tier, cache, 3, 1)
        monkeypatch.setattr(direct_io, "pwritev", slow)
        tables = tables_of(cache, 9, 2)
        stored = tier.store(keys_of(9, 2), Side(cache, tables, hold=KEPT), every(cache, 9), FENCE)
        assert load(tier, plain(), 3, 1)[1]
        assert not stored.done()
        go.set()
        assert stored.result(WAIT_S).num_blocks == 9


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_any_number_of_threads(tmp_path: Path, threads: int) -> None:
    cache = plain()
    with opened(tmp_path, cache, threads=threads) as tier:
        assert store(tier, cache, 9).num_blocks == 9
        assert load(tier, plain("flashinfer_hnd", 32), 9)[1]


def test_memory_that_lost_reads_have_is_used_again_when_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, go = plain(), threading.Event()

    def silent(fd: int, iovecs: int, count: int, offset: int) -> int:
        assert go.wait(WAIT_S)
        return preadv(fd, iovecs, count, offset)

    with opened(tmp_path, cache) as tier:
        store(tier, cache, 9)
        hush(tier, monkeypatch, "preadv", silent)
        for _ in range(3):
            with tier.lookup(keys_of(9), every(cache, 9)) as lease:
                moved = lease.load(Side(plain(), tables_of(cache, 9)), every(cache, 9)).result(WAIT_S)
            assert {one.reason for one in moved.failed} == {"the disk has done nothing for 0.3 s"}
            assert len(moved.failed) == 9
        go.set()
        monkeypatch.undo()
        assert load(tier, plain(), 9)[1]


def test_the_fence_is_waited_for(tmp_path: Path) -> None:
    cache, into, go = plain(), plain(), threading.Event()
    tables = tables_of(cache, 3)
    with opened(tmp_path, cache) as tier:
        stored = tier.store(
            keys_of(3),
            Side(cache, tables, hold=KEPT),
            every(cache, 3),
            fence=lambda: fill(cache, tables, 3) if go.wait(5) else None,
        )
        assert not stored.done()
        assert not tier.lookup(keys_of(3), every(cache, 3)).found[0].any()
        go.set()
        stored.result(WAIT_S)
        assert load(tier, into, 3)[1]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    cache = plain()
    with pytest.raises(TierError, match="holds no block"):
        open_disk(tmp_path, cache, nbytes=5000)
    (tmp_path / "file").write_text("x")
    with pytest.raises(TierError, match=r"cannot keep blocks in .*file"):
        open_disk(tmp_path / "file", cache)
    with opened(tmp_path, cache) as tier:
        with pytest.raises(TierError, match="keys of blocks of 32"):
            tier.lookup(dataclasses.replace(keys_of(2), block_tokens=32), every(cache, 2))
        with pytest.raises(TierError, match=r"places 0\.\.4 of a prompt of 2"):
            tier.lookup(keys_of(2), every(cache, 5))
        with tier.lookup(keys_of(2), every(cache, 2)) as lease, pytest.raises(TierError, match="block 0 was not found"):
            lease.load(Side(cache, tables_of(cache, 2)), every(cache, 2))
        store(tier, cache, 2)
        lease = tier.lookup(keys_of(2), every(cache, 2))
        lease.release()
        lease.release()
        with pytest.raises(TierError, match="released"):
            lease.load(Side(cache, tables_of(cache, 2)), every(cache, 2))
    with pytest.raises(TierError, match="closed"):
        tier.store(keys_of(2), Side(cache, tables_of(cache, 2), hold=KEPT), every(cache, 2), FENCE)


def test_places_may_be_few_and_in_any_order(tmp_path: Path) -> None:
    cache, into = plain(), plain("flashinfer_hnd", 32)
    with opened(tmp_path, cache) as tier:
        store(tier, cache, 6)
        tables, places = tables_of(into, 6), (np.array([4, 1], np.int64),)
        with tier.lookup(keys_of(6), places) as lease:
            moved = lease.load(Side(into, tables), places).result(WAIT_S)
        assert moved.places[0].tolist() == [4, 1]
