"""The in-process mover: both nodes in one process, one copy straight from cache to cache. For tests and trials."""

import hmac
import itertools
import logging
import threading
from dataclasses import dataclass
from typing import ClassVar

from pdtx.address import join_address, parse_address
from pdtx.errors import (
    AddressInUse,
    AuthenticationFailed,
    InputError,
    PdtxError,
    PeerLost,
    PeerUnreachable,
    TransferError,
    TransferRefused,
)
from pdtx.plan import Runs, Slices
from pdtx.ranges import check_within, copy_ranges
from pdtx.transports.base import (
    MAX_NOTICE_BYTES,
    NOTICE_KEY,
    Connection,
    Mover,
    Path,
    Placement,
    Receiver,
    Region,
    TransferHandle,
    TransferKey,
)
from pdtx.transports.gets import GetHandle, Stopped
from pdtx.transports.outbox import DeadlineWatch, Outbox

logger = logging.getLogger(__name__)

_JOIN_S = 0.8

_lock = threading.Lock()
_listeners = dict[str, "_Listener"]()
_ports = itertools.count(1)


class _Listener:
    """One address of this process that producers can connect to."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.connections = list[InprocConnection]()


class InprocMover(Mover):
    """See Mover. Addresses look like HOST:PORT but live in a table of this process."""

    name: ClassVar[str] = "inproc"

    def __init__(self) -> None:
        self._watch = DeadlineWatch("pdtx-inproc")
        self._addresses = list[str]()
        self._connections = list[InprocConnection]()
        self._closed = False

    def listen(self, address: str, receiver: Receiver) -> str:
        """Accept connections, see Mover."""
        host, port = parse_address(address)
        with _lock:
            self._check_open()
            if port == 0:
                free = (join_address(host, number) for number in _ports)
                address = next(candidate for candidate in free if candidate not in _listeners)
            if address in _listeners:
                raise AddressInUse(f"cannot listen at {address}: it is taken in this process")
            _listeners[address] = _Listener(receiver)
            self._addresses.append(address)
        return address

    def connect(self, address: str, session_id: str, token: bytes, deadline: float) -> Connection:
        """Open a connection, see Mover."""
        with _lock:
            self._check_open()
            listener = _listeners.get(address)
        if listener is None:
            raise _nobody_at(address)
        if not hmac.compare_digest(listener.receiver.admit(session_id), token):
            raise AuthenticationFailed(f"{address} does not know the token of session {session_id}")
        with _lock:
            # Either side may have closed while the receiver made up its mind.
            self._check_open()
            if _listeners.get(address) is not listener:
                raise _nobody_at(address)
            connection = InprocConnection(address, session_id, listener.receiver, self._watch)
            listener.connections.append(connection)
            self._connections.append(connection)
        return connection

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("this in-process mover is closed")

    def close(self) -> None:
        """Stop listening and end all connections, see Mover."""
        with _lock:
            self._closed = True
            listeners = [_listeners.pop(address) for address in self._addresses]
            self._addresses.clear()
            own, self._connections = self._connections, []
        for connection in own:
            connection.close()
        for listener in listeners:
            for connection in listener.connections:
                connection.lose()
        self._watch.close()


def _nobody_at(address: str) -> PeerUnreachable:
    return PeerUnreachable(f"nobody answers at {address} in this process")


@dataclass(frozen=True)
class _Job:
    """What to do: move slices of region to the receiver or from it, or (region None) tell it data."""

    region: Region | None = None
    slices: Slices | None = None
    is_get: bool = False
    data: bytes = b""


class InprocConnection(Connection):
    """See Connection. One thread copies, so that put() returns at once here too."""

    def __init__(self, address: str, session_id: str, receiver: Receiver, watch: DeadlineWatch) -> None:
        self._address, self._session_id, self._receiver = address, session_id, receiver
        self._outbox = Outbox[_Job](watch)
        self._reason = "the producer closed the connection"
        self._thread = threading.Thread(target=self._run, name="pdtx-inproc-copy", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """See Connection."""
        return Path("inproc", f"this process, {self._address}", possible=("inproc",))

    @property
    def ended(self) -> PdtxError | None:
        """See Connection."""
        return self._outbox.ended

    def put(
        self, key: TransferKey, region: Region, runs: Runs, deadline: float, *, staged: bool = False
    ) -> TransferHandle:
        """Queue a transfer, see Connection. Nothing to gain from staging: every copy goes through torch anyway."""
        slices = runs.source()
        check_within(slices, region.nbytes, "the source")
        handle = TransferHandle(key, slices.total, self._address, deadline)
        return self._queue(handle, _Job(region, slices))

    def get(self, key: TransferKey, region: Region, runs: Runs, deadline: float) -> TransferHandle:
        """Queue a transfer, see Connection."""
        slices = runs.destination()
        check_within(slices, region.nbytes, "the destination")
        handle = GetHandle(key, slices.total, self._address, deadline)
        return self._queue(handle, _Job(region, slices, is_get=True))

    def notify(self, data: bytes, deadline: float) -> TransferHandle:
        """Queue a notice, see Connection."""
        if len(data) > MAX_NOTICE_BYTES:
            raise InputError(f"a notice of {len(data)} bytes; at most {MAX_NOTICE_BYTES} are sent")
        return self._queue(TransferHandle(NOTICE_KEY, len(data), self._address, deadline), _Job(data=data))

    def _queue(self, handle: TransferHandle, job: _Job) -> TransferHandle:
        self._outbox.put(handle, job)
        return handle

    def close(self) -> None:
        """End the connection, see Connection."""
        self._outbox.close()
        self._join()

    def lose(self) -> None:
        """End the connection because the consumer has gone."""
        self._reason = "the consumer closed"
        self._outbox.close(PeerLost(f"{self._address} closed the connection"))
        self._join()

    def _join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                logger.warning("%s to %s is stuck in its receiver and left behind", self._thread.name, self._address)

    def _run(self) -> None:
        while (taken := self._outbox.next()) is not None:
            handle, job = taken
            try:
                self._carry_out(handle, job)
            except PdtxError as error:
                handle.finish(error)
            except Exception as error:
                logger.exception("the receiver failed on %s", handle.key)
                handle.finish(TransferError(f"{handle.peer} could not take {handle.key}: {error}"))
            else:
                handle.finish()
        try:
            self._receiver.closed(self._session_id, self._reason)
        except Exception:
            logger.exception("the receiver failed at the end of session %s", self._session_id)

    def _tell(self, handle: TransferHandle, data: bytes) -> None:
        try:
            self._receiver.notified(self._session_id, data)
        except PdtxError as error:
            raise TransferError(f"{handle.peer} could not take {handle.key}: {error}") from None

    def _carry_out(self, handle: TransferHandle, job: _Job) -> None:
        if job.region is None or job.slices is None:
            self._tell(handle, job.data)
            return
        receiver, here = self._receiver, Placement(job.region, job.slices)
        tell = receiver.offered if job.is_get else receiver.placed
        try:
            there = (receiver.offer if job.is_get else receiver.place)(self._session_id, handle.key)
        except PdtxError as error:
            raise TransferRefused(f"{handle.peer} refused {handle.key}: {error}") from None
        try:
            there.check(handle.nbytes)
            if handle.state.final:
                # Its deadline came while the receiver made up its mind: the memory may be somebody else's.
                raise TransferError(f"{handle.key} has ended before a byte moved")
            if isinstance(handle, GetHandle):
                with handle.filling():
                    copy_slices(there, here)
            else:
                copy_slices(here, there)
        except (PdtxError, RuntimeError, Stopped) as error:
            reason = error if isinstance(error, PdtxError) else TransferError(f"{handle.key} cannot be copied: {error}")
            tell(self._session_id, handle.key, 0, reason)
            raise TransferRefused(f"{handle.peer} refused {handle.key}: {reason}") from None
        handle.mark_sent()
        tell(self._session_id, handle.key, handle.nbytes, None)


def copy_slices(source: Placement, destination: Placement) -> None:
    """Copy the bytes of source to destination, both of the same size, in stream order; any devices."""
    copy_ranges(source.region.memory, source.slices, destination.region.memory, destination.slices)
