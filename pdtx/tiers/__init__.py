"""Tiers: other memories, and disks, that blocks are kept in under keys and come back from, by the same plans."""

from pdtx.tiers.base import ContentHashes, Failed, Fence, Lease, Moved, Side, Tier, unfenced
from pdtx.tiers.contents import HASH_BYTES, hash_contents, known_contents
from pdtx.tiers.counters import Count, GroupUsage, TierUsage
from pdtx.tiers.cpu import CpuTier
from pdtx.tiers.geometry import tier_caches
from pdtx.tiers.holds import Held, Hold, Holder
from pdtx.tiers.keys import PrefixKeys, fingerprint_of, prefix_keys
from pdtx.tiers.policies import POLICIES
from pdtx.tiers.shelf import Shelf
from pdtx.tiers.shelved import ShelfLease

__all__ = [
    "HASH_BYTES",
    "POLICIES",
    "ContentHashes",
    "Count",
    "CpuTier",
    "Failed",
    "Fence",
    "GroupUsage",
    "Held",
    "Hold",
    "Holder",
    "Lease",
    "Moved",
    "PrefixKeys",
    "Shelf",
    "ShelfLease",
    "Side",
    "Tier",
    "TierUsage",
    "fingerprint_of",
    "hash_contents",
    "known_contents",
    "prefix_keys",
    "tier_caches",
    "unfenced",
]
