"""The consumer's record of one request: who sends it, what was granted, what has arrived, what is missing."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from pdtx.cache import CallerTables, GroupBlocks
from pdtx.engine.arrivals import ExpectedBuffer
from pdtx.engine.control_thread import ControlThread, Owned
from pdtx.engine.failed_before import FailedBefore
from pdtx.engine.landing import Door, Landing
from pdtx.engine.matching import Match
from pdtx.engine.states import INBOUND, InboundState, check_transition
from pdtx.engine.waking import Mailbox
from pdtx.errors import PdtxError, VerificationError
from pdtx.plan.runs import Int64s
from pdtx.protocol import Complete, Reference, TransferRequest
from pdtx.tiers.prefix import Fetched


@dataclass(frozen=True, eq=False)
class Session:
    """One peer, a process of a producer or who reads a tier: its side-channel address, data token, and the match.

    process, incarnation, number, resumes: see Hello.
    """

    session_id: str
    peer: bytes = field(repr=False)
    engine_id: str
    token: bytes = field(repr=False)
    match: Match = field(repr=False)
    process: int = 0
    processes: int = 1
    incarnation: str = ""
    number: int = 0
    resumes: bool = False

    @property
    def name(self) -> str:
        """What messages call the peer."""
        which = f" process {self.process} of {self.processes}" if self.processes > 1 else ""
        return f"{self.engine_id}{which}"


@dataclass(eq=False)
class PrefillEngine:
    """A producer: the sessions with its processes, by their numbers. Changed by the consumer's control thread alone.

    expected: what comes of each of this node's buffers, whichever process sends it.
    """

    engine_id: str
    processes: int
    expected: tuple[ExpectedBuffer, ...] = field(repr=False)
    not_transferred: frozenset[str] = frozenset()
    tp_size: int = 1
    members: dict[int, Session] = field(default_factory=dict)
    failed: FailedBefore = field(default_factory=FailedBefore, repr=False)

    @property
    def whole(self) -> bool:
        """Whether there is a session with each of its processes."""
        return len(self.members) == self.processes

    def sender(self, buffer: int, layer: int, src_rank: int, dst_rank: int) -> Session | None:
        """Return the session with the process that sends a layer from one rank to another; None if it is not there."""
        for session in self.members.values():
            match = session.match.of_consumer.get(buffer)
            if match is not None and match.sends(layer, src_rank, dst_rank):
                return session
        return None


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
    expected no more, reported: whether the caller knows it by an exception.
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
    reported: bool = False
    owner: ControlThread | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Arrived:
    """How an expected or pulled request ended; nothing is written into its blocks any more.

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
class Ask:
    """What one process of the producer has asked for. attempt: see TransferRequest.

    door: what lets its payloads in, once it is granted. suspended: its session was lost, and it may ask again.
    """

    session: Session
    attempt: int
    door: Door | None = None
    complete: Complete | None = None
    suspended: bool = False


@dataclass(eq=False)
class InboundRequest(Owned):
    """One request on its way in. Changed by the consumer's control thread alone; anybody may read it.

    ask: of the process that was the first. asks: of each process of the producer that has asked.
    needs, tables: for each group; tables are the block tables, int64, with 0 where there is no block.
    landing: what payloads may write, and what has arrived.
    fetched: what of the prompt came from this node's tiers, so that arrivals do not expect it.
    complete: what all processes together have said.
    verified: whether every element was found to be right. error: why it failed, once it has.
    expected: whether its block tables are the caller's. pulled: whether this node asked for it.
    """

    engine: PrefillEngine
    ask: TransferRequest
    needs: tuple[GroupNeed, ...]
    landing: Landing
    deadline: float
    asks: dict[int, Ask] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)
    blocks: GroupBlocks | None = None
    tables: tuple[Int64s, ...] = ()
    state: InboundState = InboundState.QUEUED
    fetched: Fetched = field(default_factory=Fetched)
    complete: Complete | None = None
    verified: bool = False
    error: PdtxError | None = None
    expected: bool = False
    pulled: bool = False
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
    def session(self) -> Session:
        """The session with the producer's process that has asked first."""
        return next(iter(self.asks.values())).session

    @property
    def sender(self) -> str:
        """The producer's name, for messages: of its one process, or of all of them."""
        return self.engine.engine_id

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

    @property
    def noticed_bytes(self) -> int:
        """Bytes of payloads that have arrived, and of which the producer knows."""
        return self.landing.noticed_bytes

    def ask_of(self, session: Session) -> Ask | None:
        """Return what a session has asked for."""
        ask = self.asks.get(session.process)
        return ask if ask is not None and ask.session is session else None

    def heard(self) -> Iterator[Ask]:
        """What has been asked for by processes that can be told how it goes on."""
        return (ask for ask in self.asks.values() if not ask.suspended)

    def take(self, blocks: GroupBlocks) -> None:
        """Fill the block tables with blocks, which are as many as needs say."""
        self.blocks = blocks
        self.tables = blocks.tables([need.blocks for need in self.needs])

    def go(self, state: InboundState) -> None:
        """Change the state. Raises IllegalTransition."""
        check_transition(self.request_id, INBOUND, self.state, state)
        self.state = state

    def granted(self, group: int) -> Int64s:
        """A group's block table as far as the producer may write it, the null block where it may not."""
        return self.tables[group][: self.needs[group].granted.stop]

    def missing(self) -> str | None:
        """Say what has not arrived, see Arrivals."""
        return self.landing.missing()

    def lacking(self) -> str:
        """Say what it waits for: payloads, notices of them, the other processes, or the completion."""
        silent = sorted(set(range(self.engine.processes)) - set(self.asks))
        heard = f"nothing was heard of processes {', '.join(map(str, silent))} of {self.engine.processes}"
        found = [self.missing() or self.landing.unnoticed(), heard if silent else None]
        return "; ".join(filter(None, found)) or "all has arrived, but not the notice that it is complete"
