"""A node's metrics: histograms of its transfers, and counts that are read from its engine when somebody asks.

Names are vLLM's behind `pdtx_`, so that dashboards need little change; docs/metrics.md lists them.
"""

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pdtx.address import join_address
from pdtx.errors import AddressInUse, InputError

if TYPE_CHECKING:
    from socketserver import BaseServer

    from prometheus_client import Histogram, Metric

BYTES_BUCKETS = tuple(float(1 << power) for power in range(10, 33))
"""1 KiB to 4 GiB."""
SECONDS_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_DESCRIPTOR_BUCKETS = tuple(float(10**power) for power in range(8))
# A decode node places payloads without knowing where they lay.
_DESCRIPTORS = {
    "prefill": "Runs of a request, contiguous on both sides.",
    "decode": "Pieces of a request, contiguous in this node's cache.",
}
_LABELS = ("engine_id", "role", "transport")
_TAKEN = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)


@dataclass(frozen=True)
class TierBytes:
    """Bytes that one tier has given (load) and taken (store) since its start."""

    name: str
    load: int
    store: int


@dataclass(frozen=True)
class NodeCounts:
    """What a node's engine and tiers have counted since the start.

    failed: requests; expired: those of them that a deadline ended. cache_usage: share of the cache's blocks that
    requests have, 0 to 1. queries: tokens of prompts that tiers were asked for; hits: those that they had.
    """

    failed: int = 0
    expired: int = 0
    cache_usage: float = 0.0
    queries: int = 0
    hits: int = 0
    tiers: Sequence[TierBytes] = field(default=())


class NodeMetrics:
    """The metrics of one node, in a registry of their own.

    role: prefill or decode. transport: the mover. Raises InputError where prometheus_client is not installed.
    """

    def __init__(self, role: Literal["prefill", "decode"], transport: str) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ImportError:
            raise InputError("metrics need prometheus_client; pip install 'pdtx[metrics]'") from None
        self._role, self._transport = role, transport
        self.registry: CollectorRegistry = CollectorRegistry()
        self._values: tuple[str, ...] = ()
        self._counts: Callable[[], NodeCounts] | None = None
        self._asking = threading.Lock()
        self._histograms: dict[str, Histogram] = {}
        self._server: BaseServer | None = None
        self._thread: threading.Thread | None = None

    def serve(self, host: str, port: int) -> str:
        """Answer scrapes at http://HOST:PORT/metrics, on a thread; return HOST:PORT. Port 0 takes any.

        Raises AddressInUse for an address that is taken or not ours, InputError for a host that is none.
        """
        from prometheus_client import start_http_server

        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            where = join_address(host, port)
            if error.errno in _TAKEN:
                raise AddressInUse(
                    f"no metrics at {where}: {error.strerror}; choose another --metrics-port, or --metrics-host"
                ) from None
            raise InputError(f"no metrics at {where}: {error.strerror or error}") from None
        return join_address(host, int(self._server.server_address[1]))

    def watch(self, engine_id: str, counts: Callable[[], NodeCounts]) -> None:
        """Begin to tell of a node. counts: read at every scrape, on another thread."""
        from prometheus_client import Histogram

        self._values, self._counts = (engine_id, self._role, self._transport), counts
        for name, what, buckets in (
            ("pdtx_xfer_time_seconds", "Time in which a request's transfers were under way.", SECONDS_BUCKETS),
            (
                "pdtx_post_time_seconds",
                "Time in which a request's bytes were handed to the transport.",
                SECONDS_BUCKETS,
            ),
            ("pdtx_bytes_transferred", "Bytes of a request that were moved.", BYTES_BUCKETS),
            ("pdtx_num_descriptors", _DESCRIPTORS[self._role], _DESCRIPTOR_BUCKETS),
        ):
            self._histograms[name] = Histogram(name, what, _LABELS, buckets=buckets, registry=self.registry)
        self.registry.register(self)

    def transferred(
        self, *, nbytes: int, descriptors: int, move_s: float | None = None, post_s: float | None = None
    ) -> None:
        """Count one request that has been moved. descriptors: runs on the prefill node, pieces of its cache on the
        decode node. move_s, post_s: None on the side that does not know them.
        """
        for name, value in (
            ("pdtx_xfer_time_seconds", move_s),
            ("pdtx_post_time_seconds", post_s),
            ("pdtx_bytes_transferred", nbytes),
            ("pdtx_num_descriptors", descriptors),
        ):
            if value is not None and name in self._histograms:
                self._histograms[name].labels(*self._values).observe(value)

    def collect(self) -> "Iterator[Metric]":
        """Yield what is counted elsewhere, nothing after close(); prometheus_client calls it at every scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._asking:
            if self._counts is None:
                return
            counts = self._counts()
        usage = GaugeMetricFamily(
            "pdtx_kv_cache_usage_perc", "Share of the cache's blocks that requests have, 0 to 1.", labels=_LABELS
        )
        usage.add_metric(self._values, counts.cache_usage)
        yield usage
        for name, what, value in (
            ("pdtx_num_failed_transfers", "Requests that failed.", counts.failed),
            ("pdtx_num_kv_expired_reqs", "Requests that a deadline ended.", counts.expired),
            ("pdtx_external_prefix_cache_queries", "Tokens of prompts that tiers were asked for.", counts.queries),
            ("pdtx_external_prefix_cache_hits", "Tokens of prompts that tiers had.", counts.hits),
        ):
            family = CounterMetricFamily(name, what, labels=_LABELS)
            family.add_metric(self._values, value)
            yield family
        for name, what, values in (
            ("pdtx_kv_offload_load_bytes", "Bytes loaded from a tier.", [one.load for one in counts.tiers]),
            ("pdtx_kv_offload_store_bytes", "Bytes stored in a tier.", [one.store for one in counts.tiers]),
        ):
            family = CounterMetricFamily(name, what, labels=(*_LABELS, "tier"))
            for tier, value in zip(counts.tiers, values, strict=True):
                family.add_metric((*self._values, tier.name), value)
            yield family

    def close(self) -> None:
        """Answer no more, and ask the node no more. Idempotent."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        # Scrapes that are under way have threads of their own.
        with self._asking:
            self._counts = None
