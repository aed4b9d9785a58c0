"""One side of a transfer: a layout and a block table."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pdtx.errors import PlanError
from pdtx.layout import Layout
from pdtx.plan.runs import Int64s
from pdtx.units import ceil_div

NULL_BLOCK = 0
"""The manager's block that stands where a table has none: never handed out (as in vLLM), read or written."""


@dataclass(frozen=True)
class Endpoint:
    """A layout, and the steps of its block axis that hold the request's positions 0, 1, 2, ... in this order.

    Make one with of(), from a block table. known: whether block_ids are real.
    agreed: the layout that the peer takes this side to have, where that is not the layout: a deliberate fault.
    """

    layout: Layout
    block_ids: Int64s = field(repr=False)
    known: bool = True
    agreed: Layout | None = field(default=None, repr=False)

    @property
    def stream_layout(self) -> Layout:
        """The layout whose memory the stream follows if this side is the destination: both sides must agree on it."""
        return self.agreed or self.layout

    @classmethod
    def of(cls, layout: Layout, block_ids: Sequence[int] | Int64s, *, agreed: Layout | None = None) -> "Endpoint":
        """Make an endpoint from a table of the manager's block ids, in the order of positions."""
        return cls(layout, layout.block_steps(np.asarray(block_ids, dtype=np.int64)), agreed=agreed)

    @classmethod
    def stand_in(cls, layout: Layout, num_positions: int) -> "Endpoint":
        """Stand for a peer whose block table is not known here: plans with it have the right runs in the right order.

        The offsets on its side are of no use. The stream of a plan depends on its layout but not on its block ids.
        """
        steps = np.zeros(ceil_div(num_positions, layout.block_size), np.int64)
        return cls(layout, steps, known=False)

    def check(self, name: str, positions: range) -> None:
        """Raise PlanError unless there is a real block for each of positions. name: of this side, for the message."""
        size = self.layout.block_size
        needed = ceil_div(positions.stop, size)
        if len(self.block_ids) < needed:
            raise PlanError(
                f"{name} has {len(self.block_ids)} blocks of {size} tokens, "
                f"too few for tokens {positions.start}..{positions.stop} ({needed} needed)"
            )
        if not self.known or not positions:
            return
        used = self.block_ids[positions.start // size : needed]
        per_block = self.layout.blocks_per_manager_block
        num_blocks = self.layout.parts[0].layout.extent("block")
        if int(used.min()) >= (NULL_BLOCK + 1) * per_block and int(used.max()) < num_blocks:
            return
        outside = used[(used < 0) | (used >= num_blocks)]
        if len(outside):
            raise PlanError(f"{name} block id {outside[0]} is outside its pool of {num_blocks} blocks")
        first = int((used // per_block == NULL_BLOCK).argmax()) + positions.start // size
        raise PlanError(
            f"{name} has the null block where tokens {first * size}..{(first + 1) * size} should be; "
            "plan only the positions that are still kept"
        )
