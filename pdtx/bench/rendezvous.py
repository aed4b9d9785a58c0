"""Processes that a launcher has started alike find each other: prefill and decode agents, the first of which drives.

torch's TCPStore, which every launcher of the field can reach, carries addresses and public keys. The keys of the
channels are made for this run, in memory only, and used always, on loopback as well. The store itself asks nobody who
they are: whoever reaches MASTER_PORT before the run has begun can put a key of their own there and take part. Where
that matters, let nobody else reach that port, or give agents keys of your own and their addresses to the driver.

Rank 0 is an agent and drives from the same process: its keys need not leave it, and the driver sleeps while links move.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Self

import msgspec
import zmq

from pdtx.address import is_loopback, join_address, resolve
from pdtx.bench.agent import Agent
from pdtx.bench.agent_methods import AnyStation
from pdtx.bench.fleet import Fleet, Target
from pdtx.bench.rendezvous_place import Place
from pdtx.bench.rendezvous_store import RunStore
from pdtx.bench.work import Role
from pdtx.errors import DeadlineExceeded, InputError, PdtxError, PeerError, PeerLost, ProtocolError
from pdtx.sidechannel import KeyPair, Security
from pdtx.sidechannel.keys import check_key

__all__ = ["Place", "Rendezvous"]

_LOOK_S = 0.2
_WORD_S = 5.0
"""How long the others wait for rank 0's word after it has gone."""

_LEAVE_S = 3.0
"""How long rank 0 waits for the others to leave."""

_MAX_REASON = 1000


