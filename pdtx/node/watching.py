"""What nodes record of their requests at their ends: for Prometheus, and a prefill node for a capture."""

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from pdtx.engine import InboundRequest, KVConsumer, KVProducer
from pdtx.errors import ConfigError, DeadlineExceeded
from pdtx.node.config import PrefillConfig
from pdtx.node.metrics import tier_bytes, usage_of
from pdtx.node.model import OnNote
from pdtx.serving import Ended

if TYPE_CHECKING:
    from pdtx.metrics import NodeCounts, NodeMetrics
    from pdtx.node.tiers import NodeTiers
    from pdtx.replay.recorder import Recorder

CAPTURE_VARIABLE = "PDTX_CAPTURE"
"""Set by `pdtx capture` for the nodes of the command that it runs."""


class PrefillWatch:
    """Counts requests that have ended. Called by the scheduler's thread, read by the metrics' own."""

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
        """Count arrivals from now on, if it is the first run."""
        if self._recorder is not None:
            self._recorder.begin(time.monotonic())

    def ended(self, ended: Ended) -> None:
        """Count a request at its end."""
        # First, so that what a scrape counts has been written down.
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


class DecodeWatch:
    """Counts requests that end well; those that fail the consumer counts. Read by the metrics' own thread."""

    def __init__(self, consumer: KVConsumer, tiers: "NodeTiers | None", metrics: "NodeMetrics | None") -> None:
        self._consumer, self._tiers, self._metrics = consumer, tiers, metrics
        self._usage = usage_of(consumer.allocator)
        self._queries = self._hits = 0
        if metrics is not None:
            metrics.watch(consumer.engine_id, self._counts)

    def finished(self, request: InboundRequest) -> None:
        """Count a request that has ended well."""
        if self._tiers is not None:
            self._queries += request.num_tokens
            self._hits += request.fetched.num_tokens
        if self._metrics is not None:
            self._metrics.transferred(nbytes=request.received_bytes, descriptors=request.received_runs)

    def _counts(self) -> "NodeCounts":
        from pdtx.metrics import NodeCounts

        # Parts before their wholes, which grow meanwhile, and grow first.
        return NodeCounts(
            expired=self._consumer.num_expired,
            failed=self._consumer.num_failed,
            hits=self._hits,
            queries=self._queries,
            cache_usage=self._usage(),
            tiers=tier_bytes(self._tiers),
        )


def open_recorder(config: PrefillConfig, producer: KVProducer, stack: ExitStack, on_note: OnNote) -> "Recorder | None":
    """Begin to record, closed by stack, if the config or PDTX_CAPTURE asks for it. Raises InputError."""
    path, variable = config.capture.capture, os.environ.get(CAPTURE_VARIABLE)
    if path is None and not variable:
        if config.capture.capture_tokens:
            raise ConfigError("capture_tokens", "--capture-tokens is for a capture; give --capture FILE too")
        return None
    from pdtx.replay.recorder import Recorder

    recorder = Recorder(
        path or Path(variable or ""),
        producer,
        block_size=config.cache.block_size,
        chunk_size=config.chunk_size,
        max_num_seqs=config.max_num_seqs,
        with_tokens=config.capture.capture_tokens,
        numbered=path is None,
    )
    stack.callback(recorder.close)
    on_note(f"recording into {recorder.path}")
    return recorder
