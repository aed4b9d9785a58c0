"""Links over UCX between two processes: exact bytes, what is said of the way they took, and what is not possible."""

import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from operator import le
from pathlib import Path

import numpy as np
import pytest
import torch

from pdtx.errors import PeerUnreachable, ProtocolError, TransferError
from pdtx.plan import Runs
from pdtx.transports.base import Region
from pdtx.transports.onesided.fabric import Link, Shared
from pdtx.transports.ucx.fabric import UcxFabric
from pdtx.transports.ucx.libucp import Ucp
from pdtx.transports.ucx.link import Remote
from pdtx.transports.ucx.messages import Greeting, Key, pack_greeting, pack_key, unpack_greeting, unpack_key
from tests.engine_pair import wait_until
from tests.ucx_peer import (
    Moved,
    Peer,
    copied,
    joined,
    pattern,
    peer_process,
    scattered,
    ucx_fabric,
    usable_nixl,
    usable_runtime,
)


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def reversed_runs(runs: Runs) -> Runs:
    return Runs(runs.dst, runs.src, runs.nbytes)


def require_round_trip(peer: Peer, link: Link[Remote], runs: Runs, nbytes: int) -> None:
    """Put runs into the peer's memory, get them back into other memory, and compare every byte of both."""
    source, target = Region(pattern(nbytes, 1)), pattern(nbytes, 2)
    remote = link.open(peer.share(nbytes, 2), nbytes)
    moved = Moved()
    link.write(source, remote, runs, soon(), moved.progress)
    there = copied(source.memory, target, runs)
    assert torch.equal(peer.memory(), there)
    assert moved.nbytes == runs.total
    back, before = Region(pattern(nbytes, 3)), pattern(nbytes, 3)
    link.read(remote, back, reversed_runs(runs), soon(), Moved().progress)
    assert torch.equal(back.memory, copied(there, before, reversed_runs(runs)))


