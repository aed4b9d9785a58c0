"""Two results side by side, as text."""

from collections.abc import Sequence

from pdtx.report.cases import constant_text, rate_cell
from pdtx.report.tables import Table
from pdtx.results.comparison import Compared, Comparison
from pdtx.results.model import Case
from pdtx.results.params import AMOUNTS, FIELDS, label, shown, varied
from pdtx.results.summary import CaseSummary
from pdtx.units import format_bytes, format_seconds

_MOST_LINES = 40


def comparison_table(comparison: Comparison) -> Table:
    """Return the table of cases that are in both results."""
    cases = [row.case for row in comparison.rows]
    names = [name for name in FIELDS if name == "tokens" or name in varied(cases)]
    heads = (
        *map(label, names),
        "bytes",
        "move p50 A",
        "move p50 B",
        "GB/s A",
        "GB/s B",
        "#wrong A",
        "#wrong B",
        "B against A",
    )
    rows = tuple((*(shown(row.case, name) for name in names), *_cells(row)) for row in comparison.rows)
    return Table(heads, rows, frozenset({len(heads) - 1}))


def comparison_remarks(comparison: Comparison, names: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Return lines for above and below the table."""
    above = [f"A is {names[0]}, B is {names[1]}", f"all: {constant_text([row.case for row in comparison.rows])}"]
    differing = comparison.differing
    above += [f"differs: {line}" for line in differing[:_MOST_LINES]]
    above += [f"differs: {len(differing) - _MOST_LINES} more"] if len(differing) > _MOST_LINES else []
    files = dict(zip("AB", names, strict=True))
    above += [f"unsteady: {name}: {text}; see pdtx check {files[name]}" for name, text in comparison.unsteady]
    below = [f"{_label(row.case)}: {text}" for row in comparison.rows for text in row.failures]
    below += _alone("A", comparison.only_before) + _alone("B", comparison.only_after)
    if len(comparison.rows) > 1 and (mean := comparison.geometric_mean) is not None:
        below.append(f"geometric mean of B's times over A's, significant or not: {mean:.3f}")
    return above, below


def unproven(comparison: Comparison) -> list[str]:
    """Return why B has not shown that it is as fast as A, a line for each case of which that is so."""
    why = [(row.case, "; ".join(row.missed)) for row in comparison.rows if row.missed]
    why += [(case, "A has measured it, B has not") for case in comparison.only_before]
    return [f"{_label(case)}, mover {case.mover}: B has not shown that it is as fast: {text}" for case, text in why]


def _label(case: Case) -> str:
    """A case by what says how much it moves."""
    return ", ".join(f"{name} {shown(case, name)}" for name in FIELDS if name in AMOUNTS)


def _alone(name: str, cases: Sequence[Case]) -> list[str]:
    return [f"only in {name}: {_label(case)}, mover {case.mover}" for case in cases[:_MOST_LINES]]


def _cells(row: Compared) -> tuple[str, ...]:
    before, after = row.before, row.after
    size = format_bytes(before.nbytes)
    if after.nbytes != before.nbytes:
        size += f" | {format_bytes(after.nbytes)}"
    verdict = "no comparison: failed" if row.failures else f"{row.difference}"
    verdict += f"; {', '.join(row.unsteady)}" if row.unsteady and not row.failures else ""
    return (
        size,
        _median(before),
        _median(after),
        rate_cell(before.whole),
        rate_cell(after.whole),
        before.verdict,
        after.verdict,
        verdict,
    )


def _median(summary: CaseSummary) -> str:
    return format_seconds(summary.move.p50) if summary.move is not None else "-"
