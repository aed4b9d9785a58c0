"""Memory over a disk: write-through, write-back, what comes up again, and what a slow or broken disk does."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdtx.cache import KVCaches
from pdtx.errors import TierError
from pdtx.ranges import pwritev
from pdtx.tiers import Moved, PrefixKeys, Side, Tier, direct_io
from pdtx.tiers.cpu import CpuTier
from pdtx.tiers.disk import DiskTier
from pdtx.tiers.geometry import tier_caches
from pdtx.tiers.stack import TierStack, WritePolicy
from tests.engine_pair import wait_until
from tests.tier_disks import (
    TOKENS,
    WAIT_S,
    cache_poison,
    check,
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

ROOT = Path(__file__).parent.parent
BLOCK_BYTES = TOKENS * 2 * 2 * 2 * 8 * 2


def memory_of(like: KVCaches, blocks: int, layouts: tuple[str, ...] | None = None) -> CpuTier:
    """Memory of so many blocks of a plain cache."""
    cache = tier_caches(like, block_tokens=TOKENS, nbytes=(blocks + 1) * BLOCK_BYTES, layouts=layouts)
    return CpuTier(cache, like=like)


@contextmanager
def stacked(
    folder: Path,
    like: KVCaches,
    blocks: int = 4,
    write: WritePolicy = "through",
    *,
    layouts: tuple[str, ...] | None = None,
    **options: object,
) -> Iterator[tuple[TierStack, CpuTier, DiskTier]]:
    memory, disk = memory_of(like, blocks, layouts), open_disk(folder, like, **options)  # type: ignore[arg-type]
    stack = TierStack([memory, disk], write=write)
    try:
        yield stack, memory, disk
    finally:
        stack.close()


def drain(stack: TierStack) -> None:
    assert stack.drain(time.monotonic() + WAIT_S)


def sources(tier: Tier, num_blocks: int, seed: int) -> set[str]:
    """Load a whole request, check it, and return where it came from."""
    moved, whole = load(tier, plain("flashinfer_hnd", 32), num_blocks, seed)
    assert whole
    return set(moved.sources)


@pytest.mark.parametrize("layouts", [None, ("flash_attn_hnd",)])
def test_written_through_and_promoted(tmp_path: Path, layouts: tuple[str, ...] | None) -> None:
    cache = plain()
    with stacked(tmp_path, cache, 4, layouts=layouts) as (stack, memory, disk):
        for seed in range(3):
            assert store(stack, cache, 3, seed).num_blocks == 3
            drain(stack)
        assert disk.usage().groups[0].stored.blocks == 9
        assert sources(stack, 3, 2) == {"cpu"}
        assert sources(stack, 3, 0) == {"disk"}
        assert sources(stack, 3, 0) == {"cpu"}
        assert memory.usage().groups[0].pinned.blocks == disk.usage().groups[0].pinned.blocks == 0
        drain(stack)
        assert disk.usage().groups[0].stored.blocks == 9
        assert (stack.behind.written.blocks, stack.behind.refused, stack.behind.failed) == (9, 0, 0)


def test_what_is_stored_is_on_its_way_down_before_the_way_down_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has the result of a store may wait for the disk before the thread that stored has passed the blocks on."""
    cache, go, stored = plain(), threading.Event(), TierStack._stored

    def late(*call: Any) -> None:  # noqa: ANN401 - as TierStack._stored
        assert go.wait(WAIT_S)
        stored(*call)

    monkeypatch.setattr(TierStack, "_stored", late)
    with stacked(tmp_path, cache, 4) as (stack, _, disk):
        assert store(stack, cache, 3).num_blocks == 3
        assert not stack.drain(time.monotonic() + 0.05)
        go.set()
        drain(stack)
        assert disk.usage().groups[0].stored.blocks == 3


