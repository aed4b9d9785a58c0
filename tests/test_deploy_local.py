"""deploy/local/run: two namespaces, a capped link, bytes counted by it, and nothing left however it ends."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from tests.deploy_scene import DEPLOY, checkout, processes_of, run, wait_for_line, wait_until_gone


def _why_not() -> str:
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"PDTX_BIN=/bin; source <(sed -n '/^say()/,/^fail()/p;/^find_way()/,/^}}/p' {DEPLOY}/local/run); find_way",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.strip().replace("\n", " ") if done.returncode else ""


_REASON = _why_not()
pytestmark = pytest.mark.skipif(bool(_REASON), reason=_REASON or "-")


@pytest.fixture
def mark(tmp_path: Path) -> str:
    """A word that no other process has in its command line: the folder's own, as it is in every path."""
    return f"deploy-{uuid.uuid4().hex}"


@pytest.fixture
def scene(tmp_path: Path, mark: str) -> Path:
    return checkout(tmp_path / mark, mark)


def scratch(folder: Path) -> list[Path]:
    return list(folder.glob("pdtx-local.*"))


def stand_in(folder: Path, tool: str, does: str) -> dict[str, str]:
    """Return an environment in which a program is lines of a shell, for which $real is the program itself."""
    program = folder / "bin" / tool
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nreal={shutil.which(tool)}\n{does}\n")
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "TMPDIR": str(folder)}


def slow_way(folder: Path, does: str) -> dict[str, str]:
    """Return an environment in which unshare does something first, where it is for the run and no trial."""
    return stand_in(folder, "unshare", f'[ "${{settings+set}}" != set ] || {{ {does}; }}\nexec $real "$@"')


def processes_with(setting: str) -> list[str]:
    """Return the command lines of processes that have this in their environment: also of those that are not ours."""
    found = list[str]()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if setting.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


