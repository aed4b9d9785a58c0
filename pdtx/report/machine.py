"""What a result was measured on."""

import os
import platform
from importlib import metadata

import pdtx


def machine_facts() -> dict[str, str | int | None]:
    """Return processor, system and library versions, for a result file."""
    facts: dict[str, str | int | None] = {
        "pdtx": pdtx.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }
    for package in ("torch", "numpy", "pyzmq", "msgpack", "transformers"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = None
    return facts
