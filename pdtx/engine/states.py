"""The states of a request on either side, and the transitions that are allowed."""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from pdtx.errors import IllegalTransition


class OutboundState(Enum):
    """A request at the producer; the value is what it waits for, in words that fit an error message.

    It follows from how far its legs are, see OutboundRequest.state: the one that is behind all others tells.
    """

    OFFERED = "a consumer that pulls it"
    NEW = "a new session"
    ASKED = "a grant of blocks"
    COMPUTING = "prefill"
    SENDING = "the transfer"
    COMPLETED = "verification and decoding"
    RELEASED = "decoding"
    DRAINING = "the end of transfers that read its blocks"
    ENDED = "nothing"


class LegState(Enum):
    """What one process of the consumer is to get of a request; in the order in which that goes on."""

    NEW = 0
    ASKED = 1
    GRANTED = 2
    COMPLETED = 3
    RELEASED = 4
    FINISHED = 5


class OutboundLife(Enum):
    """A request at the producer. DRAINING: the outcome is known, and transfers may still read the blocks."""

    OPEN = "open"
    DRAINING = "draining"
    ENDED = "ended"


class InboundState(Enum):
    """A request at the consumer; the value is what it waits for, in words that fit an error message."""

    QUEUED = "free blocks"
    LOADING = "this node's tiers"
    RECEIVING = "payload"
    READY = "the decoder"
    DRAINING = "the end of transfers that write its blocks"
    ENDED = "nothing"


LEG: Mapping[LegState, frozenset[LegState]] = {
    LegState.NEW: frozenset({LegState.ASKED}),
    LegState.ASKED: frozenset({LegState.GRANTED, LegState.NEW}),
    LegState.GRANTED: frozenset({LegState.COMPLETED, LegState.NEW}),
    LegState.COMPLETED: frozenset({LegState.RELEASED, LegState.FINISHED}),
    LegState.RELEASED: frozenset({LegState.FINISHED}),
    LegState.FINISHED: frozenset(),
}
"""Back to NEW: its session was lost, and it goes on in another one. A leg ends with its request, in any state."""

OUTBOUND: Mapping[OutboundLife, frozenset[OutboundLife]] = {
    OutboundLife.OPEN: frozenset({OutboundLife.DRAINING}),
    OutboundLife.DRAINING: frozenset({OutboundLife.ENDED}),
    OutboundLife.ENDED: frozenset(),
}
"""ENDED: nothing reads the blocks, and they are back."""

INBOUND: Mapping[InboundState, frozenset[InboundState]] = {
    InboundState.QUEUED: frozenset({InboundState.LOADING, InboundState.DRAINING}),
    InboundState.LOADING: frozenset({InboundState.RECEIVING, InboundState.DRAINING}),
    InboundState.RECEIVING: frozenset({InboundState.READY, InboundState.DRAINING}),
    InboundState.READY: frozenset({InboundState.DRAINING}),
    InboundState.DRAINING: frozenset({InboundState.ENDED}),
    InboundState.ENDED: frozenset(),
}
"""DRAINING: the outcome is known, and transfers may still write into the blocks. ENDED: none does."""


State = TypeVar("State", LegState, OutboundLife, InboundState)


def check_transition(request_id: str, table: Mapping[State, frozenset[State]], before: State, after: State) -> None:
    """Raise IllegalTransition unless table lets a request go from before to after."""
    if after not in table[before]:
        raise IllegalTransition(f"request {request_id} cannot go from {before.name} to {after.name}")
