"""A request's times, from the stamps of its transfers."""

from dataclasses import dataclass

from pdtx.spans import union_seconds

Interval = tuple[float, float]


@dataclass(frozen=True)
class TransferTimes:
    """Seconds a request's transfers took.

    prepare: making plans and descriptors, summed. post: handing bytes to the transport, at least one transfer at it.
    move: from the first byte given to the transport to the last acknowledged, at least one transfer under way.
    hidden: the share of move that passed while the request's own prefill was still computing, 0 to 1.
    """

    prepare: float
    post: float
    move: float
    hidden: float

    @classmethod
    def of(cls, prepare: float, posts: list[Interval], moves: list[Interval], computed: float) -> "TransferTimes":
        """Summarise intervals of one clock; computed: when prefill of the request ended."""
        move = union_seconds(moves)
        hidden = union_seconds(moves, until=computed) / move if move else 0.0
        return cls(prepare, union_seconds(posts), move, hidden)
