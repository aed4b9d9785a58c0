"""A node's metrics from the command line: the port, and what the engine's counters mean."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

from pdtx.cli.common import note

if TYPE_CHECKING:
    from pdtx.cache import GroupAllocator
    from pdtx.cli.tiers import NodeTiers
    from pdtx.metrics import NodeMetrics, TierBytes


def open_metrics(
    port: int | None, host: str, stack: ExitStack, *, role: Literal["prefill", "decode"], mover: str
) -> "NodeMetrics | None":
    """Serve a node's metrics, closed by stack; None where no port is given. Raises as NodeMetrics does."""
    if port is None:
        return None
    from pdtx.metrics import NodeMetrics

    metrics = NodeMetrics(role, mover)
    stack.callback(metrics.close)
    note(f"metrics at http://{metrics.serve(host, port)}/metrics")
    return metrics


def usage_of(allocator: "GroupAllocator") -> Callable[[], float]:
    """Return what tells the share of blocks that are not free, of the fullest group."""

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
