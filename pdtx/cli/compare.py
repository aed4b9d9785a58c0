"""`pdtx compare`: is one result slower than another, or only different by chance?"""

import json
import math
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdtx.cli.common import emit, note
from pdtx.cli.options import Json
from pdtx.cli.results import Markdown, ResultFile, parse_share

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
            help="Exit with 1 if a case is significantly slower by more than this, as in 5%, or has failed.",
            show_default=False,
        ),
    ] = None,
    markdown: Markdown = False,
    as_json: Json = False,
) -> None:
    """Compare two results, case by case: '1.42x slower' with its interval, or 'not significant'."""
    from pdtx.report.comparison import comparison_remarks, comparison_table
    from pdtx.results import read_result_file
    from pdtx.results.comparison import compare_results

    limit = parse_share(fail_above, "--fail-above") if fail_above is not None else None
    allowed = parse_share(noise, "--noise")
    comparison = compare_results(read_result_file(before), read_result_file(after), metric=metric.value, noise=allowed)
    failing = _failing(comparison, limit)
    if as_json:
        emit(json.dumps(_document(comparison, metric, failing), indent=2, allow_nan=False))
    else:
        table = comparison_table(comparison)
        above, below = comparison_remarks(comparison, (f"{before}", f"{after}"))
        emit("\n".join([*above, "", *(table.markdown() if markdown else table.text()), "", *below]).rstrip())
    if failing:
        note(f"FAILED: {failing} of {len(comparison.rows)} cases are slower by more than {fail_above}, or have failed")
        raise typer.Exit(1)


def _failing(comparison: "Comparison", limit: float | None) -> int:
    """How many cases break the limit. A case that failed in the second result has not shown that it is as fast."""
    if limit is None:
        return 0
    return sum(row.slower_than(limit) or bool(row.after.failures) for row in comparison.rows)


def _document(comparison: "Comparison", metric: Metric, failing: int) -> dict[str, Any]:
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
    }
