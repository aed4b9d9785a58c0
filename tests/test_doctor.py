"""The doctor's checks, on machines that exist as a few files."""

import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest

from pdtx.doctor import Finding, Machine, parse_wants
from pdtx.doctor import __main__ as doctor_main
from pdtx.doctor.addresses import check_addresses
from pdtx.doctor.finding import Level, judged
from pdtx.doctor.gpu import check_gpu
from pdtx.doctor.infiniband import check_infiniband
from pdtx.doctor.machine import run_program
from pdtx.doctor.memory import check_memory, locked_memory, open_files
from pdtx.doctor.movers import check_movers, try_all
from pdtx.doctor.network import check_network
from pdtx.doctor.nixl import NixlPackage, check_nixl
from pdtx.doctor.probe import Trial
from pdtx.doctor.processor import check_processor
from pdtx.doctor.ucx import Copy, check_ucx
from pdtx.errors import InputError
from tests.engine_pair import wait_until

_PORT = "sys/class/infiniband/mlx5_0/ports/1"
_CARD = {
    f"{_PORT}/state": "4: ACTIVE",
    f"{_PORT}/link_layer": "Ethernet",
    f"{_PORT}/rate": "400 Gb/sec (4X NDR)",
    f"{_PORT}/gids/0": "fe80:0000:0000:0000:0000:0000:0000:0001",
    f"{_PORT}/gids/1": "0000:0000:0000:0000:0000:0000:0000:0000",
    f"{_PORT}/gid_attrs/types/0": "RoCE v2",
    "dev/infiniband/uverbs0": "",
}


def machine(
    root: Path, files: Mapping[str, str], environ: Mapping[str, str] | None = None, says: str | None = None
) -> Machine:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return Machine(root, environ or {}, lambda command, timeout_s: says)


