"""What a mover is: it moves runs of bytes between the memory of two nodes, and says when they have arrived.

The life of a transfer: the consumer listens and advertises an address; the producer connects with the session token of
the handshake and posts `put`s; the mover makes each one DONE when the bytes lie in the consumer's memory, FAILED
or ABORTED otherwise. The consumer learns of each payload through its Receiver. `get` is the same the other way round:
who has connected takes bytes out of the listener's memory. The listener's own plan decides where bytes go or come
from: an address from a peer is never trusted.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Literal, Protocol

import torch

from pdtx.errors import DeadlineExceeded, PdtxError, TransferAborted, TransferRefused
from pdtx.plan import Runs, Slices
from pdtx.ranges import check_within

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Region:
    """Memory that transfers read or write: a 1-D uint8 tensor, contiguous, kept alive by this object."""

    memory: torch.Tensor = field(repr=False)

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.memory.data_ptr()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.memory.numel()

    @property
    def on_cpu(self) -> bool:
        """Whether system calls can reach the memory."""
        return self.memory.device.type == "cpu"

    def contains(self, other: "Region") -> bool:
        """Whether all of another region lies in this one."""
        first = other.address - self.address
        return self.memory.device == other.memory.device and 0 <= first <= self.nbytes - other.nbytes


@dataclass(frozen=True)
class TransferKey:
    """Which part of which request a payload is: half-open ranges of a buffer's layers and of positions.

    All numbers are the consumer's: buffer is one of its node's, layers count within it, positions as its block table
    does (tokens; a state has position 0 only). src_rank, dst_rank: tensor-parallel ranks.
    """

    request_id: str
    layer_start: int
    layer_stop: int
    token_start: int
    token_stop: int
    buffer: int = 0
    src_rank: int = 0
    dst_rank: int = 0

    def __str__(self) -> str:
        ranks = f" rank {self.src_rank} to {self.dst_rank}" if self.src_rank or self.dst_rank else ""
        buffer = f" buffer {self.buffer}" if self.buffer else ""
        return (
            f"request {self.request_id}{buffer} layers {self.layer_start}..{self.layer_stop} "
            f"tokens {self.token_start}..{self.token_stop}{ranks}"
        )


NOTICE_KEY = TransferKey("(notice)", 0, 0, 0, 0)
"""The key of the handles that notify() returns."""

MAX_NOTICE_BYTES = 4096

PathKind = Literal["rdma", "tcp", "shm", "inproc", "other"]


@dataclass(frozen=True)
class Path:
    """What carries the payload of a connection, as found from the running endpoint and not from any setting.

    kind: rdma is a network with remote memory access in hardware or in the kernel (InfiniBand, RoCE, EFA); shm is
    any way within one host. detail: transport and device in the engine's own words. emulated: one-sided operations are
    carried out in software by the peer's CPU. library: what moves them, with its version.
    possible: the kinds that this mover could use between these two nodes.
    """

    kind: PathKind
    detail: str
    emulated: bool = False
    library: str = ""
    possible: tuple[PathKind, ...] = ()

    def __str__(self) -> str:
        emulated = ", emulated in software" if self.emulated else ""
        library = f", {self.library}" if self.library else ""
        return f"{self.kind} ({self.detail}{library}{emulated})"


@dataclass(frozen=True)
class Registration:
    """A region that a mover has made reachable for the network: its bytes, and the seconds that took."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Placement:
    """A receiver's answer: where a payload goes or comes from, in stream order.

    deadline: time.monotonic() at which the mover stops receiving it, however steadily it trickles in.
    """

    region: Region
    slices: Slices
    deadline: float = float("inf")

    def check(self, nbytes: int) -> None:
        """Raise TransferRefused or PlanError unless a payload of nbytes fits exactly."""
        if self.slices.total != nbytes:
            raise TransferRefused(f"the payload has {nbytes} bytes, the consumer's plan {self.slices.total}")
        check_within(self.slices, self.region.nbytes, "the destination")


