"""Tiers: other memories, and disks, that blocks are kept in under keys and come back from, by the same plans."""

from pdtx.tiers.base import Failed, Fence, Lease, Moved, Side, Tier, written
from pdtx.tiers.counters import Count, GroupUsage, TierUsage
from pdtx.tiers.keys import PrefixKeys, prefix_keys

__all__ = [
    "Count",
    "Failed",
    "Fence",
    "GroupUsage",
    "Lease",
    "Moved",
    "PrefixKeys",
    "Side",
    "Tier",
    "TierUsage",
    "prefix_keys",
    "written",
]
