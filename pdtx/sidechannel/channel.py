"""The thread that owns a ZeroMQ socket, and what both ends of a channel share.

ZeroMQ sockets are not thread-safe: one thread owns the socket, and what others send goes through a queue with a
wake-up. The thread also ends what it owns, so that an owner's callback may close its own channel.

The thread works in turns: it sends some messages, receives some, sends the heartbeats that are due. The share of each
turn is bounded by count and time, so that no peer, however much it sends or leaves unread, keeps the heartbeats of the
others waiting. ZeroMQ receives from all peers in rotation.

How a peer goes. Its Bye is the last message that counts: the loss is reported at once, and what comes after it on the
same connection is dropped unread. Any other loss is reported after what the peer sent before: once the socket has been
read empty, or _SETTLE_MESSAGES later.
"""

import contextlib
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import zmq

from pdtx.errors import ProtocolError
from pdtx.protocol import MAX_MESSAGE_BYTES, Bye, Heartbeat, Message, decode, encode
from pdtx.sidechannel.keys import Security
from pdtx.text import reason_of

logger = logging.getLogger(__name__)

HEARTBEAT = encode(Heartbeat())

_HIGH_WATER = 10_000
"""Messages that ZeroMQ holds of a peer, and for it. More of it wait in the network, more for it in a backlog.

Fewer would be too few: what still waits in the network when a connection breaks is lost.
"""

_MAX_BACKLOG = 100_000
_MAX_BACKLOG_BYTES = 256 << 20
"""Messages, and their bytes, that may wait in a backlog, after which the peer counts as lost."""

_TURN_MESSAGES = 256
_TURN_S = 0.05
"""The most messages that one turn of the thread sends, and receives, and how long it goes on with each."""

_SETTLE_MESSAGES = 25_600
"""Messages of all peers that are received at most before a loss is reported."""

_MAX_DEPARTED = 10_000
"""Peers that have said Bye and are remembered for it."""

_RETRY_MS = 5
_CALLBACK_S = 5.0
"""How long close() waits for a callback that is running."""

END_OF_SESSION = "end of session"
"""What a channel says to its peers when its owner closes it."""


@dataclass
class _Backlog:
    """What a peer does not take at the moment. since: when it last took something."""

    since: float
    frames: deque[bytes] = field(default_factory=deque)
    nbytes: int = 0

    @property
    def full(self) -> bool:
        """Whether the peer has left too much waiting."""
        return len(self.frames) >= _MAX_BACKLOG or self.nbytes >= _MAX_BACKLOG_BYTES

    def push(self, data: bytes) -> None:
        """Add a message."""
        self.frames.append(data)
        self.nbytes += len(data)

    def pop(self, now: float) -> None:
        """Remove the first message: the peer has taken it."""
        self.nbytes -= len(self.frames.popleft())
        self.since = now


@dataclass(frozen=True)
class _Loss:
    """Why a peer has gone, and how many messages had been received from all peers then."""

    reason: str
    received: int


class _Share:
    """What one turn may still do of one kind: _TURN_MESSAGES in _TURN_S."""

    def __init__(self) -> None:
        self._left, self._until = _TURN_MESSAGES, time.monotonic() + _TURN_S

    def __bool__(self) -> bool:
        return self._left > 0 and time.monotonic() < self._until

    def take(self) -> None:
        """Count one message."""
        self._left -= 1