def named(findings: Sequence[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


class TestGpu:
    def test_none_is_no_fault_but_stops_cuda(self, tmp_path: Path) -> None:
        (driver,) = check_gpu(machine(tmp_path, {}))
        assert (driver.value, driver.level, driver.stops) == ("none", "ok", ("cuda",))

    def test_a_card_without_driver_is_seen(self, tmp_path: Path) -> None:
        pci = "sys/bus/pci/devices/0000:01:00.0"
        (driver,) = check_gpu(machine(tmp_path, {f"{pci}/vendor": "0x10de", f"{pci}/class": "0x030200"}))
        assert driver.level == "warning"
        assert "1 NVIDIA cards" in driver.value

    def test_cards_and_the_way_to_a_network_card(self, tmp_path: Path) -> None:
        files = {"proc/driver/nvidia/version": "NVRM version: 590.1", **_CARD}
        found = list(check_gpu(machine(tmp_path, files, says="H200, 143771 MiB, 590.1, 00000000:01:00.0\n")))
        assert named(found, "cards").value.startswith("H200")
        assert named(found, "GPUDirect RDMA").level == "warning"
        (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
        assert list(check_gpu(machine(tmp_path, {}, says="H200\n")))[-1].level == "ok"

    @pytest.mark.parametrize("says", [None, "\n"])
    def test_a_driver_that_shows_no_card_stops_cuda(self, tmp_path: Path, says: str | None) -> None:
        found = list(check_gpu(machine(tmp_path, {"proc/driver/nvidia/version": "590"}, says=says)))
        assert named(found, "cards").stops == ("cuda",)


class TestNetwork:
    @staticmethod
    def _card(speed: str, mtu: str, state: str = "up") -> dict[str, str]:
        folder = "sys/class/net/eth0"
        return {f"{folder}/operstate": state, f"{folder}/mtu": mtu, f"{folder}/speed": speed}

    @pytest.mark.parametrize(
        ("speed", "mtu", "level"),
        [("100000", "1500", "warning"), ("100000", "9000", "ok"), ("1000", "1500", "ok"), ("-1", "1500", "ok")],
    )
    def test_small_packets_on_a_fast_card(self, tmp_path: Path, speed: str, mtu: str, level: Level) -> None:
        found = list(check_network(machine(tmp_path, self._card(speed, mtu))))
        assert named(found, "eth0").level == level

    def test_none_up(self, tmp_path: Path) -> None:
        found = list(check_network(machine(tmp_path, self._card("-1", "1500", "down"))))
        assert named(found, "cards").level == "warning"


class TestInfiniband:
    def test_none(self, tmp_path: Path) -> None:
        (devices,) = check_infiniband(machine(tmp_path, {}))
        assert devices.stops == ("rdma",)
        assert "verbs card" in devices.fix

    def test_an_active_port_is_well(self, tmp_path: Path) -> None:
        found = list(check_infiniband(machine(tmp_path, _CARD)))
        assert all(finding.level == "ok" and not finding.stops for finding in found)
        port = named(found, "mlx5_0:1").value
        assert "400 Gb/sec" in port
        assert "1 GIDs, GID 0 fe80:" in port
        assert "RoCE v2, index 0 picked by UCX" in port

    @pytest.mark.parametrize(
        ("card_mtu", "told"),
        [("9000", "MTU 4096 (eth2: 9000)"), ("1500", "MTU 1024 (eth2: 1500)"), ("100", "MTU of eth2: 100")],
    )
    def test_the_largest_packet_of_roce(self, tmp_path: Path, card_mtu: str, told: str) -> None:
        files = {f"{_PORT}/gid_attrs/ndevs/0": "eth2", "sys/class/net/eth2/mtu": card_mtu}
        found = named(list(check_infiniband(machine(tmp_path, _CARD | files))), "mlx5_0:1").value
        assert found.endswith(told)

    @pytest.mark.parametrize(
        ("chosen", "more", "told"),
        [
            (None, {"3": ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2")}, "index 3 picked by UCX"),
            ("auto", {"3": ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2")}, "index 3 picked by UCX"),
            (None, {"3": ("0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1")}, "index 0 picked by UCX"),
            (None, {"3": ("fd77:0000:0000:0000:0000:0000:0000:0002", "RoCE v2")}, "index 0 picked by UCX"),
            ("3", {"3": ("fd77:0000:0000:0000:0000:0000:0000:0002", "RoCE v2")}, "index 3 by UCX_IB_GID_INDEX, MTU"),
            ("5", {"3": ("fd77:0000:0000:0000:0000:0000:0000:0002", "RoCE v2")}, "which the port does not have"),
        ],
    )
    def test_which_of_several_gids(
        self, tmp_path: Path, chosen: str | None, more: dict[str, tuple[str, str]], told: str
    ) -> None:
        files = {f"{_PORT}/gid_attrs/ndevs/0": "eth2", "sys/class/net/eth2/mtu": "9000"}
        for index, (address, kind) in more.items():
            files |= {f"{_PORT}/gids/{index}": address, f"{_PORT}/gid_attrs/types/{index}": kind}
        environ = {} if chosen is None else {"UCX_IB_GID_INDEX": chosen}
        found = named(list(check_infiniband(machine(tmp_path, _CARD | files, environ))), "mlx5_0:1").value
        assert "2 GIDs" in found
        assert "GID 3 {} {}".format(*more["3"]) in found
        assert told in found
        level = named(list(check_infiniband(machine(tmp_path, _CARD | files, environ))), "mlx5_0:1").level
        assert level == ("warning" if "not have" in told else "ok")

    def test_infiniband_proper_takes_the_first(self, tmp_path: Path) -> None:
        files = {f"{_PORT}/link_layer": "InfiniBand", f"{_PORT}/gids/1": "fe80:0000:0000:0000:0000:0000:0000:0009"}
        assert "index 0 picked" in named(list(check_infiniband(machine(tmp_path, _CARD | files))), "mlx5_0:1").value

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({f"{_PORT}/state": "1: DOWN"}, "mlx5_0:1"),
            ({f"{_PORT}/gids/0": "0000:0000:0000:0000:0000:0000:0000:0000"}, "mlx5_0:1"),
        ],
    )
    def test_a_port_that_cannot_be_used(self, tmp_path: Path, change: dict[str, str], name: str) -> None:
        found = named(list(check_infiniband(machine(tmp_path, _CARD | change))), name)
        assert found.stops == ("rdma",)
        assert found.fix

    def test_a_port_that_is_down_beside_an_active_one_stops_nothing(self, tmp_path: Path) -> None:
        other = {"sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN"}
        assert not any(finding.stops for finding in check_infiniband(machine(tmp_path, _CARD | other)))

    def test_devices_that_the_process_may_not_open(self, tmp_path: Path) -> None:
        files = {name: text for name, text in _CARD.items() if not name.startswith("dev/")}
        found = named(list(check_infiniband(machine(tmp_path, files))), "/dev/infiniband")
        assert found.stops == ("rdma",)
        assert "--device=/dev/infiniband" in found.fix


class TestMemory:
    @pytest.mark.parametrize(
        ("limit", "capabilities", "level", "stops"),
        [
            (8 << 20, "0", "warning", ("rdma",)),
            (8 << 30, "0", "warning", ()),
            (8 << 20, "0000000000004000", "ok", ()),
            (resource.RLIM_INFINITY, "0", "ok", ()),
        ],
    )
    def test_locked_memory(
        self, tmp_path: Path, limit: int, capabilities: str, level: Level, stops: tuple[str, ...]
    ) -> None:
        found = locked_memory(machine(tmp_path, {"proc/self/status": f"CapEff:\t{capabilities}"}), limit)
        assert (found.level, found.stops) == (level, stops)

    def test_shared_memory_and_pages(self, tmp_path: Path) -> None:
        files = {"dev/shm/x": "", "proc/meminfo": "HugePages_Total: 8\nHugePages_Free: 3\nHugepagesize: 2048 kB"}
        found = list(check_memory(machine(tmp_path, files)))
        assert "free of" in named(found, "/dev/shm").value
        assert named(found, "huge pages").value.startswith("3 of 8 reserved pages of 2 MiB")

    def test_no_shared_memory(self, tmp_path: Path) -> None:
        assert named(list(check_memory(machine(tmp_path, {}))), "/dev/shm").level == "warning"

    @pytest.mark.parametrize(("soft", "level"), [(1024, "warning"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")])
    def test_open_files(self, soft: int, level: Level) -> None:
        assert open_files((soft, resource.RLIM_INFINITY)).level == level


class TestProcessor:
    def test_slow_clock_governor_and_load(self, tmp_path: Path) -> None:
        files = {
            "sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet",
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
            "proc/loadavg": f"{os.cpu_count() or 1}.5 1 1 1/1 1",
        }
        found = list(check_processor(machine(tmp_path, files)))
        assert [named(found, name).level for name in ("clock", "governor", "load")] == ["warning"] * 3

    @pytest.mark.parametrize(
        ("files", "memory", "processors"),
        [
            (
                {
                    "proc/self/cgroup": "0::/a/b",
                    "sys/fs/cgroup/a/memory.max": "1073741824",
                    "sys/fs/cgroup/a/b/memory.max": "max",
                    "sys/fs/cgroup/a/b/cpu.max": "150000 100000",
                },
                "1 GiB",
                "1.5",
            ),
            (
                {
                    "proc/self/cgroup": "4:memory:/a\n1:cpu,cpuacct:/a",
                    "sys/fs/cgroup/memory/memory.limit_in_bytes": "2147483648",
                    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000",
                    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
                },
                "2 GiB",
                "4",
            ),
            ({}, "no limit", "no limit"),
        ],
        ids=["version 2", "version 1", "none"],
    )
    def test_what_a_container_leaves(self, tmp_path: Path, files: dict[str, str], memory: str, processors: str) -> None:
        found = [finding for finding in check_processor(machine(tmp_path, files)) if finding.subject == "container"]
        assert named(found, "memory").value == memory
        assert named(found, "processors").value.split(" of ")[0] == processors


class TestUcx:
    @staticmethod
    def _copy(root: Path, origin: str, *, verbs: bool) -> Copy:
        folder = root / origin
        (folder / "ucx").mkdir(parents=True)
        if verbs:
            (folder / "ucx" / "libuct_ib.so.0").touch()
        return Copy(origin, folder / "libucp.so.0")

    def test_verbs_are_told_by_their_module(self, tmp_path: Path) -> None:
        copies = [self._copy(tmp_path, "wheel", verbs=False), self._copy(tmp_path, "nixl", verbs=True)]
        found = list(check_ucx(machine(tmp_path, {}), copies))
        assert "without verbs" in named(found, "library wheel").value
        assert named(found, "library nixl").value.endswith("with verbs")
        assert not named(found, "verbs").stops

    def test_no_verbs_anywhere_stops_rdma(self, tmp_path: Path) -> None:
        found = list(check_ucx(machine(tmp_path, {}), [self._copy(tmp_path, "wheel", verbs=False)]))
        assert named(found, "verbs").stops == ("rdma",)

    def test_none_installed(self, tmp_path: Path) -> None:
        assert named(list(check_ucx(machine(tmp_path, {}), [])), "libraries").stops == ("ucx", "rdma")

    @pytest.mark.parametrize(
        ("name", "value", "level", "words"),
        [
            ("UCX_TLS", "rc,tcp", "warning", "has no rc"),
            ("UCX_TLS", "tcp", "ok", "no RDMA"),
            ("UCX_TLS", "posix,cma", "warning", "posix,cma"),
            ("UCX_TLS", "all", "ok", "all"),
            ("UCX_RNDV_THRESH", "8192", "warning", "emulation"),
            ("UCX_RNDV_THRESH", "inf", "ok", "inf"),
            ("UCX_NET_DEVICES", "mlx5_9:1", "warning", "no mlx5_9:1"),
            ("UCX_NET_DEVICES", "lo", "ok", "lo"),
        ],
    )
    def test_settings(self, tmp_path: Path, name: str, value: str, level: Level, words: str) -> None:
        one = machine(tmp_path, {}, {name: value})
        found = named(list(check_ucx(one, [self._copy(tmp_path, "wheel", verbs=False)])), name)
        assert found.level == level
        assert words in found.value
        assert bool(found.fix) == (level == "warning" or value == "tcp")

    def test_several_cards_and_no_choice(self, tmp_path: Path) -> None:
        files = {f"sys/class/net/eth{number}/operstate": "up" for number in (0, 1)}
        found = named(list(check_ucx(machine(tmp_path, files), [])), "UCX_NET_DEVICES")
        assert found.level == "warning"
        assert "UCX_NET_DEVICES=eth0" in found.fix


class TestNixl:
    def test_not_installed(self, tmp_path: Path) -> None:
        (found,) = check_nixl(machine(tmp_path, {}), NixlPackage(None))
        assert found.stops == ("nixl",)

    @pytest.mark.parametrize(("plugin", "stops"), [("UCX", ()), ("POSIX", ("nixl",))])
    def test_plugins(self, tmp_path: Path, plugin: str, stops: tuple[str, ...]) -> None:
        (tmp_path / f"libplugin_{plugin}.so").touch()
        package = NixlPackage("1.5.1", ("nixl-cu12",), (tmp_path,))
        found = named(list(check_nixl(machine(tmp_path, {}), package)), "plugins")
        assert (found.value, found.stops) == (plugin, stops)

    @pytest.mark.parametrize(
        ("library", "modules", "warns"),
        [
            ("libefa.so.1", "", True),
            ("libefa.so.1", "^ib_mlx5", True),
            ("libefa.so.1", "^ib_mlx5,efa", False),
            ("libmlx5.so.1", "", False),
        ],
    )
    def test_the_systems_efa_beside_nixl(self, tmp_path: Path, library: str, modules: str, warns: bool) -> None:
        (tmp_path / "libplugin_UCX.so").touch()
        environ = {"UCX_MODULES": modules} if modules else {}
        here = machine(tmp_path, {f"usr/lib/x86_64-linux-gnu/{library}": ""}, environ)
        found = {one.name: one for one in check_nixl(here, NixlPackage("1.5.1", ("nixl-cu12",), (tmp_path,)))}
        assert ("EFA" in found) is warns
        if warns:
            assert (found["EFA"].level, found["EFA"].stops) == ("warning", ())
            assert "UCX_MODULES=^efa" in found["EFA"].fix


# "ucx" crashes, "shm" hangs and ignores what asks it to end, "leaver" dies and leaves one who holds all it had open.
_BAD_MOVERS = dedent("""
    import os, signal, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of shells ignore it
    import pdtx.transports  # takes what it takes: no part of the trial
    from pdtx.doctor import __main__, probe

    def try_mover(name):
        if name == "ucx":
            os.kill(os.getpid(), signal.SIGSEGV)
        if name == "shm":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(600)
        if name == "leaver":
            if os.fork() == 0:
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(1, b"pdtx-trial \\xff" * 1000)
        return probe.Trial(name=name, detail="works")

    probe.try_mover = try_mover
    __main__.main()
""")


# An interrupt while a trial is forked, or when that has been and the trial ignores what asks it to end.
_STRIKES = dedent("""
    import os, signal, time
    from multiprocessing.context import ForkProcess
    from pathlib import Path

    start = ForkProcess.start

    def strike():
        os.kill(os.getpid(), signal.SIGINT)

    def ignores(process):
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(status.partition("SigIgn:")[2].split()[0], 16) >> signal.SIGTERM - 1 & 1

    def start_and_strike(process):
        start(process)
        while not ignores(process):
            time.sleep(0.01)
        strike()
""")


def _trials_of(parent: int) -> set[int]:
    """The processes of _BAD_MOVERS that this process has started, whoever their parent is by now."""
    found, mark = set[int](), _BAD_MOVERS[:60].encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # The mark is this run's own: others may test the same at the same time.
            environ = (folder / "environ").read_bytes()
            if mark in (folder / "cmdline").read_bytes() and f"PDTX_TRIALS={parent}\0".encode() in environ + b"\0":
                found.add(int(folder.name))
    return found


@pytest.fixture(autouse=True)
def _marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDTX_TRIALS", str(os.getpid()))


class TestMovers:
    def test_trials_that_cannot_be_made_are_errors_and_no_exception(self, tmp_path: Path) -> None:
        trials = try_all(machine(tmp_path, {}, says=None), ["ucx"])
        assert "could not be tried" in trials["ucx"].error
        assert named(list(check_movers(trials)), "ucx").stops == ("ucx",)

    def test_one_that_dies_or_hangs_or_prints_leaves_the_others_alone(self) -> None:
        """With real processes, of movers that do so."""

        def run(command: Sequence[str], timeout_s: float) -> str | None:
            # Seconds, that are counted from when all is imported, however long that takes here.
            return run_program([sys.executable, "-c", _BAD_MOVERS, "4", *command[4:]], timeout_s + 90)

        trials = try_all(Machine(run=run), ["ucx", "tcp", "shm", "leaver", "nixl"], trial_s=4)
        assert (trials["tcp"].detail, trials["nixl"].detail) == ("works", "works")
        assert "its process died" in trials["ucx"].error
        assert "its process died" in trials["leaver"].error
        assert "has not started in time" in trials["shm"].error
        wait_until(lambda: not _trials_of(os.getpid()), "the end of what the trials have started")

    @pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    def test_no_trial_outlives_its_doctor(self, sign: signal.Signals) -> None:
        words = [sys.executable, "-c", _BAD_MOVERS, "600", "shm"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as doctor:
            try:
                wait_until(lambda: bool(_trials_of(os.getpid()) - {doctor.pid}), "the trial", 60)
                doctor.send_signal(sign)
                doctor.communicate(timeout=20)
            finally:
                doctor.kill()
        wait_until(lambda: not _trials_of(os.getpid()), "the end of the trial")

    @pytest.mark.parametrize(
        "interrupt",
        ["os.register_at_fork(after_in_parent=strike)", "ForkProcess.start = start_and_strike"],
        ids=["in a hook of the fork", "right after the fork"],
    )
    def test_an_interrupt_while_a_trial_is_forked_ends_all(self, interrupt: str) -> None:
        words = [sys.executable, "-c", f"{_STRIKES}\n{interrupt}\n{_BAD_MOVERS}", "600", "shm"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as doctor:
            try:
                _, told = doctor.communicate(timeout=90)
            finally:
                doctor.kill()
        assert told.decode().rstrip().endswith("KeyboardInterrupt")
        wait_until(lambda: not _trials_of(os.getpid()), "the end of the trial")

    def test_the_limit_of_trials_is_over_before_they_are_killed_from_outside(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limits = list[tuple[float, float]]()

        def run(command: Sequence[str], timeout_s: float) -> None:
            begun = time.monotonic()
            time.sleep(0.01)  # python starts

            def try_all(_: Sequence[str], limit: float) -> Iterator[Trial]:
                limits.append((limit, begun + timeout_s))
                yield from ()

            monkeypatch.setattr(doctor_main, "try_all", try_all)
            monkeypatch.setattr(sys, "argv", command[2:])
            doctor_main.main()

        monkeypatch.setattr(logging, "disable", lambda _: None)
        try_all(Machine(run=run), ["tcp"], trial_s=20.0)
        ((limit, killed),) = limits
        assert limit + 5.0 <= killed

    def test_what_a_library_prints_beside_is_left_out(self, tmp_path: Path) -> None:
        says = 'hello\n\npdtx-trial {"name":"tcp"}\nbye\n'
        assert try_all(machine(tmp_path, {}, says=says), ["tcp"]) == {"tcp": Trial(name="tcp")}

    def test_rdma_is_what_a_started_ucx_would_use(self) -> None:
        tcp = Trial(name="ucx", lanes=["tcp/eth0"], kinds=["tcp"])
        assert named(list(check_movers({"ucx": tcp})), "rdma").stops == ("rdma",)
        both = Trial(name="nixl", lanes=["tcp/eth0", "rc_mlx5/mlx5_0:1"], kinds=["rdma", "tcp"])
        found = named(list(check_movers({"nixl": both})), "rdma")
        assert (found.stops, found.value) == ((), "nixl by rc_mlx5/mlx5_0:1")

    @pytest.mark.parametrize(
        ("mapped", "level"),
        [
            (["/a/libucp.so.0", "/b/libucp.so.0"], "warning"),
            (["/a/libucp.so.0", "/b/libucp-1234.so.0.0.0"], "ok"),
            (["/a/libucp.so.0"], "ok"),
        ],
    )
    def test_two_copies_of_one_name(self, mapped: list[str], level: Level) -> None:
        assert named(list(check_movers({"ucx": Trial(name="ucx", mapped=mapped)})), "ucx, UCX").level == level

    def test_real_trials(self) -> None:
        trials = try_all(Machine(), ["tcp", "cuda"])
        assert trials["tcp"] == Trial(name="tcp")
        assert trials["cuda"].error or trials["cuda"].detail


class TestAddresses:
    @staticmethod
    def _check(
        *, listen: Sequence[str] = (), reach: Sequence[str] = (), advertise: str | None = None, two_nodes: bool = False
    ) -> list[Finding]:
        return list(
            check_addresses(listen=listen, reach=reach, advertise=advertise, two_nodes=two_nodes, timeout_s=2.0)
        )

    def test_free_then_taken_then_refused(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
            assert [finding.level for finding in self._check(listen=[address], reach=[address])] == ["problem", "ok"]
        assert [finding.level for finding in self._check(listen=[address], reach=[address])] == ["ok", "problem"]

    def test_every_advertised_address_is_judged(self) -> None:
        found = self._check(listen=["0.0.0.0:0", "127.0.0.1:0"], two_nodes=True)
        told = {finding.name: finding.level for finding in found}
        assert told["advertise 0.0.0.0"] == told["advertise 127.0.0.1"] == "problem"

    @pytest.mark.parametrize(
        ("host", "two_nodes", "level"),
        [
            ("127.0.0.1", False, "ok"),
            ("127.0.0.1", True, "problem"),
            ("localhost", True, "problem"),
            ("10.0.0.2", True, "ok"),
            ("0.0.0.0", False, "problem"),
            ("::", False, "problem"),
            ("no-such-host.invalid", True, "problem"),
        ],
    )
    def test_advertise(self, host: str, two_nodes: bool, level: Level) -> None:
        (found,) = self._check(advertise=host, two_nodes=two_nodes)
        assert found.level == level
        assert bool(found.fix) == (level == "problem")

    def test_no_address(self) -> None:
        with pytest.raises(InputError, match="HOST:PORT"):
            self._check(reach=["somewhere"])


def test_what_stops_a_want_is_a_problem_to_who_wants_it() -> None:
    finding = Finding(subject="RDMA", name="devices", value="none", stops=("rdma",))
    assert [one.level for one in judged([finding], ["rdma", "tcp"])] == ["problem"]
    assert [one.level for one in judged([finding], ["tcp"])] == ["info"]
    assert [one.level for one in judged([Finding(subject="NUMA", name="nodes", value="1")], ["tcp"])] == ["ok"]


def test_wants() -> None:
    assert parse_wants(["tcp,rdma", "shm"]) == ("rdma", "tcp", "shm")
    with pytest.raises(InputError, match="rmda"):
        parse_wants(["rmda"])