def test_a_store_that_fails_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = plain()

    def broken(*_: object) -> None:
        raise TierError("no")

    with stacked(tmp_path, cache, 4) as (stack, memory, _):
        with monkeypatch.context() as patch:
            patch.setattr(memory, "_move_in", broken)
            with pytest.raises(TierError):
                store(stack, cache, 3)
        drain(stack)
        with monkeypatch.context() as patch:
            patch.setattr(memory, "store", broken)
            with pytest.raises(TierError):
                store(stack, cache, 3)
        drain(stack)


def test_one_request_from_two_tiers(tmp_path: Path) -> None:
    cache = plain()
    with stacked(tmp_path, cache, 4) as (stack, memory, _):
        store(stack, cache, 4, 0)
        drain(stack)
        store(memory, cache, 2, 1)
        assert sources(stack, 4, 0) == {"cpu", "disk"}


def test_written_back_when_it_leaves_and_before_its_memory_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, into = plain(), plain()
    with stacked(tmp_path, cache, 4, "back") as (stack, memory, disk):
        store(stack, cache, 4, 0)
        assert disk.usage().groups[0].used.blocks == 0
        go = threading.Event()

        def slow(fd: int, iovecs: int, count: int, offset: int) -> int:
            assert go.wait(WAIT_S)
            return pwritev(fd, iovecs, count, offset)

        monkeypatch.setattr(direct_io, "pwritev", slow)
        before = [rank.memory.clone() for buffer in memory.cache.buffers for rank in buffer.ranks]
        tables = tables_of(cache, 3, 1)
        fill(cache, tables, 3, 1)
        stored = stack.store(keys_of(3, 1), Side(cache, tables, hold=KEPT), every(cache, 3), FENCE)
        wait_until(lambda: stack.behind.under_way == 3, "blocks are on their way down")
        time.sleep(0.05)
        after = [rank.memory for buffer in memory.cache.buffers for rank in buffer.ranks]
        assert all(bool((one == two).all()) for one, two in zip(before, after, strict=True))
        assert not stored.done()
        # A lookup does not wait, and what leaves is not found.
        with stack.lookup(keys_of(4, 0), every(cache, 4)) as lease:
            assert lease.found[0].sum() == 1
        go.set()
        assert stored.result(WAIT_S).num_blocks == 3
        assert disk.usage().groups[0].stored.blocks == 3
        for seed, blocks in ((0, 4), (1, 3)):
            moved, whole = load(stack, into, blocks, seed)
            assert whole, moved.failed


def test_a_load_does_not_wait_for_a_disk_that_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded is to be kept in memory too, whose blocks would have to be written down first."""
    cache, go = plain(), threading.Event()

    def stuck(fd: int, iovecs: int, count: int, offset: int) -> int:
        assert go.wait(WAIT_S)
        return pwritev(fd, iovecs, count, offset)

    with stacked(tmp_path, cache, 4, "back") as (stack, _, _):
        store(stack, cache, 3, 0)
        store(stack, cache, 4, 1)  # drives the others out
        drain(stack)
        monkeypatch.setattr(direct_io, "pwritev", stuck)
        begun = time.monotonic()
        assert sources(stack, 3, 0) == {"disk"}
        assert time.monotonic() - begun < 5
        go.set()
        drain(stack)
        monkeypatch.undo()
        assert sources(stack, 3, 0) <= {"disk", "cpu"}


def test_what_is_in_memory_alone_is_written_down_at_the_end(tmp_path: Path) -> None:
    cache = plain()
    with stacked(tmp_path, cache, 4, "back") as (stack, _, disk):
        store(stack, cache, 3, 0)
        assert disk.usage().groups[0].used.blocks == 0
    with stacked(tmp_path, cache, 4, "back") as (stack, _, _):
        assert sources(stack, 3, 0) == {"disk"}


def test_to_be_written_down_is_no_use_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With first in, first out by use, the request that was really used stays and the other one goes."""
    cache = plain()
    with stacked(tmp_path, cache, 4) as (stack, memory, _):
        store(stack, cache, 2, 0)
        drain(stack)
        policy, touched = memory._shelves[0]._policy, list[int]()
        monkeypatch.setattr(policy, "touch", lambda keys: touched.append(len(keys)))
        store(stack, cache, 2, 1)
        drain(stack)
        assert touched == []
        assert memory.usage().groups[0].missed.blocks == 0
        assert sources(stack, 2, 1) == {"cpu"}
        assert sum(touched) == 2


