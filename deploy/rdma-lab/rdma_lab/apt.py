"""Debian's packages: installed where the user asks for it, else only downloaded and unpacked into a folder."""

import subprocess
from pathlib import Path

from rdma_lab.say import LabError

_DOWNLOAD_S, _UNPACK_S = 600, 300


def install(names: list[str]) -> None:
    """Install packages. Raises LabError where that fails."""
    for arguments in (["update", "-qq"], ["install", "-qq", "-y", "--no-install-recommends", *names]):
        run(["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", *arguments], _DOWNLOAD_S)


def depends(name: str) -> list[str]:
    """Return what a package depends on. Raises LabError where apt does not know it."""
    listed = run(["apt-cache", "depends", name], 60)
    return [line.split()[-1] for line in listed.splitlines() if line.strip().startswith("Depends:")]


def unpack(names: list[str], work: Path) -> Path:
    """Download packages and unpack them below work; nothing is installed. Raises LabError."""
    # As root apt downloads as a user of its own, who may not write here: root itself then.
    run(["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", *names], _DOWNLOAD_S, cwd=work)
    archives = sorted(work.glob("*.deb"))
    if len(archives) < len(names):
        raise LabError(f"apt-get download {' '.join(names)} left {len(archives)} packages; try apt-get update")
    for archive in archives:
        run(["dpkg-deb", "-x", str(archive), str(work / "unpacked")], _UNPACK_S)
        archive.unlink()
    return work / "unpacked"


def run(command: list[str], timeout_s: float, *, cwd: Path | None = None) -> str:
    """Return what a command prints. Raises LabError with its last line if it fails."""
    try:
        done = subprocess.run(
            command, cwd=cwd, timeout=timeout_s, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"{' '.join(command[:3])} took longer than {timeout_s:.0f} s") from None
    except OSError as error:
        raise LabError(f"{command[0]} does not start: {error}") from None
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise LabError(f"{' '.join(command[:3])}: {last[0]}")
    return done.stdout
