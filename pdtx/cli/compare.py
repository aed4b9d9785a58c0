"""`pdtx compare`: is one result slower than another, or only different by chance?"""

import json
import math
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdtx.cli.common import emit, note
from pdtx.cli.options import Json
from pdtx.cli.results import Markdown, ResultFile, emit_lines, parse_share

if TYPE_CHECKING:
    from pdtx.results.comparison import Compared, Comparison

JSON_VERSION = 1


class Metric(StrEnum):
    """What is compared: seconds of an iteration."""

    MOVE = "move"
    WALL = "wall"
    POST = "post"
    PREPARE = "prepare"


def compare(
    before: ResultFile,
    after: ResultFile,
    metric: Annotated[
        Metric, typer.Option(help="Seconds of an iteration to compare; of several links the slowest counts.")
    ] = Metric.MOVE,
    noise: Annotated[
        str, typer.Option(help="What two runs of the same thing may differ by; less is never significant.")
    ] = "5%",
    fail_above: Annotated[
        str | None,
        typer.Option(
            help="Exit with 1 if a case is significantly slower by more than this, as in 5%, or has not shown that it "
            "is as fast: it is missing, failed, unverified or has too few samples.",
            show_default=False,
        ),
    ] = None,
    markdown: Markdown = False,
    as_json: Json = False,
) -> None:
    """Compare two results, case by case: '1.42x slower' with its interval, or 'not significant'."""
    from pdtx.report.comparison import comparison_remarks, comparison_table, unproven
    from pdtx.results import read_result_file
    from pdtx.results.comparison import compare_results
    from pdtx.text import printable

    limit = parse_share(fail_above, "--fail-above") if fail_above is not None else None
    allowed = parse_share(noise, "--noise")
    comparison = compare_results(read_result_file(before), read_result_file(after), metric=metric.value, noise=allowed)
    failing = _slower(comparison, limit)
    missed = unproven(comparison) if limit is not None else []
    if as_json:
        emit(json.dumps(_document(comparison, metric, failing, missed), indent=2, allow_nan=False))
    else:
        table = comparison_table(comparison)
        above, below = comparison_remarks(comparison, (f"{before}", f"{after}"))
        emit_lines([*above, "", *(table.markdown() if markdown else table.text()), *([""] if below else []), *below])
    for line in missed:
        note(f"FAILED: {printable(line)}")
    if failing:
        note(f"FAILED: {failing} of {len(comparison.rows)} cases are slower by more than {fail_above}")
    if failing or missed:
        raise typer.Exit(1)


def _slower(comparison: "Comparison", limit: float | None) -> int:
    """How many cases break the limit; of those that failed nothing is known."""
    return 0 if limit is None else sum(row.slower_than(limit) and not row.failures for row in comparison.rows)


def _document(comparison: "Comparison", metric: Metric, failing: int, missed: list[str]) -> dict[str, Any]:
    import msgspec

    return {
        "version": JSON_VERSION,
        "metric": metric.value,
        "differing": comparison.differing,
        "cases": [_row(row) for row in comparison.rows],
        "only_a": msgspec.to_builtins(comparison.only_before),
        "only_b": msgspec.to_builtins(comparison.only_after),
        "geometric_mean": comparison.geometric_mean,
        "failing": failing,
        "unproven": missed,
        "unsteady": comparison.unsteady,
    }


def _row(row: "Compared") -> dict[str, Any]:
    import msgspec

    found = row.difference
    figures = {name: getattr(found, name) for name in ("ratio", "low", "high", "p", "wander")}
    return {
        "case": msgspec.to_builtins(row.case),
        "verdict": "failed" if row.failures else found.verdict,
        "text": f"{found}",
        **{name: None if math.isnan(value) else value for name, value in figures.items()},
        "counts": found.counts,
        "failures": row.failures,
        "unsteady": row.unsteady,
    }
