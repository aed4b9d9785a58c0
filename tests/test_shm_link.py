"""One link within the host: two processes, by mapping and by attaching; peers that die, lie, or lock us out."""

import ctypes
import fcntl
import gc
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path as FilePath

import numpy as np
import pytest
import torch

from pdtx.cache.memory import allocate
from pdtx.cache.shared import shared_file
from pdtx.errors import DeadlineExceeded, PeerLost, ProtocolError, TransferAborted, TransferError
from pdtx.plan import Runs
from pdtx.plan.runs import Int64s
from pdtx.testing.pair import open_descriptors
from pdtx.transports.base import Path, Region
from pdtx.transports.onesided.fabric import Progress, Shared
from pdtx.transports.shm import attach
from pdtx.transports.shm.copying import Copier, CopyBy
from pdtx.transports.shm.fabric import ShmFabric
from pdtx.transports.shm.keys import NONCE_BYTES, VERSION, Greeting, InFile, InProcess, OnDevice, pack
from pdtx.transports.shm.link import ShmLink
from pdtx.transports.shm.remote import Foreign, Mapped, Remote
from tests.shm_node import payload, receive, send

REPOSITORY = FilePath(__file__).parent.parent
CPU = torch.device("cpu")
NBYTES = 40 << 20
FOREVER = float("inf")


def int64s(*numbers: int) -> Int64s:
    return np.array(numbers, np.int64)


def region(nbytes: int = NBYTES, *, shared: bool = False) -> Region:
    return Region(allocate(nbytes, CPU, shared=shared))


def whole(nbytes: int = NBYTES) -> Runs:
    return Runs(int64s(0), int64s(0), int64s(nbytes))


def shuffled(size: int) -> Runs:
    random, count = np.random.default_rng(3), (8 << 20) // size
    return Runs(random.permutation(count) * size, random.permutation(count) * size, np.full(count, size))


def progress(moved: Callable[[int], None] = lambda nbytes: None, stopped: bool = False) -> Progress:
    return Progress(moved, lambda: stopped, b"")


class Node:
    """A process that shares one region, see tests.shm_node, and this side's link to it."""

    def __init__(self, link: ShmLink, remote: Remote, nbytes: int, process: "subprocess.Popen[bytes]") -> None:
        self.link, self.remote, self.nbytes, self.process = link, remote, nbytes, process

    def read(self, runs: Runs, deadline: float = FOREVER) -> Region:
        to = region(self.nbytes)
        to.memory.zero_()
        self.link.read(self.remote, to, runs, deadline, progress())
        return to

    def require_whole(self) -> None:
        assert np.array_equal(self.read(whole(self.nbytes)).memory.numpy(), payload(self.nbytes))

    def kill_at_the_first_step(self) -> None:
        """Read, and kill the process in the middle of it."""

        def moved(count: int) -> None:
            self.process.kill()
            self.process.wait()

        self.link.read(self.remote, region(self.nbytes), whole(self.nbytes), FOREVER, progress(moved))


@contextmanager
def node(kind: str) -> Iterator[Node]:
    name = f"pdtx-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        listener.settimeout(60)
        command = [sys.executable, "-m", "tests.shm_node", name, kind, str(NBYTES)]
        with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE) as process:
            try:
                control, _ = listener.accept()
                with control:
                    link = ShmFabric().link(control.fileno())
                    send(control, link.greeting())
                    link.join(receive(control)[0], FOREVER)
                    yield Node(link, link.open(Shared(*receive(control)), NBYTES), NBYTES, process)
                    link.close()
            finally:
                process.kill()


@pytest.fixture(scope="module")
def mapped() -> Iterator[Node]:
    """A node with shared memory, for all tests that leave it alive."""
    with node("shared") as other:
        yield other


@pytest.fixture(scope="module")
def attached() -> Iterator[Node]:
    """A node with private memory, for all tests that leave it alive."""
    with node("private") as other:
        yield other


# -- the bytes -------------------------------------------------------------------------------------------------------


def require_exact(to: Region, runs: Runs) -> None:
    """Raise AssertionError unless a node's runs, and nothing else, lie in a region that was zeroed before."""
    expected, sent = np.zeros(to.nbytes, np.uint8), payload(to.nbytes)
    for src, dst, count in zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True):
        expected[dst : dst + count] = sent[src : src + count]
    assert np.array_equal(to.memory.numpy(), expected)


