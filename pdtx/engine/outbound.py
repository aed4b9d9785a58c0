"""The producer's record of one request: its blocks, what each process of the consumer gets of it, and the times."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pdtx.cache import GroupBlocks
from pdtx.engine.control_thread import ControlThread, Owned
from pdtx.engine.picking import Picks
from pdtx.engine.states import OUTBOUND, LegState, OutboundLife, OutboundState, check_transition
from pdtx.engine.timing import Interval, TransferTimes
from pdtx.errors import CacheError, PdtxError
from pdtx.plan.runs import Int64s
from pdtx.protocol import Finished, Grant, TransferRequest, encode

if TYPE_CHECKING:
    from pdtx.engine.outbound_leg import Leg


@dataclass(frozen=True)
class ReadySlice:
    """What a model has computed: tokens start..stop of one layer of a buffer. fence: returns once it is written."""

    buffer: int
    layer: int
    start: int
    stop: int
    fence: Callable[[], None]


_OF_LEGS = {
    LegState.NEW: OutboundState.NEW,
    LegState.ASKED: OutboundState.ASKED,
    LegState.GRANTED: OutboundState.COMPUTING,
    LegState.COMPLETED: OutboundState.COMPLETED,
    LegState.RELEASED: OutboundState.RELEASED,
    LegState.FINISHED: OutboundState.RELEASED,
}


@dataclass(eq=False)
class OutboundRequest(Owned):
    """One request on its way out. Changed by the producer's control thread alone; anybody may read it.

    token_ids: of the prompt; empty where the caller has named their number only.
    blocks: None until they are taken. sources: a block table for each of the producer's groups, 0 where there is no
    block. device: the cache's.
    legs: one for each process of the consumer. dropped: those of processes that were lost while they read what is
    offered. ready: all that has been computed.
    deadline: time.monotonic() by which the consumer must have finished it.
    lease_s: of an offered request, how long it is held for whoever pulls it; 0 for one that is not offered.
    lease_end: time.monotonic() at which that is over, from when all of it was computed. generation: names the offer.
    error: why it failed, finished: how it ended well; one of them is set once it has an outcome.
    """

    request_id: str
    num_tokens: int
    deadline: float
    token_ids: Sequence[int] = ()
    max_tokens: int = 0
    ignore_eos: bool = False
    attempt: int = 0
    lease_s: float = 0.0
    generation: int = 0
    device: torch.device = field(default=torch.device("cpu"), repr=False)
    encoded_ask: bytes = field(default=b"", repr=False)  # for the first attempt of all legs
    blocks: GroupBlocks | None = None
    sources: tuple[Int64s, ...] = ()
    begun: float = field(default_factory=time.monotonic)
    computed: float = float("nan")
    first_token: int | None = None
    lease_end: float = float("inf")
    finished: Finished | None = None
    error: PdtxError | None = None
    legs: "list[Leg]" = field(default_factory=list, repr=False)
    dropped: "list[Leg]" = field(default_factory=list, repr=False)
    ready: list[ReadySlice] = field(default_factory=list, repr=False)
    picks: Picks = field(default_factory=Picks)
    prepare: float = 0.0
    posts: list[Interval] = field(default_factory=list)
    moves: list[Interval] = field(default_factory=list)
    life: OutboundLife = OutboundLife.OPEN
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

    # -- over all processes of the consumer ---------------------------------------------------------------------------

    @property
    def grant(self) -> Grant | None:
        """What the consumer's first process has granted."""
        return self.legs[0].grant if self.legs else None

    @property
    def destinations(self) -> tuple[Int64s, ...]:
        """The tables that the consumer's first process has granted, one for each of its groups."""
        return self.legs[0].destinations if self.legs else ()

    @property
    def all_legs(self) -> "Iterator[Leg]":
        """legs, and those that were dropped."""
        yield from self.legs
        yield from self.dropped

    @property
    def nbytes(self) -> int:
        """Bytes that were handed to the transport; of what was sent again they count again."""
        return sum(leg.nbytes for leg in self.all_legs)

    @property
    def num_runs(self) -> int:
        """Runs that were handed to the transport."""
        return sum(leg.num_runs for leg in self.all_legs)

    @property
    def unsent(self) -> int:
        """Pieces that are computed and have not arrived."""
        return sum(leg.unsent for leg in self.all_legs)

    @property
    def reading(self) -> int:
        """Readers of its blocks beside transfers: reference data for the consumer."""
        return sum(leg.reading for leg in self.all_legs)

    @property
    def state(self) -> OutboundState:
        """How far it is."""
        if self.life is not OutboundLife.OPEN:
            return OutboundState[self.life.name]
        if not self.legs:
            return OutboundState.OFFERED if self.is_computed else OutboundState.COMPUTING
        least = _OF_LEGS[min((leg.state for leg in self.legs), key=lambda state: state.value)]
        return OutboundState.SENDING if least is OutboundState.COMPUTING and self.is_computed else least

    @property
    def has_outcome(self) -> bool:
        """Whether it is known how the request ended; its blocks may still be read."""
        return self.error is not None or self.finished is not None

    @property
    def is_computed(self) -> bool:
        """Whether all of it has been computed."""
        return self.computed == self.computed

    @property
    def phase(self) -> str:
        """What it waits for, for messages."""
        state = self.state
        return str((OutboundState.COMPLETED if state is OutboundState.RELEASED else state).value)

    @property
    def times(self) -> TransferTimes:
        """How long the transfers took so far."""
        return TransferTimes.of(self.prepare, self.posts, self.moves, self.computed)

    def ask(self, attempt: int, token_ids: Sequence[int]) -> TransferRequest:
        """Return the message that asks the consumer for a grant."""
        return TransferRequest(
            request_id=self.request_id,
            num_tokens=self.num_tokens,
            token_ids=list(token_ids),
            max_tokens=self.max_tokens,
            deadline_s=max(0.0, self.deadline - time.monotonic()),
            ignore_eos=self.ignore_eos,
            attempt=attempt,
            lease_s=self.lease_s,
        )

    def encode_ask(self) -> None:
        """Encode the first ask of all legs. Raises ProtocolError if no message can carry that.

        It takes as long as the prompt is long, so that the caller's thread does it before the request has an owner.
        """
        self.encoded_ask = encode(self.ask(self.attempt, self.token_ids))

    def go(self, life: OutboundLife) -> None:
        """Go on. Raises IllegalTransition."""
        check_transition(self.request_id, OUTBOUND, self.life, life)
        self.life = life
