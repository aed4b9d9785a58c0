"""deploy/rdma-lab/run with a QEMU that only seems to be one: arguments, exit statuses, and that nothing is left."""

import fcntl
import gzip
import importlib
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

_LAB = Path(__file__).parent.parent / "deploy" / "rdma-lab"
_LIMIT_S = 20.0

# The lab as it is run, on a host that seems to have all packages.
_RUN = """
import sys
import rdma_lab.host
rdma_lab.host.missing = list
from rdma_lab.command import main
sys.exit(main(sys.argv[1:]))
"""

# Finds the share among its arguments, says who it is, and does what the test wants.
_QEMU = """#!/bin/sh
for word in "$@"; do
    case $word in local,path=/,*) ;; local,path=*) share=${word#local,path=}; share=${share%%,*} ;; esac
    case $word in *lab.node=*) node=${word##*lab.node=} ;; *addr.path=*) touch "${word##*addr.path=}" ;; esac
done
echo $$ >>"$FAKE/pids"; echo "$share" >"$FAKE/share"
"""


@dataclass
class Fake:
    """A host whose QEMU does what it is told."""

    folder: Path

    def qemu(self, does: str) -> None:
        program = self.folder / "bin" / "qemu-system-x86_64"
        program.write_text(_QEMU + does + "\n")
        program.chmod(stat.S_IRWXU)

    def start(self, *words: str) -> "subprocess.Popen[str]":
        environment = os.environ | {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(_LAB),
            "FAKE": str(self.folder),
            "PDTX_RDMA_LAB_PARTS": str(self.folder / "parts"),
        }
        return subprocess.Popen(
            [sys.executable, "-c", _RUN, *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=_LIMIT_S)
        return process.returncode, out, err

    def pids(self) -> list[int]:
        path = self.folder / "pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def wait_for_machines(self, count: int) -> None:
        self._wait(lambda: len(self.pids()) == count, f"{count} machines")

    def require_nothing_left(self) -> None:
        self._wait(lambda: not any(alive(pid) for pid in self.pids()), "the end of the machines")

    def share(self) -> Path:
        return Path((self.folder / "share").read_text().strip())

    @staticmethod
    def _wait(condition: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + _LIMIT_S
        while not condition():
            assert time.monotonic() < limit, what
            time.sleep(0.02)


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    """The host; whatever a failed test leaves is killed."""
    (tmp_path / "bin").mkdir()
    busybox = tmp_path / "bin" / "busybox"
    busybox.write_text("#!/bin/sh\n")
    busybox.chmod(stat.S_IRWXU)
    modules = tmp_path / "parts/kernel/lib/modules/6.1"
    modules.mkdir(parents=True)
    for name in ("9p", "netfs"):
        (modules / f"{name}.ko").write_text(name)
    (modules / "modules.dep").write_text("9p.ko: netfs.ko\nnetfs.ko:\n")
    (tmp_path / "parts/kernel/boot").mkdir()
    (tmp_path / "parts/kernel/boot/vmlinuz-6.1").write_text("a kernel")
    host = Fake(tmp_path)
    yield host
    for pid in host.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


SAYS = 'echo "hello from $node" >"$share/.lab/out.$node"; echo {status} >"$share/.lab/rc.$node"'
STAYS = "exec sleep 300"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no command"),
        (["--memory", "64", "--", "true"], "--memory 64: at least 256 MiB"),
        (["--timeout", "0", "--", "true"], "--timeout 0.0: seconds, more than 0"),
        (["--loss", "1", "--", "true"], "--loss 1: such as 1%"),
        (["--delay", "1ms; reboot", "--", "true"], "--delay 1ms; reboot: such as 1ms"),
        (["--single", "--loss", "1%", "--", "true"], "--single has no wire"),
    ],
)
def test_wrong_arguments_are_told(fake: Fake, words: list[str], message: str) -> None:
    code, _, err = fake.run(*words)
    assert code == 2
    assert message in err


