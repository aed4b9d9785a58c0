"""The consumer's record of one request: what was granted, what has arrived, what is missing."""

import queue
import time
from dataclasses import dataclass, field
from enum import Enum

from pdtx.cache import GroupBlocks
from pdtx.engine.arrivals import Arrivals
from pdtx.engine.matching import Match
from pdtx.errors import PdtxError
from pdtx.plan.runs import Int64s
from pdtx.protocol import Complete, Reference, TransferRequest
from pdtx.tiers.prefix import Fetched


@dataclass(frozen=True)
class Session:
    """One producer: its side-channel address, data token, and how its cache matches this one."""

    session_id: str
    peer: bytes = field(repr=False)
    engine_id: str
    token: bytes = field(repr=False)
    match: Match = field(repr=False)


class InboundState(Enum):
    """What a request waits for, in words that fit an error message."""

    QUEUED = "free blocks"
    LOADING = "this node's tiers"
    RECEIVING = "payload"
    READY = "the decoder"
    ENDED = "nothing"


@dataclass(frozen=True)
class GroupNeed:
    """What a request needs of one group.

    positions: what is moved of the prompt. blocks: the places of the block table that need blocks, for the prompt and
    the tokens to come; before them it holds the null block. granted: those of them that the producer may write.
    """

    positions: range
    blocks: range
    granted: range


@dataclass
class InboundRequest:
    """One request on its way in. Changed only under the consumer's lock, but for what the decode loop owns.

    needs, tables: for each group; tables are the block tables, int64, with 0 where there is no block.
    fetched: what of the prompt came from this node's tiers, so that arrivals do not expect it.
    verified: whether verify() has found every element to be right.
    """

    session: Session
    ask: TransferRequest
    needs: tuple[GroupNeed, ...]
    arrivals: Arrivals
    deadline: float
    begun: float = field(default_factory=time.monotonic)
    blocks: GroupBlocks | None = None
    tables: tuple[Int64s, ...] = ()
    state: InboundState = InboundState.QUEUED
    fetched: Fetched = field(default_factory=Fetched)
    verified: bool = False
    received_bytes: int = 0
    received_runs: int = 0
    noticed_bytes: int = 0
    complete: Complete | None = None
    error: PdtxError | None = None
    references: "queue.Queue[Reference | PdtxError]" = field(default_factory=queue.Queue)

    @property
    def request_id(self) -> str:
        """The producer's name for the request."""
        return self.ask.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.ask.token_ids)

    def take(self, blocks: GroupBlocks) -> None:
        """Fill the block tables with blocks, which are as many as needs say."""
        self.blocks = blocks
        self.tables = blocks.tables([need.blocks for need in self.needs])

    def granted(self, group: int) -> Int64s:
        """A group's block table as far as the producer may write it, the null block where it may not."""
        return self.tables[group][: self.needs[group].granted.stop]

    def missing(self) -> str | None:
        """Say what has not arrived, see Arrivals."""
        return self.arrivals.missing()

    def lacking(self) -> str:
        """Say what it waits for: payloads, notices of them, or the last word."""
        return self.missing() or self.arrivals.unnoticed() or "all has arrived, but not the word that it is complete"
