"""The producer's end: talks to one listener."""

import time
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial

import zmq
from zmq.utils.monitor import recv_monitor_message

from pdtx.address import join_address, numeric_host, parse_address
from pdtx.errors import AuthenticationFailed, IncompatiblePeer, InputError, PeerSilent, PeerUnreachable, ProtocolError
from pdtx.protocol import Message, Reject
from pdtx.sidechannel.channel import HEARTBEAT, Channel
from pdtx.sidechannel.keys import Security
from pdtx.sidechannel.protection import require_protection

_NEVER_MS = 3_600_000
"""ZeroMQ's own reconnects: off, for it would take a restarted listener for the old one.

-1 would also discard what has been received and not been read when the connection ends.
"""

_RETRY_S = 0.05
_PEER = b""


class _Outcome(Enum):
    CONNECTED = auto()
    NOT_THERE = auto()
    REFUSED = auto()
    DENIED = auto()
    TIMED_OUT = auto()
    SILENT = auto()


_OUTCOMES: dict[int, _Outcome] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: _Outcome.CONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: _Outcome.DENIED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: _Outcome.REFUSED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: _Outcome.REFUSED,
    zmq.EVENT_CONNECT_RETRIED: _Outcome.NOT_THERE,
}


class Dialer(Channel):
    """Talks to the listener at address. Nothing moves before connect().

    on_message(message), on_lost(reason): called on this channel's thread, so they must be short; what they raise is
    logged. A listener that went away stays lost, also when another one appears at its address.
    Raises InputError for an address that needs keys, or keys that are no keys.
    """

    def __init__(
        self,
        address: str,
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
        *,
        security: Security,
        heartbeat_s: float = 1.0,
        silence_s: float = 5.0,
    ) -> None:
        self.address = address
        host, port = parse_address(address)
        if port == 0:
            raise InputError(f"cannot connect to port 0 of {address!r}")
        require_protection(host, security)
        numeric = numeric_host(host)
        super().__init__(zmq.DEALER, security, heartbeat_s, silence_s)
        self._target = f"tcp://{join_address(numeric, port)}"
        self._on_message, self._on_lost = on_message, on_lost
        self._lost = False
        self._heard_at = self._sent_at = self._tended_at = time.monotonic()
        self._socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 0)  # connect() has a deadline of its own
        own = security.own
        if own is not None:
            self._socket.curve_secretkey, self._socket.curve_publickey = own.secret, own.public
            self._socket.curve_serverkey = security.peer_public[0]
        self._monitor = self._socket.get_monitor_socket()

    def connect(self, timeout_s: float) -> None:
        """Connect, trying again until timeout_s has passed. A dialer that failed is closed: make another one.

        Raises PeerUnreachable if nobody answers, AuthenticationFailed if the listener refuses our keys or has others.
        """
        try:
            self._establish(timeout_s)
        except BaseException:
            self.close(0.0)
            raise
        self._heard_at = self._sent_at = self._tended_at = time.monotonic()
        self._poller.register(self._monitor, zmq.POLLIN)
        self._thread.start()

    def _establish(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        refused = 0
        while True:
            self._socket.connect(self._target)
            outcome = self._await_handshake(deadline)
            if outcome is _Outcome.CONNECTED:
                return
            self._socket.disconnect(self._target)
            refused += outcome is _Outcome.REFUSED
            # A listener that is just starting or ending can drop a first connection; the second refusal is meant.
            if outcome is _Outcome.DENIED or refused > 1:
                raise AuthenticationFailed(
                    f"{self.address} refused the handshake: its keys and ours do not match, or it is no pdtx node"
                )
            if outcome is _Outcome.SILENT:
                raise PeerSilent(
                    f"{self.address} takes the connection but does not answer within {timeout_s:g} s; "
                    "is the decode side there, and running?"
                )
            if time.monotonic() + _RETRY_S >= deadline:
                raise PeerUnreachable(
                    f"nobody answers at {self.address} within {timeout_s:g} s; is the decode side there?"
                )
            time.sleep(_RETRY_S)
            while self._monitor.poll(0):  # what is still to be said about the attempt that failed
                recv_monitor_message(self._monitor)

    def _await_handshake(self, deadline: float) -> _Outcome:
        outcome = _Outcome.TIMED_OUT
        while (left := deadline - time.monotonic()) > 0 and self._monitor.poll(int(left * 1000) + 1):
            event = recv_monitor_message(self._monitor)["event"]
            if event in _OUTCOMES:
                return _OUTCOMES[event]
            if event == zmq.EVENT_CONNECTED:
                outcome = _Outcome.SILENT
        return outcome

    def send(self, message: Message | bytes) -> None:
        """Send a message; after a loss it goes nowhere. Safe from any thread, never blocks.

        bytes: what encode() has made of one, where that takes too long for the thread that sends it.
        Raises ProtocolError for a message that the listener would refuse.
        """
        self._queue(_PEER, (message,))

    def send_many(self, messages: Iterable[Message]) -> None:
        """Send messages in their order, see send(): all of them, or none if one would be refused."""
        self._queue(_PEER, messages)

    def give_up(self, reason: str) -> None:
        """Take the listener for lost. Only from on_message."""
        self._go(_PEER, reason)

    def _release(self, linger_s: float) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        super()._release(linger_s)

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _peers(self) -> list[bytes]:
        return [] if self._lost else [_PEER]

    def _receive_one(self) -> tuple[bytes, bytes]:
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        return _PEER, frames[0] if len(frames) == 1 else b""

    def _transmit(self, peer: bytes, data: bytes) -> bool:
        if self._lost:
            return True
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._sent_at = time.monotonic()
        return True

    def _heard(self, peer: bytes) -> None:
        self._heard_at = time.monotonic()

    def _deliver(self, peer: bytes, message: Message) -> None:
        if not self._lost:
            self._on_message(message)

    def _malformed(self, peer: bytes, error: ProtocolError) -> None:
        if isinstance(error, IncompatiblePeer):
            # Told as a rejection, which names the field, and not as a loss.
            reject = Reject(field=error.field, producer=error.producer, consumer=error.consumer, advice=error.advice)
            self._call(partial(self._deliver, peer, reject))
        else:
            self._go(peer, str(error))

    def _lose(self, peer: bytes, reason: str) -> None:
        if not self._lost:
            self._lost = True
            self._socket.disconnect(self._target)
            self._call(lambda: self._on_lost(reason))

    def _tend(self, now: float) -> None:
        while self._monitor.poll(0):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
                self._go(_PEER, "it closed the connection")
        if now - self._tended_at > self.silence_s:
            self._heard_at = now  # this process itself was stopped: the listener gets another chance to be heard
        self._tended_at = now
        if now - self._heard_at > self.silence_s:
            self._go(_PEER, f"nothing heard for {self.silence_s:g} s")
        if now - self._sent_at >= self.heartbeat_s and _PEER not in self._backlogs:
            self._send(_PEER, HEARTBEAT)
