"""Two joined links of NIXL engines in one process: one moves, the other waits in a thread of its own."""

import contextlib
import importlib.util
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from pdtx.plan import Runs
from pdtx.transports import Region
from pdtx.transports.base import Path
from pdtx.transports.nixl.fabric import NixlFabric
from pdtx.transports.nixl.link import NixlLink
from pdtx.transports.nixl.messages import Place
from pdtx.transports.onesided import Link, Progress

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")

PATIENCE_S = 20.0


def soon(seconds: float = PATIENCE_S) -> float:
    return time.monotonic() + seconds


def region_of(nbytes: int, seed: int = 0) -> Region:
    """Random bytes; zeros for seed 0."""
    if seed == 0:
        return Region(torch.zeros(nbytes, dtype=torch.uint8))
    values = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return Region(torch.from_numpy(values))


def runs_of(*runs: tuple[int, int, int]) -> Runs:
    """Runs from (src, dst, nbytes) each."""
    columns = np.array(runs, np.int64).reshape(-1, 3).T
    return Runs(*(np.ascontiguousarray(column) for column in columns))


def scattered(count: int, unit: int, slots: int, seed: int = 1) -> Runs:
    """Runs of one unit each, from and to random slots."""
    generator = np.random.default_rng(seed)
    src, dst = (generator.permutation(slots)[:count].astype(np.int64) * unit for _ in range(2))
    return Runs(src, dst, np.full(count, unit, np.int64))


def moved(source: Region, destination: Region, runs: Runs) -> torch.Tensor:
    """What destination must hold after the runs."""
    expected, given = destination.memory.clone().numpy(), source.memory.numpy()
    for src, dst, nbytes in zip(runs.src, runs.dst, runs.nbytes, strict=True):
        expected[dst : dst + nbytes] = given[src : src + nbytes]
    return torch.from_numpy(expected)


@dataclass
class Counted:
    """A Progress that counts, and can be stopped after so many bytes."""

    stop_after: float = float("inf")
    nbytes: int = 0
    progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        self.progress = Progress(self._moved, lambda: self.nbytes >= self.stop_after, Progress.tag_of(7))

    def _moved(self, nbytes: int) -> None:
        self.nbytes += nbytes


@dataclass
class Pair:
    """here moves; there waits, unless it is held."""

    here: Link[Place]
    there: Link[Place]
    fabrics: tuple[NixlFabric, NixlFabric]
    held: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)
    _idle: threading.Event = field(default_factory=threading.Event)

    def serve(self, control: socket.socket) -> None:
        while not self._ended.is_set():
            if self.held.is_set():
                self._idle.set()
                time.sleep(0.005)
            else:
                self._idle.clear()
                self.there.wait_readable(control.fileno(), 0.02)

    def hold(self) -> None:
        """Keep there from doing anything; returns when it does not."""
        self._idle.clear()
        self.held.set()
        assert self._idle.wait(PATIENCE_S)

    def remote(self, region: Region) -> Place:
        """Share a region of there's with here."""
        return self.here.open(self.there.share(region), region.nbytes)

    def path(self) -> Path:
        return self.here.path

    def end(self) -> None:
        self._ended.set()


@contextlib.contextmanager
def joined(**options: object) -> Iterator[Pair]:
    """Two fabrics with these options, with one connection."""
    with contextlib.ExitStack() as stack:
        fabrics = NixlFabric(**options), NixlFabric(**options)  # type: ignore[arg-type]  # the caller's business
        for fabric in fabrics:
            stack.callback(fabric.close)
        controls = socket.socketpair()
        for control in controls:
            stack.enter_context(control)
        links = [fabric.link(control.fileno()) for fabric, control in zip(fabrics, controls, strict=True)]
        for link in links:
            stack.callback(link.close)
        greetings = [link.greeting() for link in links]
        for link, greeting in zip(links, reversed(greetings), strict=True):
            link.join(greeting, soon())
        pair = Pair(links[0], links[1], fabrics)
        thread = threading.Thread(target=pair.serve, args=(controls[1],))
        thread.start()
        stack.callback(thread.join)
        stack.callback(pair.end)
        yield pair


def ended(link: Link[Place]) -> bool:
    assert isinstance(link, NixlLink)
    return link._agent is None
