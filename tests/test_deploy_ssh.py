"""deploy/ssh/run against an sshd of our own on loopback: results and logs come back, and nothing stays anywhere."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy_scene import checkout, processes_of, run, wait_for_line, wait_until_gone
from tests.ports import free_port

_SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
_SEPARATION = Path("/run/sshd")


def _why_not() -> str:
    if _SSHD is None or shutil.which("ssh") is None:
        return "needs an OpenSSH server and client (apt-get install openssh-server openssh-client)"
    if os.geteuid() == 0 and not _SEPARATION.is_dir() and not os.access("/run", os.W_OK):
        return "sshd as root needs /run/sshd"
    return ""


_REASON = _why_not()
pytestmark = pytest.mark.skipif(bool(_REASON), reason=_REASON or "-")


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a server with keys of its own; return the client's command."""
    folder = tmp_path_factory.mktemp("sshd")
    made = os.geteuid() == 0 and not _SEPARATION.is_dir()
    if made:
        _SEPARATION.mkdir(mode=0o755)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    port = free_port()
    settings = {
        "ListenAddress": f"127.0.0.1:{port}",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "authorized",
        "PidFile": "none",
        "StrictModes": "no",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        "UsePAM": "no",
    }
    (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    server = subprocess.Popen([str(_SSHD), "-D", "-f", folder / "config", "-E", folder / "log"])
    try:
        _wait_for(port, server)
        # Without a file of the user's: no host is remembered by it.
        yield (
            f"ssh -F none -p {port} -i {folder}/user -o IdentitiesOnly=yes -o StrictHostKeyChecking=no "
            f"-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -l {getpass.getuser()}"
        )
    finally:
        server.terminate()
        server.wait(10)
        if made:
            _SEPARATION.rmdir()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    pytest.skip("sshd does not start here")


@pytest.fixture
def mark() -> str:
    return f"deploy-{uuid.uuid4().hex}"


@pytest.fixture
def scene(tmp_path: Path, mark: str) -> Path:
    return checkout(tmp_path / mark, mark)


def command(scene: Path, ssh: str, output: Path, *more: str) -> list[str]:
    both = ["--prefill", "127.0.0.1", "--decode", "localhost=127.0.0.1"]
    return [str(scene / "deploy/ssh/run"), *both, "--ssh", ssh, "-o", str(output), *more]


def secrets(folder: Path) -> list[Path]:
    return list(folder.rglob("*.key_secret"))


class TestMeasures:
    def test_result_and_logs_are_gathered(self, scene: Path, ssh: str, tmp_path: Path, mark: str) -> None:
        output, keys = tmp_path / "out", tmp_path / "tmp"
        keys.mkdir()
        done = run(command(scene, ssh, output), TMPDIR=str(keys))
        assert done.returncode == 0, done.stderr
        assert {path.name for path in output.iterdir()} >= {"result.json", "prefill-0.log", "decode-0.log"}
        assert mark in (output / "decode-0.log").read_text()
        assert processes_of(mark) == []
        assert list(keys.iterdir()) == []

    def test_no_secret_is_on_a_command_line_or_in_the_results(self, scene: Path, ssh: str, tmp_path: Path) -> None:
        output = tmp_path / "out"
        assert run(command(scene, ssh, output), TMPDIR=str(tmp_path)).returncode == 0
        assert not any("secret of" in path.read_text() for path in output.iterdir())
        assert secrets(tmp_path) == []

    def test_a_host_that_does_not_let_us_in(self, scene: Path, ssh: str, tmp_path: Path) -> None:
        wrong = ssh.replace(f"-l {getpass.getuser()}", "-l no-such-user")
        done = run(command(scene, wrong, tmp_path / "out"), TMPDIR=str(tmp_path))
        assert done.returncode == 1
        assert "Permission denied" in done.stderr

    def test_a_host_without_pdtx(self, scene: Path, ssh: str, tmp_path: Path, mark: str) -> None:
        (scene / ".venv/bin/pdtx-decode").unlink()
        done = run(command(scene, ssh, tmp_path / "out"), TMPDIR=str(tmp_path))
        assert done.returncode == 1
        assert "run scripts/install there" in done.stderr
        assert wait_until_gone(mark, 10) == []
        assert secrets(tmp_path) == []


class TestTeardown:
    @pytest.mark.parametrize(
        ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
    )
    def test_a_signal_leaves_nothing(
        self, scene: Path, ssh: str, tmp_path: Path, mark: str, sent: signal.Signals, code: int
    ) -> None:
        keys = tmp_path / "tmp"
        keys.mkdir()
        env = {**os.environ, "TMPDIR": str(keys)}
        words = command(scene, ssh, tmp_path / "out", "--wait")
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env) as process:
            try:
                wait_for_line(process, "driving")
                assert any("pdtx-decode" in text for text in processes_of(mark))
                process.send_signal(sent)
                assert process.wait(30) == code
            finally:
                process.kill()
            assert wait_until_gone(mark, 15) == []
        if sent != signal.SIGKILL:  # what nobody could take away is a folder that only its owner reads
            assert list(keys.iterdir()) == []


@pytest.fixture
def far_end(scene: Path, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """An agent under way, as a host's sshd starts it; its stdin stays open."""
    words = [str(scene / "deploy/ssh/agent"), "prefill", "127.0.0.1"]
    pipe, env = subprocess.PIPE, {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=env) as script:
        assert script.stdin is not None
        assert script.stdout is not None
        script.stdin.write(2 * "c2VjcmV0\n")
        script.stdin.flush()
        assert "listening" in script.stdout.readline()
        yield script
        script.kill()


class TestFarEnd:
    def test_an_agent_ends_with_its_script(self, far_end: "subprocess.Popen[str]", mark: str) -> None:
        far_end.kill()
        far_end.wait(10)
        assert far_end.stdin is not None
        far_end.stdin.close()
        assert wait_until_gone(mark, 10) == []

    def test_nothing_waits_for_the_end_of_stdin_once_the_agent_has_ended(
        self, far_end: "subprocess.Popen[str]", mark: str
    ) -> None:
        subprocess.run(["pkill", "-TERM", "-P", str(far_end.pid), "-f", "pdtx-prefill"], check=True)
        assert far_end.wait(10) == 0
        assert wait_until_gone(mark, 10) == []
