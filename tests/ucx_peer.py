"""A process with the listening side of a UCX link, and what tests of UCX have in common."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdtx.errors import InputError
from pdtx.plan import Runs
from pdtx.testing.peers import stop_process
from pdtx.transports.base import Region
from pdtx.transports.onesided.fabric import Link, Progress, Shared
from pdtx.transports.ucx.fabric import UcxFabric
from pdtx.transports.ucx.library import nixl_path
from pdtx.transports.ucx.link import Remote
from pdtx.transports.ucx.runtime import Runtime, make_runtime
from tests.warm import WarmProcess

REPOSITORY = Path(__file__).parent.parent
TICK_S = 0.5


def usable_runtime(name: str = "auto", library: str | None = None) -> Runtime:
    """Load UCX, or skip the test with the reason why that cannot be done."""
    try:
        return make_runtime(name, library)
    except InputError as error:
        pytest.skip(str(error))


def usable_nixl() -> None:
    """Skip the test if NIXL's UCX is not there."""
    if nixl_path() is None:
        pytest.skip("nixl is not installed")


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """Bytes that differ from their neighbours."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


class Peer:
    """The other process, as the test sees it. pipe carries commands; the link beside it carries bytes."""

    def __init__(self, process: WarmProcess, pipe: Connection) -> None:
        self.process, self.pipe = process, pipe

    def greet(self, greeting: bytes) -> bytes:
        self.pipe.send(greeting)
        return self.answer()  # type: ignore[no-any-return]

    def answer(self) -> Any:  # noqa: ANN401
        assert self.pipe.poll(30), "the peer does not answer"
        return self.pipe.recv()

    def share(self, nbytes: int, seed: int) -> Shared:
        """Have the peer make and share a region with pattern(nbytes, seed)."""
        self.pipe.send(("share", nbytes, seed))
        return Shared(self.answer())

    def ask(self, command: str) -> Any:  # noqa: ANN401
        self.pipe.send((command,))
        return self.answer()

    def memory(self) -> torch.Tensor:
        """What the region holds that it has shared last."""
        return torch.frombuffer(bytearray(self.ask("bytes")), dtype=torch.uint8)

    def stop(self) -> None:
        stop_process(self.process.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def peer_process(**options: object) -> Iterator[Peer]:
    """Run serve() in a process of its own."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = WarmProcess(serve, theirs, options)
        with process, Connection(os.dup(ours.fileno())) as pipe:
            yield Peer(process, pipe)


@contextmanager
def joined(fabric: UcxFabric, deadline_s: float = 20.0, **options: object) -> Iterator[tuple[Peer, Link[Remote]]]:
    """A link of fabric to a new process."""
    with peer_process(**options) as peer:
        link = fabric.link(peer.pipe.fileno())
        try:
            link.join(peer.greet(link.greeting()), time.monotonic() + deadline_s)
            yield peer, link
        finally:
            link.close()


@contextmanager
def ucx_fabric(**options: Any) -> Iterator[UcxFabric]:  # noqa: ANN401
    fabric = UcxFabric(**options)
    try:
        yield fabric
    finally:
        fabric.close()


class Moved:
    """A Progress that counts, and says stop after a number of bytes."""

    def __init__(self, stop_after: float = float("inf")) -> None:
        self.nbytes = 0
        self.progress = Progress(self._moved, lambda: self.nbytes >= stop_after, b"")

    def _moved(self, nbytes: int) -> None:
        self.nbytes += nbytes


def scattered(count: int, nbytes: int, seed: int = 0) -> tuple[Runs, int]:
    """Runs of nbytes each in random order on both sides, and the size of the regions that hold them."""
    rng = np.random.default_rng(seed)
    slots = 2 * count
    src, dst = (rng.permutation(slots)[:count].astype(np.int64) * nbytes for _ in range(2))
    return Runs(src, dst, np.full(count, nbytes, np.int64)), slots * nbytes


def copied(source: torch.Tensor, target: torch.Tensor, runs: Runs) -> torch.Tensor:
    """What target is once the runs have been copied: the oracle, run by run."""
    result = target.clone()
    for src, dst, nbytes in zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True):
        result[dst : dst + nbytes] = source[src : src + nbytes]
    return result


def serve(channel: socket.socket, options: dict[str, Any]) -> None:
    """Accept one link and do what comes through the channel."""
    pipe = Connection(channel.detach())
    fabric = UcxFabric(**options)
    link = fabric.link(pipe.fileno())
    greeting = pipe.recv()
    pipe.send(link.greeting())
    link.join(greeting, time.monotonic() + 20)
    region: Region | None = None
    while True:
        if not link.wait_readable(pipe.fileno(), TICK_S):
            continue
        try:
            command, *arguments = pipe.recv()
        except EOFError:
            break
        if command == "share":
            region = Region(pattern(*arguments))
            pipe.send(link.share(region).key)
        elif command == "bytes":
            assert region is not None
            pipe.send(region.memory.numpy().tobytes())
        elif command == "revoke":
            pipe.send(link.revoke())
        elif command == "cpu":
            pipe.send(time.process_time())
    link.close()
    fabric.close()
