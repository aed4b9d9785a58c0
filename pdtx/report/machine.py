"""What a result was measured on."""

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import pdtx


def machine_facts() -> dict[str, str | int | None]:
    """Return processor, system and library versions, for a result file."""
    facts: dict[str, str | int | None] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "pdtx": pdtx.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }
    for package in ("torch", "numpy", "pyzmq", "msgpack", "transformers"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = None
    return facts


def _processor() -> str:
    """The processor's name as the kernel has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
