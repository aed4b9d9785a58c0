"""Engines for tests of one-sided movers: both nodes in one process, bytes copied by torch."""

import itertools
import threading
import time

import torch

from pdtx.errors import DeadlineExceeded, ProtocolError, TransferAborted
from pdtx.plan import Runs
from pdtx.transports.base import Path, Placement, Region, Registration
from pdtx.transports.inproc import copy_slices
from pdtx.transports.onesided import Fabric, Link, OneSidedMover, Progress, Shared

_numbers = itertools.count(1)
_regions: dict[int, Region] = {}


class MemoryLink(Link[Region]):
    """A key is a region's number in a table of this process."""

    def __init__(self) -> None:
        self.peer: bytes | None = None
        self.closed = False
        self.slow_s = 0.0

    def greeting(self) -> bytes:
        return b"memory"

    def join(self, greeting: bytes, deadline: float) -> None:
        if greeting != b"memory":
            raise ProtocolError("not a memory engine")

    @property
    def path(self) -> Path:
        return Path("inproc", "memory engine", possible=("inproc",))

    def share(self, region: Region) -> Shared:
        number = next(_numbers)
        _regions[number] = region
        return Shared(number.to_bytes(8, "big"))

    def open(self, shared: Shared, nbytes: int) -> Region:
        region = _regions.get(int.from_bytes(shared.key, "big"))
        if region is None or region.nbytes != nbytes:
            raise ProtocolError("no such region")
        return region

    def write(self, region: Region, remote: Region, runs: Runs, deadline: float, progress: Progress) -> None:
        self._move(region.memory, remote.memory, runs, deadline, progress)

    def read(self, remote: Region, region: Region, runs: Runs, deadline: float, progress: Progress) -> None:
        self._move(remote.memory, region.memory, runs, deadline, progress)

    def _move(
        self, source: torch.Tensor, destination: torch.Tensor, runs: Runs, deadline: float, progress: Progress
    ) -> None:
        limit = time.monotonic() + self.slow_s
        while time.monotonic() < limit:
            if progress.stopped:
                raise TransferAborted("stopped")
            if time.monotonic() > deadline:
                raise DeadlineExceeded("the engine", "peer", 0.0)
            time.sleep(0.005)
        if len(runs):
            copy_slices(Placement(Region(source), runs.source()), Placement(Region(destination), runs.destination()))
        progress.moved(runs.total)

    def close(self) -> None:
        self.closed = True


class MemoryFabric(Fabric[Region]):
    """links: all that were made, the acceptor's and the initiator's."""

    pulls = False

    def __init__(self) -> None:
        self.links = list[MemoryLink]()
        self._lock = threading.Lock()

    def register(self, region: Region) -> Registration | None:
        return Registration(region.nbytes, 0.0)

    def link(self, control: int) -> MemoryLink:
        link = MemoryLink()
        with self._lock:
            self.links.append(link)
        return link

    def close(self) -> None:
        pass


class PullingFabric(MemoryFabric):
    pulls = True


class PushingMover(OneSidedMover):
    name = "push"

    def __init__(self) -> None:
        self.fabric = MemoryFabric()
        super().__init__(self.fabric, piece_bytes=1000)


class PullingMover(OneSidedMover):
    name = "pull"
    within_host = True

    def __init__(self) -> None:
        self.fabric = PullingFabric()
        super().__init__(self.fabric)