def test_what_is_on_disk_is_not_written_back_again(tmp_path: Path) -> None:
    cache = plain()
    with stacked(tmp_path, cache, 4, "back") as (stack, _, disk):
        for _ in range(3):
            for seed in range(3):
                store(stack, cache, 4, seed)
        assert disk.usage().groups[0].stored.blocks == 12
        assert stack.behind.written.blocks == 12
        assert stack.behind.present > 0


def test_groups_of_every_kind(tmp_path: Path) -> None:
    source, into = hybrid(), hybrid("flashinfer_hnd", 32, "mamba_ds")
    memory = CpuTier(tier_caches(source, block_tokens=TOKENS, nbytes=1 << 20), like=source)
    stack = TierStack([memory, open_disk(tmp_path, source)])
    try:
        tables = tables_of(source, 5)
        fill(source, tables, 5)
        tables[1][: 3 * TOKENS // 16] = 0
        moved = stack.store(keys_of(5), Side(source, tables, hold=KEPT), every(source, 5), FENCE).result(WAIT_S)
        assert [len(each) for each in moved.places] == [5, 2, 1]
        drain(stack)
        assert [group.used.blocks for group in stack.usages()[1].groups] == [5, 2, 1]
    finally:
        stack.close()
    memory = CpuTier(tier_caches(into, block_tokens=TOKENS, nbytes=1 << 20), like=into)
    stack = TierStack([memory, open_disk(tmp_path, into)])
    try:
        for source_name in ("disk", "cpu"):
            again, _ = load(stack, into, 5)
            assert again.sources == (source_name,)
            assert again.nbytes == moved.nbytes
            assert [each.tolist() for each in again.places] == [[0, 1, 2, 3, 4], [3, 4], [4]]
    finally:
        stack.close()


def test_round_trip_over_another_process(tmp_path: Path) -> None:
    """Cache, memory, disk; a new process: disk, memory, cache of another layout and block size."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tests.test_tier_stack import stacked, drain\n"
        "from tests.tier_disks import hybrid, plain, store\n"
        "cache = plain('flash_attn_nhd', 16)\n"
        "with stacked(Path(sys.argv[1]), cache, 9) as (stack, _, _):\n"
        "    store(stack, cache, 7, 5); drain(stack)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, timeout=60, check=True)
    into = plain("flashinfer_hnd", 32)
    with stacked(tmp_path, into, 9) as (stack, memory, _):
        assert sources(stack, 7, 5) == {"disk"}
        moved, whole = load(memory, into, 7, 5)
        assert whole
        assert moved.nbytes == 7 * BLOCK_BYTES


def test_a_bad_file_is_a_miss_and_is_not_promoted(tmp_path: Path) -> None:
    cache, into = plain(), plain()
    with stacked(tmp_path, cache, 4) as (stack, memory, _):
        store(stack, cache, 4, 0)
        drain(stack)
        store(stack, cache, 4, 1)
        (path,) = tmp_path.rglob(f"{keys_of(4, 0).digests[1].hex()}*.kv")
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        moved, _ = load(stack, into, 4, 0)
        assert moved.places[0].tolist() == [0, 2, 3]
        assert [(failed.place, failed.reason) for failed in moved.failed] == [
            (1, "the checksum does not match: bytes have changed on disk")
        ]
        assert memory.lookup(keys_of(4, 0), every(cache, 4)).found[0].tolist() == [True, False, True, True]


def test_a_slow_disk_refuses_and_nothing_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, go = plain(), threading.Event()

    def slow(fd: int, iovecs: int, count: int, offset: int) -> int:
        assert go.wait(WAIT_S)
        return pwritev(fd, iovecs, count, offset)

    with stacked(tmp_path, cache, 12) as (stack, memory, disk):
        monkeypatch.setattr(direct_io, "pwritev", slow)
        begun = time.monotonic()
        for seed in range(12):
            assert store(stack, cache, 3, seed).num_blocks == 3
            assert sources(stack, 3, seed) == {"cpu"}
        assert time.monotonic() - begun < WAIT_S / 2
        wait_until(lambda: stack.behind.refused == 36 - 6, "what became of the last store")
        assert stack.behind.under_way == 6  # two stores: half of the memory
        assert memory.usage().groups[0].pinned.blocks == 6
        assert not stack.drain(time.monotonic() + 0.01)
        go.set()
        drain(stack)
        assert stack.behind.written.blocks == disk.usage().groups[0].stored.blocks == 6
        assert memory.usage().groups[0].pinned.blocks == 0
        assert "36" not in stack.usage().details["written down"]


def test_a_disk_that_takes_no_more_jobs_lets_blocks_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = plain()

    def failing(fd: int, iovecs: int, count: int, offset: int) -> int:
        raise OSError(28, "No space left on device")

    with stacked(tmp_path, cache, 4, "back") as (stack, _, disk):
        monkeypatch.setattr(direct_io, "pwritev", failing)
        for seed in range(4):
            assert store(stack, cache, 4, seed).num_blocks == 4
        assert stack.behind.failed == 12
        disk.close()
        assert store(stack, cache, 4, 9).num_blocks == 4
        assert stack.behind.refused == 4
        assert sources(stack, 4, 9) == {"cpu"}


@pytest.mark.parametrize("write", ["through", "back"])
def test_random_operations_from_several_threads(tmp_path: Path, write: WritePolicy) -> None:
    """Lookups, stores, loads and evictions at once, in memory and on disk: every load is of its own tokens."""
    like, errors = plain(), list[str]()
    loaded, done = [0] * 4, [0] * 4  # by each thread: to add to one number from several may lose some

    def work(stack: TierStack, number: int) -> None:
        cache, into, chance = plain(num_blocks=20), plain("flashinfer_hnd", 32), np.random.default_rng(number)
        try:
            for _ in range(60):
                seed, blocks = int(chance.integers(8)), int(chance.integers(1, 4))
                if chance.random() < 0.5:
                    store_prefix(stack, cache, blocks, seed)
                else:
                    loaded[number] += load_prefix(stack, into, blocks, seed)
                done[number] += 1
        except BaseException as error:
            errors.append(f"{number}: {type(error).__name__}: {error}")
            raise

    with stacked(tmp_path, like, 5, write, nbytes=14 * (BLOCK_BYTES + 4096)) as (stack, memory, disk):
        threads = [threading.Thread(target=work, args=(stack, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors
        assert done == [60] * 4
        assert sum(loaded) > 20
        drain(stack)
        for tier in (memory, disk):
            (group,) = tier.usage().groups
            assert group.pinned.blocks == group.failed.blocks == 0
        assert disk.usage().groups[0].evicted.blocks > 0
        assert disk.usage().groups[0].loaded.blocks > 0
        assert len(list(tmp_path.rglob("*.kv"))) == disk.usage().groups[0].used.blocks <= 14


MOST = 3
"""Blocks of each prompt above: the codes of its first ones do not depend on how many are stored."""


def store_prefix(stack: TierStack, cache: KVCaches, blocks: int, seed: int) -> None:
    tables = tables_of(cache, MOST, seed)
    fill(cache, tables, MOST, seed)
    stack.store(keys_of(MOST, seed), Side(cache, tables, hold=KEPT), [np.arange(blocks)], FENCE).result(WAIT_S)


def load_prefix(stack: TierStack, into: KVCaches, blocks: int, seed: int) -> int:
    cache_poison(into)
    tables, asked = tables_of(into, MOST, 3), np.arange(blocks)
    with stack.lookup(keys_of(MOST, seed), [asked]) as lease:
        found = asked[lease.found[0]]
        time.sleep(0.001)  # for others to drive it out, if they could
        moved = lease.load(Side(into, tables), [found]).result(WAIT_S)
    assert moved.failed == ()
    assert moved.places[0].tolist() == found.tolist()
    check(into, tables, MOST, moved.places, seed=seed)
    return moved.num_blocks


def test_nothing_to_load_is_done_at_once(tmp_path: Path) -> None:
    cache = plain()
    with (
        stacked(tmp_path, cache) as (stack, _, _),
        stack.lookup(keys_of(2), every(cache, 2)) as lease,
    ):
        moved = lease.load(Side(cache, tables_of(cache, 2)), [np.zeros(0, np.int64)]).result(0)
        assert (moved.num_blocks, moved.failed, moved.sources) == (0, (), ())
        with pytest.raises(TierError, match="block 1 was not found"):
            lease.load(Side(cache, tables_of(cache, 2)), [np.array([1])])


def test_tiers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    cache = plain()
    disk = open_disk(tmp_path / "disk", cache)
    other = CpuTier(tier_caches(cache, block_tokens=32, nbytes=1 << 20), like=cache)
    try:
        checks: list[tuple[Callable[[], object], str]] = [
            (lambda: TierStack([disk]), "first tier of a stack is one of memory"),
            (lambda: TierStack([]), "first tier of a stack is one of memory"),
            (lambda: TierStack([other, disk]), "different sizes"),
            (lambda: TierStack([other], write="around"), "written through or back"),  # type: ignore[arg-type]
        ]
        for make, message in checks:
            with pytest.raises(TierError, match=message):
                make()
    finally:
        disk.close()
        other.close()


class Deaf(DiskTier):
    """A disk tier whose loads all fail, or are refused."""

    refuse = False

    def load(self, *_: object) -> "object":  # type: ignore[override]
        if self.refuse:
            raise TierError("refused")
        from concurrent.futures import Future

        future = Future[Moved]()
        future.set_exception(TierError("deaf"))
        return future


def test_what_one_tier_cannot_load_fails_alone(tmp_path: Path) -> None:
    cache, into = plain(), plain("flashinfer_hnd", 32)
    memory = memory_of(cache, 4)
    disk = Deaf(tmp_path, like=cache, block_tokens=TOKENS, nbytes=1 << 20, fingerprint=b"f" * 32)
    stack = TierStack([memory, disk])
    try:
        store(stack, cache, 4, 0)
        drain(stack)
        store(memory, cache, 2, 1)
        for refuse, reason in ((False, "deaf"), (True, "refused")):
            disk.refuse = refuse
            moved, whole = load(stack, into, 4, 0)
            assert not whole
            assert moved.num_blocks == len(moved.failed) == 2
            assert {failed.reason for failed in moved.failed} == {reason}
        store(memory, cache, 4, 1)
        with stack.lookup(keys_of(4, 0), every(into, 4)) as lease, pytest.raises(TierError, match="refused"):
            lease.load(Side(into, tables_of(into, 4)), every(into, 4))
    finally:
        stack.close()


def test_keys_are_the_only_thing_tiers_share(tmp_path: Path) -> None:
    cache = plain()
    with stacked(tmp_path, cache) as (stack, _, _):
        store(stack, cache, 2, 0)
        drain(stack)
        keys = keys_of(2, 0)
        other = PrefixKeys(keys.block_tokens, keys.digests, (b"other tokens",) * 2)
        assert not stack.lookup(other, every(cache, 2)).found[0].any()
