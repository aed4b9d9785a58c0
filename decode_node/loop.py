"""The decode loop: takes requests whose K/V have arrived, verifies them, and generates for all of them in turns."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pdtx.engine import InboundRequest, KVConsumer
from pdtx.errors import PdtxError, TransferError
from pdtx.protocol import Finished
from pdtx.runner import ModelRunner, PagedSequence, greedy

logger = logging.getLogger(__name__)

_KEEP_S = 10.0
"""How long the end of the node waits for tiers to take what they were given."""


@dataclass
class _Active:
    request: InboundRequest
    sequence: PagedSequence
    token_ids: list[int]
    times: dict[str, float] = field(default_factory=dict)


class DecodeLoop:
    """Generates greedily from the consumer's cache until stop is set, or until limit requests have ended."""

    def __init__(self, runner: ModelRunner, consumer: KVConsumer, stop: threading.Event, limit: int | None) -> None:
        self.runner, self.consumer, self.stop, self.limit = runner, consumer, stop, limit
        self._active = deque[_Active]()

    def run(self) -> None:
        """Serve. Failures of single requests are told to their producers, and the loop goes on."""
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
            self.consumer.verify(request)
            times["verify"] = time.monotonic() - began
        self.consumer.release(request)
        if request.blocks is None or request.complete is None:
            raise TransferError(f"request {request.request_id} has no blocks")
        sequence = PagedSequence(self.consumer.cache, request.tables, num_tokens=request.num_tokens)
        active = _Active(request, sequence, [request.complete.first_token], times)
        return self._goes_on(active)

    def _step(self, active: _Active) -> bool:
        began = time.monotonic()
        active.token_ids.append(greedy(self.runner.forward(active.sequence, active.token_ids[-1:])))
        active.times["decode"] = active.times.get("decode", 0.0) + time.monotonic() - began
        return self._goes_on(active)

    def _goes_on(self, active: _Active) -> bool:
        """Queue a request for its next token, or finish it; whether it goes on."""
        ask, tokens = active.request.ask, active.token_ids
        ended = tokens[-1] in self.runner.eos_token_ids and not ask.ignore_eos
        if not ended and len(tokens) < ask.max_tokens:
            self._active.append(active)
            return True
        self._keep(active)
        finished = Finished(
            request_id=ask.request_id,
            token_ids=tokens,
            text=self.runner.decode(tokens),
            verified=self.consumer.verifies,
            wrong=0,
            received_bytes=active.request.received_bytes,
            received_runs=active.request.received_runs,
            times=active.times,
        )
        self.consumer.finish(active.request, finished)
        return False

    def _keep(self, active: _Active) -> None:
        """Put what is in the cache of a request into the tiers; it ends well whatever comes of that."""
        tokens = [*active.request.ask.token_ids, *active.token_ids][: active.sequence.num_tokens]
        try:
            self.consumer.keep(active.request, tokens)
        except PdtxError as error:
            logger.warning("request %s is not kept: %s", active.request.request_id, error)
