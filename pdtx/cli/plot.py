"""`pdtx plot`: pictures of a result, and its trace for Perfetto."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdtx.cli.common import note
from pdtx.cli.results import Force, ResultFile, check_new
from pdtx.errors import InputError

if TYPE_CHECKING:
    from pdtx.report.cases import Row


class Kind(StrEnum):
    """What is drawn."""

    RATE = "rate"
    LATENCY = "latency"
    TIMELINE = "timeline"
    OVERLAP = "overlap"
    TRACE = "trace"


def plot(
    file: ResultFile,
    others: Annotated[list[Path] | None, typer.Argument(hidden=True)] = None,
    kind: Annotated[
        Kind,
        typer.Option(
            help="rate: against size, with the references; latency: the share of moves by their time; timeline: layers "
            "of one iteration; overlap: what computation hides; trace: JSON for ui.perfetto.dev or chrome://tracing."
        ),
    ] = Kind.RATE,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A .png, .svg or .pdf; for a trace .json. Default: FILE-KIND.png.",
                     show_default=False),
    ] = None,
    case: Annotated[
        int | None,
        typer.Option(help="Only this case, as pdtx show numbers them; default: all, or what fits.", min=0,
                     show_default=False),
    ] = None,
    force: Force = False,
) -> None:  # fmt: skip
    """Draw a result."""
    from pdtx.report.cases import measured_rows
    from pdtx.results import read_result_file

    if others:
        raise InputError(f"one file is drawn at a time; to lay two side by side: pdtx compare {file} {others[0]}")
    rows = measured_rows(read_result_file(file))
    if case is not None:
        rows = [row for row in rows if row.number == case]
        if not rows:
            raise InputError(f"there is no case {case} in {file} that was measured; pdtx show {file} numbers them")
    ending = "json" if kind is Kind.TRACE else "png"
    stem = "result" if str(file) == "-" else file.stem
    path = output if output is not None else Path(f"{stem}-{kind}.{ending}")
    check_new(path, force=force)
    if kind is Kind.TRACE:
        _trace(rows, path)
    else:
        from pdtx.report.pictures import save
        from pdtx.report.plots import DRAWN

        save(DRAWN[kind](rows), path)
    note(f"drawn into {path}" if kind is not Kind.TRACE else f"written to {path}; open it in https://ui.perfetto.dev")


def _trace(rows: "list[Row]", path: Path) -> None:
    """Write the first case whose transfers are known."""
    import json

    from pdtx.report.trace import chrome_trace
    from pdtx.results import write_whole
    from pdtx.results.summary import counted_samples

    for row in rows:
        if samples := [sample for sample in counted_samples(row.case) if sample.transfers]:
            note(f"case {row.number}, {len(samples)} iterations one after the other")
            write_whole(path, json.dumps(chrome_trace(row.case, samples)).encode() + b"\n")
            return
    raise InputError("no transfers are known of any iteration; results of version 1 have none")
