"""Build the C library, if there is a compiler: python pdtx/native/build.py. $CC names another one than cc.

Used at install time too, before anything else of pdtx can be imported: the standard library only.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("runs.c")
BUILT = Path(__file__).with_name("libruns.so")

_TIMEOUT_S = 120
_FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-pthread")


def build(target: Path = BUILT) -> bool:
    """Compile SOURCE to target. Where that cannot be done say so on stderr, leave no target and return False."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    try:
        # Beside the target and then renamed: a process that has the old one mapped keeps it whole.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
            fresh = Path(scratch) / target.name
            _compile([*compiler, *_FLAGS, str(SOURCE), "-o", str(fresh)])
            fresh.replace(target)
            return True
    except (OSError, subprocess.SubprocessError) as error:
        target.unlink(missing_ok=True)
        sys.stderr.write(f"pdtx: no C library ({compiler[0]}: {error}); going on without, which is slower\n")
        return False


def _compile(command: list[str]) -> None:
    """Raise OSError, also for what the compiler does not like, or SubprocessError."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise OSError(lines[0])


if __name__ == "__main__":
    sys.exit(0 if build() else 1)
