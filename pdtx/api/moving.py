"""send and receive: carry out a plan between two processes, over any transport."""

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from pdtx.api.planning import Plan, RankPlan
from pdtx.arguments import seconds
from pdtx.cache import KVCaches
from pdtx.cache.foreign import AnyMemory, memories
from pdtx.errors import AuthenticationFailed, DeadlineExceeded, InputError, PdtxError, TransferError, TransferRefused
from pdtx.layout import Layout
from pdtx.transports import Mover, Path, Placement, Region, TransferKey

_TIMEOUT_S = 60.0
_STOP_S = 30.0
"""How long a transport that was closed may take to stop writing."""
AnyCache = KVCaches | AnyMemory | Sequence[AnyMemory]
"""A cache of one buffer, or the memory of its ranks."""


@dataclass(frozen=True)
class Ticket:
    """What the sender needs to know of a receiver: give it to nobody else. address: HOST:PORT."""

    address: str
    session_id: str
    token: bytes = field(repr=False)


@dataclass(frozen=True)
class Sent:
    """What was sent. seconds: from the first byte given to the transport to the last acknowledgement."""

    nbytes: int
    seconds: float
    path: Path


class Receiving:
    """One transfer that is expected; made by receive(). ticket: for the sender. Close it, or use it in a with.

    Once it is closed, or wait() has raised, nothing is written into the memory any more: a transport in the middle of a
    payload is closed for that.
    """

    def __init__(self, transport: Mover, plan: Plan, regions: Sequence[Region], address: str, timeout_s: float) -> None:
        self._regions, self._deadline, self._timeout_s = regions, time.monotonic() + timeout_s, timeout_s
        self._transport = transport
        self._plans = {_key(rank): rank for rank in plan.ranks}
        self._placed, self._ended, self._done = set[TransferKey](), set[TransferKey](), set[TransferKey]()
        self._error: PdtxError | None = None
        self._changed = threading.Condition()
        session, token = secrets.token_hex(8), secrets.token_bytes(32)
        self.ticket = Ticket("", session, token)
        self.ticket = Ticket(transport.listen(address, self), session, token)

    def wait(self) -> None:
        """Wait until every byte has arrived. Raises TransferError for what ended it, DeadlineExceeded."""
        with self._changed:
            left = max(0.0, self._deadline - time.monotonic())
            arrived = self._changed.wait_for(lambda: self._error or len(self._done) == len(self._plans), left)
            error = self._error
            if error is None and not arrived:
                detail = f"{len(self._done)} of {len(self._plans)} payloads have arrived"
                error = DeadlineExceeded("the payload", "the sender", self._timeout_s, detail)
        if error is not None:
            self.close()
            raise error

    def close(self) -> None:
        """Admit and place nothing any more, and return once nothing is being written. Idempotent.

        Raises DeadlineExceeded for a transport that does not stop writing.
        """
        with self._changed:
            self._error = self._error or TransferError("the receiver has been closed")
            self._changed.notify_all()
            writing = self._placed != self._ended
        if writing:
            self._transport.close()
        with self._changed:
            if not self._changed.wait_for(lambda: self._placed == self._ended, _STOP_S):
                raise DeadlineExceeded("the end of a payload that is being written", "the transport", _STOP_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what the transport calls, see pdtx.transports.Receiver ----------------------------------------------------

    def admit(self, session_id: str) -> bytes:
        """Return the token of the session. Raises AuthenticationFailed for another, or once closed."""
        if session_id != self.ticket.session_id or self._error is not None:
            raise AuthenticationFailed(f"no session {session_id} is expected here")
        return self.ticket.token

    def place(self, session_id: str, key: TransferKey) -> Placement:
        """Return where a payload goes: by this side's own plan, once. Raises TransferRefused."""
        with self._changed:
            rank = self._plans.get(key)
            if rank is None or key in self._placed or self._error is not None:
                raise TransferRefused(f"{key} is not expected here")
            self._placed.add(key)
        return Placement(self._regions[rank.destination_rank], rank.destination_ranges(), self._deadline)

    def placed(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        """Learn that a payload has arrived, or failed."""
        with self._changed:
            self._ended.add(key)
            if error is None:
                self._done.add(key)
            else:
                self._error = self._error or error
            self._changed.notify_all()

    def offer(self, session_id: str, key: TransferKey) -> Placement:
        """Refuse: nothing is to be had here."""
        raise TransferRefused(f"{key} is not offered here")

    def offered(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        """Learn nothing: nothing was offered."""

    def notified(self, session_id: str, data: bytes) -> None:
        """Refuse notices."""
        raise TransferRefused("no notice is expected here")

    def closed(self, session_id: str, reason: str) -> None:
        """Learn that the sender has gone; what it has not sent will not come."""
        with self._changed:
            if len(self._done) < len(self._plans):
                self._error = self._error or TransferError(f"the sender has gone before all had arrived: {reason}")
            self._changed.notify_all()


def receive(
    transport: Mover,
    plan: Plan,
    destination: AnyCache,
    *,
    address: str = "127.0.0.1:0",
    timeout_s: float = _TIMEOUT_S,
) -> Receiving:
    """Begin to listen for what a plan moves; each byte goes where this side's plan says, whoever sends it.

    address: HOST:PORT, port 0 for any. timeout_s: in which all must have arrived. A transport listens once.
    Raises AddressInUse, InputError for memory that the plan does not fit.
    """
    timeout_s = seconds("timeout_s", timeout_s)
    layouts = [one.plan.dst.layout for one in plan.ranks]
    regions = _regions(destination, max(one.destination_rank for one in plan.ranks) + 1, layouts[0], "destination")
    return Receiving(transport, plan, regions, address, timeout_s)


def send(
    transport: Mover,
    ticket: Ticket,
    plan: Plan,
    source: AnyCache,
    *,
    timeout_s: float = _TIMEOUT_S,
    staged: bool = False,
) -> Sent:
    """Send what a plan moves, and wait until all has arrived. staged: pack small runs on the way.

    The receiver must have made its plan from the same layouts, tokens and sizes; of the other side's block table only
    the length counts. Raises PeerUnreachable, AuthenticationFailed, TransferError or DeadlineExceeded, InputError.
    """
    timeout_s = seconds("timeout_s", timeout_s)
    layouts = [one.plan.src.layout for one in plan.ranks]
    regions = _regions(source, max(one.source_rank for one in plan.ranks) + 1, layouts[0], "source")
    deadline = time.monotonic() + timeout_s
    connection = transport.connect(ticket.address, ticket.session_id, ticket.token, deadline)
    try:
        handles = [
            connection.put(_key(one), regions[one.source_rank], one.plan.to_move, deadline, staged=staged)
            for one in plan.ranks
        ]
        for handle in handles:
            handle.wait()
        took = max(handle.ended for handle in handles) - min(handle.posted for handle in handles)
        return Sent(plan.nbytes, took, connection.path)
    finally:
        connection.close()


def _key(rank: RankPlan) -> TransferKey:
    plan = rank.plan
    first = plan.dst_layer
    return TransferKey(
        "pdtx.send",
        first,
        first + len(plan.layers),
        plan.tokens.start,
        plan.tokens.stop,
        src_rank=rank.source_rank,
        dst_rank=rank.destination_rank,
    )


def _regions(given: AnyCache, ranks: int, layout: Layout, side: str) -> list[Region]:
    """Return the memory of each rank. Raises InputError unless it is what the layout takes."""
    if isinstance(given, KVCaches):
        if len(given.buffers) != 1:
            raise InputError(f"the {side} has {len(given.buffers)} buffers, and a plan is for one; give its memory")
        found = [rank.memory for rank in given.buffers[0].ranks]
    else:
        found = [memory.bytes for memory in memories(given)]
    if len(found) < ranks:
        raise InputError(f"the plan is for {ranks} ranks of the {side}; memory of {len(found)} was given")
    wrong = next((one for one in found if one.numel() != layout.size_bytes), None)
    if wrong is not None:
        raise InputError(
            f"the {side} has {wrong.numel()} bytes of memory, its layout {layout.name} {layout.size_bytes}"
        )
    return [Region(memory) for memory in found]
