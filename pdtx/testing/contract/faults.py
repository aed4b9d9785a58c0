"""Peers in processes of their own that are killed or stopped: typed errors in time, and not a byte written later."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import torch

from pdtx.cache.memory import allocate
from pdtx.errors import DeadlineExceeded, PdtxError, PeerLost
from pdtx.testing.contract.subject import Subject, soon
from pdtx.testing.jobs import Job, Option
from pdtx.testing.open_receiver import HELD, STRAIGHT, OpenReceiver, key_of, runs_of
from pdtx.testing.pair import require, require_error
from pdtx.testing.peers import PeerProcess
from pdtx.transports import Connection, Mover, Region, TransferHandle, TransferState

NBYTES = 64 << 20
KILL_S = 5.0
"""How long after a kill everything has to have ended: less than anything here is given to end by itself."""

_QUIET_S = 0.3
_TOKEN = secrets.token_bytes(32)
_HERE, _THERE = 0x11, 0x22


def _memory(fill: int = _HERE, *, shared: bool = False) -> Region:
    return Region(allocate(NBYTES, torch.device("cpu"), shared=shared).fill_(fill))


def _job(subject: Subject, address: str, producer: bool) -> Job:
    options: dict[str, Option] = dict(subject.options)  # type: ignore[arg-type]
    return Job(subject.name or "", options, producer, address, _TOKEN, NBYTES, _THERE, shared=subject.shared)


def _consumer(subject: Subject, address: str | None = None) -> PeerProcess:
    return PeerProcess(_job(subject, address or subject.listen_at, producer=False))


@contextlib.contextmanager
def _made(subject: Subject) -> Iterator[Mover]:
    mover = subject.make()
    try:
        yield mover
    finally:
        mover.close()


def _connect(mover: Mover, address: str) -> Connection:
    return mover.connect(address, "session", _TOKEN, soon())


def _put(connection: Connection, region: Region, deadline: float, layer: int = STRAIGHT) -> TransferHandle:
    return connection.put(key_of(0, NBYTES, layer), region, runs_of(0, NBYTES), deadline)


def _get(connection: Connection, region: Region, deadline: float, layer: int = STRAIGHT) -> TransferHandle:
    return connection.get(key_of(0, NBYTES, layer), region, runs_of(0, NBYTES), deadline)


def _require_round_trip(connection: Connection, fill: int) -> None:
    """Put bytes, get them back, and compare."""
    _put(connection, _memory(fill), soon(30)).wait()
    back = _memory(0)
    _get(connection, back, soon(30)).wait()
    require(bool((back.memory == fill).all()), "what was put and then got back is not the same")


@dataclass(frozen=True)
class _Still:
    """Memory as it is now, in which nothing may be written any more."""

    memory: torch.Tensor
    before: torch.Tensor

    @classmethod
    def of(cls, region: Region) -> "_Still":
        return cls(region.memory, region.memory.clone())

    def require(self, when: str) -> None:
        time.sleep(_QUIET_S)
        changed = int((self.memory != self.before).sum())
        require(changed == 0, f"{changed} bytes were written {when}")


def check_killed_consumer(subject: Subject) -> None:
    """When the consumer is killed all ends with PeerLost at once; a new one at the same address can be used."""
    with _made(subject) as mover:
        with _consumer(subject) as peer:
            address = peer.said
            connection = _connect(mover, address)
            _require_round_trip(connection, 0x33)
            region = _memory()
            held = _put(connection, region, soon(), HELD)
            handles = [held, _put(connection, region, soon()), _get(connection, _memory(), soon())]
            handles.append(connection.notify(b"anyone?", soon()))
            limit = soon(5)
            while held.state is TransferState.PENDING and time.monotonic() < limit:
                time.sleep(0.01)
            peer.kill()
            _require_lost(handles, address)
            _require_lost([_put(connection, region, soon())], address)
            require(connection.ended is not None, "a connection to a killed peer does not say that it has ended")
        with _consumer(subject, address) as peer:
            require(peer.said == address, f"a consumer restarted at {address} listens at {peer.said}")
            connection = _connect(mover, address)
            _require_round_trip(connection, 0x44)
            _kill_while_getting(connection, peer)


def _require_lost(handles: list[TransferHandle], address: str) -> None:
    killed = time.monotonic()
    for handle in handles:
        error = require_error(PeerLost, f"{handle.key} when the peer was killed", handle.wait)
        require(address in str(error), f"the message of a lost peer does not name it: {error}")
        took = time.monotonic() - killed
        require(took < KILL_S, f"a killed peer was noticed after {took:.2f} s")


def _kill_while_getting(connection: Connection, peer: PeerProcess) -> None:
    region = _memory()
    handles = [_get(connection, region, soon()) for _ in range(15)]
    handles[0].wait()
    handles.append(_get(connection, region, soon(), HELD))  # surely under way, should the kill come after all others
    peer.kill()
    killed = time.monotonic()
    for handle in handles:
        with contextlib.suppress(PeerLost):
            handle.wait()
    require(handles[-1].state is TransferState.FAILED, f"a get from a killed peer is {handles[-1].state.name}")
    took = time.monotonic() - killed
    require(took < KILL_S, f"a killed peer was noticed after {took:.2f} s")
    _Still.of(region).require("after a get had failed because the peer was killed")


def check_stopped_consumer(subject: Subject) -> None:
    """When the consumer is stopped all ends at its deadline, saying how far it came; when it goes on, so can we."""
    with _made(subject) as mover, _consumer(subject) as peer:
        connection = _connect(mover, peer.said)
        _require_round_trip(connection, 0x33)
        peer.stop()
        source, region = _memory(), _memory()
        begun = time.monotonic()
        handles = [
            _put(connection, source, begun + 1.0),
            _get(connection, region, begun + 1.0),
            connection.notify(b"anyone?", begun + 1.0),
        ]
        for handle in handles:
            error = require_error(DeadlineExceeded, f"{handle.key} of a stopped peer", handle.wait)
            took = handle.ended - begun
            require(0.9 < took < 4.0, f"a deadline of 1 s ended {handle.key} after {took:.2f} s")
            for word in (handle.peer, str(handle.key), f"of {handle.nbytes} bytes"):
                require(word in str(error), f"a deadline's message lacks {word!r}: {error}")
        still = _Still.of(region)
        peer.resume()
        try:
            _require_round_trip(connection, 0x55)
        except PdtxError:
            # Some movers can only give up a connection on which a transfer was cut off.
            connection.close()
            _require_round_trip(_connect(mover, peer.said), 0x66)
        still.require("after a get had ended at its deadline")


@contextlib.contextmanager
def _served(
    subject: Subject, grant_s: float, *, puts: bool = True, gets: bool = True
) -> Iterator[tuple[OpenReceiver, Region, str, PeerProcess]]:
    """A consumer here, and a producer in a process of its own that keeps it busy."""
    with _made(subject) as mover:
        region = _memory(shared=subject.shared)
        receiver = OpenReceiver(region, _TOKEN, grant_s)
        address = mover.listen(subject.listen_at, receiver)
        job = msgspec.structs.replace(_job(subject, address, producer=True), puts=puts, gets=gets)
        with PeerProcess(job) as peer:
            require(receiver.wait_for_end("peer", 16, 30.0), "a producer in a process of its own got nowhere")
            yield receiver, region, address, peer


def _require_serves(subject: Subject, address: str) -> None:
    with _made(subject) as mover:
        _require_round_trip(_connect(mover, address), 0x77)


def check_killed_producer(subject: Subject) -> None:
    """When the producer is killed the receiver hears at once of every end; not a byte is written later."""
    with _served(subject, grant_s=60.0) as (receiver, region, address, peer):
        peer.kill()
        begun = time.monotonic()
        require(receiver.wait_until_closed("peer", 10.0), "the end of a killed producer was not heard of")
        took = time.monotonic() - begun
        require(took < KILL_S, f"the end of a killed producer was heard of after {took:.2f} s")
        idle = receiver.wait_until_idle("peer", 5.0)
        require(idle, f"{receiver.open['peer']} transfers of a killed producer were never ended")
        _Still.of(region).require("after a killed producer's transfers had ended")
        _require_serves(subject, address)


def check_stopped_producer(subject: Subject) -> None:
    """When the producer is stopped its transfers end at the grants' deadline; it writes nothing when it goes on."""
    with contextlib.ExitStack() as stack:
        all_served = list[tuple[OpenReceiver, Region, str, PeerProcess]]()
        for puts in (True, False):
            # Time enough for a slow machine's transfer. It passes for the one while the other starts.
            served = stack.enter_context(_served(subject, grant_s=5.0, puts=puts, gets=not puts))
            receiver, _, _, peer = served
            all_served.append(served)
            # Stopped while the receiver finds the place: not even a small part can have moved.
            receiver.hold()
            require(receiver.wait_until_held(5.0), "a producer in a process of its own stopped working")
            peer.stop()
            receiver.release()
            receiver.shut("peer")
        for (receiver, region, address, peer), kind in zip(all_served, ("puts", "gets"), strict=True):
            idle = receiver.wait_until_idle("peer", 12.0)
            what = f"{receiver.open['peer']} {kind}"
            require(idle, f"{what} of a stopped producer were open long after their deadline")
            _require_serves(subject, address)
            still = _Still.of(region)
            peer.resume()
            still.require("by a producer that went on after its transfers had ended")


FAULTS: tuple[Callable[[Subject], None], ...] = (
    check_killed_consumer,
    check_stopped_consumer,
    check_killed_producer,
    check_stopped_producer,
)
"""Checks that need a peer in a process of its own: for movers that make_mover() knows by name."""
