"""The machine as the checks see it: files below a root, the environment, and what other programs say."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PROGRAM_S = 10.0
"""Seconds that a program which is asked may take."""

_FILE_BYTES = 4 << 20

Run = Callable[[Sequence[str], float], str | None]


def run_program(command: Sequence[str], timeout_s: float) -> str | None:
    """Return what a program writes on stdout; None if it is not there, fails, or takes longer than timeout_s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None


@dataclass(frozen=True)
class Machine:
    """root: what stands for /. run: asks a program, see run_program. Other roots and answers are for tests."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    run: Run = run_program

    def path(self, name: str) -> Path:
        """Return where an absolute path lies below the root."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """Return a file's text without the white space around it; None if it cannot be read."""
        try:
            # Some files of /sys exist and give an error to who reads them, as the speed of a card that is down.
            with self.path(name).open("rb") as file:
                return file.read(_FILE_BYTES).decode(errors="replace").strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """Return a file's whole number; None if there is none."""
        try:
            return int(self.text(name) or "")
        except ValueError:
            return None

    def names(self, name: str) -> list[str]:
        """Return what a folder holds, sorted; nothing if it cannot be read."""
        try:
            return sorted(os.listdir(self.path(name)))
        except OSError:
            return []

    def table(self, name: str) -> dict[str, str]:
        """Return a file's lines 'KEY: VALUE'."""
        lines = (self.text(name) or "").splitlines()
        pairs = (line.partition(":") for line in lines if ":" in line)
        return {key.strip(): value.strip() for key, _, value in pairs}
