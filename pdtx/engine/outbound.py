"""The producer's record of one request: its blocks, its grant, what is on its way, and the times that took."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from pdtx.cache import GroupBlocks
from pdtx.engine.control_thread import ControlThread, Owned
from pdtx.engine.matching import BufferMatch
from pdtx.engine.picking import Picks
from pdtx.engine.route import Route
from pdtx.engine.states import OutboundState, check_transition
from pdtx.engine.timing import Interval, TransferTimes
from pdtx.errors import CacheError, PdtxError
from pdtx.parallel import RankTransfer
from pdtx.plan.runs import Int64s
from pdtx.protocol import Finished, Grant, TransferRequest, encode
from pdtx.transports import TransferHandle, TransferKey
from pdtx.units import ceil_div

MAX_NAMED_BLOCKS = 16
"""Blocks that one message names."""


@dataclass(frozen=True)
class ReadySlice:
    """What a model has computed: tokens start..stop of one layer of a buffer. fence: returns once it is written."""

    buffer: int
    layer: int
    start: int
    stop: int
    fence: Callable[[], None]


@dataclass(eq=False)
class OutboundRequest(Owned):
    """One request on its way out. Changed by the producer's control thread alone; anybody may read it.

    token_ids: of the prompt; empty where the caller has named their number only.
    blocks: None until they are taken. sources: a block table for each of the producer's groups, 0 where there is no
    block. device: the cache's.
    deadline: time.monotonic() by which the consumer must have finished it.
    error: why it failed, finished: how it ended well; one of them is set once it has an outcome.
    """

    request_id: str
    num_tokens: int
    deadline: float
    token_ids: Sequence[int] = ()
    max_tokens: int = 0
    ignore_eos: bool = False
    device: torch.device = field(default=torch.device("cpu"), repr=False)
    encoded_ask: bytes = field(default=b"", repr=False)  # until it has been sent
    blocks: GroupBlocks | None = None
    sources: tuple[Int64s, ...] = ()
    destinations: tuple[Int64s, ...] = ()  # the granted tables, for each of the consumer's groups
    begun: float = field(default_factory=time.monotonic)
    computed: float = float("nan")
    first_token: int | None = None
    grant: Grant | None = None
    finished: Finished | None = None
    error: PdtxError | None = None
    waiting: list[ReadySlice] = field(default_factory=list)  # until the grant comes
    unsent: int = 0  # pieces that are computed and not acknowledged
    posted: dict[TransferKey, TransferHandle] = field(default_factory=dict)  # those of them that the transport has
    reading: int = 0  # readers of its blocks beside transfers: reference data for the consumer
    nbytes: int = 0
    num_runs: int = 0
    picks: Picks = field(default_factory=Picks)
    prepare: float = 0.0
    posts: list[Interval] = field(default_factory=list)
    moves: list[Interval] = field(default_factory=list)
    state: OutboundState = OutboundState.NEW
    returned: bool = False  # whether its blocks were given back
    owner: ControlThread | None = field(default=None, repr=False)  # last: from then on changes are checked

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """The block tables, int64, on the cache's device.

        Copied there anew, by who asks: that may have to wait for all that the device does, as no event may.
        """
        return tuple(torch.tensor(table, device=self.device) for table in self.sources)

    @property
    def own_blocks(self) -> GroupBlocks:
        """Its blocks. Raises CacheError for a request that has none yet."""
        if self.blocks is None:
            raise CacheError(f"request {self.request_id} has no blocks")
        return self.blocks

    @property
    def has_outcome(self) -> bool:
        """Whether it is known how the request ended; its blocks may still be read."""
        return self.error is not None or self.finished is not None

    @property
    def is_computed(self) -> bool:
        """Whether all of it has been computed."""
        return self.computed == self.computed

    @property
    def completed(self) -> bool:
        """Whether all of it has been delivered."""
        return self.state in (OutboundState.COMPLETED, OutboundState.RELEASED) or self.finished is not None

    @property
    def phase(self) -> str:
        """What it waits for, for messages."""
        released = self.state is OutboundState.RELEASED
        return (OutboundState.COMPLETED if released else self.state).value

    @property
    def times(self) -> TransferTimes:
        """How long the transfers took so far."""
        return TransferTimes.of(self.prepare, self.posts, self.moves, self.computed)

    def encode_ask(self) -> None:
        """Make the message that asks the consumer for a grant. Raises ProtocolError if no message can carry that.

        It takes as long as the prompt is long, so that the caller's thread does it before the request has an owner.
        """
        ask = TransferRequest(
            request_id=self.request_id,
            num_tokens=self.num_tokens,
            token_ids=list(self.token_ids),
            max_tokens=self.max_tokens,
            deadline_s=max(0.0, self.deadline - time.monotonic()),
            ignore_eos=self.ignore_eos,
        )
        self.encoded_ask = encode(ask)

    def go(self, state: OutboundState) -> None:
        """Change the state. Raises IllegalTransition."""
        check_transition(self.request_id, self.state, state)
        self.state = state


@dataclass(frozen=True)
class Piece:
    """A part of a request that is computed: what goes from one rank to another, of the consumer's layers at positions.

    route: the session's, which matches the caches and has the data connection.
    fence: returns once the device has really written it.
    """

    request: OutboundRequest
    route: Route
    match: BufferMatch
    move: RankTransfer
    layers: range
    positions: range
    fence: Callable[[], None]

    @property
    def key(self) -> TransferKey:
        """What the transport and the consumer call it."""
        return self.match.key(self.request.request_id, self.move, self.layers, self.positions)

    def __str__(self) -> str:
        size = self.match.producer.layout.block_size
        table = self.request.sources[self.match.producer_group]
        blocks = table[self.positions.start // size : ceil_div(self.positions.stop, size)].tolist()
        more = ", ..." if len(blocks) > MAX_NAMED_BLOCKS else ""
        named = ", ".join(map(str, blocks[:MAX_NAMED_BLOCKS])) + more
        return f"{self.key}, {len(blocks)} blocks of rank {self.move.src_rank} ({named})"
