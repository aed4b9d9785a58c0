"""How a payload is reached: straight, or through a buffer; by the C library or by torch."""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from pdtx.native import library
from pdtx.plan import Runs, Slices
from pdtx.ranges.hostgrid import HostGrid
from pdtx.ranges.iovec import Iovecs
from pdtx.ranges.units import UnitGrid
from pdtx.testing import MoverPair
from pdtx.transports import Placement, Region, TransferKey
from pdtx.transports.bounce import BounceStage, Stager
from pdtx.transports.tcp import TcpMover
from pdtx.transports.tcp_payload import receive_payload, straight
from pdtx.transports.wire import Wire

KEY = TransferKey("request", 0, 1, 0, 16)


def random_slices(seed: int, count: int = 200, most: int = 400, region_bytes: int = 200_000) -> Slices:
    """Ranges that do not overlap, of any length from 0 on, in random order."""
    random = np.random.default_rng(seed)
    cell = region_bytes // count
    nbytes = random.integers(0, min(most, cell) + 1, count)
    offsets = random.permutation(count) * cell + random.integers(0, cell - nbytes + 1)
    return Slices(offsets.astype(np.int64), nbytes.astype(np.int64))


def region_of(nbytes: int = 200_000, seed: int | None = None) -> Region:
    if seed is None:
        return Region(torch.zeros(nbytes, dtype=torch.uint8))
    return Region(torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)))


def stream_of(region: Region, slices: Slices) -> bytes:
    """Return the payload, by a loop that nobody would ship."""
    memory = region.memory.numpy()
    ranges = zip(slices.offsets.tolist(), slices.nbytes.tolist(), strict=True)
    return b"".join(memory[offset : offset + nbytes].tobytes() for offset, nbytes in ranges)


def bytes_of(vectors: Iovecs) -> "ctypes.Array[ctypes.c_char]":
    """View the one range of vectors."""
    ((address, nbytes),) = vectors.tolist()
    view: ctypes.Array[ctypes.c_char] = (ctypes.c_char * nbytes).from_address(address)
    return view


