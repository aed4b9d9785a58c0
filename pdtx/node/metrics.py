"""A node's metrics: the port, and what the engine's counters mean."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

from pdtx.node.config import MetricsConfig
from pdtx.node.model import OnNote

if TYPE_CHECKING:
    from pdtx.cache import GroupAllocator
    from pdtx.metrics import NodeMetrics, TierBytes
    from pdtx.node.tiers import NodeTiers


def open_metrics(
    config: MetricsConfig, stack: ExitStack, *, role: Literal["prefill", "decode"], mover: str, on_note: OnNote
) -> "NodeMetrics | None":
    """Serve a node's metrics, closed by stack; None where no port is given. Raises as NodeMetrics does."""
    if config.metrics_port is None:
        return None
    from pdtx.metrics import NodeMetrics

    metrics = NodeMetrics(role, mover)
    stack.callback(metrics.close)
    on_note(f"metrics at http://{metrics.serve(config.metrics_host, config.metrics_port)}/metrics")
    return metrics


def usage_of(allocator: "GroupAllocator") -> Callable[[], float]:
    """Return a function that reads the share of blocks that are not free, of the fullest group."""

    def usage() -> float:
        pairs = zip(allocator.pools, allocator.num_free, strict=True)
        return max(1.0 - free / max(pool.num_blocks - 1, 1) for pool, free in pairs)

    return usage


def tier_bytes(tiers: "NodeTiers | None") -> "list[TierBytes]":
    """Return what each tier has loaded and stored."""
    from pdtx.metrics import TierBytes

    return [
        TierBytes(
            usage.name,
            sum(group.loaded.nbytes for group in usage.groups),
            sum(group.stored.nbytes for group in usage.groups),
        )
        for usage in (tiers.prefix.usages() if tiers is not None else ())
    ]
