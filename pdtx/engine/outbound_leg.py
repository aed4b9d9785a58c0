"""What one process of the consumer gets of a request, and the pieces that it goes in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pdtx.cache import CacheGroup
from pdtx.engine.control_thread import ControlThread, Owned
from pdtx.engine.holding_back import Fence, HoldingBack
from pdtx.engine.matching import BufferMatch, Match
from pdtx.engine.outbound import OutboundRequest, ReadySlice
from pdtx.engine.outbound_session import OutboundSession
from pdtx.engine.route import Route
from pdtx.engine.states import LEG, LegState, check_transition
from pdtx.errors import ProtocolError
from pdtx.parallel import RankTransfer
from pdtx.plan.runs import Int64s
from pdtx.protocol import Finished, Grant, Part
from pdtx.transports import TransferHandle, TransferKey
from pdtx.units import ceil_div

MAX_NAMED_BLOCKS = 16
"""Blocks that one message names."""


@dataclass(eq=False)
class Leg(Owned):
    """A request's way to one process of the consumer. Changed by the producer's control thread alone.

    attempt: of asking for a grant; what is left of an earlier one's pieces only counts for the blocks. route: of the
    session in which it was asked. unsent: pieces that have not ended, pending: those of them of this attempt.
    held: of each layer of a buffer, what waits for the rest of what only moves together.
    delivered: bytes of each piece whose arrival was noticed to the consumer.
    """

    request: OutboundRequest
    session: OutboundSession = field(repr=False)
    state: LegState = LegState.NEW
    attempt: int = 0
    route: Route | None = None
    grant: Grant | None = None
    destinations: tuple[Int64s, ...] = ()
    arrived: "ArrivedParts | None" = None
    unsent: int = 0
    pending: int = 0
    held: dict[tuple[int, int], HoldingBack] = field(default_factory=dict, repr=False)
    posted: dict[TransferHandle, None] = field(default_factory=dict)
    delivered: dict[TransferKey, int] = field(default_factory=dict)
    nbytes: int = 0
    num_runs: int = 0
    reading: int = 0  # pieces of reference data that are being read
    finished: Finished | None = None
    refused: bool = False  # whether a payload was, as happens when the consumer has left a session first
    owner: ControlThread | None = field(default=None, repr=False)  # last: from then on changes are checked

    @property
    def completed(self) -> bool:
        """Whether all of it has been delivered."""
        return self.state.value >= LegState.COMPLETED.value

    @property
    def released(self) -> bool:
        """Whether this process does not need the blocks any more."""
        return self.state.value >= LegState.RELEASED.value

    def go(self, state: LegState) -> None:
        """Change the state. Raises IllegalTransition."""
        check_transition(self.request.request_id, LEG, self.state, state)
        self.state = state

    def answers(self, attempt: int) -> bool:
        """Whether an answer to so manieth attempt means this one; 0 is said by those who cannot know."""
        return attempt in (0, self.attempt)

    def restart(self) -> None:
        """Go back to before it was asked: what has not begun never crosses."""
        self.go(LegState.NEW)
        self.grant, self.destinations, self.pending, self.arrived = None, (), 0, None
        self.held.clear()
        for handle in list(self.posted):
            handle.cancel()

    def sendable(self, match: BufferMatch, group: CacheGroup, ready: ReadySlice) -> tuple[range, Fence]:
        """Return the positions that can be sent now that a slice is computed, and what returns once they are written.

        group: the producer's. What only moves together waits until all of it is computed.
        """
        cached, tokens = self.grant.cached_tokens if self.grant is not None else 0, self.request.num_tokens
        if match.together == 1 or not group.counts_tokens:
            return group.uncached(group.ready(tokens, ready.start, ready.stop), cached), ready.fence
        held = self.held.get((ready.buffer, ready.layer))
        if held is None:
            needed = group.uncached(group.positions(tokens), cached)
            held = self.held[ready.buffer, ready.layer] = HoldingBack(match.together, needed)
        return held.add(ready.start, ready.stop, ready.fence)

    def stop(self) -> None:
        """Let nothing more of it cross than is moving now."""
        for handle in list(self.posted):
            handle.cancel()
        self.session.new.pop(self, None)

    def drop(self, attempt: int) -> None:
        """Stop for good: pieces that are under way do not count any more, as attempt is another one."""
        self.attempt = attempt
        self.stop()

    def follow(self, dropped: "Sequence[Leg]", attempt: int, *, keeps: bool) -> None:
        """Ask in the place of a leg that was dropped. keeps: whether what its process has of that is not sent again."""
        self.attempt = attempt
        earlier = [leg for leg in dropped if leg.session.peer == self.session.peer]
        if keeps and earlier:
            self.delivered = dict(earlier[-1].delivered)

    def take(self, grant: Grant, tables: tuple[Int64s, ...], arrived: "ArrivedParts | None") -> None:
        """Take a grant. arrived: what is not to be sent again. Raises ProtocolError if that cannot be."""
        kept = {key: nbytes for key, nbytes in self.delivered.items() if arrived is not None and arrived.covers(key)}
        self.arrived, self.delivered, self.grant, self.destinations = arrived, kept, grant, tables
        self.go(LegState.GRANTED)

    def has_arrived(self, key: TransferKey) -> bool:
        """Whether a piece need not be sent again. Raises ProtocolError for one that cannot have arrived."""
        if self.arrived is None or not self.arrived.covers(key):
            return False
        if key not in self.delivered:
            raise ProtocolError(f"the consumer says that {key} has arrived, which was never delivered")
        return True


class ArrivedParts:
    """What a consumer still has of an earlier attempt: looked up piece by piece."""

    def __init__(self, parts: Sequence[Part], match: Match, stops: Sequence[int]) -> None:
        """parts: of the grant. stops: of each buffer of match, the position behind the request's last.

        Raises ProtocolError for parts of what does not move here.
        """
        self._masks = dict[tuple[int, int, int], npt.NDArray[np.bool_]]()
        shapes = {one.index: (one, (len(one.layers), stop)) for one, stop in zip(match.buffers, stops, strict=True)}
        for part in parts:
            one, shape = shapes.get(part.buffer, (None, (0, 0)))
            if (
                one is None
                or (part.src_rank, part.dst_rank) not in one.move_index
                or not part.layer_start < part.layer_stop <= shape[0]
                or not part.token_start < part.token_stop <= shape[1]
            ):
                raise ProtocolError(f"the consumer says that {part} has arrived, which is no part of the request")
            mask = self._masks.setdefault((part.buffer, part.src_rank, part.dst_rank), np.zeros(shape, bool))
            mask[part.layer_start : part.layer_stop, part.token_start : part.token_stop] = True

    def covers(self, key: TransferKey) -> bool:
        """Whether all of a piece has arrived. Raises ProtocolError where only some of it has, as nothing was sent."""
        mask = self._masks.get((key.buffer, key.src_rank, key.dst_rank))
        if mask is None:
            return False
        part = mask[key.layer_start : key.layer_stop, key.token_start : key.token_stop]
        if part.any() and not part.all():
            raise ProtocolError(f"the consumer says that a part of {key} has arrived; pieces arrive whole")
        return bool(part.all())


@dataclass(frozen=True)
class Piece:
    """A part of a leg that is computed: what goes from one rank to another, of the consumer's layers at positions.

    attempt: the leg's when it was made. route: the session's, which matches the caches and has the data connection.
    fence: returns once the device has really written it.
    """

    leg: Leg
    attempt: int
    route: Route
    match: BufferMatch
    move: RankTransfer
    layers: range
    positions: range
    fence: Callable[[], None]

    @property
    def request(self) -> OutboundRequest:
        """The request that it is a part of."""
        return self.leg.request

    @property
    def is_current(self) -> bool:
        """Whether it is still to be sent."""
        return self.attempt == self.leg.attempt and not self.request.has_outcome

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
