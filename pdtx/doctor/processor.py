"""Processors: NUMA nodes, clock, frequency, load, and what a container leaves of them."""

import os
from collections.abc import Iterator

from pdtx.doctor.finding import Finding
from pdtx.doctor.machine import Machine
from pdtx.units import format_bytes

_SUBJECT = "processor"
_CPUS = "/sys/devices/system/cpu"
_CLOCK = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
_FAST_CLOCKS = ("tsc", "arch_sys_counter", "kvm-clock", "pvclock", "hyperv_clocksource_tsc_page")
_UNLIMITED = 1 << 60


def check_processor(machine: Machine) -> Iterator[Finding]:
    """Look at what makes timings good or bad."""
    cpus = len(os.sched_getaffinity(0))
    yield _nodes(machine)
    yield _clock(machine)
    yield _governor(machine)
    yield _load(machine, cpus)
    yield from _limits(machine, cpus)


def _nodes(machine: Machine) -> Finding:
    names = [
        name for name in machine.names("/sys/devices/system/node") if name.startswith("node") and name[4:].isdigit()
    ]
    texts = [f"{name}: cpus {machine.text(f'/sys/devices/system/node/{name}/cpulist') or 'none'}" for name in names]
    several = len(names) > 1
    fix = "keep a node's process, memory, GPU and network card together: numactl --cpunodebind=N --membind=N pdtx-..."
    value = "; ".join(texts) or "not told"
    return Finding(subject=_SUBJECT, name="NUMA", value=value, fix=fix if several else "")


def _clock(machine: Machine) -> Finding:
    source = machine.text(_CLOCK)
    if source is None or source in _FAST_CLOCKS:
        return Finding(subject=_SUBJECT, name="clock", value=source or "not told")
    fix = "reading this clock takes a system call, which shows in times of microseconds; see whether tsc is available"
    return Finding(subject=_SUBJECT, name="clock", value=source, level="warning", fix=fix)


def _governor(machine: Machine) -> Finding:
    governors = [machine.text(f"{_CPUS}/{name}/cpufreq/scaling_governor") for name in machine.names(_CPUS)]
    found = sorted({one for one in governors if one})
    slow = found not in ([], ["performance"])
    fix = "cpupower frequency-set -g performance while measuring" if slow else ""
    return Finding(
        subject=_SUBJECT,
        name="governor",
        value=", ".join(found) or "not told",
        level="warning" if slow else "ok",
        fix=fix,
    )


def _load(machine: Machine, cpus: int) -> Finding:
    try:
        load = float((machine.text("/proc/loadavg") or "").split()[0])
    except (IndexError, ValueError):
        return Finding(subject=_SUBJECT, name="load", value="not told")
    busy = load > 0.5 * cpus
    fix = "something else is running: wait until it is over, or results will be unstable" if busy else ""
    return Finding(
        subject=_SUBJECT,
        name="load",
        value=f"{load:g} on {cpus} processors",
        level="warning" if busy else "ok",
        fix=fix,
    )


def _limits(machine: Machine, cpus: int) -> Iterator[Finding]:
    """Tell what a container may use, by cgroups of either version."""
    memory = _least(machine.number(f"{folder}/memory.max") for folder in _folders(machine, ""))
    memory = memory or _least(
        machine.number(f"{folder}/memory.limit_in_bytes") for folder in _folders(machine, "memory")
    )
    value = format_bytes(memory) if memory is not None and memory < _UNLIMITED else "no limit"
    yield Finding(subject="container", name="memory", value=value)
    share = _processors(machine)
    short = share is not None and share < 2
    yield Finding(
        subject="container",
        name="processors",
        value=f"{share:g} of {cpus}" if share is not None else "no limit",
        level="warning" if short else "ok",
        fix="give the container two processors or more: a node moves and listens at the same time" if short else "",
    )


def _folders(machine: Machine, controller: str) -> list[str]:
    """Return this process's cgroup and all above it; controller: of version 1, empty for version 2.

    Within a container the path may be that of the host, and the limits lie at the mount itself.
    """
    mount = f"/sys/fs/cgroup/{controller}".rstrip("/")
    for line in (machine.text("/proc/self/cgroup") or "").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if controller in names.split(","):
            parts = [part for part in path.split("/") if part]
            return [f"{mount}/{'/'.join(parts[:length])}".rstrip("/") for length in range(len(parts), -1, -1)]
    return [mount]


def _least(limits: Iterator[int | None]) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _processors(machine: Machine) -> float | None:
    """Return how many processors the cgroups leave; None for all."""
    found = list[float]()
    for folder in _folders(machine, ""):
        quota, _, period = (machine.text(f"{folder}/cpu.max") or "max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            found.append(int(quota) / int(period))
    for folder in _folders(machine, "cpu"):
        used, of = machine.number(f"{folder}/cpu.cfs_quota_us"), machine.number(f"{folder}/cpu.cfs_period_us")
        if used is not None and of and used > 0:
            found.append(used / of)
    return min(found, default=None)
