"""A station that moves nothing and says it has, and an agent with one: python -m tests.fake_station ROLE."""

import sys
import threading
import time
from dataclasses import dataclass, field, replace

from pdtx.bench.agent import Agent
from pdtx.bench.work import LinkChecked, LinkMoved, Prepared, Role, StationWork
from pdtx.cli.termination import Termination
from pdtx.errors import TransferAborted
from pdtx.results.model import Registration, Transfer
from pdtx.sidechannel import Security
from pdtx.transports.base import Path

NBYTES = 1000
MAX_BYTES = 1 << 30


@dataclass
class FakeStation:
    """Tells what it was asked to do in log, and in moved when. clock_s: what its clock shows beyond ours.

    posts, deliveries, received, wrong: what it says of every link; wrong_in: the one iteration with wrong elements.
    move_s: how long a move takes. fails: from a method's name to what it raises.
    """

    clock_s: float = 0.0
    posts: int = 1
    deliveries: int = 1
    received: int = NBYTES
    wrong_in: int | None = None
    move_s: float = 0.002
    fails: dict[str, Exception] = field(default_factory=dict)
    log: list[tuple[str, object]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    moved: list[tuple[float, float]] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)
    ends_when_stopped: bool = True
    iteration: int = -1

    def _did(self, what: str, detail: object = None) -> None:
        self.log.append((what, detail))
        if what in self.fails:
            raise self.fails[what]

    def prepare(self, work: StationWork, host: str) -> Prepared:
        self._did("prepare", work)
        return Prepared(
            {link.number: self.facts(link.number) for link in work.links},
            (Registration(node=0, nbytes=NBYTES, seconds=0.1),),
            f"{host}:1",
            b"t" * 32,
        )

    def connect(self, link: int, address: str, token: bytes, timeout_s: float) -> Path:
        self._did("connect", (link, address, token))
        return Path("tcp", "a fake")

    def facts(self, link: int) -> dict[str, object]:
        return {"wire_bytes": NBYTES, "unique_bytes": NBYTES, "runs": 2, "run_sizes": {"500": 2}}

    def ready(self, iteration: int) -> None:
        self.iteration = iteration
        self._did("ready", iteration)

    def move(self, links: tuple[int, ...], start_at: float, timeout_s: float) -> tuple[LinkMoved, ...]:
        self._did("move", links)
        time.sleep(max(0.0, start_at - self.clock_s - time.monotonic()))
        begun = time.monotonic() + self.clock_s
        if self.stopped.wait(self.move_s) and self.ends_when_stopped:
            raise TransferAborted("stopped")
        ended = time.monotonic() + self.clock_s
        self.moved.append((begun, ended))
        transfer = Transfer(0, 0, 0, 0, 1, 0, 0, NBYTES, 0.0, 0.0, 0.001, ended - begun)
        return tuple(
            LinkMoved(link, begun, ended, 0.1, 0.2, 0.3, NBYTES, self.posts, (_of_link(transfer, link),))
            for link in links
        )

    def stop(self, reason: str) -> None:
        self.stopped.set()

    def check(self, links: tuple[int, ...], full: bool) -> tuple[LinkChecked, ...]:
        self._did("check", (links, full))
        bad = full and self.iteration == self.wrong_in
        one = LinkChecked(0, self.received, self.deliveries, int(bad) if full else None, "layer 3" if bad else "")
        return tuple(replace(one, link=link) for link in links)

    def release(self) -> None:
        self.stopped.clear()
        self.log.append(("release", None))
        self.released.set()

    def close(self) -> None:
        self.log.append(("close", None))

    def did(self, what: str) -> list[object]:
        """What was told of each time that a method was called."""
        return [detail for name, detail in self.log if name == what]


def _of_link(transfer: Transfer, link: int) -> Transfer:
    fields = {name: getattr(transfer, name) for name in transfer.__struct_fields__}
    return Transfer(**{**fields, "link": link})


def main() -> None:
    """Serve until the parent ends us; say the address first. Moves take as many seconds as the second argument says."""
    role: Role = "prefill" if sys.argv[1] == "prefill" else "decode"
    station = FakeStation(move_s=float(sys.argv[2]))
    stop = Termination()
    with Agent(station, role, "127.0.0.1:0", security=Security(), max_bytes=MAX_BYTES) as agent:
        sys.stdout.write(agent.address + "\n")
        sys.stdout.flush()
        stop.wait(60.0)


if __name__ == "__main__":
    main()
