"""Memory in sealed files: found again, freed with its last tensor, and out of everybody else's reach."""

import fcntl
import gc
import mmap
import os

import pytest
import torch

from pdtx.cache import PagedKVCache
from pdtx.cache.memory import allocate
from pdtx.cache.shared import HUGE_PAGE_BYTES, shared_file
from pdtx.errors import InputError
from pdtx.kvspec import FullAttentionSpec
from pdtx.testing.pair import open_descriptors

CPU = torch.device("cpu")
NBYTES = 3 * HUGE_PAGE_BYTES + 100


@pytest.fixture
def memory() -> torch.Tensor:
    return allocate(NBYTES, CPU, shared=True)


def file_of(memory: torch.Tensor) -> int:
    found = shared_file(memory)
    assert found is not None
    return found[0]


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("pdtx-cache" in line for line in maps)


def test_memory_is_zeroed_aligned_and_of_its_size(memory: torch.Tensor) -> None:
    assert memory.shape == (NBYTES,)
    assert memory.dtype is torch.uint8
    assert memory.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not memory.any()


def test_file_holds_what_the_memory_holds(memory: torch.Tensor) -> None:
    memory.copy_(torch.arange(NBYTES) % 251)
    assert os.pread(file_of(memory), NBYTES, 0) == memory.numpy().tobytes()


def test_file_is_found_from_any_part(memory: torch.Tensor) -> None:
    fd = file_of(memory)
    assert shared_file(memory) == (fd, 0)
    assert shared_file(memory[5:]) == (fd, 5)
    assert shared_file(memory[8:].view(-1)[100:200]) == (fd, 108)
    assert shared_file(memory[:8].view(torch.int64)) == (fd, 0)


def test_other_memory_has_no_file(memory: torch.Tensor) -> None:
    assert shared_file(allocate(NBYTES, CPU)) is None
    assert shared_file(torch.zeros(8)) is None
    assert shared_file(torch.zeros(8, device="meta")) is None


def test_no_byte_at_all_can_be_had() -> None:
    assert allocate(0, CPU, shared=True).shape == (0,)


def test_memory_lives_as_long_as_its_last_view() -> None:
    gc.collect()
    descriptors, mapped = open_descriptors(), mappings()
    view = allocate(NBYTES, CPU, shared=True).fill_(7)[100:200]
    gc.collect()
    assert mappings() > mapped
    assert view.sum() == 700
    del view
    gc.collect()
    assert (open_descriptors(), mappings()) == (descriptors, mapped)


def test_nobody_can_shrink_or_grow_it(memory: torch.Tensor) -> None:
    for size in (0, NBYTES // 2, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(file_of(memory), size)


def test_nobody_can_write_to_it_by_its_descriptor(memory: torch.Tensor) -> None:
    fd = file_of(memory)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    anew = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(anew, b"x", 0)
    finally:
        os.close(anew)
    memory.fill_(1)  # its maker still can


def test_no_seal_can_be_added_or_taken_off(memory: torch.Tensor) -> None:
    with pytest.raises(PermissionError):
        fcntl.fcntl(file_of(memory), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 70])
def test_more_than_there_is_is_refused(nbytes: int) -> None:
    with pytest.raises(InputError, match=f"no shared memory for a cache of {nbytes} bytes: this host has"):
        allocate(nbytes, CPU, shared=True)


def test_no_descriptor_left_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(InputError, match="Too many open files"):
        allocate(NBYTES, CPU, shared=True)


def test_kernel_without_the_seals_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    descriptors, mapped = open_descriptors(), mappings()
    monkeypatch.setattr("pdtx.cache.shared._SEALS", 1 << 20)
    with pytest.raises(InputError, match="Invalid argument"):
        allocate(NBYTES, CPU, shared=True)
    gc.collect()
    assert (open_descriptors(), mappings()) == (descriptors, mapped)


@pytest.mark.parametrize("shared", [False, True])
def test_cache_is_in_shared_memory_if_asked(llama_spec: FullAttentionSpec, shared: bool) -> None:
    cache = PagedKVCache(llama_spec, num_layers=2, num_blocks=4, tp_size=2, shared=shared)
    assert [shared_file(rank.memory) is not None for rank in cache.ranks] == [shared, shared]
    assert cache.unpoisoned(torch.arange(4)) == 0
