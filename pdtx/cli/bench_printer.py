"""What `pdtx bench` prints while it measures: a row a case, and on stderr how far it is."""

from collections.abc import Callable, Sequence

from pdtx.bench.fleet_case import Progress
from pdtx.bench.measuring import How, Observer
from pdtx.bench.sweep import Point
from pdtx.cli.bench_rows import RowTable
from pdtx.cli.bench_teller import Teller
from pdtx.cli.common import note
from pdtx.results.model import Case, CaseResult
from pdtx.units import counted, format_bytes


class Printer(Observer):
    """See Observer. save: called after each case. quiet: without rows on stdout."""

    def __init__(self, save: Callable[[], None], *, gbits: bool, quiet: bool) -> None:
        self._save, self._gbits, self._quiet = save, gbits, quiet

    def begun(self, points: Sequence[Point], how: How) -> None:
        """Say how much there is to do, and print the heads of the table."""
        todo = [point for point in points if point.skipped is None]
        note(_plan_text(points, todo, how))
        self._table = RowTable([point.case for point in points], gbits=self._gbits)
        self._teller = Teller(len(todo), how.deadline)
        for line in self._table.heads():
            self._row(line)

    def _row(self, text: str) -> None:
        if not self._quiet:
            self._teller.row(text)

    def case(self, case: Case) -> None:
        """Say that a case begins."""
        self._teller.case(self._table.label(case))

    def progress(self, progress: Progress) -> None:
        """Say how far it is."""
        self._teller(progress)

    def done(self, found: CaseResult) -> None:
        """Save, and print its row."""
        self._save()
        self._row(self._table.line(found))

    def late(self, left: int, total: int) -> None:
        """Say that the deadline has passed."""
        note(f"the deadline has passed with {left} of {total} cases left")

    def ended(self) -> None:
        """Take the changing line away."""
        self._teller.clear()


def _plan_text(points: Sequence[Point], todo: Sequence[Point], how: How) -> str:
    """Return how much there is to do."""
    rounds = how.iterations + how.warmup
    nbytes = sum(point.request_bytes * point.case.batch for point in todo)
    skipped = f", {len(points) - len(todo)} skipped as impossible" if len(todo) < len(points) else ""
    return (
        f"{counted(len(todo), 'case')}{skipped}; {how.warmup} + {how.iterations} iterations each, about "
        f"{format_bytes(nbytes * rounds)} a link in all{'' if how.verify else '; nothing is verified'}"
    )
