"""What carries the payload: read from UCX's own descriptions of a running endpoint, a request and a context."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pdtx.transports.base import PathKind

_RDMA = ("rc", "dc", "ud", "gga", "srd", "efa", "ib", "mlx5", "ugni", "cxi")
_SHM = ("posix", "sysv", "cma", "knem", "xpmem", "mm", "self", "cuda_ipc", "rocm_ipc", "ze_ipc")

DIRECT = frozenset(("cma", "knem", "xpmem", "cuda_ipc", "rocm_ipc", "ze_ipc"))
"""Transports by which a peer on this host reaches memory without any help from here."""

_LANE = re.compile(r"\b([a-z][a-z0-9_]*)/([A-Za-z0-9_.:\-]+)")
_ENDPOINT_LANE = re.compile(r"lane\[\d+\]:\s+\d+:([a-z0-9_]+)/(\S+?)\.\d+ md\S*\s+->\s+\S+(.*)")
_RESOURCE = re.compile(r"resource \d+ .*-- ([a-z0-9_]+)/(\S+)")
_EMULATION = "software emulation"
_UNKNOWN = "no debug info"


@dataclass(frozen=True)
class Lane:
    """A transport on a device, in UCX's words: tcp on lo, rc_mlx5 on mlx5_0:1."""

    transport: str
    device: str

    @property
    def kind(self) -> PathKind:
        """What it is for people."""
        first = self.transport.split("_")[0]
        if self.transport in _SHM:
            return "shm"
        if self.transport == "tcp":
            return "tcp"
        return "rdma" if first in _RDMA else "other"

    def __str__(self) -> str:
        return f"{self.transport}/{self.device}"


@dataclass(frozen=True)
class Route:
    """How UCX carries out an operation: by which lanes, and whether in software on the peer's processor."""

    lanes: tuple[Lane, ...]
    emulated: bool

    @property
    def kind(self) -> PathKind:
        """The kind of its lanes; of several kinds the one that is slowest, so that none is claimed in vain."""
        kinds = {lane.kind for lane in self.lanes}
        order: tuple[PathKind, ...] = ("tcp", "rdma", "shm")
        return next((kind for kind in order if kind in kinds), "other")

    @property
    def detail(self) -> str:
        """Its lanes in UCX's words."""
        return " + ".join(map(str, self.lanes)) or "unknown"


def route_of_request(description: str) -> Route | None:
    """Read UCX's description of a request; None where UCX keeps none (UCX_PROTO_ENABLE=n)."""
    lanes = _unique(Lane(*match) for match in _LANE.findall(description))
    if _UNKNOWN in description or not lanes:
        return None
    return Route(lanes, _EMULATION in description)


def route_of_endpoint(description: str) -> Route:
    """Read UCX's description of an endpoint: where no lane is for puts and gets, active messages emulate them."""
    found = [(Lane(transport, device), uses) for transport, device, uses in _ENDPOINT_LANE.findall(description)]
    remote = _unique(lane for lane, uses in found if re.search(r"\brma(_bw)?\b", uses))
    if remote:
        return Route(remote[:1], emulated=False)
    messages = _unique(lane for lane, uses in found if re.search(r"\bam(_bw)?\b", uses))
    return Route(messages[:1], emulated=True)


def lanes_of_context(description: str) -> tuple[Lane, ...]:
    """Read UCX's description of a context: what it may use, if the peer can too."""
    return _unique(Lane(*match) for match in _RESOURCE.findall(description))


def _unique(lanes: Iterable[Lane]) -> tuple[Lane, ...]:
    return tuple(dict.fromkeys(lanes))
