"""Faults over verbs between two nodes: run("producer", MOVER) on the first, "consumer" and "victim" on the second.

Loss and delay: still exact. Link down, peer killed: a typed error within the deadline, and not a byte written to memory
that the consumer has been told is its own again. Prints a JSON object a fault.
"""

import contextlib
import faulthandler
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from pdtx.errors import DeadlineExceeded, PdtxError, PeerLost
from pdtx.testing.open_receiver import OpenReceiver, key_of, runs_of
from pdtx.transports import Connection, Mover, Region, TransferHandle, make_mover
from tests.rdma_node import Node, counters, grown

MIB = 1 << 20
NBYTES = 48 * MIB
"""At a few MB/s: seconds, so that there is a middle."""

EXACT_BYTES = 2 * MIB
DEADLINE_S = 6.0
GRANT_S = 15.0
LATE_S = 1.5
"""How long after its deadline a transfer may end, on an emulated processor."""

_MEET_S = 120.0
_UNDER_WAY = 400
"""Packets after which a transfer is in its middle."""

_TOKEN = hashlib.sha256(b"a trial on a wire that nobody else is on").digest()
_OPTIONS: dict[str, dict[str, object]] = {"nixl": {"tls": "rc,ud"}, "ucx": {"library": "nixl"}}


def require(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"rdma_faults: {what}")


def say(fault: str, **facts: object) -> None:
    sys.stdout.write(json.dumps({"fault": fault, **facts}) + "\n")
    sys.stdout.flush()


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8))


def shell(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=20).stdout


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = _MEET_S) -> float:
    """Return how many seconds it took."""
    begun = time.monotonic()
    while not condition():
        require(time.monotonic() - begun < timeout_s, f"{what}: not within {timeout_s:g} s")
        time.sleep(0.02)
    return time.monotonic() - begun


@contextlib.contextmanager
def lossy(percent: int = 1) -> Iterator[Callable[[], int]]:
    """Lose so much of what this node sends, and delay it by 1 ms; yields what says how many packets were lost."""
    shell("modprobe", "sch_netem")
    shell("tc", "qdisc", "add", "dev", "eth0", "root", "netem", "delay", "1ms", "loss", f"{percent}%")
    try:
        yield lambda: int(re.findall(r"dropped (\d+)", shell("tc", "-s", "qdisc", "show", "dev", "eth0"))[0])
    finally:
        shell("tc", "qdisc", "del", "dev", "eth0", "root")


@contextlib.contextmanager
def no_link() -> Iterator[None]:
    """This node's network card is down meanwhile."""
    shell("ip", "link", "set", "eth0", "down")
    try:
        yield
    finally:
        shell("ip", "link", "set", "eth0", "up")


def make(mover: str) -> Mover:
    return make_mover(mover, **_OPTIONS[mover])


class Consumer:
    """Node 2."""

    def __init__(self, node: Node, mover: str) -> None:
        self.node, self.mover, self.name = node, make(mover), mover
        self.region = Region(torch.zeros(NBYTES, dtype=torch.uint8))
        self.receiver = OpenReceiver(self.region, _TOKEN, GRANT_S)
        self.mover.register(self.region)

    def listen(self, round_name: str) -> None:
        self.node.tell(f"{self.name}-{round_name}", self.mover.listen(f"{self.node.here}:0", self.receiver))

    def loss(self) -> None:
        """Under the lossy link: what came is what was sent."""
        with lossy():
            self.node.meet(f"{self.name}-loss-on", _MEET_S)
            self.node.meet(f"{self.name}-loss-put", _MEET_S)
        exact = torch.equal(self.region.memory[:EXACT_BYTES], pattern(EXACT_BYTES, 1))
        require(exact, "bytes that came over a lossy link differ from those sent")
        say("loss", side="consumer", mover=self.name, nbytes=EXACT_BYTES, wrong=0)

    def be_cut_off(self) -> None:
        """Nothing goes either way until the producer has given up."""
        self.node.hear(f"{self.name}-cut-begun", _MEET_S)
        with lossy(100):
            self.node.hear(f"{self.name}-cut-failed", _MEET_S)

    def still(self, session: str, fault: str) -> None:
        """Wait until nothing of a session is under way; from then on memory must stay as it is."""
        took = wait_until(lambda: self.receiver.open[session] == 0, f"the end of transfers after {fault}", 2 * GRANT_S)
        before = self.region.memory.clone()
        self.node.meet(f"{self.name}-{fault}-ended", _MEET_S)
        # The link is up again by now: whatever the card still had to send would come.
        time.sleep(2.0)
        changed = int((self.region.memory != before).sum())
        require(changed == 0, f"{changed} bytes were written after {fault}, to memory that was free again")
        require(self.receiver.failed[session] > 0, f"no transfer was told as failed after {fault}")
        say(fault, side="consumer", mover=self.name, ended_s=round(took, 2), written_later=changed)
        self.node.tell(f"{self.name}-{fault}-checked")


def consume(node: Node, mover: str) -> None:
    """Loss, then link down; the producer's end comes last. Another process is killed in between, see victim()."""
    consumer = Consumer(node, mover)
    consumer.listen("faults")
    consumer.loss()
    node.hear(f"{mover}-down-begun", _MEET_S)
    consumer.still("down", "link down")
    consumer.be_cut_off()
    consumer.still("cut", "network cut")
    node.hear(f"{mover}-die-begun", _MEET_S)
    consumer.still("die", "producer killed")
    consumer.mover.close()


