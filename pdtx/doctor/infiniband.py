"""Verbs devices: InfiniBand, RoCE and iWARP cards as the kernel shows them, and what lets a process use them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdtx.doctor.finding import Finding
from pdtx.doctor.machine import Machine

_SUBJECT = "RDMA"
_FOLDER = "/sys/class/infiniband"
_NULL_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_IPV4_GID = "0000:0000:0000:0000:0000:ffff:"
_GIDS_TOLD = 4
_ETHERNET = "Ethernet"
_AUTO = "auto"
_ROCE_BYTES = (256, 512, 1024, 2048, 4096)
_ROCE_HEADERS = 96
"""Bytes that IPv6, UDP and RoCE's own headers may need."""

_NEEDED = (
    "RDMA needs a verbs card with its driver (mlx5_ib, irdma, efa, ...; for trials Soft-RoCE: "
    "rdma link add rxe0 type rxe netdev NAME, or in virtual machines, deploy/rdma-lab/run: docs/rdma.md)"
)
_DEVICES = (
    "let the process have /dev/infiniband: docker run --device=/dev/infiniband --cap-add=IPC_LOCK, or an rdma/... "
    "resource in Kubernetes; on the host load ib_uverbs"
)


@dataclass(frozen=True)
class _Gid:
    """An entry of a port's GID table. kind: RoCE v2, IB/RoCE v1, or empty where it is not told."""

    index: int
    address: str
    kind: str

    def __str__(self) -> str:
        return f"{self.index} {self.address} {self.kind}".strip()

    @property
    def is_ipv4(self) -> bool:
        """Whether it stands for an address of IPv4."""
        return self.address.startswith(_IPV4_GID)


def check_infiniband(machine: Machine) -> Iterator[Finding]:
    """Look for verbs devices, their ports and addresses, and the files in /dev by which processes reach them."""
    devices = machine.names(_FOLDER)
    if not devices:
        yield Finding(subject=_SUBJECT, name="devices", value="none", fix=_NEEDED, stops=("rdma",))
        return
    verbs = [name for name in machine.names("/dev/infiniband") if name.startswith("uverbs")]
    value = ", ".join(verbs) or "no uverbs in /dev/infiniband, though the kernel has " + ", ".join(devices)
    yield _finding("/dev/infiniband", value, fix="" if verbs else _DEVICES, fails=not verbs)
    ports = [(device, port) for device in devices for port in machine.names(f"{_FOLDER}/{device}/ports")]
    active = [one for one in ports if _state(machine, *one).endswith("ACTIVE")]
    for device, port in ports:
        yield _port(machine, device, port, needed=not active)
    if not ports:
        yield _finding("ports", "none", fix=_NEEDED, fails=True)


def _finding(name: str, value: str, *, fix: str, fails: bool) -> Finding:
    if not fails:
        return Finding(subject=_SUBJECT, name=name, value=value, fix=fix)
    return Finding(subject=_SUBJECT, name=name, value=value, level="warning", fix=fix, stops=("rdma",))


def _state(machine: Machine, device: str, port: str) -> str:
    return machine.text(f"{_FOLDER}/{device}/ports/{port}/state") or "unknown"


def _port(machine: Machine, device: str, port: str, *, needed: bool) -> Finding:
    """needed: whether no port is active, so that this one would have to be."""
    folder = f"{_FOLDER}/{device}/ports/{port}"
    state, layer = _state(machine, device, port), machine.text(f"{folder}/link_layer") or "unknown"
    rate, node = machine.text(f"{folder}/rate"), machine.number(f"{_FOLDER}/{device}/device/numa_node")
    gids = _gids(machine, folder)
    words = [state, layer, rate or "no rate told", f"{len(gids)} GIDs"]
    words += [f"GID {gid}" for gid in gids[:_GIDS_TOLD]]
    words += [_picked(machine, layer, gids)] if gids else []
    words += _mtu(machine, folder)
    words += [f"NUMA node {node}"] if node is not None and node >= 0 else []
    name, value = f"{device}:{port}", ", ".join(words)
    if not state.endswith("ACTIVE"):
        fix = "connect it and bring its network card up" if layer == _ETHERNET else "check the cable and subnet manager"
        return _finding(name, value, fix=fix, fails=needed)
    if not gids:
        fix = f"give the network card of {device} an address: RoCE takes its GIDs from there"
        return _finding(name, value, fix=fix, fails=True)
    chosen = _chosen(machine)
    if chosen is not None and not _has(gids, chosen):
        fix = "unset UCX_IB_GID_INDEX, or set it to an index that the port has"
        return Finding(subject=_SUBJECT, name=name, value=value, level="warning", fix=fix)
    return _finding(name, value, fix="", fails=False)


def _chosen(machine: Machine) -> str | None:
    """Return the index that UCX is told to take; None if it is to pick one."""
    text = machine.environ.get("UCX_IB_GID_INDEX", _AUTO)
    return None if text == _AUTO else text


def _has(gids: Sequence[_Gid], index: str) -> bool:
    return any(str(gid.index) == index for gid in gids)


def _picked(machine: Machine, layer: str, gids: Sequence[_Gid]) -> str:
    """Return which GID UCX takes, by the rule of its uct_ib_device_select_gid: seen in its log for 1.23."""
    chosen = _chosen(machine)
    if chosen is not None:
        return f"index {chosen} by UCX_IB_GID_INDEX" + ("" if _has(gids, chosen) else ", which the port does not have")
    if layer != _ETHERNET:
        return "index 0 picked by UCX"
    first = min(gids, key=lambda gid: (gid.kind != "RoCE v2", not gid.is_ipv4, gid.index))
    return f"index {first.index} picked by UCX (RoCE v2 and IPv4 first; UCX_IB_GID_INDEX changes it)"


def _mtu(machine: Machine, folder: str) -> list[str]:
    """RoCE's packets: the largest of its sizes that fits the network card's. InfiniBand's is not told here."""
    card = machine.text(f"{folder}/gid_attrs/ndevs/0")
    room = machine.number(f"/sys/class/net/{card}/mtu") if card else None
    if room is None:
        return []
    fitting = [size for size in _ROCE_BYTES if size + _ROCE_HEADERS <= room]
    return [f"MTU {fitting[-1]} ({card}: {room})"] if fitting else [f"MTU of {card}: {room}"]


def _gids(machine: Machine, folder: str) -> list[_Gid]:
    """Return the entries of a port's table that are in use, by index."""
    found = list[_Gid]()
    for name in machine.names(f"{folder}/gids"):
        address = machine.text(f"{folder}/gids/{name}")
        if address and address != _NULL_GID and name.isdecimal():
            found.append(_Gid(int(name), address, machine.text(f"{folder}/gid_attrs/types/{name}") or ""))
    return sorted(found, key=lambda gid: gid.index)
