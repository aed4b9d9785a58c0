"""The ways to copy within a host: the same bytes by each of them, in steps of bounded size."""

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdtx.errors import InputError
from pdtx.native import Memory, library
from pdtx.plan import Runs, Slices
from pdtx.plan.runs import Int64s
from pdtx.transports.shm import copying
from pdtx.transports.shm.attach import AttachedCopy, bounded, may_attach, read_bytes
from pdtx.transports.shm.copying import (
    Copier,
    CopyBy,
    Steps,
    copy_by_kernel,
    copy_by_kernel_and_torch,
    copy_by_native,
    copy_by_torch,
)

MIB = 1 << 20
Way = Callable[[torch.Tensor, torch.Tensor, Runs], Steps]


def memory(tensor: torch.Tensor) -> Memory:
    return Memory(tensor.data_ptr(), tensor.numel())


def by_native(to: torch.Tensor, source: torch.Tensor, runs: Runs) -> Steps:
    native = library()
    if native is None:
        pytest.skip("pdtx's C library is not built")
    return copy_by_native(native, memory(to), memory(source), runs)


def by_kernel(to: torch.Tensor, source: torch.Tensor, runs: Runs) -> Steps:
    return copy_by_kernel(os.getpid(), memory(to), memory(source), runs)


def by_kernel_and_torch(to: torch.Tensor, source: torch.Tensor, runs: Runs) -> Steps:
    return copy_by_kernel_and_torch(os.getpid(), to, memory(source), runs)


WAYS = [by_native, by_kernel, copy_by_torch, by_kernel_and_torch]


def int64s(*numbers: int) -> Int64s:
    return np.array(numbers, np.int64)


def laid_out(sizes: list[int], order: list[int], gaps: list[int]) -> tuple[Int64s, int]:
    """Offsets at which ranges lie, one after another in the given order with gaps between, and where that ends."""
    offsets, at = np.zeros(len(sizes), np.int64), 0
    for index, gap in zip(order, gaps, strict=True):
        at += gap
        offsets[index] = at
        at += sizes[index]
    return offsets, at


@st.composite
def scattered(draw: st.DrawFn) -> Runs:
    """Runs of any sizes, also none, whose destinations do not overlap."""
    unit = draw(st.sampled_from([1, 2, 8, 16, 4096]))
    sizes = [size * unit for size in draw(st.lists(st.integers(0, 5), max_size=12))]
    sides = []
    for _ in range(2):
        order = draw(st.permutations(range(len(sizes))))
        gaps = [gap * unit for gap in draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))]
        sides.append(laid_out(sizes, order, gaps)[0])
    return Runs(sides[0], sides[1], int64s(*sizes))


def check(way: Way, runs: Runs, nbytes: int) -> list[int]:
    """Copy and compare with what numpy does; return the bytes of each step."""
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    to = torch.zeros(nbytes, dtype=torch.uint8)
    expected = to.numpy().copy()
    for src, dst, count in zip(runs.src, runs.dst, runs.nbytes, strict=True):
        expected[dst : dst + count] = source.numpy()[src : src + count]
    steps = list(way(to, source, runs))
    assert np.array_equal(to.numpy(), expected)
    assert sum(steps) == runs.total
    return steps


@pytest.mark.parametrize("way", WAYS)
@given(runs=scattered())
def test_bytes_are_exact(way: Way, runs: Runs) -> None:
    check(way, runs, int(max([0, *(runs.src + runs.nbytes), *(runs.dst + runs.nbytes)])))


@pytest.mark.parametrize("way", WAYS)
def test_nothing_to_copy_is_no_step(way: Way) -> None:
    assert check(way, Runs(int64s(), int64s(), int64s()), 64) == []
    assert sum(check(way, Runs(int64s(0, 8), int64s(8, 0), int64s(0, 0)), 64)) == 0


@pytest.mark.parametrize("way", WAYS)
def test_more_runs_than_one_call_takes(way: Way) -> None:
    count, size = 5000, 48
    random = np.random.default_rng(0)
    src, dst = (random.permutation(count).astype(np.int64) * size for _ in range(2))
    check(way, Runs(src, dst, np.full(count, size)), count * size)


