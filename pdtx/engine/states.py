"""The states of a request on either side, and the transitions that are allowed."""

from collections.abc import Mapping
from enum import Enum

from pdtx.errors import IllegalTransition


class OutboundState(Enum):
    """A request at the producer; the value is what it waits for, in words that fit an error message."""

    NEW = "a new session"
    ASKED = "a grant of blocks"
    COMPUTING = "prefill"
    SENDING = "the transfer"
    COMPLETED = "verification and decoding"
    RELEASED = "decoding"
    DRAINING = "the end of transfers that read its blocks"
    ENDED = "nothing"


class InboundState(Enum):
    """A request at the consumer; the value is what it waits for, in words that fit an error message."""

    QUEUED = "free blocks"
    LOADING = "this node's tiers"
    RECEIVING = "payload"
    READY = "the decoder"
    DRAINING = "the end of transfers that write its blocks"
    ENDED = "nothing"


OUTBOUND: Mapping[OutboundState, frozenset[OutboundState]] = {
    OutboundState.NEW: frozenset({OutboundState.ASKED, OutboundState.DRAINING}),
    OutboundState.ASKED: frozenset({OutboundState.COMPUTING, OutboundState.DRAINING}),
    OutboundState.COMPUTING: frozenset({OutboundState.SENDING, OutboundState.DRAINING}),
    OutboundState.SENDING: frozenset({OutboundState.COMPLETED, OutboundState.DRAINING}),
    OutboundState.COMPLETED: frozenset({OutboundState.RELEASED, OutboundState.DRAINING}),
    OutboundState.RELEASED: frozenset({OutboundState.DRAINING}),
    OutboundState.DRAINING: frozenset({OutboundState.ENDED}),
    OutboundState.ENDED: frozenset(),
}
"""DRAINING: the outcome is known, and transfers may still read the blocks. ENDED: nothing does, and they are back."""

INBOUND: Mapping[InboundState, frozenset[InboundState]] = {
    InboundState.QUEUED: frozenset({InboundState.LOADING, InboundState.DRAINING}),
    InboundState.LOADING: frozenset({InboundState.RECEIVING, InboundState.DRAINING}),
    InboundState.RECEIVING: frozenset({InboundState.READY, InboundState.DRAINING}),
    InboundState.READY: frozenset({InboundState.DRAINING}),
    InboundState.DRAINING: frozenset({InboundState.ENDED}),
    InboundState.ENDED: frozenset(),
}
"""DRAINING: the outcome is known, and transfers may still write into the blocks. ENDED: none does."""


def check_transition(
    request_id: str, before: OutboundState | InboundState, after: OutboundState | InboundState
) -> None:
    """Raise IllegalTransition unless a request may go from before to after."""
    if after not in (OUTBOUND[before] if isinstance(before, OutboundState) else INBOUND[before]):
        raise IllegalTransition(f"request {request_id} cannot go from {before.name} to {after.name}")
