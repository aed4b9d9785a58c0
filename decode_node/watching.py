"""What a decode node tells Prometheus of its requests."""

from typing import TYPE_CHECKING

from pdtx.cli.metrics import tier_bytes, usage_of
from pdtx.engine import InboundRequest, KVConsumer

if TYPE_CHECKING:
    from pdtx.cli.tiers import NodeTiers
    from pdtx.metrics import NodeCounts, NodeMetrics


class Watch:
    """Takes note of requests that end well; those that fail the consumer counts. Asked by the metrics' own thread."""

    def __init__(self, consumer: KVConsumer, tiers: "NodeTiers | None", metrics: "NodeMetrics | None") -> None:
        self._consumer, self._tiers, self._metrics = consumer, tiers, metrics
        self._usage = usage_of(consumer.allocator)
        self._queries = self._hits = 0
        if metrics is not None:
            metrics.watch(consumer.engine_id, self._counts)

    def finished(self, request: InboundRequest) -> None:
        """Take note of a request that has ended well."""
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
