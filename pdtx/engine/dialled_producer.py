"""A producer's process that a consumer has dialled, to pull what it offers."""

import logging
import threading
import time
import uuid
from collections.abc import Callable

from pdtx.engine.control_channel import ControlChannel
from pdtx.engine.control_thread import FLOOD, ControlThread, PeerInbox
from pdtx.engine.handshake import new_token
from pdtx.engine.inbound import PrefillEngine
from pdtx.engine.inbound_control import InboundControl
from pdtx.engine.inbound_messages import InboundMessages
from pdtx.engine.receiving import PayloadReceiver
from pdtx.errors import DeadlineExceeded, PdtxError, PeerLost, PeerUnreachable, ProtocolError
from pdtx.protocol import Hello, Message, Reject, Welcome
from pdtx.sidechannel import END_OF_SESSION, Security
from pdtx.text import reason_of

logger = logging.getLogger(__name__)

_ATTEMPT_S = 1.0
"""How long one attempt to dial again may take; close() waits as long."""

_PAUSE_S = 0.05
"""Between two of them."""


class DialledProducer:
    """The channel to it: it is greeted with a welcome, and says hello.

    Where the producer resumes, and something that was pulled has not all arrived, a channel that was lost is dialled
    again until that has ended. welcome: makes the greeting of a session of those names (id and token).
    """

    def __init__(
        self,
        address: str,
        security: Security,
        *,
        control: ControlThread,
        core: InboundControl,
        messages: InboundMessages,
        receiver: PayloadReceiver,
        welcome: Callable[[str, bytes], Welcome],
    ) -> None:
        self._control, self._core, self._messages, self._receiver = control, core, messages, receiver
        self._welcome = welcome
        self.peer = f"dialled {uuid.uuid4().hex}".encode()
        self.channel = ControlChannel(address, security, self._on_message, self._on_lost)
        self._inbox = PeerInbox()
        self._names = "", b""
        self._redialling: threading.Thread | None = None  # set by the control thread
        self._closed = False

    def greet(self, timeout_s: float) -> None:
        """Say welcome and wait for the hello. Raises as KVConsumer.connect()."""
        self._receiver.drop_session(self._names[0])
        names = self._names = uuid.uuid4().hex, new_token()
        # The producer may open its data connection before its hello has been heard here.
        self._receiver.add_session(*names)
        self.channel.greet(self._welcome(*names), timeout_s)

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Hello):
            self._control.post(self._on_hello, message)
        elif isinstance(message, Reject):
            self.channel.answer(message)
        elif self._inbox.take():
            self._control.post(self._handle, message)
        else:
            self.channel.give_up(FLOOD)

    def _on_hello(self, hello: Hello) -> None:
        try:
            self._messages.on_hello(self.peer, hello, None, self._names)
        except ProtocolError as error:
            logger.warning("no session with %s: %s", hello.engine_id, reason_of(error))
            self.channel.fail(error)
        else:
            self.channel.answer(hello)

    def _handle(self, message: Message) -> None:
        self._inbox.done()
        self._messages.on_message(self.peer, message)

    # -- a channel that is lost ---------------------------------------------------------------------------------------

    def _on_lost(self, reason: str) -> None:
        self._control.post(self._lost_now, reason)

    def _lost_now(self, reason: str, *, departed: bool = False) -> None:
        session = self._core.sessions.get(self.peer)
        departed = departed or reason == f"closed: {END_OF_SESSION}"
        engine = self._core.engines.engine_of(session) if session is not None else None
        self._messages.on_lost(self.peer, reason, departed=departed, dialled=True)
        self._receiver.drop_session(self._names[0])
        if session is not None and engine is not None and session.resumes and not departed:
            self._redial(engine)

    def _redial(self, engine: PrefillEngine) -> None:
        """Get another session in the background, if anything waits for it."""
        if self._closed or self._redialling is not None or not self._core.pulls.wants(engine):
            return
        self._redialling = threading.Thread(target=self._dial_again, args=(engine,), name="pdtx-redial", daemon=True)
        self._redialling.start()

    def _dial_again(self, engine: PrefillEngine) -> None:
        while not self._closed and self._control.call(self._core.pulls.wants, engine):
            try:
                self.greet(_ATTEMPT_S)
            except (PeerUnreachable, PeerLost, DeadlineExceeded):
                time.sleep(_PAUSE_S)  # it may come back until the deadline of what waits
            except PdtxError as error:
                self._control.post(self._core.pulls.on_gone, engine, error)
            else:
                break
        self._control.post(self._dialled_again, engine)

    def _dialled_again(self, engine: PrefillEngine) -> None:
        self._redialling = None
        session = self._core.sessions.get(self.peer)
        if session is None:
            self._redial(engine)  # it was lost at once
        elif self._core.engines.engine_of(session) is not engine:
            self._core.pulls.on_gone(engine, PeerLost(f"{session.name} was started anew"))

    def close(self) -> None:
        """Say goodbye, and forget the session."""
        self._closed = True
        self.channel.close()
        redialling = self._redialling
        if redialling is not None:
            redialling.join()
            self.channel.close()  # which it may have dialled just now
        self._control.call(self._lost_now, "the connection to all of the producer was not had", departed=True)
