"""The thread that owns a ZeroMQ socket, and what both ends of a channel share.

ZeroMQ sockets are not thread-safe: one thread owns the socket, and what others send goes through a queue with a
wake-up.
"""

import contextlib
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial

import zmq

from pdtx.errors import InputError, ProtocolError
from pdtx.protocol import MAX_MESSAGE_BYTES, Bye, Heartbeat, Message, decode, encode
from pdtx.sidechannel.address import is_loopback
from pdtx.sidechannel.keys import Security

logger = logging.getLogger(__name__)

_HIGH_WATER = 100_000
"""Messages queued for a peer that does not take them, after which it counts as lost."""


class Channel(ABC):
    """One socket and its thread.

    heartbeat_s: how often a peer hears something. silence_s: how long it may be silent before it counts as lost.
    """

    def __init__(self, kind: int, security: Security, heartbeat_s: float, silence_s: float) -> None:
        self.security, self.heartbeat_s, self.silence_s = security, heartbeat_s, silence_s
        self._outbox: deque[tuple[bytes, Message]] = deque()
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
            (zmq.HANDSHAKE_IVL, 5000),
        ):
            self._socket.setsockopt(option, value)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_out, zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)
        self._stopping = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"pdtx-{type(self).__name__.lower()}", daemon=True)

    def _queue(self, peer: bytes, message: Message) -> None:
        self._outbox.append((peer, message))
        # A full pipe is as good as a byte in it: the thread will wake.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_in.send(b"!")

    def close(self) -> None:
        """Say goodbye, stop the thread and release everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stopping.set()
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_in.send(b"!")
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._release()

    def _release(self) -> None:
        # Give what was sent last, the goodbye among it, a moment to leave.
        self._socket.close(linger=300)
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            ready = dict(self._poller.poll(int(self.heartbeat_s * 500)))
            if self._wake_out.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake_out.recv(4096)
            self._flush()
            if self._socket in ready:
                self._receive()
            self._tend(time.monotonic())
        self._flush()
        self._say_bye(Bye(reason="closed"))

    def _flush(self) -> None:
        while self._outbox:
            peer, message = self._outbox.popleft()
            try:
                data = encode(message)
            except ProtocolError:
                logger.exception("a message could not be sent")
                continue
            self._send(peer, data)

    def _receive(self) -> None:
        # Bounded, so that one busy peer does not keep the outbox and the timers waiting.
        for _ in range(256):
            try:
                peer, data = self._receive_one()
            except zmq.Again:
                return
            self._heard(peer)
            try:
                message = decode(data)
            except ProtocolError as error:
                self._malformed(peer, error)
                continue
            if not isinstance(message, Heartbeat):
                self._call(partial(self._deliver, peer, message))

    def _call(self, callback: Callable[[], None]) -> None:
        """Run an owner's callback; its bugs must not end the thread."""
        try:
            callback()
        except Exception:
            logger.exception("a side-channel callback failed")

    @abstractmethod
    def _receive_one(self) -> tuple[bytes, bytes]: ...

    @abstractmethod
    def _send(self, peer: bytes, data: bytes) -> None: ...

    @abstractmethod
    def _heard(self, peer: bytes) -> None: ...

    @abstractmethod
    def _deliver(self, peer: bytes, message: Message) -> None: ...

    @abstractmethod
    def _malformed(self, peer: bytes, error: ProtocolError) -> None: ...

    @abstractmethod
    def _tend(self, now: float) -> None:
        """Send heartbeats that are due, and give up silent peers."""

    @abstractmethod
    def _say_bye(self, bye: Bye) -> None: ...


HEARTBEAT = encode(Heartbeat())


def require_protection(host: str, security: Security) -> None:
    """Raise InputError if an address off loopback has neither keys nor a waiver."""
    if security.own is not None and not security.peer_public:
        raise InputError("a secret key needs the peers' public keys beside it")
    if security.own is not None or is_loopback(host):
        return
    if not security.insecure:
        raise InputError(
            f"{host} is not a loopback address: make keys with 'pdtx keygen' and give --key and --peer-key, "
            "or --insecure"
        )
    logger.warning("no keys: everyone who reaches %s can read and write this session", host)
