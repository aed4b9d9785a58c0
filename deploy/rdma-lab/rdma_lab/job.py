"""What the guests are to do, as a file of the share that their shell reads."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rdma_lab.parts import Parts

_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "USER", "VIRTUAL_ENV", "TERM", "CI")
_PASSED_LIKE = ("PDTX_", "UCX_", "NIXL_", "PYTHON", "OMP_", "HF_", "TOKENIZERS_", "LAB_")


@dataclass(frozen=True)
class Job:
    """command: run in directory on every node. netem: arguments of tc's netem, or empty. nodes: 1 or 2."""

    command: Sequence[str]
    nodes: int
    directory: Path
    mtu: int
    netem: str = ""

    def settings(self, parts: Parts, environment: Mapping[str, str]) -> str:
        """Return them for bash, with the variables that guests get of the environment."""
        passed = {
            name: value
            for name, value in environment.items()
            if name.isidentifier() and (name in _PASSED or name.startswith(_PASSED_LIKE))
        }
        lines = [
            f"nodes={self.nodes}",
            f"mtu={self.mtu}",
            f"netem={shlex.quote(self.netem)}",
            f"directory={shlex.quote(str(self.directory))}",
            f"verbs_library={shlex.quote(str(verbs_library() or ''))}",
            f"kernel_modules={shlex.quote(str(parts.kernel.modules))}",
            f"verbs={shlex.quote(str(parts.verbs))}",
            f"command=({' '.join(shlex.quote(word) for word in self.command)})",
            *(f"export {name}={shlex.quote(value)}" for name, value in sorted(passed.items())),
            # Whatever the host's PATH was, guests need these.
            "export PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin",
        ]
        return "\n".join(lines) + "\n"

    def write(self, share: Path, guest: Path, parts: Parts) -> None:
        """Put everything that guests need into the share."""
        folder = share / ".lab"
        folder.mkdir(exist_ok=True)
        (folder / "settings").write_text(self.settings(parts, os.environ))
        (folder / "node").write_bytes((guest / "node").read_bytes())


def verbs_library() -> Path | None:
    """Return the libibverbs inside NIXL's wheel, if the project's .venv has one; that of either CUDA serves both."""
    project = Path(__file__).resolve().parents[3]
    found = project.glob(".venv/lib/python3*/site-packages/nixl_cu1*.libs/libibverbs-*.so*")
    return next(iter(sorted(found)), None)
