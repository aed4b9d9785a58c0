"""The consumer's end: serves many dialers."""

import errno
import logging
import time
from collections.abc import Callable, Iterable

import zmq
from zmq.auth.thread import ThreadAuthenticator

from pdtx.address import join_address, numeric_host, parse_address
from pdtx.errors import AddressInUse, IncompatiblePeer, ProtocolError
from pdtx.protocol import Bye, Message, Reject, encode
from pdtx.sidechannel.channel import HEARTBEAT, Channel
from pdtx.sidechannel.keys import Security
from pdtx.sidechannel.protection import require_protection

logger = logging.getLogger(__name__)

_HANDSHAKE_MS = 5000
_MAX_BLAMED = 1000


class _AllowedKeys:
    """Who may connect: asked by the authenticator's thread."""

    def __init__(self, keys: list[bytes]) -> None:
        self._keys = frozenset(keys)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client's public key (Z85) is allowed."""
        return key in self._keys


class Listener(Channel):
    """Serves dialers at address ("HOST:PORT"; port 0 takes any).

    on_message(peer, message), on_lost(peer, reason): called on this channel's thread, so they must be short; what they
    raise is logged. A peer that was lost is forgotten; what it says later comes from a new peer. What it sends after
    its own Bye is dropped, until it has been quiet for silence_s.
    endpoint: the bound address, "tcp://HOST:PORT". rejected: how many malformed messages came.
    Raises AddressInUse, or InputError for an address that needs keys or keys that are no keys.
    """

    def __init__(
        self,
        address: str,
        on_message: Callable[[bytes, Message], None],
        on_lost: Callable[[bytes, str], None],
        *,
        security: Security,
        heartbeat_s: float = 1.0,
        silence_s: float = 5.0,
    ) -> None:
        host, port = parse_address(address)
        require_protection(host, security)
        numeric = numeric_host(host)
        super().__init__(zmq.ROUTER, security, heartbeat_s, silence_s)
        self._on_message, self._on_lost = on_message, on_lost
        self._heard_at: dict[bytes, float] = {}
        self._beat_at = time.monotonic()
        self._blamed: set[bytes] = set()
        self.rejected = 0
        self._authenticator = self._authenticate()
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        try:
            self._socket.bind(f"tcp://{join_address(numeric, port)}")
        except zmq.ZMQError as error:
            self._release(0.0)
            advice = "choose another port" if error.errno == errno.EADDRINUSE else "choose an address of this machine"
            raise AddressInUse(f"cannot listen on {address}: {error.strerror}; {advice}") from None
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.endpoint = f"tcp://{join_address(host, parse_address(bound)[1])}"
        self._thread.start()

    def _authenticate(self) -> ThreadAuthenticator | None:
        own = self.security.own
        if own is None:
            return None
        authenticator = ThreadAuthenticator(self._context)
        authenticator.start()
        authenticator.configure_curve_callback("*", _AllowedKeys(self.security.peer_public))
        self._socket.curve_secretkey, self._socket.curve_publickey = own.secret, own.public
        self._socket.curve_server = True
        return authenticator

    def _release(self, linger_s: float) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        super()._release(linger_s)

    def send(self, peer: bytes, message: Message | bytes) -> None:
        """Send a message, or an encoded one, to a peer; one that is gone does not get it. Safe from any thread, never
        blocks.

        Raises ProtocolError for a message that the peer would refuse.
        """
        self._queue(peer, (message,))

    def send_many(self, peer: bytes, messages: Iterable[Message]) -> None:
        """Send messages to a peer in their order, see send(): all of them, or none if one would be refused."""
        self._queue(peer, messages)

    def give_up(self, peer: bytes, reason: str) -> None:
        """Take a peer for lost, and say so to it. Only from on_message."""
        self._send(peer, encode(Bye(reason=reason)))
        self._go(peer, reason)

    def peers(self) -> int:
        """How many peers are there."""
        return len(self._heard_at)

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _peers(self) -> list[bytes]:
        return list(self._heard_at)

    def _receive_one(self) -> tuple[bytes, bytes]:
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        # Anything but identity and one frame is no message of ours; it fails to decode.
        return frames[0], frames[1] if len(frames) == 2 else b""

    def _transmit(self, peer: bytes, data: bytes) -> bool:
        try:
            self._socket.send_multipart((peer, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            self._go(peer, f"it is not connected any more ({error.strerror})")
        return True

    def _heard(self, peer: bytes) -> None:
        self._heard_at[peer] = time.monotonic()

    def _deliver(self, peer: bytes, message: Message) -> None:
        self._on_message(peer, message)

    def _malformed(self, peer: bytes, error: ProtocolError) -> None:
        self.rejected += 1
        if peer not in self._blamed and len(self._blamed) < _MAX_BLAMED:  # one line each, whatever they send
            self._blamed.add(peer)
            logger.warning("peer %s sent no message of ours: %s", peer.hex(), error)
        if isinstance(error, IncompatiblePeer):
            reject = Reject(field=error.field, producer=error.producer, consumer=error.consumer, advice=error.advice)
            self._send(peer, encode(reject))

    def _lose(self, peer: bytes, reason: str) -> None:
        if self._heard_at.pop(peer, None) is not None:
            self._call(lambda: self._on_lost(peer, reason))

    def _tend(self, now: float) -> None:
        if now - self._beat_at < self.heartbeat_s:
            return
        # If this thread itself was stopped, the peers have had no chance to be heard: start counting afresh.
        if now - self._beat_at > self.silence_s:
            self._heard_at = dict.fromkeys(self._heard_at, now)
        self._beat_at = now
        self._departed = {peer: sent for peer, sent in self._departed.items() if now - sent <= self.silence_s}
        for peer, heard in self._heard_at.items():
            if peer in self._gone:
                continue
            if now - heard > self.silence_s:
                reason = f"nothing heard for {self.silence_s:g} s"
                self._go(peer, reason)
                # It may only have been stopped: when it goes on, it must not take itself for connected.
                self._transmit(peer, encode(Bye(reason=reason)))
            elif peer not in self._backlogs:
                self._send(peer, HEARTBEAT)
