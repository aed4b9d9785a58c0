"""What an engine must do so that a one-sided mover can be made of it: share memory, and move bytes between two nodes.

Everything else (sessions, grants, order, deadlines, notices) is done by this package over a control stream of its own,
so that an engine is two small classes. Of two nodes, one has connected (the initiator) and one has listened (the
acceptor). Two kinds of engine:

pushing (UCX, NIXL): the initiator carries out every transfer, by Link.write for a put and Link.read for a get.
pulling (shared memory): whoever gets the bytes reads them, so the acceptor reads for a put; nobody ever writes
    into the other's memory.
"""

import select
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from pdtx.plan import Runs
from pdtx.transports.base import Path, Region, Registration

Remote = TypeVar("Remote")
"""What an engine makes of a peer's Shared region: an unpacked key, a mapping."""


@dataclass(frozen=True)
class Shared:
    """What a peer needs in order to reach a region. descriptors: open file descriptors that travel with it."""

    key: bytes
    descriptors: tuple[int, ...] = ()


class Progress:
    """How a transfer under way is doing: engines call moved(), and stop soon once stopped is true.

    tag: what the acceptor's confirm() will be asked about; empty if this is not the last part of a transfer.
    """

    def __init__(self, moved: Callable[[int], None], is_stopped: Callable[[], bool], tag: bytes) -> None:
        self.moved, self._is_stopped, self.tag = moved, is_stopped, tag

    @property
    def stopped(self) -> bool:
        """Whether the transfer has been given up meanwhile."""
        return self._is_stopped()

    @staticmethod
    def tag_of(sequence: int) -> bytes:
        """Return the tag of a connection's transfer."""
        return sequence.to_bytes(8, "big")


class Link(ABC, Generic[Remote]):
    """One connection of an engine. Used by one thread at a time, but for path, share() and interrupt().

    Of an engine that pulls, the acceptor's link reads in one thread while another one calls open() and wait_readable().
    """

    @abstractmethod
    def greeting(self) -> bytes:
        """Return what the peer's join() needs, at most 64 KiB."""

    @abstractmethod
    def join(self, greeting: bytes, deadline: float) -> None:
        """Complete the connection with the peer's greeting; both sides call it, at about the same time.

        Raises PeerUnreachable, ProtocolError for a greeting that is none, or DeadlineExceeded.
        """

    @property
    @abstractmethod
    def path(self) -> Path:
        """What carries the payload; asked for on the initiator's side, after join()."""

    @abstractmethod
    def share(self, region: Region) -> Shared:
        """Register a region, unless it is, and return what the peer needs for it. Raises TransferError."""

    @abstractmethod
    def open(self, shared: Shared, nbytes: int) -> Remote:
        """Make a peer's region of nbytes reachable from here. Owns shared.descriptors from now on, also if it raises.

        Raises ProtocolError for what is no region of that size, or TransferError.
        """

    def write(self, region: Region, remote: Remote, runs: Runs, deadline: float, progress: Progress) -> None:
        """Move runs from region (src) into the peer's (dst); returns when the bytes lie there. Pushing engines only.

        runs: checked to lie inside both regions. Raises DeadlineExceeded at deadline (time.monotonic()),
        TransferAborted when progress.stopped, PeerLost or TransferError; after an error no byte is written any more,
        or else every later call raises too and close() makes an end of it.
        It looks at both for the last time when no byte of region is read any more, and before confirm() can succeed:
        a transfer that has been given up does not keep its source as it was.
        """
        raise NotImplementedError(f"{type(self).__name__} only reads")

    @abstractmethod
    def read(self, remote: Remote, region: Region, runs: Runs, deadline: float, progress: Progress) -> None:
        """Move runs from the peer's region (src) into region (dst); returns when the bytes lie here. See write()."""

    def wait_readable(self, descriptor: int, timeout_s: float) -> bool:
        """Wait until a descriptor can be read, and let the peer's operations go on meanwhile; False after timeout_s.

        The acceptor's thread spends its life here. May return False early. This one only waits.
        """
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(int(timeout_s * 1000) + 1))

    def confirm(self, tag: bytes, deadline: float) -> None:
        """Wait until the peer's transfer called tag has really arrived, where the engine can tell; see Progress.

        Called by the acceptor before it reports a put as placed. Raises DeadlineExceeded or PeerLost.
        """

    def revoke(self) -> bool:
        """Cut the peer off from all shared memory; True if from now on it cannot write there, False if it still can."""
        return False

    def interrupt(self) -> None:
        """Make a call that is under way in another thread look at its progress and deadline soon."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent; no other call is under way."""


class Fabric(ABC, Generic[Remote]):
    """An engine, one for each mover. Safe to use from several threads."""

    pulls: ClassVar[bool]

    @abstractmethod
    def register(self, region: Region) -> Registration | None:
        """Register a region, once; see Mover.register."""

    @abstractmethod
    def link(self, control: int) -> Link[Remote]:
        """Return a new connection, not joined yet. Raises TransferError if the engine cannot make one.

        control: descriptor of the control socket, to ask who the peer is; it is not the link's to read or close.
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything back; all links are closed. Idempotent."""
