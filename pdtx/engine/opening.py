"""How a producer gets a session: it dials, shakes hands, and opens a data connection, on a thread of its own."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from pdtx.cache import KVCaches
from pdtx.engine.control_channel import ControlChannel
from pdtx.engine.coverage import require_all_sent
from pdtx.engine.describe import CacheFacts
from pdtx.engine.handshake import choose_endpoint, make_hello, match_welcome
from pdtx.engine.path import check_path
from pdtx.engine.picking import ModePicker
from pdtx.engine.route import Route
from pdtx.errors import InputError, PdtxError, PeerLost, ProtocolError, TransferError
from pdtx.plan import CostTable, Mode
from pdtx.protocol import Welcome
from pdtx.text import reason_of
from pdtx.transports import Connection, Mover
from pdtx.transports.base import PathKind

logger = logging.getLogger(__name__)

ATTEMPT_S = 2.0
"""How long one attempt at a new session may take, before another one is made."""


class SessionOpener:
    """Opens sessions of one producer, one after another. Its thread alone uses the channel's handshake.

    mode, costs: how pieces move. require: what must carry the payload.
    """

    def __init__(
        self, engine_id: str, cache: KVCaches, facts: CacheFacts, mover: Mover, *, mode: Mode, costs: CostTable
    ) -> None:
        self._engine_id, self._cache, self._facts, self._mover = engine_id, cache, facts, mover
        self._mode, self._costs = mode, costs
        self.require: PathKind | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "pdtx-opener")

    def open(self, channel: ControlChannel, timeout_s: float) -> Route:
        """Shake hands for a session, and open its data connection. Raises as KVProducer.connect() does."""
        deadline = time.monotonic() + timeout_s
        hello = make_hello(self._engine_id, self._facts.description, self._mover.name)
        answer = channel.greet(hello, timeout_s)
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"{channel.address} answered with a {type(answer).__name__}")
        match = match_welcome(answer, self._facts)
        require_all_sent([match])
        if match.not_sent:
            logger.info("not transferred to %s: %s", answer.engine_id, match.not_sent_text)
        endpoint = choose_endpoint(answer, self._mover.name)
        connection = self._mover.connect(endpoint.address, answer.session_id, answer.token, deadline)
        try:
            check_path(connection.path, answer.engine_id, self.require)
            return Route(answer, match, connection, self._modes(connection))
        except BaseException:
            connection.close()
            raise

    def reopen(
        self,
        channel: ControlChannel,
        old: Route | None,
        timeout_s: float,
        done: Callable[[Route | PdtxError], None],
    ) -> None:
        """Leave a session and open another one, in the background; done: called with it, or with what is in the way."""

        def attempt() -> None:
            try:
                if self._closed:
                    raise PeerLost("the producer was closed")
                if old is not None:
                    old.connection.close()
                found: Route | PdtxError = self.open(channel, min(ATTEMPT_S, timeout_s))
            except PdtxError as error:
                found = error
            except Exception as error:  # whatever it is, those who wait for the session must learn of it
                logger.exception("a new session could not be opened")
                found = TransferError(f"a new session could not be opened: {type(error).__name__}: {reason_of(error)}")
            done(found)

        try:
            self._thread.submit(attempt)
        except RuntimeError:  # closed meanwhile
            done(PeerLost("the producer was closed"))

    def close(self) -> None:
        """Open nothing more, and wait for what is being opened. Idempotent."""
        self._closed = True
        with suppress(RuntimeError):
            self._thread.shutdown(wait=True)

    def _modes(self, connection: Connection) -> ModePicker:
        name, device = self._mover.name, self._cache.device.type
        if self._mode is Mode.STAGED and not connection.stages:
            raise InputError(f"mover {name} cannot stage here; choose mode direct or auto, or another mover")
        return ModePicker(self._mode, stages=connection.stages, mover=name, device=device, table=self._costs)
