"""What both nodes of an RDMA trial share: their places, meeting points, and the card's own counters.

For the lab of deploy/rdma-lab; no torch and no pdtx here, so that whoever conducts a trial starts at once.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DEVICES = Path("/sys/class/infiniband")
_TICK_S = 0.05


@dataclass(frozen=True)
class Node:
    """One of two nodes. share: a folder that both see; peer, here: addresses."""

    number: int
    here: str
    peer: str
    share: Path

    @classmethod
    def of_environment(cls) -> "Node":
        """This node, by NODE, SELF, PEER and SHARE."""
        given = os.environ
        return cls(int(given["NODE"]), given["SELF"], given["PEER"], Path(given["SHARE"]))

    def tell(self, name: str, value: object = None) -> None:
        """Leave a value for the other node, whole."""
        path = self.share / f"{name}.{self.number}"
        path.with_suffix(path.suffix + ".tmp").write_text(json.dumps(value))
        path.with_suffix(path.suffix + ".tmp").rename(path)

    def hear(self, name: str, timeout_s: float) -> Any:  # noqa: ANN401 - JSON
        """Return what the other node has left. Raises TimeoutError."""
        path, limit = self.share / f"{name}.{3 - self.number}", time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > limit:
                raise TimeoutError(f"node {3 - self.number} has not said {name!r} within {timeout_s:g} s")
            time.sleep(_TICK_S)
        return json.loads(path.read_text())

    def meet(self, name: str, timeout_s: float) -> None:
        """Go on when both nodes are here."""
        self.tell(name)
        self.hear(name, timeout_s)


def device() -> str:
    """The first verbs device."""
    return min(path.name for path in _DEVICES.iterdir())


def counters() -> dict[str, int]:
    """The hardware counters of the first port of the first verbs device."""
    folder = _DEVICES / device() / "ports/1/hw_counters"
    return {path.name: int(path.read_text()) for path in sorted(folder.iterdir())}


def grown(before: dict[str, int]) -> dict[str, int]:
    """What has been counted since; zeros are left out."""
    return {name: after - before[name] for name, after in counters().items() if after != before[name]}


def mtu() -> int:
    """Payload bytes of the largest packet: RoCE's largest size below the network card's."""
    name = (_DEVICES / device() / "ports/1/gid_attrs/ndevs/0").read_text().strip()
    ethernet = int(Path(f"/sys/class/net/{name}/mtu").read_text())
    # IPv6, UDP, and RoCE's own headers need up to 96 bytes.
    return max(size for size in (256, 512, 1024, 2048, 4096) if size + 96 <= ethernet)
