"""How much of a transfer hides behind the computation of the layers that come later."""

from dataclasses import dataclass

from pdtx.results.model import Case, Sample
from pdtx.spans import union_seconds


@dataclass(frozen=True)
class Overlap:
    """Seconds that a link of one iteration moves: while its request's layers are still computed, and in all.

    computed: until the last layer is there, from the iteration's begin.
    """

    hidden: float
    moved: float
    computed: float

    @property
    def share(self) -> float:
        """Share of the moving that is hidden, 0 to 1."""
        return self.hidden / self.moved if self.moved > 0 else 0.0

    @property
    def exposed(self) -> float:
        """Seconds of moving that nothing hides."""
        return self.moved - self.hidden


def overlaps(case: Case, sample: Sample) -> list[Overlap]:
    """Return the overlap on each link of an iteration; nothing where no computation was emulated."""
    if case.layer_compute_s <= 0:
        return []
    found = []
    for link in sorted({transfer.link for transfer in sample.transfers}):
        of_link = [transfer for transfer in sample.transfers if transfer.link == link]
        computed = max(transfer.ready for transfer in of_link)
        moves = [(transfer.posted, transfer.ended) for transfer in of_link]
        found.append(Overlap(union_seconds(moves, until=computed), union_seconds(moves), computed))
    return found