# -- exact bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tls", "native", "runtime"),
    [
        ("tcp", True, "ucxx"),
        ("tcp", False, "raw"),
        ("tcp,cma", True, "raw"),
        ("tcp,shm", False, "ucxx"),
        ("all", True, "ucxx"),
        ("all", False, "raw"),
    ],
)
def test_scattered_runs_arrive_exactly(tls: str, native: bool, runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usable_runtime(runtime)
    monkeypatch.setenv("UCX_TLS", tls)
    monkeypatch.setenv("PDTX_NATIVE", str(int(native)))
    with ucx_fabric(runtime=runtime) as fabric, joined(fabric, runtime=runtime) as (peer, link):
        assert link.path.kind == ("tcp" if tls == "tcp" else "shm")
        for count, size in ((1, 1), (777, 100), (300, 4096), (9000, 64)):
            require_round_trip(peer, link, *scattered(count, size, seed=count))


@pytest.mark.parametrize("tls", ["tcp", "all"])
def test_sizes_of_every_kind_in_one_transfer(tls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty runs, single bytes, odd offsets and runs longer than a batch."""
    usable_runtime()
    monkeypatch.setenv("UCX_TLS", tls)
    sizes = np.array([0, 1, 3, 20 << 20, 7, 0, 4097, 9 << 20, 65537], np.int64)
    starts = np.cumsum(sizes + 13) - sizes
    with ucx_fabric() as fabric, joined(fabric) as (peer, link):
        require_round_trip(peer, link, Runs(starts, starts[-1] - starts + 5, sizes), int(starts[-1] + (40 << 20)))
        nothing = np.zeros(0, np.int64)
        require_round_trip(peer, link, Runs(nothing, nothing, nothing), 4096)


def test_nixls_library(monkeypatch: pytest.MonkeyPatch) -> None:
    usable_nixl()
    usable_runtime("raw", "nixl")
    monkeypatch.setenv("UCX_TLS", "tcp")
    with ucx_fabric(library="nixl") as fabric, joined(fabric, library="nixl") as (peer, link):
        assert "(nixl)" in link.path.library
        require_round_trip(peer, link, *scattered(100, 5000))


def test_two_libraries_understand_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    usable_nixl()
    usable_runtime("raw", "wheel")
    monkeypatch.setenv("UCX_TLS", "tcp")
    with ucx_fabric(library="wheel") as fabric, joined(fabric, library="nixl") as (peer, link):
        require_round_trip(peer, link, *scattered(100, 5000))


# -- what is said of the way -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tls", "kind", "detail", "possible"),
    [
        ("tcp", "tcp", "tcp/", ("tcp",)),
        ("tcp,cma", "shm", "cma/memory", ("shm", "tcp")),
        ("all", "shm", "cma/memory", ("shm", "tcp")),
        ("rc,tcp", "tcp", "tcp/", ("tcp",)),
    ],
)
def test_path(tls: str, kind: str, detail: str, possible: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    usable_runtime()
    if Path("/sys/class/infiniband").exists() and any(Path("/sys/class/infiniband").iterdir()):
        pytest.skip("this host has verbs devices, which may carry it")
    monkeypatch.setenv("UCX_TLS", tls)
    with ucx_fabric() as fabric, joined(fabric) as (_, link):
        path = link.path
        assert path.kind == kind
        assert path.detail.startswith(detail)
        assert not path.emulated
        assert path.library == str(fabric)
        assert path.library.startswith("UCX 1.")
        assert path.possible == possible
        assert link.path is path


def test_put_over_tcp_is_real_and_get_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    usable_runtime()
    monkeypatch.setenv("UCX_TLS", "tcp")
    with ucx_fabric() as fabric, joined(fabric) as (_, link):
        assert link.path.detail.endswith(", gets emulated")
        assert not link.path.emulated


@pytest.mark.parametrize("runtime", ["ucxx", "raw"])
def test_threshold_of_the_user_makes_puts_emulated_and_that_is_said(
    runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable_runtime(runtime)
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_RNDV_THRESH", "8192")
    with ucx_fabric(runtime=runtime) as fabric, joined(fabric, runtime=runtime) as (peer, link):
        assert link.path.emulated
        assert "emulated in software" in str(link.path)
        require_round_trip(peer, link, *scattered(50, 20_000))


def test_path_without_ucx_describing_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    usable_runtime("raw")
    monkeypatch.setenv("UCX_PROTO_ENABLE", "n")
    with ucx_fabric(runtime="raw") as fabric, joined(fabric, runtime="raw") as (peer, link):
        assert (link.path.kind, link.path.detail) == ("shm", "cma/memory")
        require_round_trip(peer, link, *scattered(50, 20_000))


# -- what is not possible ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["ucxx", "raw"])
@pytest.mark.parametrize("tls", ["cma", "posix"])
def test_transports_that_cannot_notice_the_peers_end(runtime: str, tls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usable_runtime(runtime)
    monkeypatch.setenv("UCX_TLS", tls)
    with ucx_fabric(runtime=runtime) as fabric, joined(fabric, runtime=runtime) as (_, link):
        with pytest.raises(PeerUnreachable, match=f"UCX_TLS={tls}: Destination is unreachable.*such as tcp"):
            _ = link.path
        with pytest.raises(PeerUnreachable):
            _ = link.path


@pytest.mark.parametrize("runtime", ["ucxx", "raw"])
def test_transports_that_are_not_there(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usable_runtime(runtime)
    monkeypatch.setenv("UCX_TLS", "xpmem")
    with pytest.raises(TransferError, match=r"does not start with UCX_TLS=xpmem and all devices: .*[Nn]o such device"):
        UcxFabric(runtime=runtime)


def test_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    usable_runtime("raw")
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "nowhere0")
    with pytest.raises(TransferError, match="UCX_TLS=tcp and UCX_NET_DEVICES=nowhere0"):
        UcxFabric(runtime="raw")


def test_two_sides_without_a_common_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    usable_runtime("raw")
    monkeypatch.setenv("UCX_TLS", "cma")
    with peer_process(runtime="raw") as peer:
        monkeypatch.setenv("UCX_TLS", "tcp")
        with ucx_fabric(runtime="raw") as fabric:
            link = fabric.link(peer.pipe.fileno())
            link.join(peer.greet(link.greeting()), soon())
            with pytest.raises(PeerUnreachable, match="UCX_TLS=tcp: Destination is unreachable"):
                _ = link.path
            link.close()


# -- what strangers may send -------------------------------------------------------------------------------------------


@contextmanager
def lone_link(**options: object) -> Iterator[Link[Remote]]:
    usable_runtime("raw")
    with ucx_fabric(runtime="raw", **options) as fabric:
        link = fabric.link(-1)
        yield link
        link.close()


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        b"\x90",
        b"no greeting",
        pack_greeting(Greeting(99, b"a", b"h", [], b"s")),
        pack_greeting(Greeting(1, b"", b"h", [], b"s")),
        pack_greeting(Greeting(1, bytes(50_000), b"h", [], b"s")),
        pack_greeting(Greeting(1, b"a", bytes(65), [], b"s")),
        pack_greeting(Greeting(1, b"a", b"h", ["pigeon"], b"s")),  # type: ignore[list-item]
    ],
)
def test_greeting_that_is_none(greeting: bytes) -> None:
    with lone_link() as link, pytest.raises(ProtocolError):
        link.join(greeting, soon())


def test_greeting_is_small() -> None:
    with lone_link() as link:
        assert len(link.greeting()) < 4096
        assert unpack_greeting(link.greeting()).kinds


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(16),
        pack_key(Key(4096, 99, b"k")),
        pack_key(Key((1 << 64) - 50, 100, b"k")),
        pack_key(Key(4096, 100, bytes(10_000))),
    ],
)
def test_key_that_is_none(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="UCX key"):
        unpack_key(data, 100)
    with lone_link() as link, pytest.raises(ProtocolError):
        link.open(Shared(data), 100)


def test_key_round_trip() -> None:
    key = Key(4096, 100, b"key")
    assert unpack_key(pack_key(key), 100) == key


# -- memory ------------------------------------------------------------------------------------------------------------


def test_region_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    usable_runtime("raw")
    calls = list[int]()
    original = Ucp.map_memory

    def counted(self: Ucp, context: int, address: int, nbytes: int) -> int:
        calls.append(nbytes)
        return original(self, context, address, nbytes)

    with ucx_fabric(runtime="raw") as fabric:
        monkeypatch.setattr(Ucp, "map_memory", counted)
        memory = pattern(8 << 20, 1)
        first = fabric.register(Region(memory))
        assert first is not None
        assert first.nbytes == 8 << 20
        assert 0 < first.seconds < 10
        assert fabric.register(Region(memory)) is first
        with joined(fabric, runtime="raw") as (peer, link):
            remote = link.open(peer.share(8 << 20, 2), 8 << 20)
            runs, _ = scattered(10, 1000)
            for _ in range(3):
                link.write(Region(memory), remote, runs, soon(), Moved().progress)
            assert link.share(Region(memory)) == link.share(Region(memory))
        assert calls == [8 << 20]
        assert fabric.register(Region(memory[4096:])) is first, "it lies in a registered one"
        assert calls == [8 << 20]
        fabric.register(Region(pattern(4096, 2)))
        assert calls == [8 << 20, 4096]


def test_registered_memory_stays_as_long_as_the_fabric() -> None:
    """Its address must not become another region's."""
    usable_runtime("raw")
    with ucx_fabric(runtime="raw") as fabric:
        memory = pattern(4096, 1)
        gone = weakref.ref(memory)
        fabric.register(Region(memory))
        del memory
        gc.collect()
        assert gone() is not None


def test_memory_that_cannot_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    usable_runtime("raw")
    with ucx_fabric(runtime="raw") as fabric:
        with pytest.raises(TransferError, match="an empty region"):
            fabric.register(Region(torch.zeros(0, dtype=torch.uint8)))
        refuse = lambda *_: (_ for _ in ()).throw(fabric._engine.runtime.ucp.error("register memory", -4))  # noqa: E731
        monkeypatch.setattr(Ucp, "map_memory", refuse)
        with pytest.raises(TransferError, match=r"UCX failed to register memory: Out of memory; see ulimit -l"):
            fabric.register(Region(torch.zeros(1, dtype=torch.uint8)))


# -- waiting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "python"])
def test_waiting_reacts_at_once_and_costs_nothing(native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usable_runtime("raw")
    monkeypatch.setenv("PDTX_NATIVE", native)
    ours, theirs = socket.socketpair()
    with ours, theirs, lone_link() as link:
        assert not link.wait_readable(ours.fileno(), 0.0)
        begun, cpu = time.monotonic(), time.thread_time()
        assert not link.wait_readable(ours.fileno(), 1.0)
        assert 0.9 < time.monotonic() - begun < 2.0
        assert time.thread_time() - cpu < 0.2, "an idle link keeps a core busy"
        timer = threading.Timer(0.3, theirs.send, [b"x"])
        timer.start()
        begun = time.monotonic()
        assert link.wait_readable(ours.fileno(), 20.0)
        assert 0.2 < time.monotonic() - begun < 2.0
        timer.join()
        assert link.wait_readable(ours.fileno(), 20.0), "what has not been read is still there"
        ours.recv(1)
        theirs.close()
        assert link.wait_readable(ours.fileno(), 20.0), "the end of a stream can be read"


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "python"])
def test_interrupt_ends_a_wait_early(native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usable_runtime("raw")
    monkeypatch.setenv("PDTX_NATIVE", native)
    ours, theirs = socket.socketpair()
    with ours, theirs, lone_link() as link:
        timer = threading.Timer(0.3, link.interrupt)
        timer.start()
        begun = time.monotonic()
        assert not link.wait_readable(ours.fileno(), 20.0)
        assert time.monotonic() - begun < 2.0
        timer.join()
        begun = time.monotonic()
        assert not link.wait_readable(ours.fileno(), 0.5)
        assert time.monotonic() - begun > 0.4, "one interrupt ends one wait"


def test_interrupt_does_not_wait_until_a_worker_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes as long as the kernel does, and whoever ends a connection interrupts it first."""
    destroying, go = threading.Event(), threading.Event()
    destroy = Ucp.destroy_worker

    def slow(self: Ucp, worker: int) -> None:
        destroying.set()
        assert go.wait(20)
        destroy(self, worker)

    monkeypatch.setattr(Ucp, "destroy_worker", slow)
    with lone_link() as link:
        closing, interrupting = threading.Thread(target=link.close), threading.Thread(target=link.interrupt)
        closing.start()
        assert destroying.wait(20)
        interrupting.start()
        interrupting.join(10)
        waited = interrupting.is_alive()
        go.set()
        for thread in (closing, interrupting):
            thread.join()
        assert not waited


def test_link_that_is_closed_waits_for_its_descriptor_all_the_same() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, lone_link() as link:
        link.close()
        link.close()
        link.interrupt()
        assert not link.wait_readable(ours.fileno(), 0.01)
        theirs.send(b"x")
        assert link.wait_readable(ours.fileno(), 1.0)


# -- nothing is left ---------------------------------------------------------------------------------------------------


def one_transfer(fabric: UcxFabric, other: UcxFabric, region: Region, target: Region) -> None:
    """A link from one fabric to another within this process, one put over it, and the end of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        here, there = fabric.link(ours.fileno()), other.link(theirs.fileno())
        here.join(there.greeting(), soon())
        there.join(here.greeting(), soon())
        waiting = threading.Thread(target=wait, args=(there, theirs))
        waiting.start()
        try:
            remote = here.open(there.share(target), target.nbytes)
            runs, _ = scattered(8, 64)
            here.write(region, remote, runs, soon(), Moved().progress)
        finally:
            ours.send(b"x")
            waiting.join()
            here.close()
            there.close()


def wait(link: Link[Remote], sock: socket.socket) -> None:
    limit = soon()
    while not link.wait_readable(sock.fileno(), 1.0):
        assert time.monotonic() < limit


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("runtime", ["ucxx", "raw"])
@pytest.mark.parametrize("tls", ["tcp", "all"])
def test_two_hundred_links_leave_nothing(runtime: str, tls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usable_runtime(runtime)
    monkeypatch.setenv("UCX_TLS", tls)
    with ucx_fabric(runtime=runtime) as fabric, ucx_fabric(runtime=runtime) as other:
        region, target = Region(pattern(4096, 1)), Region(pattern(4096, 2))

        def footprint() -> tuple[int, int]:
            gc.collect()
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

        for _ in range(40):
            one_transfer(fabric, other, region, target)
        # What links leave to threads of UCX's goes a moment later: not before it has may it be counted.
        before, memory = footprint(), resident()
        time.sleep(0.1)
        while before != (before := footprint()):
            time.sleep(0.1)
        for _ in range(200):
            one_transfer(fabric, other, region, target)
        wait_until(lambda: all(map(le, footprint(), before)), "descriptors and threads are back")
        assert resident() - memory < 8 << 20


def test_fabric_that_is_closed() -> None:
    usable_runtime("raw")
    with ucx_fabric(runtime="raw") as fabric:
        fabric.close()
        with pytest.raises(TransferError, match="closed"):
            fabric.register(Region(pattern(4096, 1)))
        with pytest.raises(TransferError, match="closed"):
            fabric.link(-1)


def test_fabric_with_an_open_link_is_left_alone_until_that_is_closed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To destroy what a thread may be using would bring the process down; to keep it after that would be a leak."""
    usable_runtime("raw")
    destroyed, destroy = list[int](), Ucp.destroy_context

    def counted(self: Ucp, context: int) -> None:
        destroyed.append(context)
        destroy(self, context)

    monkeypatch.setattr(Ucp, "destroy_context", counted)
    fabric = UcxFabric(runtime="raw")
    context = fabric._engine.context.handle
    links = [fabric.link(-1) for _ in range(2)]
    fabric.close()
    fabric.close()
    assert "2 connections of UCX" in caplog.text
    links[0].close()
    assert destroyed == []
    for _ in range(2):
        links[1].close()
        fabric.close()
        assert destroyed == [context]
