"""A connected socket on which every wait has a deadline, and every failure is one of our errors."""

import contextlib
import os
import select
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from types import TracebackType

from pdtx.address import join_address
from pdtx.errors import DeadlineExceeded, PeerLost, ProtocolError
from pdtx.ranges.iovec import IovecCursor, Iovecs, VectorCall, receive_all, send_at_once, writev

FOREVER = float("inf")

Guard = Callable[[], contextlib.AbstractContextManager[None]]
"""What surrounds each step that touches a payload's memory."""

# Probes start after this many silent seconds, so that a dead host is noticed on an idle connection.
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_COUNT = 15, 5, 3
# The kernel gives up on bytes nobody acknowledges. It also counts the time in which a peer's window is shut, so it must
# stay well above what a busy consumer may take before it reads on.
_USER_TIMEOUT_MS = 120_000
# How long a call that moves a payload sleeps in the kernel before it comes back to look at the clock. Sleeping there
# and not in poll() spares a refused call and a trip through Python each time the socket runs dry: 10 % of the rate.
_TICK_US = 50_000

# Of Linux's struct tcp_info: where tcpi_min_rtt is, and what it says before the first measurement.
_MIN_RTT, _MIN_RTT_AT, _NO_RTT = struct.Struct("=I"), 148, 2**32 - 1


def set_buffers(sock: socket.socket, nbytes: int | None) -> None:
    """Fix the kernel's buffers, before connecting or listening; None leaves them to grow by themselves."""
    if nbytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)