class _Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an agent tells of itself in the store. public: its CURVE key."""

    role: Role
    address: str
    public: bytes


class Rendezvous:
    """This process's part in the run: an agent, and at rank 0 the fleet of all.

    station: is closed by close(). timeout_s: within which all must have come together. advertise: host at which others
    reach this process; the address that leads to rank 0 where None.
    Raises PeerUnreachable, AddressInUse, DeadlineExceeded, InputError for an address that is not of this machine.
    """

    def __init__(
        self,
        place: Place,
        station: AnyStation,
        *,
        max_bytes: int,
        timeout_s: float = 120.0,
        advertise: str | None = None,
    ) -> None:
        self.place = place
        self._deadline = time.monotonic() + timeout_s
        self._agent: Agent | None = None
        self._fleet: Fleet | None = None
        self._ended = False
        self._station = station
        public, secret = zmq.curve_keypair()
        self._keys = KeyPair(public, secret)
        try:
            self._store = RunStore(place, timeout_s)
        except BaseException:
            station.close()
            raise
        try:
            self._join(max_bytes, advertise)
        except BaseException as error:
            self._leave(error)
            raise

    def _join(self, max_bytes: int, advertise: str | None) -> None:
        """Become an agent, and tell where and under which key."""
        place = self.place
        if place.drives:
            self._store.put("driver", self._keys.public)
        driver = self._store.wait("driver", "the driver's key", "rank 0", self._deadline, self._require_begun)
        _check_public(driver, "rank 0")
        host = advertise or _local_address(place.master)
        self._agent = Agent(
            self._station,
            place.role,
            join_address(host, 0),
            security=Security(self._keys, [driver]),
            max_bytes=max_bytes,
        )
        member = _Member(place.role, self._agent.address, self._keys.public)
        self._store.put(_agent_key(place.rank), msgspec.msgpack.encode(member))

    def _require_begun(self) -> None:
        """Raise PdtxError if rank 0 has ended before it began."""
        word = self._stopped()
        if word is not None:
            raise PdtxError(f"rank 0 has failed: {word or 'it has left'}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._leave(error)

    def fleet(self) -> Fleet:
        """At rank 0: wait for all agents and connect to them.

        Raises DeadlineExceeded, naming the ranks that have not come; PdtxError with the reason of one that has failed;
        InputError for agents that cannot reach each other, or at another rank; and what Fleet.connect raises.
        """
        if not self.place.drives:
            raise InputError(f"rank {self.place.rank} does not drive; rank 0 does")
        members = [self._member(rank) for rank in range(self.place.world)]
        _require_reachable(members)
        targets = [Target(one.role, one.address, Security(self._keys, [one.public])) for one in members]
        self._fleet = Fleet(targets, timeout_s=max(1.0, self._deadline - time.monotonic()))
        return self._fleet

    def _member(self, rank: int) -> _Member:
        """Wait for what a rank tells of itself."""

        def look() -> None:
            reason = self._store.get(_failed_key(rank))
            if reason is not None:
                raise PdtxError(f"rank {rank} has failed: {_text(reason)}")

        data = self._store.wait(_agent_key(rank), "the address of its agent", f"rank {rank}", self._deadline, look)
        try:
            member = msgspec.msgpack.decode(data, type=_Member)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"rank {rank} tells no address in the store: {error}") from None
        _check_public(member.public, f"rank {rank}")
        return member

    def serve(self, told: Callable[[str], None] = lambda _: None) -> None:
        """At the other ranks: work for rank 0 until it says that it has done. told: hears what goes on.

        Raises PdtxError with rank 0's reason if it has failed, PeerLost if it is gone, DeadlineExceeded if it does not
        connect.
        """
        agent = self._agent
        if self.place.drives or agent is None:
            raise InputError("rank 0 drives; it has no driver to serve")
        told(f"{self.place.role} agent {self.place.index} (rank {self.place.rank}) at {agent.address} waits for rank 0")
        driven, gone_at = False, 0.0
        while (word := self._stopped()) is None:
            now = time.monotonic()
            if agent.driver:
                driven, gone_at = True, 0.0
            elif driven:
                gone_at = gone_at or now
                if now - gone_at > _WORD_S:
                    raise PeerLost("rank 0 is gone, and has not said that it has done")
            elif now > self._deadline:
                raise DeadlineExceeded("rank 0 to connect", "rank 0", 0.0)
            time.sleep(_LOOK_S)
        if word:
            raise PdtxError(f"rank 0 has failed: {word}")

    def _stopped(self) -> str | None:
        """Return what rank 0 said at its end: "" if all went well; None while it is at work. Raises PeerLost."""
        try:
            reason = self._store.get("stop")
        except (PeerError, DeadlineExceeded) as error:
            raise PeerLost(f"rank 0 is gone: {error}") from None
        return None if reason is None else _text(reason)

    def close(self) -> None:
        """End this process's part; at rank 0 tell the others to end theirs, and wait a moment for them. Idempotent."""
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        if self._ended:
            return
        self._ended = True
        # First, for agents that have been left and hear nothing take rank 0 for gone.
        said = self._say_end("" if error is None else str(error) or type(error).__name__)
        if self._fleet is not None:
            self._fleet.close()
        if said and self.place.drives:
            self._wait_for_others()
        if self._agent is not None:
            self._agent.close()
        else:
            self._station.close()
        self._store.close()

    def _say_end(self, reason: str) -> bool:
        """Tell the others; False if the store is what has failed."""
        data = reason[:_MAX_REASON].encode()
        with contextlib.suppress(PdtxError):
            if self.place.drives:
                self._store.put("stop", data)
                return True
            if reason:
                self._store.put(_failed_key(self.place.rank), data)
            self._store.add("left", 1)
            return True
        return False

    def _wait_for_others(self) -> None:
        """Let them read what rank 0 has said in the store, which may end with this process."""
        deadline = time.monotonic() + _LEAVE_S
        with contextlib.suppress(PdtxError):
            while self._store.add("left", 0) < self.place.world - 1 and time.monotonic() < deadline:
                time.sleep(_LOOK_S)


def _agent_key(rank: int) -> str:
    return f"agent/{rank}"


def _failed_key(rank: int) -> str:
    return f"failed/{rank}"


def _text(reason: bytes) -> str:
    return " ".join(reason[:_MAX_REASON].decode(errors="replace").split())


def _check_public(key: bytes, whose: str) -> None:
    check_key(key, f"the public key of {whose} in the store")


def _local_address(master: str) -> str:
    """Return this machine's address on the way to a host; nothing is sent. Raises InputError where there is no way."""
    (family, target), *_ = sorted(resolve(master, 9), key=lambda found: found[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target)
        except OSError as error:
            raise InputError(f"there is no way to MASTER_ADDR {master}: {error.strerror}") from None
        host: str = probe.getsockname()[0]
    return host


def _require_reachable(members: list[_Member]) -> None:
    """Raise InputError where some agents are at a loopback address and others are not."""
    local = [rank for rank, one in enumerate(members) if is_loopback(one.address.rpartition(":")[0].strip("[]"))]
    if local and len(local) < len(members):
        raise InputError(
            f"rank {local[0]} is at {members[local[0]].address}, which other hosts cannot reach; set MASTER_ADDR to an "
            "address that rank 0's own host does not take for loopback, or give --advertise HOST"
        )
