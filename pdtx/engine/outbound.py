"""The producer's record of one request: its blocks, its grant, what is on its way, and the times that took."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from pdtx.cache import CacheGroup, GroupBlocks
from pdtx.engine.matching import BufferMatch
from pdtx.engine.picking import Picks
from pdtx.engine.timing import Interval, TransferTimes
from pdtx.errors import PdtxError
from pdtx.parallel import RankTransfer
from pdtx.plan.runs import Int64s
from pdtx.protocol import Finished, Grant
from pdtx.transports import TransferKey
from pdtx.units import ceil_div

_MOST_NAMED = 16
"""Blocks that one message names."""


@dataclass
class OutboundRequest:
    """One request on its way out. Everything below `deadline` belongs to the producer.

    tables: a block table for each of the producer's groups, int64, on the cache's device, 0 where there is no block.
    deadline: time.monotonic() by which the consumer must have finished it.
    """

    request_id: str
    token_ids: Sequence[int]
    blocks: GroupBlocks
    tables: tuple[torch.Tensor, ...]
    deadline: float
    sources: tuple[Int64s, ...] = ()  # the tables, for plans
    destinations: tuple[Int64s, ...] = ()  # the granted tables, for each of the consumer's groups
    begun: float = field(default_factory=time.monotonic)
    computed: float = float("nan")
    first_token: int | None = None
    grant: Grant | None = None
    finished: Finished | None = None
    error: PdtxError | None = None
    waiting: list["Piece"] = field(default_factory=list)  # until the grant comes
    unsent: int = 0  # pieces that are computed and not acknowledged
    sending: dict[TransferKey, None] = field(default_factory=dict)  # those of them that the mover has, in order
    nbytes: int = 0
    num_runs: int = 0
    picks: Picks = field(default_factory=Picks)
    prepare: float = 0.0
    posts: list[Interval] = field(default_factory=list)
    moves: list[Interval] = field(default_factory=list)
    released: bool = False
    completed: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)

    @property
    def times(self) -> TransferTimes:
        """How long the transfers took so far."""
        return TransferTimes.of(self.prepare, self.posts, self.moves, self.computed)


@dataclass(frozen=True)
class Piece:
    """A part of a request that is computed: what goes from one rank to another, of the consumer's layers at positions.

    fence: returns once the device has really written it.
    """

    request: OutboundRequest
    match: BufferMatch
    move: RankTransfer
    layers: range
    positions: range
    fence: Callable[[], None]

    def uncached(self, group: CacheGroup, cached_tokens: int) -> "Piece | None":
        """Return the part that who has the first cached_tokens lacks, if there is any. group: the producer's."""
        positions = group.uncached(self.positions, cached_tokens)
        return replace(self, positions=positions) if positions else None

    @property
    def key(self) -> TransferKey:
        """What the mover and the consumer call it."""
        return self.match.key(self.request.request_id, self.move, self.layers, self.positions)

    def __str__(self) -> str:
        size = self.match.producer.layout.block_size
        table = self.request.sources[self.match.producer_group]
        blocks = table[self.positions.start // size : ceil_div(self.positions.stop, size)].tolist()
        named = ", ".join(map(str, blocks[:_MOST_NAMED])) + (", ..." if len(blocks) > _MOST_NAMED else "")
        return f"{self.key}, {len(blocks)} blocks of rank {self.move.src_rank} ({named})"
