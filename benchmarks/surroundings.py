"""What a measurement depends on besides the code: written at the head of a result. Names no host."""

import os
import re
from importlib import metadata
from pathlib import Path

from benchmarks.settings import Settings
from pdtx.report import machine_facts

_PACKAGES = ("nixl", "ucxx-cu12", "libucx-cu12", "mooncake-transfer-engine-non-cuda")
_SETTINGS = re.compile(r"(UCX|NIXL|MC|PDTX|OMP)_")
_KERNEL = {
    "transparent_hugepage": "/sys/kernel/mm/transparent_hugepage/enabled",
    "transparent_hugepage_shmem": "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "tcp_congestion_control": "/proc/sys/net/ipv4/tcp_congestion_control",
    "tcp_rmem": "/proc/sys/net/ipv4/tcp_rmem",
    "tcp_wmem": "/proc/sys/net/ipv4/tcp_wmem",
    "ptrace_scope": "/proc/sys/kernel/yama/ptrace_scope",
    "load": "/proc/loadavg",
}


def surroundings(settings: Settings) -> dict[str, object]:
    """Return machine, versions, the environment's settings of libraries, and how much was measured."""
    facts = machine_facts()
    versions = {name: facts.pop(name) for name in ("pdtx", "python", "torch", "numpy")}
    machine = {name: facts[name] for name in ("date", "system", "processor", "cpus", "memory_bytes")}
    return {
        "machine": machine | {name: _read(path) for name, path in _KERNEL.items()},
        "versions": versions | {name: _version(name) for name in _PACKAGES},
        # What the caller has set; processes that are compared get what their rows say, and nothing else of these.
        "environment": {name: value for name, value in sorted(os.environ.items()) if _SETTINGS.match(name)},
        "settings": {"rounds": settings.rounds, "quick": settings.quick},
    }


def _read(path: str) -> str | None:
    try:
        return " ".join(Path(path).read_text(encoding="utf-8").split())
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
