"""The producer's end: talks to one listener."""

import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from pdtx.errors import AuthenticationFailed, InputError, PeerUnreachable, ProtocolError
from pdtx.protocol import Bye, Message, encode
from pdtx.sidechannel.address import join_address, parse_address
from pdtx.sidechannel.channel import HEARTBEAT, Channel, require_protection
from pdtx.sidechannel.keys import Security

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Dialer(Channel):
    """Talks to the listener at address. Nothing moves before connect().

    on_message(message), on_lost(reason): called on this channel's thread, so they must be short. A listener that
    went away stays lost, also when another one appears at its address.
    Raises InputError for an address that needs keys.
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
        super().__init__(zmq.DEALER, security, heartbeat_s, silence_s)
        self._target = f"tcp://{join_address(host, port)}"
        self._on_message, self._on_lost = on_message, on_lost
        self._lost = False
        self._heard_at = self._sent_at = self._tended_at = time.monotonic()
        own = security.own
        if own is not None:
            self._socket.curve_secretkey, self._socket.curve_publickey = own.secret, own.public
            self._socket.curve_serverkey = security.peer_public[0]
        self._monitor = self._socket.get_monitor_socket()

    def connect(self, timeout_s: float) -> None:
        """Connect, trying again until timeout_s has passed.

        Raises PeerUnreachable if nobody answers, AuthenticationFailed if the listener refuses our keys or has others.
        """
        deadline = time.monotonic() + timeout_s
        self._socket.connect(self._target)
        refused = 0
        while (left := deadline - time.monotonic()) > 0:
            if not self._monitor.poll(int(left * 1000) + 1):
                break
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._heard_at = self._sent_at = self._tended_at = time.monotonic()
                self._poller.register(self._monitor, zmq.POLLIN)
                self._thread.start()
                return
            if event & _REFUSED:
                refused += 1
                # A listener that is just starting can drop a first connection; the second refusal is meant.
                if refused > 1 or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    raise AuthenticationFailed(
                        f"{self.address} refused the handshake: its keys and ours do not match, or it is no pdtx node"
                    )
        raise PeerUnreachable(f"nobody answers at {self.address} within {timeout_s:g} s; is pdtx-decode there?")

    def send(self, message: Message) -> None:
        """Send a message; after a loss it goes nowhere. Safe from any thread, never blocks."""
        self._queue(b"", message)

    def _release(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        super()._release()

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _receive_one(self) -> tuple[bytes, bytes]:
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        return b"", frames[0] if len(frames) == 1 else b""

    def _send(self, peer: bytes, data: bytes) -> None:
        if self._lost:
            return
        try:
            self._socket.send(data, zmq.NOBLOCK)
            self._sent_at = time.monotonic()
        except zmq.ZMQError as error:
            self._lose(f"it does not take its messages ({error.strerror})")

    def _heard(self, peer: bytes) -> None:
        self._heard_at = time.monotonic()

    def _deliver(self, peer: bytes, message: Message) -> None:
        if self._lost:
            return
        if isinstance(message, Bye):
            self._lose(message.reason)
        else:
            self._on_message(message)

    def _malformed(self, peer: bytes, error: ProtocolError) -> None:
        self._lose(str(error))

    def _lose(self, reason: str) -> None:
        if not self._lost:
            self._lost = True
            self._call(lambda: self._on_lost(reason))

    def _tend(self, now: float) -> None:
        while self._monitor.poll(0):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
                # What it said last may still be in the socket: its goodbye says more than the disconnection.
                self._receive()
                self._lose("it closed the connection")
        if now - self._tended_at > self.silence_s:
            self._heard_at = now  # this process itself was stopped: the listener gets another chance to be heard
        self._tended_at = now
        if now - self._heard_at > self.silence_s:
            self._lose(f"nothing heard for {self.silence_s:g} s")
        if now - self._sent_at >= self.heartbeat_s:
            self._send(b"", HEARTBEAT)

    def _say_bye(self, bye: Bye) -> None:
        self._send(b"", encode(bye))
