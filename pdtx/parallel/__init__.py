"""Tensor parallelism: which rank holds which heads, and what must move between ranks of two degrees."""

from pdtx.parallel.audit import audit_moves, held_units
from pdtx.parallel.boxes import Box, Cut
from pdtx.parallel.ranks import Source, heads_of_rank, rank_spec, require_sharding, sources, units_of_rank
from pdtx.parallel.transfers import RankTransfer, transfers, unread_ranks

__all__ = [
    "Box",
    "Cut",
    "RankTransfer",
    "Source",
    "audit_moves",
    "heads_of_rank",
    "held_units",
    "rank_spec",
    "require_sharding",
    "sources",
    "transfers",
    "units_of_rank",
    "unread_ranks",
]