def test_what_is_missing_is_told_at_once() -> None:
    begun = time.monotonic()
    environment = {"PATH": "/nowhere"}
    done = subprocess.run(
        [sys.executable, _LAB / "run", "--check"], env=environment, capture_output=True, text=True, timeout=_LIMIT_S
    )
    assert done.returncode == 125
    assert "apt-get install" in done.stderr
    assert "qemu-system-x86" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("status", [0, 3])
def test_status_and_output_come_back(fake: Fake, status: int, tmp_path: Path) -> None:
    fake.qemu(SAYS.format(status=status))
    code, out, err = fake.run("--share", str(tmp_path / "kept"), "--", "do", "what's asked")
    assert code == status, err
    assert sorted(out.splitlines()) == ["1: hello from 1", "2: hello from 2"]
    settings = (tmp_path / "kept/.lab/settings").read_text()
    told = subprocess.run(
        ["bash", "-c", f'. {tmp_path / "kept/.lab/settings"}; printf "%s\n" "${{command[@]}}"'],
        capture_output=True,
        text=True,
    )
    assert told.stdout == "do\nwhat's asked\n", settings
    fake.require_nothing_left()


@dataclass
class Told:
    """A machine that runs, and whose status reads so, one time after the other."""

    node: int
    readings: list[int | None]
    running: bool = True

    @property
    def status(self) -> int | None:
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]


@pytest.mark.parametrize(
    "readings",
    [[[3], [0]], [[None, 3], [0]], [[None, None, 3], [0]], [[0], [None, None, 3]], [[None, 3], [None, None, 0]]],
)
def test_a_failure_counts_whenever_it_is_seen(
    readings: list[list[int | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(_LAB))
    lab, job, machine = (importlib.import_module(f"rdma_lab.{name}") for name in ("lab", "job", "machine"))
    setup = machine.Setup(None, tmp_path, tmp_path, tmp_path, 1024)
    run = lab.Lab(setup, job.Job(["true"], 2, tmp_path, 9000), _LIMIT_S)
    run._machines = [Told(node, list(told)) for node, told in enumerate(readings, 1)]
    assert run.wait() == 3
    assert "has failed with exit status 3" in capfd.readouterr().err


def test_a_share_of_its_own_goes_with_the_run(fake: Fake) -> None:
    fake.qemu(SAYS.format(status=0))
    assert fake.run("--single", "--", "true")[0] == 0
    assert not fake.share().exists()


def test_a_status_of_an_earlier_run_does_not_count(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "kept/.lab").mkdir(parents=True)
    (tmp_path / "kept/.lab/rc.1").write_text("0")
    fake.qemu(STAYS)
    assert fake.run("--single", "--timeout", "1", "--share", str(tmp_path / "kept"), "--", "true")[0] == 124


def test_when_time_is_up_the_phase_is_told_and_nothing_is_left(fake: Fake) -> None:
    fake.qemu('[ "$node" = 2 ] || touch "$share/.lab/ready.$node"; ' + STAYS)
    code, _, err = fake.run("--timeout", "1.5", "--", "true")
    assert code == 124
    assert "node 1 still runs the command" in err
    assert "node 2 still boots" in err
    assert len(fake.pids()) == 2
    fake.require_nothing_left()


def test_a_machine_that_dies_is_told(fake: Fake) -> None:
    fake.qemu("echo qemu: no such thing; exit 1")
    code, _, err = fake.run("--single", "--", "true")
    assert code == 125
    assert "machine 1 died: qemu: no such thing" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_after_a_signal(fake: Fake, number: signal.Signals) -> None:
    fake.qemu(STAYS)
    process = fake.start("--", "true")
    fake.wait_for_machines(2)
    process.send_signal(number)
    _, err = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}" in err
    fake.require_nothing_left()
    assert not fake.share().exists()


def test_a_lab_that_is_killed_takes_its_machines_along(fake: Fake) -> None:
    fake.qemu(STAYS)
    process = fake.start("--", "true")
    fake.wait_for_machines(2)
    process.kill()
    process.communicate(timeout=_LIMIT_S)
    fake.require_nothing_left()
    left = fake.share()
    assert left.exists()
    fake.qemu(SAYS.format(status=0))
    assert fake.run("--single", "--", "true")[0] == 0
    assert not left.exists(), "the next run removes what a killed one has left"


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(_LAB))
    return importlib.import_module("rdma_lab.folder")