@pytest.mark.parametrize("way", WAYS)
def test_one_side_in_one_piece(way: Way) -> None:
    """What is one range on one side is thousands on the other."""
    count, size = 3000, 256
    scattered = np.random.default_rng(0).permutation(count).astype(np.int64) * size
    whole = np.arange(count, dtype=np.int64) * size
    check(way, Runs(whole, scattered, np.full(count, size)), count * size)
    check(way, Runs(scattered, whole, np.full(count, size)), count * size)


@pytest.mark.parametrize("way", WAYS)
def test_steps_are_short_whatever_the_runs(way: Way) -> None:
    """A deadline is looked at between steps: neither one huge run nor many small ones may make a long one."""
    one = Runs(int64s(8), int64s(24), int64s(70 * MIB))
    count = 1100
    many = np.arange(count, dtype=np.int64) * (64 << 10)
    for runs in (one, Runs(many, many[::-1].copy(), np.full(count, 64 << 10))):
        steps = check(way, runs, 72 * MIB)
        assert len(steps) >= 4
        assert max(steps) <= 17 * MIB


def test_nothing_is_written_outside_the_runs_when_the_source_ends_early() -> None:
    """Half of the source is not mapped: the kernel stops there, and says so."""
    source = torch.ones(64, dtype=torch.uint8)
    to = torch.zeros(256, dtype=torch.uint8)
    runs = Runs(int64s(0, 1 << 46), int64s(10, 100), int64s(50, 50))
    steps = by_kernel(to, source, runs)
    with pytest.raises(OSError, match="Bad address"):
        list(steps)
    assert to.sum() == 50
    assert to[10:60].sum() == 50


def test_interrupted_ranges_go_on_where_they_stopped() -> None:
    """The kernel may move fewer bytes than asked for, down to the middle of a range."""
    source = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    to = torch.zeros(1000, dtype=torch.uint8)
    src, dst = Slices(int64s(0, 400), int64s(100, 300)), Slices(int64s(500, 20), int64s(250, 150))
    copy = AttachedCopy(os.getpid(), source.data_ptr(), src, to.data_ptr(), dst, piece_bytes=70)
    moved = []
    while copy.left:
        moved.append(copy.step())
    assert max(moved) <= 70
    payload = torch.cat([source[0:100], source[400:700]])
    assert torch.equal(to[500:750], payload[:250])
    assert torch.equal(to[20:170], payload[250:])


def test_ranges_are_cut_to_a_limit() -> None:
    cut = bounded(Slices(int64s(100, 5, 50), int64s(25, 0, 10)), 10)
    assert cut.offsets.tolist() == [100, 110, 120, 5, 50]
    assert cut.nbytes.tolist() == [10, 10, 5, 0, 10]
    small = Slices(int64s(1), int64s(10))
    assert bounded(small, 10) is small


# -- which way -------------------------------------------------------------------------------------------------------


def test_own_memory_can_be_read() -> None:
    assert may_attach()
    assert read_bytes(os.getpid(), torch.full((4,), 7, dtype=torch.uint8).data_ptr(), 4) == b"\7\7\7\7"


def test_auto_takes_the_library_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    if library() is not None:
        assert Copier(threads=1).library == "pdtx native, 1 thread"
        assert Copier(threads=3).library == "pdtx native, 3 threads"
    monkeypatch.setenv("PDTX_NATIVE", "0")
    assert Copier().library == "process_vm_readv"
    monkeypatch.setattr(copying, "may_attach", lambda: False)
    assert Copier().library == "torch"


@pytest.mark.parametrize(("copy_by", "library_name"), [("kernel", "process_vm_readv"), ("torch", "torch")])
def test_way_can_be_chosen(copy_by: CopyBy, library_name: str) -> None:
    assert Copier(copy_by).library == library_name


@pytest.mark.parametrize("threads", [-1, 17, 1.5, True, "2"])
def test_a_number_of_threads_that_is_none_is_refused(threads: int) -> None:
    with pytest.raises(InputError, match=r"threads is .*; a number of 1 to 16"):
        Copier("auto", threads)


def test_library_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDTX_NATIVE", "0")
    with pytest.raises(InputError, match="needs pdtx's C library"):
        Copier("native")
