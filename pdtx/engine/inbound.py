"""The consumer's record of one request: what was granted, what has arrived, what is missing."""

import time
from dataclasses import dataclass, field

from pdtx.cache import CallerTables, GroupBlocks
from pdtx.engine.control_thread import ControlThread, Owned
from pdtx.engine.landing import Landing
from pdtx.engine.matching import Match
from pdtx.engine.states import InboundState, check_transition
from pdtx.engine.waking import Mailbox
from pdtx.errors import PdtxError, VerificationError
from pdtx.plan.runs import Int64s
from pdtx.protocol import Complete, Reference, TransferRequest
from pdtx.tiers.prefix import Fetched


@dataclass(frozen=True, eq=False)
class Session:
    """One peer, a producer or who reads a tier: its side-channel address, data token, and how the caches match."""

    session_id: str
    peer: bytes = field(repr=False)
    engine_id: str
    token: bytes = field(repr=False)
    match: Match = field(repr=False)


@dataclass(frozen=True)
class GroupNeed:
    """What a request needs of one group.

    positions: what is moved of the prompt. blocks: the places of the block table that need blocks, for the prompt and
    the tokens to come; before them it holds the null block. granted: those of them that the producer may write.
    """

    positions: range
    blocks: range
    granted: range


@dataclass(eq=False)
class Expectation(Owned):
    """A request that the caller has given block tables for. Changed by the consumer's control thread alone.

    cached_tokens: of its beginning, that are in the blocks already. needs: for each group, see needs_of_tables().
    clean: its other blocks are full of poison, where that is asked for, so that they can be granted. error: why it is
    expected no more.
    """

    request_id: str
    num_tokens: int
    blocks: CallerTables
    cached_tokens: int
    deadline: float
    needs: tuple[GroupNeed, ...] = ()
    begun: float = field(default_factory=time.monotonic)
    clean: bool = False
    error: PdtxError | None = None
    owner: ControlThread | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Arrived:
    """How an expected request ended; nothing is written into its blocks any more.

    error: None where all of it is there, and is the producer's where the consumer verifies. request: None where no
    producer has asked for it.
    """

    request_id: str
    error: PdtxError | None
    request: "InboundRequest | None" = field(repr=False)

    @property
    def wrong(self) -> int:
        """Elements that verification found wrong."""
        return self.error.wrong if isinstance(self.error, VerificationError) else 0


@dataclass(eq=False)
class InboundRequest(Owned):
    """One request on its way in. Changed by the consumer's control thread alone; anybody may read it.

    needs, tables: for each group; tables are the block tables, int64, with 0 where there is no block.
    landing: what payloads may write, and what has arrived.
    fetched: what of the prompt came from this node's tiers, so that arrivals do not expect it.
    verified: whether every element was found to be right. error: why it failed, once it has.
    expected: whether its block tables are the caller's.
    """

    session: Session
    ask: TransferRequest
    needs: tuple[GroupNeed, ...]
    landing: Landing
    deadline: float
    begun: float = field(default_factory=time.monotonic)
    blocks: GroupBlocks | None = None
    tables: tuple[Int64s, ...] = ()
    state: InboundState = InboundState.QUEUED
    fetched: Fetched = field(default_factory=Fetched)
    noticed_bytes: int = 0
    complete: Complete | None = None
    verified: bool = False
    error: PdtxError | None = None
    expected: bool = False
    references: "Mailbox[Reference | PdtxError]" = field(default_factory=Mailbox)
    owner: ControlThread | None = field(default=None, repr=False)  # last: from then on changes are checked

    @property
    def request_id(self) -> str:
        """The producer's name for the request."""
        return self.ask.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.ask.num_tokens

    @property
    def has_ended(self) -> bool:
        """Whether it is known how the request ended; its blocks may still be written."""
        return self.state in (InboundState.DRAINING, InboundState.ENDED)

    @property
    def received_bytes(self) -> int:
        """Bytes of payloads that have arrived."""
        return self.landing.received_bytes

    @property
    def received_runs(self) -> int:
        """Runs that payloads were placed as."""
        return self.landing.received_runs

    def take(self, blocks: GroupBlocks) -> None:
        """Fill the block tables with blocks, which are as many as needs say."""
        self.blocks = blocks
        self.tables = blocks.tables([need.blocks for need in self.needs])

    def go(self, state: InboundState) -> None:
        """Change the state. Raises IllegalTransition."""
        check_transition(self.request_id, self.state, state)
        self.state = state

    def granted(self, group: int) -> Int64s:
        """A group's block table as far as the producer may write it, the null block where it may not."""
        return self.tables[group][: self.needs[group].granted.stop]

    def missing(self) -> str | None:
        """Say what has not arrived, see Arrivals."""
        return self.landing.missing()

    def lacking(self) -> str:
        """Say what it waits for: payloads, notices of them, or the completion."""
        return self.missing() or self.landing.unnoticed() or "all has arrived, but not the notice that it is complete"