class TestMeasures:
    def test_counted_and_claimed_bytes_agree(self, scene: Path, tmp_path: Path) -> None:
        output = tmp_path / "result.json"
        done = run([scene / "deploy/local/run", "--rate", "2gbit", "-o", output], TMPDIR=str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert "they agree" in done.stderr
        assert done.stdout == "measured rate=2gbit delay=none mtu=1500\n"  # so that the result tells of its cap
        assert scratch(tmp_path) == []

    def test_a_result_that_claims_thrice_as_much_fails(self, scene: Path, tmp_path: Path) -> None:
        done = run([scene / "deploy/local/run", "-o", tmp_path / "result.json", "--lie"], TMPDIR=str(tmp_path))
        assert done.returncode == 1
        assert "DISAGREE" in done.stderr

    def test_the_exit_code_is_the_drivers(self, scene: Path, tmp_path: Path) -> None:
        done = run([scene / "deploy/local/run", "-o", tmp_path / "result.json"], TMPDIR=str(tmp_path), EXIT="7")
        assert done.returncode == 7

    def test_the_cap_holds(self, scene: Path, tmp_path: Path) -> None:
        """6 MB at 20 Mb/s take 2.4 s; without the cap, a few milliseconds."""
        command: list[str | Path] = [
            scene / "deploy/local/run",
            "--rate",
            "20mbit",
            "-o",
            tmp_path / "r.json",
            "--bytes",
            "6000000",
        ]
        began = os.times().elapsed
        assert run(command, TMPDIR=str(tmp_path)).returncode == 0
        assert os.times().elapsed - began > 2.0

    def test_n_by_m_agents(self, scene: Path, tmp_path: Path) -> None:
        command: list[str | Path] = [
            scene / "deploy/local/run",
            "--prefill-agents",
            "2",
            "--decode-agents",
            "1",
            "-o",
            tmp_path / "r.json",
        ]
        done = run(command, TMPDIR=str(tmp_path))
        assert done.returncode == 0, done.stderr

    def test_nothing_of_the_host_is_seen_inside(self, scene: Path, tmp_path: Path) -> None:
        text = "ip -o link | wc -l; $ON_DECODE ip -o -4 address show pdtx-d"
        done = run([scene / "deploy/local/run", "--exec", text], TMPDIR=str(tmp_path))
        assert done.stdout.splitlines()[0] == "2"
        assert "10.77.0.2/24" in done.stdout

    def test_a_rate_that_is_none(self, scene: Path, tmp_path: Path) -> None:
        done = run([scene / "deploy/local/run", "--rate", "quick", "--exec", "true"], TMPDIR=str(tmp_path))
        assert done.returncode == 1
        assert "is 'quick' a rate" in done.stderr


class TestTeardown:
    @pytest.mark.parametrize(
        ("sent", "code"),
        [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -signal.SIGKILL)],
    )
    def test_a_signal_leaves_nothing(
        self, scene: Path, tmp_path: Path, mark: str, sent: signal.Signals, code: int
    ) -> None:
        command = [str(scene / "deploy/local/run"), "-o", str(tmp_path / "r.json"), "--wait"]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
        )
        with process:
            try:
                wait_for_line(process, "driving")
                assert len(processes_of(mark)) >= 4
                process.send_signal(sent)
                assert process.wait(30) == code
                if sent == signal.SIGKILL:
                    assert wait_until_gone(mark, 20) == []
                assert processes_with(f"TMPDIR={tmp_path}") == []
            finally:
                process.kill()
        links = json.loads(subprocess.run(["ip", "-j", "link"], capture_output=True, check=True).stdout)
        assert not [link["ifname"] for link in links if link["ifname"].startswith("pdtx-")]
        if sent == signal.SIGKILL:
            # Only an empty folder, which the next run takes away.
            assert [list(folder.iterdir()) for folder in scratch(tmp_path)] == [[]]
            run([scene / "deploy/local/run", "--exec", "true"], TMPDIR=str(tmp_path))
        assert scratch(tmp_path) == []

    def test_a_run_in_another_container_leaves_this_ones_folder(self, scene: Path, tmp_path: Path) -> None:
        """They share the temporary folder, but do not see each other's processes."""
        script, env = scene / "deploy/local/run", {**os.environ, "TMPDIR": str(tmp_path)}
        container = ["unshare", "--pid", "--mount", "--fork", "--mount-proc"]
        if os.geteuid():
            container += ["--user", "--map-root-user"]
        words = [str(script), "-o", str(tmp_path / "r.json"), "--wait"]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env) as process:
            try:
                wait_for_line(process, "driving")
                mine = scratch(tmp_path)
                assert len(mine) == 1
                assert run([*container, script, "--exec", "true"], TMPDIR=str(tmp_path)).returncode == 0
                assert scratch(tmp_path) == mine
            finally:
                process.terminate()
                process.wait(30)
        assert scratch(tmp_path) == []

    @pytest.mark.parametrize(
        ("tool", "does"),
        [
            ("mktemp", 'made=$($real "$@"); [ -e {once} ] || rmdir "$made"; echo "$made"; touch {once}'),
            ("flock", '[ -e {once} ] || rmdir "$TMPDIR"/pdtx-local.*; touch {once}; exec $real "$@"'),
        ],
        ids=["before it is opened", "before it is locked"],
    )
    def test_a_folder_that_another_run_sweeps_before_it_is_locked_is_made_again(
        self, scene: Path, tmp_path: Path, tool: str, does: str
    ) -> None:
        env = stand_in(tmp_path, tool, does.replace("{once}", str(tmp_path / "once")))
        done = run([scene / "deploy/local/run", "--exec", "true"], **env)
        assert done.returncode == 0, done.stderr
        assert scratch(tmp_path) == []

    def test_one_killed_before_it_has_its_namespaces_leaves_nothing(
        self, scene: Path, tmp_path: Path, mark: str
    ) -> None:
        reached = tmp_path / "reached"
        env = slow_way(tmp_path, f"touch {reached}; while kill -0 $PPID; do sleep 0.05; done 2>/dev/null")
        words = [str(scene / "deploy/local/run"), "-o", str(tmp_path / "r.json"), "--wait"]
        with subprocess.Popen(words, stderr=subprocess.DEVNULL, env=env) as process:
            try:
                until = time.monotonic() + 30
                while not reached.exists():
                    assert time.monotonic() < until
                    time.sleep(0.02)
            finally:
                process.kill()
        assert wait_until_gone(mark, 5) == []

    def test_one_whose_namespaces_fail_before_it_looks_fails(self, scene: Path, tmp_path: Path) -> None:
        script = scene / "deploy/local/run"
        text = script.read_text()
        assert text.count("    code=0\n") == 1
        script.write_text(text.replace("    code=0\n", '    tail --pid="$child" -s 0.05 -f /dev/null\n    code=0\n'))
        env = slow_way(tmp_path, "exit 5")
        assert run([script, "--exec", "true"], **env).returncode == 5

    @pytest.mark.parametrize("mode", [["--nodes"], ["-o", "r.json"]], ids=["node", "agent"])
    def test_one_that_never_listens_ends_the_run(
        self, scene: Path, tmp_path: Path, mark: str, mode: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        script = scene / "deploy/local/run"
        text = script.read_text()
        script.write_text(re.sub(r"start_s=\d+", "start_s=1", text))
        (scene / ".venv/bin/pdtx-decode").write_text("#!/bin/sh\nexec sleep 600\n")
        done = run([script, *mode], TMPDIR=str(tmp_path))
        assert done.returncode == 1
        assert "does not listen after 1 s" in done.stderr
        assert wait_until_gone(mark, 5) == []

    def test_an_agent_that_does_not_start_ends_the_run(self, scene: Path, tmp_path: Path, mark: str) -> None:
        (scene / ".venv/bin/pdtx-decode").write_text("#!/bin/sh\necho cannot >&2\nexit 3\n")
        done = run([scene / "deploy/local/run", "-o", tmp_path / "r.json"], TMPDIR=str(tmp_path))
        assert done.returncode == 1
        assert "decode-0 has ended before it listened" in done.stderr
        assert wait_until_gone(mark, 5) == []
        assert scratch(tmp_path) == []
