"""How much is measured."""

from dataclasses import dataclass, replace

from benchmarks.workload import Case

ROUNDS = 9
LEAST_ROUNDS = 7


@dataclass(frozen=True)
class Settings:
    """rounds: of every measurement, the first one that warms up left out.

    quick: everything with next to no bytes, to see that it works; the figures mean nothing.
    write_costs: the file for what movers cost; "" for where pdtx looks for it, None for nowhere.
    """

    rounds: int = ROUNDS
    quick: bool = False
    write_costs: str | None = None

    def case(self, case: Case) -> Case:
        """Return what is moved in place of a case."""
        return replace(case, layers=min(case.layers, 2), blocks=min(case.blocks, 3)) if self.quick else case

    @property
    def repeat(self) -> int:
        """How often a transfer that is over in a millisecond is repeated in a round."""
        return 2 if self.quick else 25