def tune(sock: socket.socket) -> None:
    """Set the options of a connected socket; one within the host has none."""
    if sock.family == socket.AF_UNIX:
        return
    tcp = socket.IPPROTO_TCP
    sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(tcp, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    sock.setsockopt(tcp, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    sock.setsockopt(tcp, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)
    sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def milliseconds(deadline: float) -> int | None:
    """Return what poll() takes to wait until deadline, at least one millisecond past it."""
    if deadline == FOREVER:
        return None
    return min(int(max(0.0, deadline - time.monotonic()) * 1000) + 1, 2**31 - 1)


def local_name(sock: socket.socket) -> str:
    """Return this side's address of a connected socket, for people."""
    return "this host" if sock.family == socket.AF_UNIX else join_address(*sock.getsockname()[:2])


class Wire:
    """One connected socket. One thread may send while another receives; any may shut it down.

    Sending and receiving raise PeerLost where the connection has ended, and DeadlineExceeded at `deadline`
    (time.monotonic()) or after `stall_s` seconds without a byte; `phase` says in it what was waited for.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(True)
        tune(sock)
        tick = struct.pack("ll", 0, _TICK_US)  # struct timeval
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        self.peer, self.local = peer, local_name(sock)
        self._sock = sock
        self._fd = sock.fileno()
        self._lock = threading.Lock()
        self._readable = select.poll()
        self._readable.register(self._fd, select.POLLIN)

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait on."""
        return self._fd

    def send(self, data: bytes, phase: str, deadline: float = FOREVER) -> None:
        """Send all of data."""
        view = memoryview(data)

        def step() -> int:
            nonlocal view
            sent = self._sock.send(view, socket.MSG_DONTWAIT)
            view = view[sent:]
            return sent

        self._all(step, len(data), select.POLLOUT, phase, deadline, FOREVER)

    def receive(self, nbytes: int, phase: str, deadline: float = FOREVER) -> bytes:
        """Receive exactly nbytes, a small number."""
        if nbytes == 0:
            return b""
        data = bytearray()

        def step() -> int:
            got = self._sock.recv(nbytes - len(data), socket.MSG_DONTWAIT)
            data.extend(got)
            return self._some(len(got))

        self._all(step, nbytes, select.POLLIN, phase, deadline, FOREVER)
        return bytes(data)

    def send_vectors(
        self,
        vectors: Iovecs | IovecCursor,
        phase: str,
        deadline: float = FOREVER,
        stall_s: float = FOREVER,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Send the ranges, or what a cursor has left of them; progress is told the bytes of each step."""
        self._vectors(writev, vectors, phase, deadline, stall_s, progress, contextlib.nullcontext)

    def send_some(self, data: bytes) -> int:
        """Send what there is room for, without waiting; return how many bytes that was."""
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise PeerLost(f"connection to {self.peer} broke: {error.strerror or error}") from None

    def send_at_once(self, cursor: IovecCursor) -> bool:
        """Send what there is room for, without waiting; True if that was all."""
        try:
            while cursor.done < cursor.total:
                cursor.move(send_at_once, self._fd)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise PeerLost(f"connection to {self.peer} broke: {error.strerror or error}") from None
        return True

    def receive_vectors(
        self,
        vectors: Iovecs | IovecCursor,
        phase: str,
        deadline: float = FOREVER,
        stall_s: float = FOREVER,
        progress: Callable[[int], None] | None = None,
        guard: Guard = contextlib.nullcontext,
    ) -> None:
        """Fill the ranges, each step inside a guard(); progress is told the bytes of each step."""
        self._vectors(receive_all, vectors, phase, deadline, stall_s, progress, guard)

    def _vectors(
        self,
        call: VectorCall,
        vectors: Iovecs | IovecCursor,
        phase: str,
        deadline: float,
        stall_s: float,
        progress: Callable[[int], None] | None,
        guard: Guard,
    ) -> None:
        cursor = vectors if isinstance(vectors, IovecCursor) else IovecCursor(vectors)

        def step() -> int:
            with guard():
                moved = self._some(cursor.move(call, self._fd))
            if progress is not None:
                progress(moved)
            return moved

        self._all(step, cursor.total - cursor.done, None, phase, deadline, stall_s)

    def discard(self, nbytes: int, phase: str, stall_s: float = FOREVER) -> None:
        """Receive nbytes and throw them away."""
        scrap = memoryview(bytearray(min(nbytes, 1 << 20)))
        left = nbytes

        def step() -> int:
            nonlocal left
            got = self._some(self._sock.recv_into(scrap[: min(left, len(scrap))], 0, socket.MSG_DONTWAIT))
            left -= got
            return got

        self._all(step, nbytes, select.POLLIN, phase, FOREVER, stall_s)

    def send_descriptors(self, descriptors: Sequence[int], phase: str, deadline: float = FOREVER) -> None:
        """Send open files with one byte of the stream, over a socket within the host."""
        # Not by socket.send_fds(), nor received by recv_fds(): in Python 3.11 they drop their flags.
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]
        step = lambda: self._sock.sendmsg([b"F"], rights, socket.MSG_DONTWAIT)  # noqa: E731
        self._all(step, 1, select.POLLOUT, phase, deadline, FOREVER)

    def receive_descriptors(self, count: int, phase: str, deadline: float = FOREVER) -> tuple[int, ...]:
        """Receive what send_descriptors() sends; the caller closes them. Raises also ProtocolError."""
        received = array("i")
        room = socket.CMSG_LEN(count * received.itemsize)

        def step() -> int:
            data, messages, _, _ = self._sock.recvmsg(1, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
            for level, kind, content in messages:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    received.frombytes(content)
            return self._some(len(data))

        self._all(step, 1, select.POLLIN, phase, deadline, FOREVER)
        if len(received) != count:
            for descriptor in received:
                os.close(descriptor)
            raise ProtocolError(f"{self.peer} sent {len(received)} descriptors instead of {count}")
        return tuple(received)

    def round_trip_s(self) -> float:
        """Return the shortest time of a round trip that the kernel has seen; 0 where it says nothing."""
        try:
            info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_AT + _MIN_RTT.size)
        except OSError:  # it has ended, or is one within the host
            return 0.0
        if len(info) < _MIN_RTT_AT + _MIN_RTT.size:
            return 0.0
        microseconds: int = _MIN_RTT.unpack_from(info, _MIN_RTT_AT)[0]
        return 0.0 if microseconds == _NO_RTT else microseconds * 1e-6

    def finish_sending(self) -> None:
        """Tell the peer that nothing more comes from here; it can still be received from."""
        with self._lock, contextlib.suppress(OSError):  # the peer was faster
            self._sock.shutdown(socket.SHUT_WR)

    def wait_for_hang_up(self, timeout_s: float) -> bool:
        """Wait until the peer has ended the connection; whether it has."""
        poll = select.poll()
        poll.register(self._fd, select.POLLRDHUP)
        return bool(poll.poll(int(timeout_s * 1000)))

    def hung_up(self) -> bool:
        """Return whether the peer has ended the connection, or this side has."""
        poll = select.poll()
        poll.register(self._fd, select.POLLRDHUP)
        return any(events & (select.POLLRDHUP | select.POLLHUP | select.POLLNVAL) for _, events in poll.poll(0))

    def wait_for_data(self, others: Sequence["Wire"] = ()) -> None:
        """Wait, for ever, until something can be received or the connection has ended.

        Raises PeerLost if one of the other wires, on which nothing is received meanwhile, has ended.
        """
        poll = self._readable
        if others:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            for other in others:
                poll.register(other._fd, select.POLLRDHUP)
        ready = {descriptor for descriptor, _ in poll.poll()}
        if self._fd not in ready:
            raise PeerLost(f"{self.peer} closed one of the connection's streams")

    def _some(self, received: int) -> int:
        if received == 0:
            raise PeerLost(f"{self.peer} closed the connection")
        return received

    def _all(
        self, step: Callable[[], int], nbytes: int, event: int | None, phase: str, deadline: float, stall_s: float
    ) -> None:
        """Repeat step, which moves some bytes, until nbytes are through.

        event: what to poll for when step finds nothing to do; None if step itself has waited for a tick then.
        """
        begun = last = time.monotonic()
        done = 0
        while done < nbytes:
            try:
                done += step()
                if done >= nbytes:
                    return
                last = time.monotonic()
            except (BlockingIOError, InterruptedError):
                if event is not None:
                    self._poll(event, min(deadline, last + stall_s))
            except OSError as error:
                raise PeerLost(f"connection to {self.peer} broke: {error.strerror or error}") from None
            now = time.monotonic()
            if now >= min(deadline, last + stall_s):
                progress = f"{done} of {nbytes} bytes" + ("" if now >= deadline else f", none for {stall_s:g} s")
                raise DeadlineExceeded(phase, self.peer, round(now - begun, 3), progress)

    def _poll(self, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._fd, event)
        poll.poll(milliseconds(deadline))

    def shutdown(self) -> None:
        """End the connection for both sides; whoever waits on it wakes up. Idempotent."""
        with self._lock:
            if self._sock.fileno() >= 0:
                try:
                    self._sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    return  # the peer was faster

    def close(self) -> None:
        """Give back the descriptor. Only once no thread sends or receives. Idempotent."""
        with self._lock:
            self._sock.close()
