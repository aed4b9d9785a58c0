"""Decoding without a model: what has arrived is compared with what its tokens say, and kept for as long as asked."""

import time
from collections.abc import Callable

from pdtx.cache.verify import Verification
from pdtx.engine import InboundRequest, KVConsumer
from pdtx.errors import VerificationError
from pdtx.node.loop import Active, DecodeLoop
from pdtx.node.stop import Stop
from pdtx.replay.contents import PrefixContents, prefix_codes

_PAUSE_S = 0.002


class SyntheticLoop(DecodeLoop):
    """Ends each request after the time that its answer would have taken. tokens_per_s: of one request; 0: at once.

    A consumer that verifies compares with the producer's cache; here every element is compared with its prompt as well,
    so that a block which a tier had for other tokens is found although both sides have it.
    """

    def __init__(
        self,
        consumer: KVConsumer,
        stop: Stop,
        limit: int | None,
        on_finish: Callable[[InboundRequest], None],
        tokens_per_s: float,
    ) -> None:
        super().__init__(consumer, stop, limit, on_finish)
        self._tokens_per_s = tokens_per_s
        self._contents = PrefixContents(consumer.cache)

    def _verify(self, request: InboundRequest) -> None:
        super()._verify(request)
        found = self._contents.check(request.tables, prefix_codes(request.ask.token_ids))
        if found.wrong:
            raise VerificationError(_text(found), found.wrong)

    def _goes_on(self, active: Active) -> bool:
        """Queue a request until its answer would be there; whether it goes on."""
        rate, tokens = self._tokens_per_s, active.request.ask.max_tokens
        if not rate or tokens == 1:
            self._finish(active, "")
            return False
        active.due = time.monotonic() + (tokens - 1) / rate
        self._active.append(active)
        return True

    def _step(self, active: Active) -> bool:
        left = active.due - time.monotonic()
        if left > 0:
            self._active.append(active)
            time.sleep(min(left, _PAUSE_S / len(self._active)))
            return True
        self._finish(active, "")
        return False


def _text(found: Verification) -> str:
    first = found.first
    where = f"; first: {first.coordinate}" if first is not None else ""
    return (
        f"{found.wrong} of {found.compared} elements are not what the prompt's tokens say, though the prefill node's "
        f"cache has them, too: a block of another prompt was used{where}"
    )
