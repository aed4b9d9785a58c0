"""What every layout answers, whatever it is made of: the questions that a plan, a cache and a description ask."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pdtx.errors import LayoutError

if TYPE_CHECKING:
    from pdtx.layout.strided import StridedLayout

Int64s = npt.NDArray[np.int64]

OUTSIDE_PAGE = ("layer", "block")
"""The axes that step from page to page; all others lie inside one."""


@dataclass(frozen=True)
class Part:
    """A part of a layout that has strides of its own, beginning offset bytes into the region.

    name: "key" and "value"; "conv", "conv0", "ssm", ... of states; "" where a layout is a single part.
    """

    name: str
    offset: int
    layout: "StridedLayout"


class Layout(ABC):
    """Where a cache of equal layers lies in one region of size_bytes: one StridedLayout or several."""

    name: str
    size_bytes: int

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """What a plan is made for one by one; two layouts with equal names of parts hold the same things."""

    @property
    def blocks_per_manager_block(self) -> int:
        """Steps of the block axis in one block of the manager's, see block_steps."""
        return self.parts[0].layout.blocks_per_manager_block

    @property
    def sliceable(self) -> frozenset[str]:
        """The axes of which a part may be moved without the rest, in every part."""
        return frozenset.intersection(*(part.layout.sliceable for part in self.parts))

    @property
    def block_size(self) -> int:
        """Positions in a step of the block axis: tokens, or 1 of states."""
        return self.parts[0].layout.block_size

    @property
    def bytes_per_block(self) -> int:
        """Payload bytes of one step of the block axis in one layer, all parts together."""
        return sum(part.layout.bytes_per_block for part in self.parts)

    @property
    def movable(self) -> bool:
        """Whether one block of one layer can be moved without others, as every transfer does."""
        return not self._stuck

    def require_movable(self) -> None:
        """Raise LayoutError, saying why, where blocks cannot be moved one by one."""
        if stuck := self._stuck:
            raise LayoutError(
                f"{self.name} cannot be transferred: in memory its axis {stuck[0]} lies inside bytes whose order the "
                "strides do not tell (data first, then scales); choose a layout that keeps a block in one piece"
            )

    @property
    def _stuck(self) -> tuple[str, ...]:
        """The axes that a transfer must cut, and cannot."""
        return tuple(
            axis
            for part in self.parts
            for axis in OUTSIDE_PAGE
            if axis not in part.layout.sliceable and part.layout.extent(axis) > 1
        )

    def block_steps(self, block_ids: Sequence[int] | Int64s) -> Int64s:
        """Return the steps of the block axis that blocks of the manager's are, in token order; int64.

        block_ids: shape (n,); the result: (n * blocks_per_manager_block,).
        They differ where a kernel's blocks are smaller than the manager's (vLLM: 256 tokens managed, 64 a kernel
        block): manager's block b is then the steps b * n .. b * n + n - 1, and the token axis counts a step's tokens.
        """
        ids, count = np.asarray(block_ids, dtype=np.int64), self.blocks_per_manager_block
        if count == 1:
            return ids
        return (ids[:, None] * count + np.arange(count, dtype=np.int64)).reshape(-1)
