"""What a node tells Prometheus about itself."""

from pdtx.metrics.node import NodeCounts, NodeMetrics, TierBytes

__all__ = ["NodeCounts", "NodeMetrics", "TierBytes"]