@pytest.mark.parametrize("size", [256, 1000, 32768])
@pytest.mark.parametrize("copy_by", ["auto", "kernel", "torch"])
def test_bytes_of_mapped_memory(mapped: Node, copy_by: CopyBy, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copier = Copier(copy_by)
    monkeypatch.setattr(mapped.link, "_copier", copier)
    runs = shuffled(size)
    require_exact(mapped.read(runs), runs)
    assert mapped.link.path == Path("shm", "mapped memfd", library=copier.library, possible=("shm",))


@pytest.mark.parametrize("size", [256, 32768])
def test_bytes_of_mapped_memory_without_the_library(mapped: Node, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDTX_NATIVE", "0")
    monkeypatch.setattr(mapped.link, "_copier", Copier())
    assert mapped.link.path.library == "process_vm_readv"
    runs = shuffled(size)
    require_exact(mapped.read(runs), runs)


@pytest.mark.parametrize("size", [256, 1000, 32768])
def test_bytes_of_private_memory(attached: Node, size: int) -> None:
    runs = shuffled(size)
    require_exact(attached.read(runs), runs)
    assert attached.link.path.kind == "shm"
    assert attached.link.path.detail == "cma"


@pytest.mark.gpu
@pytest.mark.parametrize("to_device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["shared", "private", "cuda"])
def test_bytes_to_and_from_a_device(kind: str, to_device: str) -> None:
    runs = shuffled(1000)
    with node(kind) as other:
        to = Region(torch.zeros(NBYTES, dtype=torch.uint8, device=to_device))
        other.link.read(other.remote, to, runs, FOREVER, progress())
        require_exact(Region(to.memory.cpu()), runs)


def test_mapped_memory_cannot_be_written_here(mapped: Node) -> None:
    assert isinstance(mapped.remote, Mapped)
    address = f"{mapped.remote.mapping.address:x}-"
    lines = FilePath("/proc/self/maps").read_text().splitlines()
    assert [line.split()[1] for line in lines if line.startswith(address)] == ["r--s"]


def test_peer_that_is_stopped_is_read_all_the_same(mapped: Node, attached: Node) -> None:
    for other in (mapped, attached):
        other.process.send_signal(signal.SIGSTOP)
        try:
            other.require_whole()
        finally:
            other.process.send_signal(signal.SIGCONT)


# -- peers that die --------------------------------------------------------------------------------------------------


def test_mapped_memory_outlives_a_killed_peer() -> None:
    with node("shared") as other:
        other.kill_at_the_first_step()
        other.require_whole()


def test_private_memory_is_lost_with_a_killed_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    with node("private") as other:
        with pytest.raises(PeerLost, match=f"process {other.process.pid} has ended"):
            other.kill_at_the_first_step()
        with pytest.raises(PeerLost, match=f"process {other.process.pid} has ended"):
            other.read(whole())
        # Its number may be another process's by now: what is read there is not taken for the peer's.
        monkeypatch.setattr(other.link._peer, "pid", os.getpid())
        mine = payload(NBYTES)
        with pytest.raises(PeerLost, match="has ended"):
            other.link.read(Foreign(mine.ctypes.data, NBYTES), region(), whole(), FOREVER, progress())


def test_memory_that_is_gone(attached: Node) -> None:
    with pytest.raises(TransferError, match="has no memory any more where it said"):
        attached.link.read(Foreign(4096, NBYTES), region(), whole(), FOREVER, progress())


# -- deadlines and giving up -----------------------------------------------------------------------------------------


def test_deadline_ends_a_read_between_two_steps(mapped: Node) -> None:
    told = list[int]()

    def moved(count: int) -> None:
        told.append(count)
        time.sleep(1.1)

    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=f"bytes within this host from process {mapped.process.pid}"):
        mapped.link.read(mapped.remote, region(), whole(), begun + 1.0, progress(moved))
    assert 0 < sum(told) < NBYTES
    with pytest.raises(DeadlineExceeded, match="0 of"):
        mapped.read(whole(), time.monotonic() - 1)


def test_transfer_that_was_given_up_is_not_begun(attached: Node) -> None:
    with pytest.raises(TransferAborted, match="given up after 0 of"):
        attached.link.read(attached.remote, region(), whole(), FOREVER, progress(stopped=True))


# -- locked out ------------------------------------------------------------------------------------------------------


def test_memory_that_may_not_be_read_says_what_to_do(attached: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a system call fails like that of a peer that belongs to another user."""

    def refuse(*arguments: int) -> int:
        ctypes.set_errno(1)
        return -1

    monkeypatch.setattr(attach, "_readv", refuse)
    with pytest.raises(TransferError, match=r"Operation not permitted.*ptrace_scope.*caches in shared memory"):
        attached.read(whole())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try what another user may do")
def test_another_user_may_map_but_not_attach() -> None:
    """A process of nobody's reads what this one shares."""
    program = """if True:
        import os, socket, sys
        import numpy as np
        from pdtx.transports.shm.fabric import ShmFabric
        from pdtx.transports.onesided.fabric import Shared, Progress
        from pdtx.transports.base import Path, Region
        from pdtx.plan import Runs
        from pdtx.errors import TransferError
        from tests.shm_node import receive, send
        import torch
        os.setgid(65534); os.setuid(65534)
        one = lambda number: np.array([number], np.int64)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect("\\0" + sys.argv[1])
            link = ShmFabric().link(sock.fileno())
            send(sock, link.greeting())
            link.join(receive(sock)[0], 0)
            for _ in range(2):
                remote = link.open(Shared(*receive(sock)), 4096)
                to = Region(torch.zeros(4096, dtype=torch.uint8))
                try:
                    runs = Runs(one(0), one(0), one(4096))
                    link.read(remote, to, runs, float("inf"), Progress(lambda n: None, lambda: False, b""))
                    send(sock, str(int(to.memory.sum())).encode())
                except TransferError as error:
                    send(sock, str(error).encode())
    """
    name = f"pdtx-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        listener.settimeout(60)
        with subprocess.Popen([sys.executable, "-c", program, name], cwd=REPOSITORY) as process:
            control, _ = listener.accept()
            with control:
                link = ShmFabric().link(control.fileno())
                send(control, link.greeting())
                link.join(receive(control)[0], FOREVER)
                answers = []
                for shared in (True, False):
                    mine = region(4096, shared=shared)
                    mine.memory.fill_(1)
                    told = link.share(mine)
                    send(control, told.key, told.descriptors)
                    answers.append(receive(control)[0].decode())
                link.close()
            assert process.wait(30) == 0
    assert answers[0] == "4096"
    assert "Operation not permitted" in answers[1]


# -- peers that lie --------------------------------------------------------------------------------------------------


@pytest.fixture
def links() -> Iterator[tuple[ShmLink, ShmLink]]:
    """Two links of this process, joined."""
    ends = socket.socketpair()
    pair = tuple(ShmFabric().link(end.fileno()) for end in ends)
    pair[0].join(pair[1].greeting(), FOREVER)
    pair[1].join(pair[0].greeting(), FOREVER)
    yield pair[0], pair[1]
    for link, end in zip(pair, ends, strict=True):
        link.close()
        end.close()


def memory_file(nbytes: int, seals: int = fcntl.F_SEAL_SHRINK, flags: int = 0) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def other_file(path: FilePath) -> int:
    path.write_bytes(bytes(8192))
    return os.open(path, os.O_RDWR)


def pipe_end() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def only_writable() -> int:
    fd = memory_file(8192)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    finally:
        os.close(fd)


LIES: dict[str, tuple[Callable[[FilePath], tuple[int, ...]], int, int, str]] = {
    "unsealed": (lambda path: (memory_file(8192, 0),), 0, 8192, "could still shrink"),
    "sealed against growing only": (lambda path: (memory_file(8192, fcntl.F_SEAL_GROW),), 0, 8192, "still shrink"),
    "too small": (lambda path: (memory_file(8191),), 0, 8192, "of a file of 8191"),
    "too small from there": (lambda path: (memory_file(8192),), 1, 8192, "of a file of 8192"),
    "starts behind the end": (lambda path: (memory_file(8192),), 1 << 62, 8192, "of a file of 8192"),
    "on disk": (lambda path: (other_file(path / "file"),), 0, 8192, "no memory file|not plain memory|still shrink"),
    "in a file system in memory": (lambda path: (other_file(FilePath("/dev/shm/pdtx-test")),), 0, 8192, "still shrink"),
    "a pipe": (lambda path: (pipe_end(),), 0, 8192, "no memory file"),
    "a socket": (lambda path: (socket.socket().detach(),), 0, 8192, "no memory file"),
    "nothing to read": (lambda path: (only_writable(),), 0, 8192, "cannot be read"),
    "no descriptor": (lambda path: (), 0, 8192, "sent 0 descriptors"),
    "two descriptors": (lambda path: (memory_file(8192), memory_file(8192)), 0, 8192, "sent 2 descriptors"),
    "not open": (lambda path: (987654,), 0, 8192, "no memory file"),
}


@pytest.mark.parametrize("lie", LIES)
def test_file_that_is_none_of_ours_is_refused(lie: str, links: tuple[ShmLink, ShmLink], tmp_path: FilePath) -> None:
    make, offset, nbytes, reason = LIES[lie]
    before = open_descriptors()
    try:
        with pytest.raises(ProtocolError, match=reason):
            links[0].open(Shared(pack(InFile(offset)), make(tmp_path)), nbytes)
    finally:
        FilePath("/dev/shm/pdtx-test").unlink(missing_ok=True)
    assert open_descriptors() == before


def test_huge_page_file_is_refused(links: tuple[ShmLink, ShmLink]) -> None:
    """A hole in such a file kills who reads it, sealed or not."""
    try:
        fd = memory_file(2 << 20, flags=os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"no file in huge pages here: {error}")
    with pytest.raises(ProtocolError, match="not plain memory"):
        links[0].open(Shared(pack(InFile(0)), (fd,)), 2 << 20)


def test_holes_are_read_as_zeros(links: tuple[ShmLink, ShmLink]) -> None:
    """What a hostile peer can still do to a file of its own: take pages out. Nobody dies of that."""
    fd = memory_file(NBYTES)
    remote = links[0].open(Shared(pack(InFile(0)), (os.dup(fd),)), NBYTES)
    os.posix_fallocate(fd, 0, NBYTES)
    os.pwrite(fd, b"\1" * NBYTES, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    keep_size, punch_hole = 1, 2
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    assert libc.fallocate(fd, keep_size | punch_hole, 0, NBYTES // 2) == 0
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    to = region()
    links[0].read(remote, to, whole(), FOREVER, progress())
    assert to.memory.sum() == NBYTES // 2


@pytest.mark.parametrize(
    "key",
    [
        b"",
        b"\xc1",
        pack(Greeting(VERSION, 0, bytes(NONCE_BYTES))),
        pack(InFile(-1)),
        pack(InProcess(1 << 63)),
        pack(OnDevice("x" * 65, 0, b"", 0, 0, b"", 0, b"", False)),
        pack(OnDevice("x", 0, b"x" * 32769, 0, 0, b"", 0, b"", False)),
        pack(OnDevice("x", 0, b"", 0, 0, b"x" * 257, 0, b"", False)),
        pack(InFile(0)) + b"more",
    ],
)
def test_key_that_is_none_is_refused(key: bytes, links: tuple[ShmLink, ShmLink]) -> None:
    before = open_descriptors()
    with pytest.raises(ProtocolError, match="the peer's region cannot be read"):
        links[0].open(Shared(key, (memory_file(8192),)), 8192)
    assert open_descriptors() == before


def test_greeting_that_is_none_is_refused(links: tuple[ShmLink, ShmLink]) -> None:
    for greeting in (b"", b"hello", pack(InFile(0)), pack(Greeting(VERSION, 0, b"short"))):
        with pytest.raises(ProtocolError, match="the peer's greeting cannot be read"):
            links[0].join(greeting, FOREVER)
    with pytest.raises(ProtocolError, match="speaks version 99"):
        links[0].join(pack(Greeting(99, 0, bytes(NONCE_BYTES))), FOREVER)


def test_who_is_at_the_other_end_is_the_kernels_word(links: tuple[ShmLink, ShmLink]) -> None:
    """A peer that names memory which is not its own gets none of it read."""
    links[0].join(pack(Greeting(VERSION, 4096, bytes(NONCE_BYTES))), FOREVER)
    with pytest.raises(TransferError, match="private memory of process"):
        links[0].read(Foreign(4096, 4096), region(), whole(4096), FOREVER, progress())
    zeros = np.zeros(NONCE_BYTES, np.uint8)
    links[0].join(pack(Greeting(VERSION, zeros.ctypes.data, b"\1" * NONCE_BYTES)), FOREVER)
    with pytest.raises(TransferError, match="what it says is in its memory is not there"):
        links[0].read(Foreign(4096, 4096), region(), whole(4096), FOREVER, progress())


def test_device_region_outside_its_allocation_is_refused(links: tuple[ShmLink, ShmLink]) -> None:
    key = OnDevice("x", 100, b"", 8192, 0, b"", 0, b"", False)
    with pytest.raises(ProtocolError, match="bytes 100 to 8292 of 8192"):
        links[0].open(Shared(pack(key)), 8192)


def test_device_that_is_not_seen_here_is_refused(links: tuple[ShmLink, ShmLink]) -> None:
    key = OnDevice("x", 0, b"", 8192, 0, b"", 0, b"", False)
    with pytest.raises(TransferError, match="CUDA device x, which this process does not see"):
        links[0].open(Shared(pack(key)), 8192)


def test_memory_that_no_process_can_reach_is_not_shared(links: tuple[ShmLink, ShmLink]) -> None:
    with pytest.raises(TransferError, match="memory of meta cannot be shared"):
        links[0].share(Region(torch.zeros(8, dtype=torch.uint8, device="meta")))


# -- what is left ----------------------------------------------------------------------------------------------------


def test_region_may_start_anywhere_in_its_memory(links: tuple[ShmLink, ShmLink]) -> None:
    """A cache's region is often a part of a larger allocation."""
    memory = allocate(6 << 20, CPU, shared=True)
    memory.copy_(torch.arange(6 << 20) % 251)
    for first, nbytes in ((1, 100), (4097, 3 << 20), ((2 << 20) + 1, 2 << 20), (6 << 20, 0)):
        part = Region(memory[first : first + nbytes])
        shared = links[1].share(part)
        remote = links[0].open(Shared(shared.key, tuple(map(os.dup, shared.descriptors))), nbytes)
        to = region(max(1, nbytes))
        links[0].read(remote, to, whole(nbytes), FOREVER, progress())
        assert torch.equal(to.memory[:nbytes], part.memory)


def test_address_in_new_use_is_another_file(links: tuple[ShmLink, ShmLink]) -> None:
    """Freed and allocated again, memory may come to lie at the same address: its file is looked up each time."""
    found = list[int]()
    for value in range(8):
        mine = region(1 << 20, shared=True)
        mine.memory.fill_(value)
        found.append(mine.address)
        shared = links[1].share(mine)
        file = shared_file(mine.memory)
        assert file is not None
        assert shared.descriptors == (file[0],)
        remote = links[0].open(Shared(shared.key, (os.dup(file[0]),)), 1 << 20)
        to = region(1 << 20)
        links[0].read(remote, to, whole(1 << 20), FOREVER, progress())
        assert torch.unique(to.memory).tolist() == [value]
        links[1]._kept.clear()
        del mine
        gc.collect()
    assert len(set(found)) < 8, "no address was used again: this test shows nothing"


def test_shared_region_is_kept_while_the_link_lives(links: tuple[ShmLink, ShmLink]) -> None:
    """A peer may read at its address at any time."""
    mine = region()
    mine.memory.fill_(5)
    shared = links[1].share(mine)
    del mine
    gc.collect()
    to = region()
    links[0].read(links[0].open(shared, NBYTES), to, whole(), FOREVER, progress())
    assert torch.unique(to.memory).tolist() == [5]


def test_nothing_grows_over_two_hundred_links() -> None:
    mine = region(4 << 20, shared=True)
    theirs = region(4 << 20)

    def use() -> tuple[int, int, int]:
        ends = socket.socketpair()
        pair = [ShmFabric().link(end.fileno()) for end in ends]
        pair[0].join(pair[1].greeting(), FOREVER)
        shared = pair[1].share(mine)
        remote = pair[0].open(Shared(shared.key, tuple(map(os.dup, shared.descriptors))), mine.nbytes)
        pair[0].read(remote, theirs, whole(mine.nbytes), FOREVER, progress())
        for link, end in zip(pair, ends, strict=True):
            link.close()
            link.close()  # idempotent
            end.close()
        maps = len(FilePath("/proc/self/maps").read_text().splitlines())
        return open_descriptors(), maps, threading.active_count()

    for _ in range(5):
        first = use()
    for _ in range(200):
        last = use()
    assert (last[0], last[2]) == (first[0], first[2])
    assert last[1] <= first[1] + 3  # the heap may have grown by a piece


def test_path_before_the_first_region_is_what_was_registered() -> None:
    ends = socket.socketpair()
    fabric = ShmFabric()
    assert fabric.link(ends[0].fileno()).path.detail == "cma or mapped memfd"
    assert fabric.register(region(shared=True)) is None
    link = fabric.link(ends[0].fileno())
    assert link.path.detail == "mapped memfd"
    link.share(region())
    assert link.path.detail == "cma"
    for end in ends:
        end.close()


def test_peer_cannot_write_here_ever(links: tuple[ShmLink, ShmLink]) -> None:
    assert links[0].revoke()
    with pytest.raises(NotImplementedError):
        links[0].write(region(), Foreign(0, 0), whole(), FOREVER, progress())
