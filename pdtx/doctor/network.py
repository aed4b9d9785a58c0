"""Network cards: what the kernel knows of each, and what is likely to be slower than it could be."""

from collections.abc import Iterator

from pdtx.doctor.finding import Finding
from pdtx.doctor.machine import Machine

_SUBJECT = "network"
_FOLDER = "/sys/class/net"
_FAST_MBITS, _JUMBO = 10_000, 4000
"""From 10 Gb/s on, packets of 1,500 bytes cost more processor time than a core has."""


def check_network(machine: Machine) -> Iterator[Finding]:
    """Look at each network card. Virtual ones without a speed are listed and not judged."""
    cards = [name for name in machine.names(_FOLDER) if name != "lo" and machine.text(f"{_FOLDER}/{name}/operstate")]
    for name in cards:
        yield _card(machine, name)
    if not any(_is_up(machine, name) for name in cards):
        fix = "bring a card up (ip link set NAME up) or work on one host with --mover shm"
        yield Finding(subject=_SUBJECT, name="cards", value="none is up besides loopback", level="warning", fix=fix)
    yield _congestion(machine)


def _is_up(machine: Machine, name: str) -> bool:
    # Tunnels and some virtual cards never say more than unknown.
    return machine.text(f"{_FOLDER}/{name}/operstate") in ("up", "unknown")


def _card(machine: Machine, name: str) -> Finding:
    folder = f"{_FOLDER}/{name}"
    state, mtu = machine.text(f"{folder}/operstate"), machine.number(f"{folder}/mtu") or 0
    speed = machine.number(f"{folder}/speed") or -1  # Mb/s; -1 where it has none
    node = machine.number(f"{folder}/device/numa_node")
    words = [f"{state}", f"MTU {mtu}", f"{speed / 1000:g} Gb/s" if speed > 0 else "no speed told"]
    words += [f"NUMA node {node}"] if node is not None and node >= 0 else []
    value = ", ".join(words)
    if state == "up" and speed >= _FAST_MBITS and mtu < _JUMBO:
        fix = f"ip link set {name} mtu 9000, if every switch between the nodes carries that"
        return Finding(subject=_SUBJECT, name=name, value=value, level="warning", fix=fix)
    return Finding(subject=_SUBJECT, name=name, value=value)


def _congestion(machine: Machine) -> Finding:
    """Which congestion control: rates of plain sockets may be compared within one of them only."""
    control = machine.text("/proc/sys/net/ipv4/tcp_congestion_control") or "not told"
    words = [f"congestion control {control}"]
    for kind, doing in (("wmem", "send"), ("rmem", "receive")):
        limits = (machine.text(f"/proc/sys/net/ipv4/tcp_{kind}") or "").split()
        words += [f"{doing} buffers up to {limits[-1]} B"] if limits else []
    return Finding(subject=_SUBJECT, name="tcp", value=", ".join(words))