@pytest.mark.parametrize("after", ["mkdtemp", "open"])
def test_a_folder_that_another_run_sweeps_before_it_is_locked_is_made_again(
    folders: ModuleType, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, locked, swept = tempfile.mkdtemp, fcntl.flock, list[Path]()

    def sweep() -> None:
        if not swept:
            swept.extend(Path("/tmp").glob("pdtx-rdma-lab-*"))
            folders.sweep(Path("/tmp"))

    def made_and_swept(prefix: str, dir: Path) -> str:  # noqa: A002
        name = made(prefix=prefix, dir=dir)
        if after == "mkdtemp":
            sweep()
        return name

    def swept_and_locked(lock: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            sweep()
        locked(lock, how)

    monkeypatch.setattr(tempfile, "mkdtemp", made_and_swept)
    monkeypatch.setattr(fcntl, "flock", swept_and_locked)
    with folders.run_folder() as folder:
        assert folder.is_dir()
        folders.sweep(folder.parent)
        assert folder.is_dir(), "the lock keeps it"
    assert swept
    assert not folder.exists()


def test_a_folder_of_a_run_that_was_killed_at_its_very_start_is_swept(folders: ModuleType, tmp_path: Path) -> None:
    left = tmp_path / "pdtx-rdma-lab-left"
    left.mkdir()
    folders.sweep(tmp_path)
    assert not left.exists()


def _of_the_lab() -> list[str]:
    """QEMU processes and folders of runs that this host has."""
    machines = [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if b"lab.node=" in _read(path)]
    return [*machines, *(str(path) for path in Path("/tmp").glob("pdtx-rdma-lab-*"))]


def _read(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_nothing_is_left_after_20_real_runs_that_are_killed_at_random() -> None:
    """Not beside other runs of the lab on this host."""
    lab = str(_LAB / "run")
    if subprocess.run([lab, "--check"], capture_output=True).returncode:
        pytest.skip("the lab cannot be had here: deploy/rdma-lab/run --check says why")
    chance = random.Random(7)
    before = _of_the_lab()
    for _ in range(20):
        process = subprocess.Popen([lab, "--", "sleep", "3"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(chance.uniform(0.1, 9))
        process.send_signal(chance.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]))
        process.wait(_LIMIT_S)
    # What a killed one could not remove goes with the next one.
    assert subprocess.run([lab, "--single", "--", "true"], capture_output=True, timeout=200).returncode == 0
    assert _of_the_lab() == before


def test_the_first_root_holds_modules_after_what_they_need(fake: Fake, tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from rdma_lab.initrd import write_initrd
from rdma_lab.parts import open_parts
write_initrd(Path(sys.argv[1]), open_parts().kernel, Path(sys.argv[2]))
"""
    environment = os.environ | {
        "PYTHONPATH": str(_LAB),
        "PDTX_RDMA_LAB_PARTS": str(fake.folder / "parts"),
        "PATH": f"{fake.folder / 'bin'}:{os.environ['PATH']}",
    }
    subprocess.run([sys.executable, "-c", code, tmp_path / "initrd", _LAB / "guest/init"], env=environment, check=True)
    data, names, at = gzip.decompress((tmp_path / "initrd").read_bytes()), dict[str, bytes](), 0
    while True:
        assert data[at : at + 6] == b"070701"
        size, length = (int(data[at + 6 + 8 * field : at + 14 + 8 * field], 16) for field in (6, 11))
        name = data[at + 110 : at + 110 + length - 1].decode()
        begin = (at + 110 + length + 3) // 4 * 4
        if name == "TRAILER!!!":
            break
        names[name] = data[begin : begin + size]
        at = (begin + size + 3) // 4 * 4
    assert names["init"] == (_LAB / "guest/init").read_bytes()
    modules = sorted(name for name in names if name.startswith("modules/"))
    assert [names[name] for name in modules] == [b"netfs", b"9p"]
