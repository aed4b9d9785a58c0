"""The thread that owns a ZeroMQ socket, and what both ends of a channel share.

ZeroMQ sockets are not thread-safe: one thread owns the socket, and what others send goes through a queue with a
wake-up. The thread also ends what it owns, so that an owner's callback may close its own channel.
"""

import contextlib
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import zmq

from pdtx.errors import ProtocolError
from pdtx.protocol import MAX_MESSAGE_BYTES, Bye, Heartbeat, Message, decode, encode
from pdtx.sidechannel.keys import Security

logger = logging.getLogger(__name__)

HEARTBEAT = encode(Heartbeat())

_HIGH_WATER = 10_000
"""Messages that ZeroMQ holds for a peer; more wait in a backlog."""

_MAX_BACKLOG = 100_000
"""Messages that may wait beyond that, after which the peer counts as lost."""

_SETTLE_ROUNDS = 100
"""Rounds of receiving that may delay the news of a loss; one queue holds fewer messages."""

_RETRY_MS = 5
_CALLBACK_S = 5.0
"""How long close() waits for a callback that is running."""


@dataclass
class _Backlog:
    """What a peer does not take at the moment. since: when it last took something."""

    since: float
    frames: deque[bytes] = field(default_factory=deque)


class Channel(ABC):
    """One socket and its thread.

    heartbeat_s: how often a peer hears something. silence_s: how long it may be silent, or take nothing, before it
    counts as lost.
    """

    def __init__(self, kind: int, security: Security, heartbeat_s: float, silence_s: float) -> None:
        self.security, self.heartbeat_s, self.silence_s = security, heartbeat_s, silence_s
        self._outbox: deque[tuple[bytes, bytes]] = deque()
        self._backlogs: dict[bytes, _Backlog] = {}
        self._gone: dict[bytes, str] = {}
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
        self._linger_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"pdtx-{type(self).__name__.lower()}", daemon=True)

    def _queue(self, peer: bytes, message: Message) -> None:
        # Encoded here, so that a message that cannot be sent fails where it was made.
        self._outbox.append((peer, encode(message)))
        self._wake()

    def _wake(self) -> None:
        # A full pipe is as good as a byte in it: the thread will wake. A closed one has nobody left to wake.
        with contextlib.suppress(OSError):
            self._wake_in.send(b"!")

    def close(self, linger_s: float = 1.0) -> None:
        """Send what is queued and a goodbye, within linger_s; then release everything. Idempotent.

        From a callback it returns at once and the rest happens after the callback; from any other thread it waits.
        """
        with self._closing:
            if not self._stopping.is_set():
                self._linger_s = linger_s
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
        ready = dict(self._poller.poll(_RETRY_MS if self._backlogs else int(self.heartbeat_s * 250) + 1))
        if self._wake_out.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake_out.recv(4096)
        self._flush()
        if self._socket in ready:
            self._receive()
        self._tend(time.monotonic())
        if self._gone:
            self._settle()

    def _settle(self) -> None:
        """Tell losses, but first hear what those peers said before they went, their goodbye among it."""
        for _ in range(_SETTLE_ROUNDS):
            if self._receive():
                break
        gone, self._gone = self._gone, {}
        for peer, reason in gone.items():
            self._backlogs.pop(peer, None)
            self._lose(peer, reason)

    def _finish(self, deadline: float) -> None:
        self._flush()
        while self._backlogs and time.monotonic() < deadline:
            time.sleep(_RETRY_MS / 1000)
            self._flush()
        bye = encode(Bye(reason="end of session"))
        for peer in self._peers():
            self._send(peer, bye)

    def _flush(self) -> None:
        now = time.monotonic()
        for peer, backlog in list(self._backlogs.items()):
            self._retry(peer, backlog, now)
        while self._outbox:
            self._send(*self._outbox.popleft())

    def _retry(self, peer: bytes, backlog: _Backlog, now: float) -> None:
        while backlog.frames and self._transmit(peer, backlog.frames[0]):
            backlog.frames.popleft()
            backlog.since = now
        if not backlog.frames:
            del self._backlogs[peer]
        elif now - backlog.since > self.silence_s:
            self._gone[peer] = f"it took no messages for {self.silence_s:g} s"

    def _send(self, peer: bytes, data: bytes) -> None:
        backlog = self._backlogs.get(peer)
        if backlog is None:
            if self._transmit(peer, data):
                return
            backlog = self._backlogs[peer] = _Backlog(time.monotonic())
        if len(backlog.frames) < _MAX_BACKLOG:
            backlog.frames.append(data)
        else:
            self._gone[peer] = f"it left {_MAX_BACKLOG} messages waiting"

    def _receive(self) -> bool:
        """Handle what has come; whether that was all.

        Bounded, so that one busy peer does not keep the outbox and the timers waiting.
        """
        for _ in range(256):
            try:
                peer, data = self._receive_one()
            except zmq.Again:
                return True
            try:
                message = decode(data)
            except ProtocolError as error:
                self._malformed(peer, error)
                continue
            self._heard(peer)
            if isinstance(message, Bye):
                self._gone[peer] = f"closed: {message.reason}"
            elif not isinstance(message, Heartbeat):
                self._call(partial(self._deliver, peer, message))
        return False

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
        """Give data to ZeroMQ; False if the peer's queue is full. A peer that is not there goes into _gone."""

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