@pytest.fixture(params=["C", "torch"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setenv("PDTX_NATIVE", "0")
    elif library() is None:
        pytest.skip("the C library is not built")
    return str(request.param)


@pytest.mark.parametrize("piece", [13, 1000, 1 << 20])
def test_gather_and_scatter_are_exact(native: str, piece: int) -> None:
    for seed in range(4):
        slices, source, there = random_slices(seed), region_of(seed=seed), region_of()
        stage = BounceStage(piece)
        stream = b"".join(bytes(bytes_of(vectors)) for vectors in stage.gather(source, slices))
        assert stream == stream_of(source, slices)
        at = 0
        for vectors in stage.scatter(there, slices):
            room = memoryview(bytes_of(vectors)).cast("B")
            room[:] = stream[at : at + len(room)]
            at += len(room)
        assert at == slices.total
        assert stream_of(there, slices) == stream
        outside = torch.ones(200_000, dtype=torch.bool)
        for offset, nbytes in zip(slices.offsets.tolist(), slices.nbytes.tolist(), strict=True):
            outside[offset : offset + nbytes] = False
        assert not there.memory[outside].any()


def test_the_next_piece_is_packed_while_one_is_sent(native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, ready = list[str](), threading.Event()
    grid = HostGrid if native == "C" else UnitGrid
    pack = grid.pack

    def noting(self: object, *of: object) -> None:
        pack(self, *of)  # type: ignore[arg-type]
        packed.append(threading.current_thread().name)
        if len(packed) == 2:
            ready.set()

    monkeypatch.setattr(grid, "pack", noting)
    slices = random_slices(1, most=1000)
    pieces = BounceStage(slices.total // 4 + 1).gather(region_of(seed=1), slices)
    next(pieces)
    assert ready.wait(5), "nothing is packed while the first piece is out"
    assert packed[1].startswith("pdtx-tcp-packer")
    pieces.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pdtx-tcp-packer")]


def test_what_is_chosen(native: str) -> None:
    stager, region, always = Stager(False, 1000), region_of(), Stager(True, 1000)

    def of(nbytes: int, count: int = 64) -> Slices:
        return Slices(np.arange(count) * 1500, np.full(count, nbytes))

    limit = 1024 if native == "C" else 256
    assert stager.choose(region, of(limit - 1)) is not None
    assert stager.choose(region, of(limit)) is None
    assert stager.choose(region, of(limit - 1, count=63)) is None, "few ranges are not worth a buffer"
    assert stager.choose(region, of(1), staged=False) is None
    assert stager.choose(region, of(limit), staged=True) is not None
    assert always.choose(region, of(limit), staged=False) is not None


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("staged", [False, True])
def test_small_ranges_on_both_sides(native: str, streams: int, staged: bool) -> None:
    """Of lengths of their own on each side, in more pieces than one."""
    with MoverPair(lambda: TcpMover(streams=streams, part_bytes=5000, bounce_bytes=10_000)) as pair:
        connection = pair.connect()
        for seed in range(3):
            there, source, region = random_slices(seed, 3000, 60), region_of(seed=seed), region_of()
            starts = np.cumsum(there.nbytes) - there.nbytes
            pair.grants.grant("session", KEY, Placement(region, there))
            connection.put(
                KEY, source, Runs(starts, there.offsets, there.nbytes), time.monotonic() + 10, staged=staged
            ).wait()
            assert stream_of(region, there) == source.memory.numpy()[: there.total].tobytes()
            back = region_of()
            pair.grants.grant_get("session", KEY, Placement(region, there))
            connection.get(KEY, back, Runs(there.offsets, starts, there.nbytes), time.monotonic() + 10).wait()
            assert back.memory.numpy()[: there.total].tobytes() == stream_of(region, there)
            assert not back.memory[there.total :].any()


def test_buffers_are_kept_and_no_larger_than_needed(native: str) -> None:
    stage, slices = BounceStage(1 << 20), random_slices(3)
    for _ in range(3):
        for _ in stage.gather(region_of(seed=1), slices):
            pass
        assert max(len(buffer) for buffer in stage._buffers) <= slices.total
    addresses = [buffer.data_ptr() for buffer in stage._buffers]
    for _ in stage.gather(region_of(seed=2), slices):
        pass
    assert [buffer.data_ptr() for buffer in stage._buffers] == addresses


class Silent(Wire):
    """Fills whatever it is given at once, with nothing."""

    def __init__(self) -> None:
        pass

    def receive_vectors(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("guarded", [True, False])
def test_no_copy_is_under_way_outside_a_guard(native: str, guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device copies go on by themselves; who gives a get up must not meet one. Without a guard they may."""
    seen, grid = list[str](), HostGrid if native == "C" else UnitGrid
    monkeypatch.setattr(grid, "put", lambda *_: seen.append("put"))
    monkeypatch.setattr(BounceStage, "_settle", lambda _: seen.append("settled"))

    @contextmanager
    def guard() -> Iterator[None]:
        yield
        seen.append("left")

    slices = random_slices(7)
    stage = BounceStage(slices.total // 3)
    receive_payload(Silent(), stage, region_of(), slices, "it", guard=guard if guarded else None)
    puts = seen.count("put")
    assert puts >= 3
    if guarded:
        assert seen == ["left", *["put", "settled", "left"] * (puts - 1), "put", "settled", "settled", "left"]
    else:
        assert seen == ["put"] * puts + ["settled"]


def test_straight_is_the_head_and_the_ranges() -> None:
    slices, region = random_slices(5), region_of(seed=5)
    cursor = straight(b"head", region, slices)
    assert cursor.total == slices.total + 4
    moved = b""

    def take(_: int, address: int, count: int) -> int:
        """A call that takes 1,000 bytes at most, and stops inside ranges."""

        nonlocal moved
        ranges = np.frombuffer(ctypes.string_at(address, 16 * count), np.uint64).reshape(-1, 2)
        taken = b"".join(ctypes.string_at(int(at), int(nbytes)) for at, nbytes in ranges)[:1000]
        moved += taken
        return len(taken)

    while cursor.done < cursor.total:
        cursor.move(take, 0)
    assert moved == b"head" + stream_of(region, slices)
