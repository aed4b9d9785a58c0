"""Control channels: one that is dialled, greeted, and dialled again when it was lost; one that a peer has dialled."""

import queue
import time
from collections.abc import Callable

from pdtx.engine.waking import Mailbox
from pdtx.errors import DeadlineExceeded, IncompatiblePeer, PdtxError, PeerLost
from pdtx.protocol import Bye, Hello, Message, Reject, TierHello, TierWelcome, Welcome
from pdtx.sidechannel import END_OF_SESSION, Dialer, Listener, Security
from pdtx.text import reason_of

Greeting = Hello | TierHello | Welcome | TierWelcome


class ControlChannel:
    """Talks to the peer at address. on_message(message), on_lost(reason): called on the channel's thread.

    Used by one thread at a time, but for send() and answer().
    """

    def __init__(
        self,
        address: str,
        security: Security,
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.address, self._security = address, security
        self._on_message, self._on_lost = on_message, on_lost
        self._dialer: Dialer | None = None
        self._lost: PdtxError | None = None
        self._answer = Mailbox[Greeting | PdtxError]()

    @property
    def lost(self) -> PdtxError | None:
        """What ended the channel that was dialled last, if something has."""
        return self._lost

    def greet(self, hello: Greeting, timeout_s: float) -> Greeting:
        """Say hello, or welcome to a producer; return the answer.

        The channel is dialled anew if there is none or the last one was lost.
        Raises PeerUnreachable (PeerSilent where somebody takes the connection), AuthenticationFailed, PeerLost,
        IncompatiblePeer or DeadlineExceeded.
        """
        deadline = time.monotonic() + timeout_s
        dialer = self._dialer
        if dialer is None or self._lost is not None:
            dialer = self._dial(timeout_s)
        self._answer = Mailbox()
        if self._lost is not None:
            raise self._lost
        dialer.send(hello)
        try:
            answer = self._answer.get(max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            error = DeadlineExceeded("the handshake's answer", self.address, round(timeout_s, 3))
            # An answer that comes yet must not be taken for the answer to a later hello.
            dialer.close(0.0, "its handshake was not answered in time")
            self._lose(error, str(error))
            raise error from None
        if isinstance(answer, PdtxError):
            raise answer
        return answer

    def _dial(self, timeout_s: float) -> Dialer:
        # A peer that was only slow reads that yet: it must not take this side for gone.
        self.close(0.0, "another channel is dialled")
        self._lost, self._dialer = None, None
        dialer = Dialer(self.address, self._on_message, self._on_channel_lost, security=self._security)
        dialer.connect(timeout_s)
        self._dialer = dialer
        return dialer

    def fail(self, error: PdtxError) -> None:
        """Let greet() fail because of the answer that has come."""
        self._answer.put(error)

    def answer(self, answer: Greeting | Reject) -> None:
        """Take what the peer says to the greeting."""
        if isinstance(answer, Reject):
            texts = answer.field, answer.producer, answer.consumer, answer.advice
            self._answer.put(IncompatiblePeer(*(reason_of(text) if text else text for text in texts)))
        else:
            self._answer.put(answer)

    def send(self, message: Message | bytes) -> None:
        """Send a message, see Dialer; without a channel it goes nowhere. Raises ProtocolError."""
        if self._dialer is not None:
            self._dialer.send(message)

    def give_up(self, reason: str) -> None:
        """Take the channel for lost. Only from on_message."""
        if self._dialer is not None:
            self._dialer.give_up(reason)

    def _on_channel_lost(self, reason: str) -> None:
        self._lose(PeerLost(f"lost {self.address}: {reason}"), reason)

    def _lose(self, error: PdtxError, reason: str) -> None:
        self._lost = error
        self._on_lost(reason)
        self._answer.put(error)

    def close(self, linger_s: float = 1.0, reason: str = END_OF_SESSION) -> None:
        """Say goodbye; a handshake under way fails. Idempotent."""
        self._answer.put(PeerLost(f"the channel to {self.address} was closed"))
        if self._dialer is not None:
            self._dialer.close(linger_s, reason)


class AcceptedChannel:
    """A channel that a peer of a listener has dialled. lost: set by the owner of the listener."""

    def __init__(self, listener: Listener, peer: bytes) -> None:
        self._listener, self._peer = listener, peer
        self.address = listener.endpoint
        self.lost: PdtxError | None = None

    def send(self, message: Message | bytes) -> None:
        """Send a message; a peer that is gone does not get it. Raises ProtocolError."""
        self._listener.send(self._peer, message)

    def give_up(self, reason: str) -> None:
        """Take the peer for lost. Only from the listener's thread."""
        self._listener.give_up(self._peer, reason)

    def close(self, linger_s: float = 1.0) -> None:
        """Say goodbye."""
        if self.lost is None:
            self._listener.send(self._peer, Bye(reason="the session was closed"))
