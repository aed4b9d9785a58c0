"""Memory: what may be pinned, what may be shared, and in what pages."""

import os
import resource
from collections.abc import Iterator

from pdtx.doctor.finding import Finding, Want
from pdtx.doctor.machine import Machine
from pdtx.units import format_bytes

_SUBJECT = "memory"
_LEAST_LOCKED, _LEAST_SHARED = 64 << 20, 64 << 20
_CAP_IPC_LOCK = 1 << 14
_NO_LIMIT = resource.RLIM_INFINITY
_FILES_WANTED = 4096


def check_memory(machine: Machine) -> Iterator[Finding]:
    """Look at limits for pinned memory, at /dev/shm and at large pages."""
    yield locked_memory(machine, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield from _shared(machine)
    yield _large_pages(machine)
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE))


def locked_memory(machine: Machine, limit: int) -> Finding:
    """Judge the limit of locked memory, in bytes: registering a cache with a verbs card pins all of it."""
    capable = int(machine.table("/proc/self/status").get("CapEff", "0"), 16) & _CAP_IPC_LOCK
    text = "unlimited" if limit == _NO_LIMIT else format_bytes(limit)
    if limit == _NO_LIMIT or capable:
        value = text if limit == _NO_LIMIT else f"{text}, waived by CAP_IPC_LOCK"
        return Finding(subject=_SUBJECT, name="memlock", value=value)
    fix = (
        "RDMA pins the cache: ulimit -l unlimited (memlock in /etc/security/limits.conf, LimitMEMLOCK=infinity in "
        "systemd), --ulimit memlock=-1 or --cap-add=IPC_LOCK for containers"
    )
    stops: tuple[Want, ...] = ("rdma",) if limit < _LEAST_LOCKED else ()
    return Finding(subject=_SUBJECT, name="memlock", value=text, level="warning", fix=fix, stops=stops)


def _shared(machine: Machine) -> Iterator[Finding]:
    """Judge /dev/shm: UCX and NIXL keep their queues there, and containers give it 64 MiB."""
    fix = "give the process more: docker run --shm-size=8g or --ipc=host, an emptyDir of medium Memory in Kubernetes"
    try:
        found = os.statvfs(machine.path("/dev/shm"))
    except OSError:
        yield Finding(subject=_SUBJECT, name="/dev/shm", value="not there", level="warning", fix=fix)
        return
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    value = f"{format_bytes(free)} free of {format_bytes(size)}"
    small = free < _LEAST_SHARED
    yield Finding(
        subject=_SUBJECT, name="/dev/shm", value=value, level="warning" if small else "ok", fix=fix if small else ""
    )


def _large_pages(machine: Machine) -> Finding:
    """Tell the setting of large pages: it changes copies by nearly twice, so both nodes should have the same."""
    info = machine.table("/proc/meminfo")
    total, free, size = (info.get(key, "0").split()[0] for key in ("HugePages_Total", "HugePages_Free", "Hugepagesize"))
    chosen = machine.text("/sys/kernel/mm/transparent_hugepage/enabled") or "not there"
    chosen = chosen[chosen.find("[") + 1 : chosen.find("]")] if "[" in chosen else chosen
    value = f"{free} of {total} reserved pages of {format_bytes(int(size) * 1024)} free; transparent: {chosen}"
    return Finding(subject=_SUBJECT, name="huge pages", value=value)


def open_files(limits: tuple[int, int]) -> Finding:
    """Judge the soft and hard limit of open files: every link has some."""
    soft, hard = ("unlimited" if limit == _NO_LIMIT else str(limit) for limit in limits)
    few = limits[0] != _NO_LIMIT and limits[0] < _FILES_WANTED
    fix = f"ulimit -n {_FILES_WANTED} for many agents on one host" if few else ""
    # It is enough for the few links of a usual run.
    return Finding(
        subject=_SUBJECT, name="open files", value=f"{soft}, at most {hard}", level="warning" if few else "ok", fix=fix
    )
