"""How a producer gets sessions: it shakes hands, whoever has dialled, and opens data connections."""

import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from pdtx.cache import KVCaches
from pdtx.engine.control_channel import ControlChannel
from pdtx.engine.describe import CacheFacts
from pdtx.engine.handshake import ProcessIdentity, choose_endpoint, make_hello, match_welcome
from pdtx.engine.path import check_path
from pdtx.engine.picking import ModePicker
from pdtx.engine.route import NoConnection, Route
from pdtx.errors import InputError, PdtxError, PeerLost, ProtocolError, TransferError
from pdtx.plan import CostTable, Mode
from pdtx.protocol import Hello, Welcome
from pdtx.text import reason_of
from pdtx.transports import Connection, Mover
from pdtx.transports.base import PathKind

logger = logging.getLogger(__name__)

ATTEMPT_S = 2.0
"""How long one attempt at a new session may take, before another one is made."""

_OPENERS = 4
"""Sessions that are opened at once: a process that does not answer must not keep the others waiting."""

Opened = Callable[[Route | PdtxError], None]


class SessionOpener:
    """Opens the sessions of one producer.

    mode, costs: how pieces move. require: what must carry the payload. resumes: see KVProducer.
    """

    def __init__(
        self,
        identity: ProcessIdentity,
        cache: KVCaches,
        facts: CacheFacts,
        mover: Mover,
        *,
        mode: Mode,
        costs: CostTable,
        resumes: bool,
    ) -> None:
        self._identity, self._cache, self._facts, self._mover = identity, cache, facts, mover
        self._mode, self._costs, self._resumes = mode, costs, resumes
        self._numbers = itertools.count(1)
        self.require: PathKind | None = None
        self._closed = False
        self._threads = ThreadPoolExecutor(_OPENERS, "pdtx-opener")

    def hello(self) -> Hello:
        """Return what this producer says of itself, in every session."""
        return make_hello(
            self._identity,
            self._facts.description,
            self._mover.name,
            number=next(self._numbers),
            resumes=self._resumes,
        )

    def open(self, channel: ControlChannel, timeout_s: float) -> Route:
        """Shake hands for a session, and open its data connection. Raises as KVProducer.connect() does."""
        deadline = time.monotonic() + timeout_s
        answer = channel.greet(self.hello(), timeout_s)
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"{channel.address} answered with a {type(answer).__name__}")
        return self._connect(answer, deadline, lambda: None)

    def _connect(self, welcome: Welcome, deadline: float, agree: Callable[[], None]) -> Route:
        """Open the data connection of a session, if anything moves. agree: called when the caches match."""
        match = match_welcome(welcome, self._facts)
        if match.not_sent:
            logger.warning("not transferred to %s: %s", welcome.engine_id, match.not_sent_text)
        endpoint = choose_endpoint(welcome, self._mover.name) if match.moves_anything else None
        agree()
        if endpoint is None:
            logger.info("no rank or layer of %s is read from this process", welcome.engine_id)
            return Route(welcome, match, NoConnection(), self._modes(None))
        connection = self._mover.connect(endpoint.address, welcome.session_id, welcome.token, deadline)
        try:
            check_path(connection.path, welcome.engine_id, self.require)
            return Route(welcome, match, connection, self._modes(connection))
        except BaseException:
            connection.close()
            raise

    def accept(self, welcome: Welcome, say: Callable[[Hello], None], done: Opened) -> None:
        """Answer a consumer that has dialled, in the background; done: called with the route, or what is in the way."""
        self._submit(lambda: self._connect(welcome, time.monotonic() + ATTEMPT_S, lambda: say(self.hello())), done)

    def reopen(self, channel: ControlChannel, old: Route | None, timeout_s: float, done: Opened) -> None:
        """Leave a session and open another one, in the background; done: called with it, or with what is in the way."""

        def attempt() -> Route:
            if old is not None:
                old.connection.close()
            return self.open(channel, min(ATTEMPT_S, timeout_s))

        self._submit(attempt, done)

    def _submit(self, attempt: Callable[[], Route], done: Opened) -> None:
        def run() -> None:
            try:
                if self._closed:
                    raise PeerLost("the producer was closed")
                found: Route | PdtxError = attempt()
            except PdtxError as error:
                found = error
            except Exception as error:  # whatever it is, those who wait for the session must learn of it
                logger.exception("a new session could not be opened")
                found = TransferError(f"a new session could not be opened: {type(error).__name__}: {reason_of(error)}")
            done(found)

        try:
            self._threads.submit(run)
        except RuntimeError:  # closed meanwhile
            done(PeerLost("the producer was closed"))

    def close(self) -> None:
        """Open nothing more, and wait for what is being opened. Idempotent."""
        self._closed = True
        with suppress(RuntimeError):
            self._threads.shutdown(wait=True)

    def _modes(self, connection: Connection | None) -> ModePicker:
        name, device = self._mover.name, self._cache.device.type
        stages = connection is not None and connection.stages
        if connection is not None and self._mode is Mode.STAGED and not stages:
            raise InputError(f"mover {name} cannot stage here; choose mode direct or auto, or another mover")
        return ModePicker(self._mode, stages=stages, mover=name, device=device, table=self._costs)
