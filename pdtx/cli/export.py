"""`pdtx export`: a result as CSV."""

from pathlib import Path
from typing import Annotated

import typer

from pdtx.cli.common import emit, note
from pdtx.cli.results import Force, ResultFile, check_new
from pdtx.errors import InputError


def export(
    file: ResultFile,
    as_csv: Annotated[bool, typer.Option("--csv", help="As CSV, which is what there is so far.")] = False,
    samples: Annotated[
        bool, typer.Option("--samples", help="A row for each link of each iteration, instead of one for each case.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to; default: stdout.", show_default=False)
    ] = None,
    force: Force = False,
) -> None:
    """Write a result as CSV: bytes and seconds as plain numbers, heads with their unit."""
    from pdtx.report.cases import measured_rows
    from pdtx.report.csv_export import cases_csv, samples_csv
    from pdtx.results import read_result_file, write_whole

    if not as_csv:
        raise InputError("say what to export to: --csv")
    rows = measured_rows(read_result_file(file))
    text = samples_csv(rows) if samples else cases_csv(rows)
    if output is None:
        emit(text.removesuffix("\n"))
        return
    check_new(output, force=force)
    write_whole(output, text.encode())
    note(f"written to {output}")
