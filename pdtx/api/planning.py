"""plan: which bytes of one cache go where in another."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import SupportsIndex

import numpy as np

from pdtx.api.specs import ModelSpec
from pdtx.arguments import integer
from pdtx.cache import KVCaches
from pdtx.errors import InputError
from pdtx.kvspec import KVCacheSpec, StateSharding
from pdtx.layout import Layout
from pdtx.parallel import Box, RankTransfer, transfers
from pdtx.plan import Endpoint, TransferPlan, build_plan
from pdtx.plan.runs import Int64s, Slices
from pdtx.protocol import MAX_COUNT

Blocks = Sequence[int] | Int64s


@dataclass(frozen=True)
class RankPlan:
    """What one rank of the source sends to one rank of the destination. plan: see pdtx.plan.TransferPlan."""

    source_rank: int
    destination_rank: int
    plan: TransferPlan

    @property
    def num_runs(self) -> int:
        """Runs: pieces that are contiguous on both sides."""
        return self.plan.num_runs

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.plan.nbytes

    @cached_property
    def descriptors(self) -> Int64s:
        """The runs as (source offset, destination offset, bytes): int64, shape (num_runs, 3).

        Offsets count from the start of each rank's memory.
        """
        runs = self.plan.flat
        return np.stack((runs.src, runs.dst, runs.nbytes), axis=1)

    def source_ranges(self) -> Slices:
        """The source's ranges in the order in which their bytes are sent."""
        return self.plan.source()

    def destination_ranges(self) -> Slices:
        """The destination's ranges in the same order."""
        return self.plan.destination()


@dataclass(frozen=True)
class Plan:
    """What a request moves between all ranks. ranks: by destination rank, then source rank."""

    ranks: tuple[RankPlan, ...]

    @property
    def num_runs(self) -> int:
        """Runs of all ranks."""
        return sum(one.num_runs for one in self.ranks)

    @property
    def nbytes(self) -> int:
        """Bytes of all ranks."""
        return sum(one.nbytes for one in self.ranks)

    @property
    def descriptors(self) -> Int64s:
        """Those of the only pair of ranks. Raises InputError where there are several: each has memory of its own."""
        if len(self.ranks) != 1:
            raise InputError(f"the plan is for {len(self.ranks)} pairs of ranks; take descriptors from each of .ranks")
        return self.ranks[0].descriptors


def plan(
    source: Layout | KVCaches,
    source_blocks: Blocks,
    destination: Layout | KVCaches,
    destination_blocks: Blocks,
    tokens: SupportsIndex | range,
    *,
    source_tp: int | None = None,
    destination_tp: int | None = None,
    spec: ModelSpec | KVCacheSpec | None = None,
    layers: range | None = None,
    merge: bool = True,
) -> Plan:
    """Plan the copy of a request's tokens (how many, or which positions) from one layout to another.

    source, destination: layouts of one rank each, see pdtx.layout(); or caches of one buffer, which know their own
    tp sizes and spec. *_blocks: block tables, in the order of tokens; block 0 is the null block.
    *_tp: tensor-parallel sizes, 1 where nothing says otherwise; otherwise spec, of a layer of the whole model, says how
    ranks share it. layers: of the source, by default all, to the same of the destination. merge: join runs that touch
    on both sides.
    Raises PlanError where the two cannot be matched, LayoutError, ParallelError, InputError.
    """
    here, there = (
        _Side.of(source, source_tp, spec, "source"),
        _Side.of(destination, destination_tp, spec, "destination"),
    )
    positions = tokens if isinstance(tokens, range) else range(integer("tokens", tokens, 0, MAX_COUNT))
    ends = Endpoint.of(here.layout, source_blocks), Endpoint.of(there.layout, destination_blocks)
    return Plan(
        tuple(
            RankPlan(
                move.src_rank,
                move.dst_rank,
                build_plan(*ends, positions, layers, merge=merge, boxes=move.boxes),
            )
            for move in _moves(here, there, spec)
        )
    )


@dataclass(frozen=True)
class _Side:
    layout: Layout
    tp_size: int
    spec: KVCacheSpec | None
    sharding: StateSharding | None = None

    @classmethod
    def of(
        cls, given: Layout | KVCaches, tp_size: int | None, spec: ModelSpec | KVCacheSpec | None, name: str
    ) -> "_Side":
        if isinstance(given, Layout):
            return cls(given, 1 if tp_size is None else tp_size, spec.spec if isinstance(spec, ModelSpec) else spec)
        if len(given.buffers) != 1:
            names = ", ".join(buffer.name for buffer in given.buffers)
            raise InputError(f"the {name} has the buffers {names}; plan them one by one, by their layouts")
        (buffer,) = given.buffers
        if tp_size not in (None, buffer.tp_size) or spec is not None:
            raise InputError(
                f"the {name} is a cache, which knows its spec and its tp size, {buffer.tp_size}; leave both out"
            )
        return cls(buffer.layout, buffer.tp_size, buffer.spec, buffer.sharding)


def _moves(here: _Side, there: _Side, given: ModelSpec | KVCacheSpec | None) -> tuple[RankTransfer, ...]:
    if here.tp_size == there.tp_size == 1:
        return (RankTransfer(0, 0, (Box(),)),)
    spec = there.spec or here.spec
    if spec is None:
        raise InputError("ranks share a layer as its spec says: give spec, of a layer of the whole model")
    sharding = given.sharding if isinstance(given, ModelSpec) else there.sharding or here.sharding
    if any(one not in (None, sharding) for one in (here.sharding, there.sharding)):
        raise InputError("the two caches share states over ranks in different ways; make both for one model")
    return transfers(spec, here.tp_size, there.tp_size, sharding)
