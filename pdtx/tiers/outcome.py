"""What has become of blocks that were to be copied into a tier, or out of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pdtx.cache import KVCaches
from pdtx.errors import PdtxError
from pdtx.plan.runs import Int64s
from pdtx.tiers.base import Bools, Failed, Moved
from pdtx.tiers.copies import Copier, tier_positions
from pdtx.tiers.keys import PrefixKeys

_COPY_ERRORS = (PdtxError, OSError, RuntimeError)
"""What fails a block and not the whole call; anything else is a defect, and is told as it is."""


@dataclass
class Outcome:
    """What has become of one group's blocks."""

    group: str
    places: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    failed: list[Failed] = field(default_factory=list)
    present: int = 0
    nbytes: int = 0

    def fail(self, places: Int64s, reason: str) -> None:
        """Note places that were not moved."""
        self.failed += [Failed(self.group, place, reason) for place in places.tolist()]

    def copy(self, copier: Copier, group: int, places: Int64s, src: Int64s, dst: Int64s, tier: KVCaches) -> Bools:
        """Copy blocks, all at once if that goes well and else one by one; return which were copied.

        src, dst: a row of blocks for each place. tier: the cache whose blocks places count.
        """
        copied = np.ones(len(places), bool)
        try:
            self._copy(copier, group, src, dst, tier)
        except _COPY_ERRORS:
            for at in range(len(places)):
                try:
                    self._copy(copier, group, src[at : at + 1], dst[at : at + 1], tier)
                except _COPY_ERRORS as error:
                    copied[at] = False
                    self.fail(places[at : at + 1], str(error))
        self.places = places[copied]
        return copied

    def _copy(self, copier: Copier, group: int, src: Int64s, dst: Int64s, tier: KVCaches) -> None:
        if len(src):
            positions = tier_positions(tier, group, len(src))
            nbytes, _ = copier.copy(group, src.reshape(-1), dst.reshape(-1), positions)
            self.nbytes += nbytes


def named(keys: PrefixKeys, places: Int64s) -> tuple[list[bytes], list[bytes]]:
    """Return the digests and the proofs of places."""
    at = places.tolist()
    return [keys.digests[place] for place in at], [keys.proofs[place] for place in at]


def rows_of(blocks: Int64s, num_places: int) -> Int64s:
    """Return blocks as a row for each place."""
    return blocks.reshape(num_places, -1) if num_places else blocks.reshape(0, 1)


def sum_up(done: Sequence[Outcome], seconds: float, waited: float) -> Moved:
    """Return what all groups came to."""
    return Moved(
        tuple(one.places for one in done),
        tuple(failed for one in done for failed in one.failed),
        sum(one.present for one in done),
        sum(one.nbytes for one in done),
        seconds,
        waited,
    )