class Receiver(Protocol):
    """What a consumer does for a listening mover. Called from the mover's threads.

    Calls are short: a connection stands still meanwhile and, where a deadline is the reason of the call, so do all
    other deadlines of the mover.
    """

    def admit(self, session_id: str) -> bytes:
        """Return the 32-byte token of a session. Raises AuthenticationFailed if there is none."""

    def place(self, session_id: str, key: TransferKey) -> Placement:
        """Return where key's payload goes; the memory must stay granted until placed() is called.

        Raises TransferRefused if nothing was granted.
        """

    def placed(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        """Learn that a payload has arrived (error is None), or stopped after nbytes; called once for each place()."""

    def offer(self, session_id: str, key: TransferKey) -> Placement:
        """Return where the payload of a get comes from; it must stay as it is until offered() is called.

        Raises TransferRefused if it is not to be had.
        """

    def offered(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        """Learn that a payload has been taken (error is None), or stopped; called once for each offer().

        With an error it may have been taken all the same: the peer could not say so, since it closed at once.
        """

    def notified(self, session_id: str, data: bytes) -> None:
        """Learn of a peer's notice: all that it put on this connection before has been placed, or has failed."""

    def closed(self, session_id: str, reason: str) -> None:
        """Learn that a session's connection has ended."""


class TransferState(Enum):
    """PENDING: not begun. POSTED: bytes may be moving. The other three are final."""

    PENDING = "pending"
    POSTED = "posted"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"

    @property
    def final(self) -> bool:
        """Whether nothing moves any more."""
        return self in (TransferState.DONE, TransferState.FAILED, TransferState.ABORTED)


class TransferHandle:
    """One transfer under way. Safe to use from several threads.

    deadline: time.monotonic() at which it fails at the latest. times: time.monotonic() of created, posted (first byte
    given to the transport), sent (last byte given to it) and ended; nan until then.
    """

    def __init__(self, key: TransferKey, nbytes: int, peer: str, deadline: float) -> None:
        self.key, self.nbytes, self.peer, self.deadline = key, nbytes, peer, deadline
        self.created, self.posted, self.sent, self.ended = time.monotonic(), float("nan"), float("nan"), float("nan")
        self.moved = 0  # bytes given to the transport so far
        self.error: PdtxError | None = None
        self._state = TransferState.PENDING
        self._callbacks: list[Callable[[TransferHandle], None]] = []
        self._changed = threading.Condition()

    @property
    def state(self) -> TransferState:
        """The present state."""
        return self._state

    def post(self) -> bool:
        """Mark as moving; False if it has ended meanwhile and must not be begun."""
        with self._changed:
            if self._state is not TransferState.PENDING:
                return False
            self._state, self.posted = TransferState.POSTED, time.monotonic()
            return True

    def note_moved(self, nbytes: int) -> None:
        """Note how many bytes have been given to the transport so far.

        Less than was noted before changes nothing: the end, or another thread, has overtaken this call.
        """
        with self._changed:
            self.moved = max(self.moved, nbytes)

    def mark_sent(self) -> None:
        """Mark the last byte as given to the transport, unless the end has overtaken this call."""
        with self._changed:
            if not self._state.final:
                self.sent, self.moved = time.monotonic(), self.nbytes

    def finish(self, error: PdtxError | None = None, state: TransferState = TransferState.FAILED) -> bool:
        """End as DONE (no error) or as state; False if it had ended before, which then stands."""
        return self._end(error, TransferState.DONE if error is None else state, from_state=None)

    def abort(self, reason: str) -> bool:
        """End because this side gives up: as ABORTED if not begun, as FAILED if moving; False if it had ended."""
        error = TransferAborted(f"{self.key} to {self.peer}: {reason}")
        pending = self._end(error, TransferState.ABORTED, from_state=TransferState.PENDING)
        return pending or self._end(error, TransferState.FAILED, from_state=None)

    def cancel(self) -> bool:
        """End as ABORTED if no byte has moved; False if it is moving (it then ends by itself) or has ended."""
        error = TransferAborted(f"{self.key} to {self.peer} was cancelled")
        return self._end(error, TransferState.ABORTED, from_state=TransferState.PENDING)

    def expire(self) -> bool:
        """End as FAILED because the deadline has passed, naming what was waited for; False if it had ended."""
        return self.finish(self._late())

    def _end(self, error: PdtxError | None, state: TransferState, from_state: TransferState | None) -> bool:
        """End once, and only out of from_state if one is given."""
        with self._changed:
            if self._state.final or from_state not in (None, self._state):
                return False
            self.error, self.ended = error, time.monotonic()
            if error is None and self.sent != self.sent:  # the acknowledgement has overtaken mark_sent()
                self.sent, self.moved = self.ended, self.nbytes
            self._state = state
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            self._call(callback)
        return True

    def on_end(self, callback: Callable[["TransferHandle"], None]) -> None:
        """Call callback once when the transfer ends (at once if it has), in the thread that ends it.

        It is short: that thread may be the one that watches over all deadlines of the mover.
        """
        with self._changed:
            if not self._state.final:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def _call(self, callback: Callable[["TransferHandle"], None]) -> None:
        try:
            callback(self)
        except Exception:  # a mover's thread must outlive its users' mistakes
            logger.exception("a callback at the end of %s failed", self.key)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end, at most to the deadline (which ends it) or for timeout_s (which leaves it open).

        Raises what ended the transfer, or DeadlineExceeded.
        """
        limit = self.deadline if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            ended = self._changed.wait_for(lambda: self._state.final, max(0.0, limit - time.monotonic()))
        if not ended and timeout_s is not None:
            raise self._late()
        if not ended:
            self.expire()
            with self._changed:  # a get ends after the step that is writing into its region
                self._changed.wait_for(lambda: self._state.final)
        if self.error is not None:
            raise self.error

    def _late(self) -> DeadlineExceeded:
        if self._state is TransferState.PENDING:
            phase = "its turn to send"
        else:
            phase = "arrival" if self.moved >= self.nbytes else "room to send"
        waited = round(time.monotonic() - self.created, 3)
        progress = f"{self.moved} of {self.nbytes} bytes sent"
        return DeadlineExceeded(f"{phase} of {self.key}", self.peer, waited, progress)


class Connection(ABC):
    """A producer's way to one consumer. Safe to use from several threads."""

    @property
    @abstractmethod
    def path(self) -> Path:
        """What carries the payload. Known as soon as connect() has returned."""

    @property
    def stages(self) -> bool:
        """Whether put(staged=True) makes a difference here."""
        return False

    @property
    def ended(self) -> PdtxError | None:
        """What ended the connection, so that nothing moves over it any more; None while it can be used.

        Known at the latest when a transfer has ended by it. One that never says so is never replaced by an engine.
        """
        return None

    @abstractmethod
    def put(
        self, key: TransferKey, region: Region, runs: Runs, deadline: float, *, staged: bool = False
    ) -> TransferHandle:
        """Begin to move runs (src offsets in region) to where the consumer places key; never blocks on the network.

        deadline: time.monotonic() at which the transfer ends as FAILED with DeadlineExceeded if it is not DONE.
        staged: pack the runs into large pieces on the way, by torch on the region's device.
        Transfers of one connection arrive in the order of their puts. The source must not change until the end.

        Raises PlanError if a run leaves region, InputError for a key that cannot be sent.
        """

    @abstractmethod
    def get(self, key: TransferKey, region: Region, runs: Runs, deadline: float) -> TransferHandle:
        """Begin to move what the consumer offers for key to runs (dst offsets in region); never blocks on the network.

        The region's ranges may hold anything until the transfer is DONE, and after it has failed; nothing is written
        into them once it has ended.
        Raises PlanError if a run leaves region, InputError for a key that cannot be sent.
        """

    @abstractmethod
    def notify(self, data: bytes, deadline: float) -> TransferHandle:
        """Tell the consumer's receiver something after all that was put before has been placed, or has failed.

        DONE once the receiver has heard it. Raises InputError for more than MAX_NOTICE_BYTES.
        """

    @abstractmethod
    def close(self) -> None:
        """End the connection; what has not ended becomes FAILED (moving) or ABORTED (not begun). Idempotent.

        A get into whose region an engine still writes ends as soon as that has stopped, which may be a little later.
        """


class Mover(ABC):
    """One way to move bytes. A node makes one and closes it at its end."""

    name: ClassVar[str]

    @abstractmethod
    def listen(self, address: str, receiver: Receiver) -> str:
        """Accept connections at address ("HOST:PORT", port 0 for any); return the address to advertise.

        Raises AddressInUse.
        """

    @abstractmethod
    def connect(self, address: str, session_id: str, token: bytes, deadline: float) -> Connection:
        """Open a connection, proving the session by its token.

        Raises PeerUnreachable, AuthenticationFailed or DeadlineExceeded.
        """

    def register(self, region: Region) -> Registration | None:
        """Make a region reachable before its first transfer; None where there is nothing to do.

        What was not registered is when it is first used. Twice costs nothing; the first answer stands. So it does for a
        region that lies in a registered one.
        Raises TransferError if the memory cannot be registered.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Stop listening and end all connections; no thread or descriptor is left. Idempotent."""
