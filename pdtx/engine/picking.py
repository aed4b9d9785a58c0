"""Direct or staged, for each piece that is shipped, and what was picked over a request."""

from collections import Counter
from dataclasses import dataclass, field

from pdtx.plan import Choice, CostTable, Mode, TransferPlan, choose_mode


class ModePicker:
    """Picks how pieces move over one connection.

    mode: what was asked for. stages: whether the connection can pack. mover, device: whose costs in table count.
    """

    def __init__(self, mode: Mode, *, stages: bool, mover: str, device: str, table: CostTable) -> None:
        self._mode, self._stages, self._mover = mode, stages, mover
        self._costs, self._source = table.of(mover, device)

    def pick(self, plan: TransferPlan) -> Choice:
        """Choose for one piece's plan."""
        if not self._stages:
            return Choice(Mode.DIRECT, 0.0, 0.0, f"{self._mover} moves directly")
        return choose_mode(
            plan.num_runs,
            plan.nbytes,
            self._mode,
            self._costs,
            num_ranges=plan.num_destination_ranges,
            source=self._source,
        )


@dataclass
class Picks:
    """How many pieces of a request moved in which mode, and why the first of each did."""

    counts: Counter[Mode] = field(default_factory=Counter)
    reasons: dict[Mode, str] = field(default_factory=dict)

    def add(self, choice: Choice) -> None:
        """Count a piece."""
        self.counts[choice.mode] += 1
        self.reasons.setdefault(choice.mode, choice.reason)

    @property
    def text(self) -> str:
        """The number of pieces of each mode, as in "staged 30, direct 2"; empty before anything was shipped."""
        return ", ".join(f"{mode} {count}" for mode, count in self.counts.most_common())

    @property
    def reason(self) -> str:
        """Why the first piece of each mode was picked to move so."""
        reasons = list(self.reasons.items())  # at once, for the control thread may add one
        return "; ".join(f"{mode}: {reason}" for mode, reason in reasons)
