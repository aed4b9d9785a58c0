"""What a plan is: the runs of one transfer, compressed, and what they come to."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pdtx.plan.endpoint import Endpoint
from pdtx.plan.grids import RunSet
from pdtx.plan.runs import Runs, Slices


@dataclass(frozen=True)
class TransferPlan:
    """The runs that carry layers x tokens of one request from src to dst.

    layers: of the source, dst_layer: the first of the destination; tokens: positions. runs: compressed, unmerged.
    The stream follows the destination's memory: its ranges are as long as the runs allow.
    """

    src: Endpoint
    dst: Endpoint
    layers: range
    tokens: range
    runs: RunSet
    dst_layer: int = 0
    merge: bool = True

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return self.runs.total

    @cached_property
    def flat(self) -> Runs:
        """What to move, one run after another; joined where they touch on both sides, if merging was asked for.

        Runs of a segment that loops run through (one for each head, say) are left as they are: at most the last of them
        could be joined, and then no loop would describe them any more.
        """
        return self._final.flat if isinstance(self._final, RunSet) else self._final

    @cached_property
    def to_move(self) -> Runs:
        """The same runs as flat, for movers: what a mover does not look at is never made."""
        return self._final.expanding() if isinstance(self._final, RunSet) else self._final

    @property
    def num_runs(self) -> int:
        """How many runs flat has; seldom costs an expansion."""
        return len(self._final)

    @property
    def num_destination_ranges(self) -> int:
        """How many ranges destination() has, likewise."""
        return self._merged.num_ranges("dst")

    def source(self) -> Slices:
        """The source's ranges in stream order, joined where they touch there; the destination is not looked at."""
        return self._merged.ranges("src")

    def destination(self) -> Slices:
        """The destination's ranges likewise."""
        return self._merged.ranges("dst")

    @property
    def sizes(self) -> dict[int, int]:
        """How many runs of each number of bytes flat has, the largest first."""
        if isinstance(self._final, RunSet):
            return self._final.sizes()
        sizes, times = np.unique(self._final.nbytes, return_counts=True)
        return dict(zip(sizes.tolist()[::-1], times.tolist()[::-1], strict=True))

    @cached_property
    def _merged(self) -> RunSet:
        return self.runs.merged() if self.merge else self.runs

    @cached_property
    def _final(self) -> RunSet | Runs:
        """The runs of flat: compressed, unless runs touch that no loop can join."""
        merged = self._merged
        return merged.flat.merged() if self.merge and not merged.looped and merged.touching else merged
