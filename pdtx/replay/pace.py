"""How long computing a prompt takes: by a rate, or as it was captured."""

from collections.abc import Mapping, Sequence

from pdtx.errors import InputError
from pdtx.results.capture import CapturedChunk
from pdtx.serving import Job


class RatePace:
    """So many tokens a second, every layer the same share of a chunk. Raises InputError for a rate of 0 or less."""

    def __init__(self, tokens_per_s: float) -> None:
        if not tokens_per_s > 0:
            raise InputError(f"a prefill rate of {tokens_per_s:g} tokens a second never ends; give more than 0")
        self._tokens_per_s = tokens_per_s

    def ready(self, job: Job, start: int, stop: int, layers: int) -> Sequence[float]:
        """See Pace."""
        seconds = (stop - start) / self._tokens_per_s
        return [seconds * (layer + 1) / layers for layer in range(layers)]


class CapturedPace:
    """As it was captured: chunks that are the same take the same time, layer by layer; others as long for each token.

    chunks: of each request, by id. scale_tokens: tokens of the capture that one of the replay's stands for.
    otherwise: for requests of which nothing was captured.
    """

    def __init__(
        self, chunks: Mapping[str, Sequence[CapturedChunk]], otherwise: RatePace, scale_tokens: int = 1
    ) -> None:
        self._chunks, self._otherwise, self._scale = chunks, otherwise, scale_tokens

    def ready(self, job: Job, start: int, stop: int, layers: int) -> Sequence[float]:
        """See Pace."""
        found = [chunk for chunk in self._chunks.get(job.request_id, ()) if chunk.ready]
        same = next((chunk for chunk in found if (chunk.start, chunk.stop) == (start, stop)), None)
        if same is not None and self._scale == 1:
            # Fewer layers here stand for all there.
            last = len(same.ready)
            return [same.ready[max(0, (layer + 1) * last // layers - 1)][2] for layer in range(layers)]
        tokens = sum(chunk.stop - chunk.start for chunk in found)
        if not tokens:
            return self._otherwise.ready(job, start, stop, layers)
        each = sum(chunk.ready[-1][2] for chunk in found) / tokens * self._scale
        return [each * (stop - start) * (layer + 1) / layers for layer in range(layers)]
