"""The decode loop: takes requests whose K/V have arrived, verifies them, and generates for all of them in turns."""

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pdtx.engine import InboundRequest, KVConsumer
from pdtx.errors import PdtxError, TransferError
from pdtx.node.stop import Stop
from pdtx.protocol import Finished
from pdtx.runner import ModelRunner, PagedSequence, greedy

logger = logging.getLogger(__name__)

_KEEP_S = 10.0
"""How long the end of the node waits for tiers to take what they were given."""


@dataclass
class Active:
    """A request that is being served. times: seconds, for its producer. due: before which it does not end."""

    request: InboundRequest
    sequence: PagedSequence
    token_ids: list[int]
    times: dict[str, float] = field(default_factory=dict)
    due: float = 0.0


def _ignore(_: InboundRequest) -> None:
    """Do nothing with it."""


class DecodeLoop(ABC):
    """Serves what has arrived in the consumer's cache until stop is set, or until limit requests have ended."""

    def __init__(
        self,
        consumer: KVConsumer,
        stop: Stop,
        limit: int | None,
        on_finish: Callable[[InboundRequest], None] = _ignore,
    ) -> None:
        """on_finish: called with each request that ends well, on the thread of run()."""
        self.consumer, self.stop, self.limit = consumer, stop, limit
        self._on_finish = on_finish
        self._active = deque[Active]()

    def run(self) -> None:
        """Serve. Failures of single requests are reported to their producers, and the loop goes on."""
        while not self.stop.is_set() and (self.limit is None or self.consumer.num_ended < self.limit):
            request = self.consumer.next_ready(0.0 if self._active else 0.05)
            if request is not None:
                self._guard(request, partial(self._admit, request))
            if self._active:
                active = self._active.popleft()
                self._guard(active.request, partial(self._step, active))
        if self.consumer.prefix is not None:
            self.consumer.prefix.settle(_KEEP_S)

    def _guard(self, request: InboundRequest, work: Callable[[], bool]) -> None:
        """Do one piece of work for a request; when it has ended, or fails now, let its blocks go."""
        try:
            if request.error is not None:
                raise request.error
            if work():
                return
        except PdtxError as error:
            self.consumer.fail(request, error)
        except Exception as error:
            # A bug in the runner must not take the other requests down with it.
            logger.exception("request %s", request.request_id)
            reason = " ".join(str(error).split())
            self.consumer.fail(request, TransferError(f"decoding failed: {type(error).__name__}: {reason}"))
        self.consumer.let_go(request)

    def _admit(self, request: InboundRequest) -> bool:
        """Verify a request and queue it for generation; whether it goes on."""
        times = {"received": time.monotonic() - request.begun}
        if self.consumer.verifies:
            began = time.monotonic()
            self._verify(request)
            times["verify"] = time.monotonic() - began
        self.consumer.release(request)
        if request.blocks is None or request.complete is None:
            raise TransferError(f"request {request.request_id} has no blocks")
        if request.complete.first_token is None:
            raise TransferError(
                f"request {request.request_id} came without its first token, which this node goes on from"
            )
        sequence = PagedSequence(self.consumer.cache, request.tables, num_tokens=request.num_tokens)
        active = Active(request, sequence, [request.complete.first_token], times)
        return self._goes_on(active)

    def _verify(self, request: InboundRequest) -> None:
        self.consumer.verify(request)

    @abstractmethod
    def _step(self, active: Active) -> bool:
        """Generate a request's next token, or finish it; whether it goes on."""

    @abstractmethod
    def _goes_on(self, active: Active) -> bool:
        """Queue a request that has a token more, or finish it; whether it goes on."""

    def _finish(self, active: Active, text: str) -> None:
        """End a request well. text: of its answer."""
        request = active.request
        self._keep(active)
        finished = Finished(
            request_id=request.request_id,
            token_ids=active.token_ids,
            text=text,
            verified=self.consumer.verifies,
            wrong=0,
            received_bytes=request.received_bytes,
            received_runs=request.received_runs,
            times=active.times,
        )
        self.consumer.finish(request, finished)
        if request.error is not None:  # it was too late
            return
        self._on_finish(request)
        outcome = "verified" if self.consumer.verifies else "finished"
        logger.info(
            "request %s %s: %d tokens, %d bytes received",
            request.request_id,
            outcome,
            request.num_tokens,
            request.received_bytes,
            extra={"request_id": request.request_id},
        )

    def _keep(self, active: Active) -> None:
        """Put what is in the cache of a request into the tiers; it ends well whatever comes of that."""
        tokens = [*active.request.ask.token_ids, *active.token_ids][: active.sequence.num_tokens]
        try:
            self.consumer.keep(active.request, tokens)
        except PdtxError as error:
            logger.warning("request %s is not kept: %s", active.request.request_id, error)


class ModelLoop(DecodeLoop):
    """Generates greedily with a model, one token of each request in turn."""

    def __init__(
        self,
        runner: ModelRunner,
        consumer: KVConsumer,
        stop: Stop,
        limit: int | None,
        on_finish: Callable[[InboundRequest], None] = _ignore,
    ) -> None:
        super().__init__(consumer, stop, limit, on_finish)
        self.runner = runner

    def _step(self, active: Active) -> bool:
        began = time.monotonic()
        active.token_ids.append(greedy(self.runner.forward(active.sequence, active.token_ids[-1:])))
        active.times["decode"] = active.times.get("decode", 0.0) + time.monotonic() - began
        return self._goes_on(active)

    def _goes_on(self, active: Active) -> bool:
        """Queue a request for its next token, or finish it; whether it goes on."""
        ask, tokens = active.request.ask, active.token_ids
        ended = tokens[-1] in self.runner.eos_token_ids and not ask.ignore_eos
        if not ended and len(tokens) < ask.max_tokens:
            self._active.append(active)
            return True
        self._finish(active, self.runner.decode(tokens))
        return False
