"""Copies of blocks between two caches of one host: one plan for all blocks of a buffer, done by the C library."""

from dataclasses import dataclass

import numpy as np
import torch

from pdtx.cache import KVCaches, PagedBuffer
from pdtx.errors import TierError
from pdtx.native import Memory, library
from pdtx.parallel import RankTransfer, transfers
from pdtx.plan import Endpoint, PlanCache, TransferPlan
from pdtx.plan.runs import Int64s, Runs
from pdtx.ranges import copy_ranges
from pdtx.tiers.base import Bools, Side

PAST_CACHES = 8 << 20
"""Bytes copied in a row from which on they go past the processor's caches."""


@dataclass(frozen=True)
class Pair:
    """A buffer on both sides, and what its ranks give each other."""

    src: PagedBuffer
    dst: PagedBuffer
    moves: tuple[RankTransfer, ...]


class Copier:
    """Copies blocks of groups from one cache to another, whatever their layouts, block sizes and ranks.

    Both have the same groups, and buffers of the same layers. Safe to use from several threads.
    """

    def __init__(self, src: KVCaches, dst: KVCaches) -> None:
        """Raise TierError where the sides' groups or buffers differ, ParallelError where their ranks cannot share."""
        names = [tuple(group.name for group in cache.groups) for cache in (src, dst)]
        if names[0] != names[1]:
            raise TierError(f"groups differ: {', '.join(names[0])} and {', '.join(names[1])}; blocks cannot be copied")
        self._src, self._dst, self._plans = src, dst, PlanCache()
        self._devices = {cache.device for cache in (src, dst) if cache.device.type == "cuda"}
        self._pairs: list[list[Pair]] = [[] for _ in src.groups]
        for ours in src.buffers:
            theirs = next((buffer for buffer in dst.buffers if buffer.name == ours.name), None)
            if theirs is None or (theirs.layer_names, theirs.group) != (ours.layer_names, ours.group):
                raise TierError(f"buffer {ours.name} has not the same layers and group on both sides")
            if (src.tp_size > 1 or dst.tp_size > 1) and ours.sharding != theirs.sharding:
                raise TierError(f"ranks share the states of buffer {ours.name} in another way on either side")
            moves = transfers(ours.spec, src.tp_size, dst.tp_size, ours.sharding)
            self._pairs[ours.group].append(Pair(ours, theirs, moves))

    def copy(self, group: int, src_table: Int64s, dst_table: Int64s, positions: range) -> tuple[int, int]:
        """Copy positions of a group of all its buffers, ranks and layers; return the bytes and the runs.

        src_table, dst_table: blocks of either side, for positions 0, 1, 2, ... Returns when the bytes are there.
        Raises PlanError for blocks that cannot be; nothing of that buffer was written then.
        """
        nbytes = num_runs = 0
        for pair in self._pairs[group]:
            for move in pair.moves:
                plan = self._plan(pair, move, src_table, dst_table, positions)
                regions_of(pair, move).copy(plan.flat, past_caches=plan.nbytes > PAST_CACHES)
                nbytes, num_runs = nbytes + plan.nbytes, num_runs + plan.num_runs
        self._finish()
        return nbytes, num_runs

    def _finish(self) -> None:
        """Wait until what was copied is there."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()

    def _plan(
        self, pair: Pair, move: RankTransfer, src_table: Int64s, dst_table: Int64s, positions: range
    ) -> TransferPlan:
        src, dst = Endpoint.of(pair.src.layout, src_table), Endpoint.of(pair.dst.layout, dst_table)
        return self._plans.plan(src, dst, positions, boxes=move.boxes)


class Regions:
    """The memory of a rank on either side, uint8, of one dimension."""

    def __init__(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        self._src, self._dst = src, dst
        on_host = src.device.type == dst.device.type == "cpu"
        self._memories = (_memory(dst), _memory(src)) if on_host else None

    def copy(self, runs: Runs, *, past_caches: bool) -> None:
        """Copy runs, on a device in stream order. past_caches: see Native.copy_runs, on the host."""
        native = library() if self._memories else None
        if native is None or self._memories is None:
            copy_ranges(self._src, runs.source(), self._dst, runs.destination())
        else:
            native.copy_runs(*self._memories, runs.dst, runs.src, runs.nbytes, past_caches=past_caches)


def regions_of(pair: Pair, move: RankTransfer) -> Regions:
    """Return the memory of the ranks that give each other something."""
    return Regions(pair.src.ranks[move.src_rank].memory, pair.dst.ranks[move.dst_rank].memory)


def _memory(region: torch.Tensor) -> Memory:
    return Memory(region.data_ptr(), region.numel())


def compact(side: Side, group: int, places: Int64s, block_tokens: int) -> tuple[Int64s, Bools]:
    """Return the side's blocks for places of a group, one place after another, and which places have all of theirs.

    block_tokens: of the tier. The table: int64, shape (len(places) * k,), where k blocks of the side make one of the
    tier; whole: shape (len(places),), False where a block is the null block or the side's table ends before it.
    Raises TierError where tier blocks are no whole number of the side's, or several places ask for a group's one state.
    """
    ours, table = side.cache.groups[group], side.tables[group]
    if ours.counts_tokens:
        count, rest = divmod(block_tokens, ours.block_size)
        if rest or not count:
            raise TierError(
                f"group {ours.name} has blocks of {ours.block_size} tokens, of which none or several make one of "
                f"{block_tokens}; tiers need a multiple"
            )
        at = places[:, None] * count + np.arange(count, dtype=np.int64)
    else:
        if not side.of_tier and len(places) > 1:
            raise TierError(f"group {ours.name} has one state a request, not {len(places)}; ask for one place")
        at = (places if side.of_tier else np.zeros_like(places))[:, None]
    inside = at < len(table)
    blocks: Int64s = np.where(inside, table[np.where(inside, at, 0)], 0) if len(table) else np.zeros_like(at)
    whole: Bools = np.all(blocks > 0, axis=1)
    return blocks.reshape(-1), whole


def tier_positions(cache: KVCaches, group: int, num_blocks: int) -> range:
    """Return the positions of so many blocks of a tier."""
    return range(num_blocks * cache.groups[group].block_size)
