"""Programs that the host must have. Verbs are not among them: those are for guests only, see parts.py."""

import os
import shutil

from rdma_lab import apt
from rdma_lab.say import LabError, say

_PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "ip": "iproute2",
    "tc": "iproute2",
    "rdma": "iproute2",
}
"""Programs, here or in the guests, and Debian's packages with them."""


def missing() -> list[str]:
    """Return Debian's names of the packages that are not here."""
    search = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return sorted({package for program, package in _PROGRAMS.items() if shutil.which(program, path=search) is None})


def require_programs() -> None:
    """Raise LabError, saying what to install, if a program is missing."""
    if names := missing():
        raise LabError(
            f"the lab lacks {' '.join(names)}; install by: deploy/rdma-lab/run --fetch (as root on Debian), or "
            f"apt-get install --no-install-recommends {' '.join(names)}"
        )


def install_programs() -> None:
    """Install what is missing. Raises LabError where that cannot be done."""
    names = missing()
    if not names:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        require_programs()
    say(f"installing {' '.join(names)}")
    apt.install(names)
