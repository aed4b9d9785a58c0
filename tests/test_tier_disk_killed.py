"""The disk tier and other processes: killed during a store, two on one folder, a disk that is really full."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdtx.errors import TierInUse
from tests.tier_disks import load, open_disk, plain, store
from tests.tier_killed import BLOCKS, REQUESTS

ROOT = Path(__file__).parent.parent
START_S = 60.0


@contextmanager
def storing(folder: Path) -> "Iterator[subprocess.Popen[str]]":
    """A process that stores, from when it has opened the tier on."""
    command = [sys.executable, "-m", "tests.tier_killed", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("delay_s", [0.0, 0.004, 0.03])
def test_after_a_kill_there_are_whole_blocks_only(tmp_path: Path, delay_s: float) -> None:
    with storing(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stored 0\n"
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        said = 1 + process.stdout.read().count("stored")
        assert process.wait(START_S) == -signal.SIGKILL
    tier, loaded = open_disk(tmp_path, plain()), 0
    try:
        assert not list(tmp_path.rglob("*.part"))
        for seed in range(REQUESTS):
            moved, whole = load(tier, plain("flashinfer_hnd", 32), BLOCKS, seed)  # and checks every element
            assert not moved.failed
            assert whole or seed >= said
            loaded += moved.num_blocks
        assert loaded == tier.usage().groups[0].used.blocks >= said * BLOCKS
        cache = plain()
        store(tier, cache, BLOCKS, REQUESTS + 1)
        assert load(tier, cache, BLOCKS, REQUESTS + 1)[1]
    finally:
        tier.close()


def test_a_killed_store_does_not_end_with_a_half_file(tmp_path: Path) -> None:
    """As above, but stopped for certain in the middle of a file: the temporary name is all there is of it."""
    code = (
        "import os, signal, sys; from pathlib import Path; from pdtx.tiers import direct_io\n"
        "from tests.tier_disks import open_disk, plain, store\n"
        "tier, cache, calls = open_disk(Path(sys.argv[1]), plain()), plain(), []\n"
        "store(tier, cache, 2, 0)\n"
        "def half(fd, iovecs, count, offset):\n"
        "    os.ftruncate(fd, 5000); os.kill(os.getpid(), signal.SIGKILL)\n"
        "direct_io.pwritev = half\n"
        "store(tier, cache, 2, 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, timeout=START_S, check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.rglob("*.part"))
    tier = open_disk(tmp_path, plain())
    try:
        assert not list(tmp_path.rglob("*.part"))
        assert load(tier, plain(), 2, 0)[1]
        assert load(tier, plain(), 2, 1)[0].num_blocks == 0
        assert tier.usage().groups[0].used.blocks == 2
    finally:
        tier.close()


def test_two_processes_on_one_folder(tmp_path: Path) -> None:
    with storing(tmp_path) as process:
        with pytest.raises(TierInUse, match=f"{tmp_path} is in use by another tier, of the process {process.pid}"):
            open_disk(tmp_path, plain())
        process.send_signal(signal.SIGKILL)
        process.wait(START_S)
    open_disk(tmp_path, plain()).close()


def test_files_that_may_not_grow(tmp_path: Path) -> None:
    """A limit of the system's in place of a full disk: the second block's file is cut by it."""
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from tests.tier_disks import load, open_disk, plain, store\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "tier, cache = open_disk(Path(sys.argv[1]), plain(), direct=False), plain()\n"
        "store(tier, cache, 2, 0)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))\n"
        "moved = store(tier, cache, 2, 1)\n"
        "print(len(moved.places[0]), *sorted({failed.reason for failed in moved.failed}))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
        "print(load(tier, cache, 2, 0)[1], store(tier, cache, 2, 1).num_blocks)\n"
        "print(load(tier, cache, 2, 1)[1])\n"
        "tier.close()\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        timeout=START_S,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.stdout.splitlines() == ["0 File too large", "True 2", "True"]


def test_a_full_file_system(tmp_path: Path) -> None:
    """A tmpfs of 72 KiB in a mount namespace of its own, where the system lets users make one."""
    code = (
        "import os, subprocess, sys; from pathlib import Path\n"
        "subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=72k', 'tmpfs', sys.argv[1]], check=True)\n"
        "from tests.tier_disks import load, open_disk, plain, store\n"
        "folder, cache = Path(sys.argv[1]), plain()\n"
        "tier = open_disk(folder, cache)\n"
        "moved = store(tier, cache, 9, 0)\n"
        "some = len(moved.places[0])\n"
        "print(0 < some < 9, *{failed.reason for failed in moved.failed}, list(folder.rglob('*.part')))\n"
        "print(load(tier, plain(), 9, 0)[0].num_blocks == some)\n"
        "next(folder.rglob('*.kv')).unlink()\n"
        "again = load(tier, plain(), 9, 0)[0]\n"
        "print(again.num_blocks == some - 1, len(again.failed))\n"
        "print(store(tier, cache, 9, 0).num_blocks > 0)\n"
        "tier.close()\n"
    )
    apart = ["unshare", "--user", "--map-root-user", "--mount"]
    if os.geteuid() == 0:
        apart = ["unshare", "--mount"]
    probe = [*apart, "mount", "-t", "tmpfs", "-o", "size=72k", "tmpfs", str(tmp_path)]
    try:
        tried = subprocess.run(probe, timeout=START_S, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no unshare or mount here")
    if tried.returncode:
        pytest.skip(f"no tmpfs of one's own here: {tried.stderr.strip()}")
    done = subprocess.run(
        [*apart, sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        timeout=START_S,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.stdout.splitlines() == ["True No space left on device []", "True", "True 1", "True"]