class Channel(ABC):
    """One socket and its thread.

    heartbeat_s: how often a peer hears something. silence_s: how long it may be silent, or take nothing, before it
    counts as lost.
    """

    def __init__(self, kind: int, security: Security, heartbeat_s: float, silence_s: float) -> None:
        self.security, self.heartbeat_s, self.silence_s = security, heartbeat_s, silence_s
        self._outbox: deque[tuple[bytes, bytes]] = deque()
        self._backlogs: dict[bytes, _Backlog] = {}
        self._gone: dict[bytes, _Loss] = {}  # not reported yet
        self._received = 0
        self._departed: dict[bytes, float] = {}  # peers that have said Bye, and when they sent something last
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, 1),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.SNDHWM, _HIGH_WATER),
            (zmq.RCVHWM, _HIGH_WATER),
            (zmq.TCP_KEEPALIVE, 1),
        ):
            self._socket.setsockopt(option, value)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_out, zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)
        self._closing = threading.Lock()
        self._stopping = threading.Event()
        self._linger_s, self._goodbye = 0.0, END_OF_SESSION
        self._thread = threading.Thread(target=self._run, name=f"pdtx-{type(self).__name__.lower()}", daemon=True)

    def _queue(self, peer: bytes, messages: Iterable[Message | bytes]) -> None:
        # Encoded here, so that a message that cannot be sent fails where it was made, and none of its batch is sent.
        self._outbox.extend([(peer, each if isinstance(each, bytes) else encode(each)) for each in messages])
        self._wake()

    def _wake(self) -> None:
        # A full pipe is as good as a byte in it: the thread will wake. A closed one has nobody left to wake.
        with contextlib.suppress(OSError):
            self._wake_in.send(b"!")

    def close(self, linger_s: float = 1.0, reason: str = END_OF_SESSION) -> None:
        """Send what is queued and a goodbye with a reason, within linger_s; then release everything. Idempotent.

        From a callback it returns at once and the rest happens after the callback; from any other thread it waits.
        """
        with self._closing:
            if not self._stopping.is_set():
                self._linger_s, self._goodbye = linger_s, reason
                self._stopping.set()
                if self._thread.ident is None:
                    self._release(0.0)
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(linger_s + _CALLBACK_S)
            if self._thread.is_alive():
                logger.error("%s does not end: one of its callbacks is stuck", self._thread.name)

    def _release(self, linger_s: float) -> None:
        self._socket.close(linger=int(linger_s * 1000))
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        deadline = time.monotonic()
        try:
            while not self._stopping.is_set():
                self._turn()
            deadline = time.monotonic() + self._linger_s
            self._finish(deadline)
        except Exception:
            # Owners wait for their peers, so they must learn that nothing will come any more.
            logger.exception("%s failed", self._thread.name)
            self._stopping.set()
            for peer in self._peers():
                self._lose(peer, "this side's channel failed; see the log")
        finally:
            self._release(max(0.0, deadline - time.monotonic()))

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._wait_ms()))
        if self._wake_out.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake_out.recv(4096)
        self._flush()
        going = list(self._gone)  # before receiving: what they sent is in the socket by now
        drained = self._receive() if going or self._socket in ready else True
        self._tend(time.monotonic())
        self._settle(going, drained)

    def _wait_ms(self) -> int:
        if self._outbox or self._gone:
            return 0
        return _RETRY_MS if self._backlogs else int(self.heartbeat_s * 250) + 1

    def _go(self, peer: bytes, reason: str) -> None:
        """Note that a peer has gone; the owner hears of it once what the peer sent before has been received."""
        self._gone.setdefault(peer, _Loss(reason, self._received))

    def _settle(self, going: list[bytes], drained: bool) -> None:
        """Report peers that had gone before this turn received. drained: nothing more was there to receive."""
        for peer in going:
            loss = self._gone.get(peer)  # None: its Bye came
            if loss is not None and (drained or self._received - loss.received >= _SETTLE_MESSAGES):
                self._report(peer, loss.reason)

    def _report(self, peer: bytes, reason: str) -> None:
        """Forget a peer that has gone, and tell the owner."""
        self._gone.pop(peer, None)
        self._backlogs.pop(peer, None)
        self._lose(peer, reason)

    def _finish(self, deadline: float) -> None:
        self._flush()
        while (self._outbox or self._backlogs) and time.monotonic() < deadline:
            if not self._outbox:
                time.sleep(_RETRY_MS / 1000)
            self._flush()
        bye = encode(Bye(reason=self._goodbye))
        for peer in self._peers():
            self._send(peer, bye)

    def _flush(self) -> None:
        """Send what waits, as much as one turn may."""
        share, now = _Share(), time.monotonic()
        for peer, backlog in list(self._backlogs.items()):
            self._retry(peer, backlog, now, share)
        share = _Share()
        while self._outbox and share:
            self._send(*self._outbox.popleft())
            share.take()

    def _retry(self, peer: bytes, backlog: _Backlog, now: float, share: _Share) -> None:
        while backlog.frames and share:
            if not self._transmit(peer, backlog.frames[0]):
                if now - backlog.since > self.silence_s:
                    self._go(peer, f"it took no messages for {self.silence_s:g} s")
                return
            backlog.pop(now)
            share.take()
        del self._backlogs[peer]
        if backlog.frames:
            self._backlogs[peer] = backlog  # at the end: the next turn begins with another peer

    def _send(self, peer: bytes, data: bytes) -> None:
        backlog = self._backlogs.get(peer)
        if backlog is None:
            if self._transmit(peer, data):
                return
            backlog = self._backlogs[peer] = _Backlog(time.monotonic())
        if backlog.full:
            self._go(peer, f"it left {len(backlog.frames)} messages of {backlog.nbytes} bytes waiting")
        else:
            backlog.push(data)

    def _receive(self) -> bool:
        """Handle what has come, as much as one turn may; whether that was all."""
        share = _Share()
        while share:
            try:
                peer, data = self._receive_one()
            except zmq.Again:
                return True
            share.take()
            self._received += 1
            if peer in self._departed:
                self._departed[peer] = time.monotonic()
            else:
                self._handle(peer, data)
        return False

    def _handle(self, peer: bytes, data: bytes) -> None:
        try:
            message = decode(data)
        except ProtocolError as error:
            self._malformed(peer, error)
            return
        self._heard(peer)
        if isinstance(message, Bye):
            self._depart(peer, message.reason)
        elif not isinstance(message, Heartbeat):
            self._call(partial(self._deliver, peer, message))

    def _depart(self, peer: bytes, reason: str) -> None:
        """Report a peer that has said Bye: all that it sent before has been received."""
        if len(self._departed) >= _MAX_DEPARTED:
            del self._departed[next(iter(self._departed))]
        self._departed[peer] = time.monotonic()
        self._report(peer, f"closed: {reason_of(reason)}")

    def _call(self, callback: Callable[[], None]) -> None:
        """Run an owner's callback; its bugs must not end the thread."""
        try:
            callback()
        except Exception:
            logger.exception("a side-channel callback failed")

    @abstractmethod
    def _peers(self) -> list[bytes]:
        """Who is there."""

    @abstractmethod
    def _receive_one(self) -> tuple[bytes, bytes]: ...

    @abstractmethod
    def _transmit(self, peer: bytes, data: bytes) -> bool:
        """Give data to ZeroMQ; False if the peer's queue is full. _go() for a peer that is not there."""

    @abstractmethod
    def _heard(self, peer: bytes) -> None: ...

    @abstractmethod
    def _deliver(self, peer: bytes, message: Message) -> None: ...

    @abstractmethod
    def _malformed(self, peer: bytes, error: ProtocolError) -> None: ...

    @abstractmethod
    def _lose(self, peer: bytes, reason: str) -> None:
        """Tell the owner, once."""

    @abstractmethod
    def _tend(self, now: float) -> None:
        """Send heartbeats that are due, and give up silent peers."""
