"""Boxes of states: which elements of a rank's states a move between ranks takes, and where they go."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from pdtx.errors import LayoutError
from pdtx.layout import StateLayout
from pdtx.parallel import Box, RankTransfer

Side = Literal["src", "dst"]
"""Which end of a move is meant."""


@dataclass(frozen=True)
class StateBox:
    """A box of one state. state: its index in the layout; extents: of the box, without blocks.

    cuts: (dimension of a block, first step at the source, first step at the destination, steps).
    """

    state: int
    extents: tuple[int, ...]
    cuts: tuple[tuple[int, int, int, int], ...]

    @property
    def reversed(self) -> "StateBox":
        """The same elements on their way back."""
        cuts = tuple((dimension, dst, src, count) for dimension, src, dst, count in self.cuts)
        return StateBox(self.state, self.extents, cuts)

    def of(self, states: Sequence[torch.Tensor], side: Side) -> torch.Tensor:
        """Return a view of the box in one side's states, each (blocks, first dimension of its shape, the rest)."""
        found = states[self.state]
        for dimension, src, dst, count in self.cuts:
            found = found.narrow(1 + dimension, src if side == "src" else dst, count)
        return found


def boxes_of(layout: StateLayout, move: RankTransfer) -> tuple[StateBox, ...]:
    """Return the boxes of a move in the states of a layout, of either side. Raises LayoutError for another's boxes."""
    found = [box for each in move.boxes for box in _boxes(layout, each)]
    if not found:
        raise LayoutError(f"layout {layout.name} has none of the states that rank {move.dst_rank} gets")
    return tuple(found)


def _boxes(layout: StateLayout, box: Box) -> list[StateBox]:
    found = list[StateBox]()
    for state, part in enumerate(layout.parts):
        if box.part not in ("", part.name):
            continue
        names = part.layout.names[2:]  # behind layer and block
        counts = {cut.axis: cut.count for cut in box.cuts}
        extents = tuple(counts.get(name, part.layout.extent(name)) for name in names)
        cuts = tuple((names.index(cut.axis), cut.src, cut.dst, cut.count) for cut in box.cuts)
        found.append(StateBox(state, extents, cuts))
    return found


def num_elements(boxes: Sequence[StateBox], state: int) -> int:
    """Return the elements that boxes take of a block of a state."""
    return sum(prod(box.extents) for box in boxes if box.state == state)