def victim(node: Node, mover: str) -> None:
    """A consumer that is killed, by itself, when the producer says so."""
    consumer = Consumer(node, mover)
    consumer.listen("victim")
    node.hear(f"{mover}-kill", _MEET_S)
    os.kill(os.getpid(), signal.SIGKILL)


class Producer:
    """Node 1."""

    def __init__(self, node: Node, mover: str) -> None:
        self.node, self.mover, self.name = node, make(mover), mover
        self.region = Region(pattern(NBYTES, 1))
        self.mover.register(self.region)

    def connect(self, round_name: str, session: str) -> Connection:
        address = self.node.hear(f"{self.name}-{round_name}", _MEET_S)
        connection = self.mover.connect(address, session, _TOKEN, time.monotonic() + 30)
        require(connection.path.kind == "rdma", f"not RDMA but {connection.path}")
        return connection

    def put(self, connection: Connection, nbytes: int, seconds: float) -> TransferHandle:
        return connection.put(key_of(0, nbytes), self.region, runs_of(0, nbytes), time.monotonic() + seconds)

    def loss(self, connection: Connection) -> None:
        with lossy() as lost:
            self.node.meet(f"{self.name}-loss-on", _MEET_S)
            before = counters()
            self.put(connection, EXACT_BYTES, 60).wait()
            back = Region(torch.zeros(EXACT_BYTES, dtype=torch.uint8))
            connection.get(key_of(0, EXACT_BYTES), back, runs_of(0, EXACT_BYTES), time.monotonic() + 60).wait()
            packets, path, dropped = grown(before), str(connection.path), lost()
            self.node.meet(f"{self.name}-loss-put", _MEET_S)
        require(torch.equal(back.memory, self.region.memory[:EXACT_BYTES]), "bytes got over a lossy link differ")
        require(dropped > 0, "the lossy link has lost nothing: nothing was tried")
        facts = {"path": path, "nbytes": 2 * EXACT_BYTES, "lost_packets": dropped, "counters": packets}
        say("loss", side="producer", mover=self.name, **facts)

    def under_way(self, connection: Connection, seconds: float) -> TransferHandle:
        """Begin a put that takes seconds; return in its middle."""
        before = counters()
        handle = self.put(connection, NBYTES, seconds)
        wait_until(lambda: grown(before).get("sent_pkts", 0) > _UNDER_WAY, "a transfer's middle")
        require(not handle.state.final, f"the transfer has ended already: {handle.error}")
        return handle

    def failed(self, handle: TransferHandle, fault: str, kinds: tuple[type[PdtxError], ...], limit_s: float) -> None:
        """The handle must end with an error of these kinds within limit_s."""
        begun = time.monotonic()
        # What keeps it from ending in time goes to the log.
        faulthandler.dump_traceback_later(limit_s)
        try:
            handle.wait()
        except kinds as error:
            took = time.monotonic() - begun
            require(took < limit_s, f"{fault}: {error!r} came after {took:.1f} s, not within {limit_s:g} s")
            facts = {"error": type(error).__name__, "text": str(error), "after_s": round(took, 2)}
            say(fault, side="producer", mover=self.name, **facts)
        else:
            require(False, f"{fault}: the transfer ended as {handle.state.name}")
        finally:
            faulthandler.cancel_dump_traceback_later()

    def link_down(self) -> None:
        """The card here notices, and says so."""
        connection = self.connect("faults", "down")
        handle = self.under_way(connection, DEADLINE_S)
        self.node.tell(f"{self.name}-down-begun")
        with no_link():
            self.failed(handle, "link down", (DeadlineExceeded, PeerLost), DEADLINE_S + LATE_S)
        self.give_up(connection, "link down")

    def network_cut(self) -> None:
        """Between the cards, so that neither notices: they go on trying when the deadline has passed."""
        connection = self.connect("faults", "cut")
        handle = self.under_way(connection, DEADLINE_S)
        self.node.tell(f"{self.name}-cut-begun")
        with lossy(100):
            self.failed(handle, "network cut", (DeadlineExceeded, PeerLost), DEADLINE_S + LATE_S)
        self.node.tell(f"{self.name}-cut-failed")
        self.give_up(connection, "network cut")

    def give_up(self, connection: Connection, fault: str) -> None:
        """Wait until the consumer has seen that nothing comes any more."""
        connection.close()
        self.node.meet(f"{self.name}-{fault}-ended", _MEET_S)
        self.node.hear(f"{self.name}-{fault}-checked", _MEET_S)

    def peer_killed(self) -> None:
        connection = self.connect("victim", "kill")
        handle = self.under_way(connection, 40.0)
        self.node.tell(f"{self.name}-kill")
        self.failed(handle, "consumer killed", (PeerLost,), 15.0)
        connection.close()

    def die(self) -> None:
        """Killed in the middle of a put: the kernel ends its queue pairs."""
        connection = self.connect("faults", "die")
        self.under_way(connection, 40.0)
        self.node.tell(f"{self.name}-die-begun")
        self.node.tell(f"{self.name}-producer killed-ended")
        os.kill(os.getpid(), signal.SIGKILL)


def produce(node: Node, mover: str) -> None:
    producer = Producer(node, mover)
    connection = producer.connect("faults", "loss")
    producer.loss(connection)
    connection.close()
    producer.link_down()
    producer.network_cut()
    producer.peer_killed()
    producer.die()


_ROLES: dict[str, Callable[[Node, str], Any]] = {"consumer": consume, "victim": victim, "producer": produce}


def run(role: str, mover: str) -> None:
    """Play a role. Raises SystemExit with what is not as it must be."""
    _ROLES[role](Node.of_environment(), mover)
