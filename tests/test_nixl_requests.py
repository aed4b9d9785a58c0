"""What a link makes of the end of its requests, over a stand-in for NIXL's agent: needs no NIXL."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pdtx.errors import TransferAborted
from pdtx.transports import Region
from pdtx.transports.nixl.agent import Agent, Request
from pdtx.transports.nixl.link import Engine, NixlLink
from pdtx.transports.nixl.messages import VERSION, Greeting, Place, pack
from pdtx.transports.onesided import Progress
from tests.nixl_links import runs_of, soon

NBYTES = 4096


class StandIn:
    """An agent whose requests need two looks each; while the second is taken, the transfer is given up."""

    name, peer = "here", "there"

    def __init__(self) -> None:
        self.looks = 0
        self.stopped = False
        self.told = list[bytes]()
        self.released = list[Request]()
        self.closed = False

    def meet(self, name: str, metadata: bytes) -> None:
        pass

    def register(self, region: Region) -> float:
        return 0.0

    def post(self, *words: Any) -> Request:  # noqa: ANN401
        return Request(object(), NBYTES, "PROC")

    def ended(self, request: Request) -> bool:
        self.looks += 1
        self.stopped = self.looks == 2
        return self.stopped

    def release(self, request: Request) -> None:
        self.released.append(request)

    def notify(self, name: str, notice: bytes) -> None:
        self.told.append(notice)

    def close(self) -> None:
        self.closed = True


def _link(agent: StandIn) -> NixlLink:
    engine = cast("Engine", SimpleNamespace(backend="UCX", versions="NIXL"))
    link = NixlLink(engine, cast("Agent", agent), lambda _: None)
    place = Place(0, NBYTES, "DRAM", 0)
    link.join(pack(Greeting(VERSION, "there", "NIXL", "UCX", b"metadata", b"host", ["shm"], place)), soon())
    return link


def test_what_is_given_up_before_its_last_byte_has_been_read_has_not_arrived() -> None:
    """Its source may have changed meanwhile: the peer must not take it for whole."""
    agent = StandIn()
    link, progress = _link(agent), Progress(lambda _: None, lambda: agent.stopped, Progress.tag_of(0))
    region, remote = Region(torch.zeros(NBYTES, dtype=torch.uint8)), Place(0, NBYTES, "DRAM", 0)
    with pytest.raises(TransferAborted):
        link.write(region, remote, runs_of((0, 0, NBYTES)), soon(), progress)
    assert agent.told == []
    assert len(agent.released) == 1
    assert agent.closed
