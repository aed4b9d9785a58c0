"""What is told of a prefill node's requests while they run: to Prometheus, and to a capture."""

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from pdtx.cli.common import note
from pdtx.cli.metrics import tier_bytes, usage_of
from pdtx.engine import KVProducer
from pdtx.errors import DeadlineExceeded
from pdtx.serving import Ended

if TYPE_CHECKING:
    from pdtx.cli.tiers import NodeTiers
    from pdtx.metrics import NodeCounts, NodeMetrics
    from pdtx.replay.recorder import Recorder

CAPTURE_VARIABLE = "PDTX_CAPTURE"
"""Set by `pdtx capture` for the nodes of the command that it runs."""


class Watch:
    """Takes note of requests that have ended. Told by the scheduler's thread, asked by the metrics' own."""

    def __init__(
        self,
        producer: KVProducer,
        tiers: "NodeTiers | None",
        metrics: "NodeMetrics | None",
        recorder: "Recorder | None",
    ) -> None:
        self._tiers, self._metrics, self._recorder = tiers, metrics, recorder
        self._usage = usage_of(producer.allocator)
        self._failed = self._expired = self._queries = self._hits = 0
        if metrics is not None:
            metrics.watch(producer.engine_id, self._counts)

    def begin(self) -> None:
        """Count arrivals from now on."""
        if self._recorder is not None:
            self._recorder.begin(time.monotonic())

    def ended(self, ended: Ended) -> None:
        """Take note of a request at its end."""
        # First, so that what a scrape tells of has been written down.
        if self._recorder is not None:
            self._recorder.record(ended)
        row, request = ended.row, ended.request
        if request is not None and self._tiers is not None:
            self._queries += row.prompt_tokens
            self._hits += row.cached_tokens
        if row.error is not None:
            self._failed += 1
            self._expired += request is not None and isinstance(request.error, DeadlineExceeded)
        elif self._metrics is not None:
            self._metrics.transferred(nbytes=row.nbytes, descriptors=row.num_runs, move_s=row.move_s, post_s=row.post_s)

    def _counts(self) -> "NodeCounts":
        from pdtx.metrics import NodeCounts

        # Parts before their wholes, which grow meanwhile, and grow first.
        return NodeCounts(
            expired=self._expired,
            failed=self._failed,
            hits=self._hits,
            queries=self._queries,
            cache_usage=self._usage(),
            tiers=tier_bytes(self._tiers),
        )


def open_recorder(
    path: Path | None,
    producer: KVProducer,
    stack: ExitStack,
    *,
    block_size: int,
    chunk_size: int,
    max_num_seqs: int,
    with_tokens: bool,
) -> "Recorder | None":
    """Begin to record, closed by stack, if --capture or PDTX_CAPTURE asks for it. Raises InputError."""
    named = os.environ.get(CAPTURE_VARIABLE)
    if path is None and not named:
        return None
    from pdtx.replay.recorder import Recorder

    recorder = Recorder(
        path or Path(named or ""),
        producer,
        block_size=block_size,
        chunk_size=chunk_size,
        max_num_seqs=max_num_seqs,
        with_tokens=with_tokens,
        numbered=path is None,
    )
    stack.callback(recorder.close)
    note(f"recording into {recorder.path}")
    return recorder
