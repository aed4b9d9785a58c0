"""`pdtx report`: a result as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from pdtx.cli.common import note
from pdtx.cli.results import Force, ResultFile, check_new


def report(
    file: ResultFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")],
    force: Force = False,
) -> None:
    """Write a result as one HTML file with its plots, tables, facts and findings; it needs no network."""
    from pdtx.report.html import html_report
    from pdtx.results import read_result_file, write_whole

    check_new(output, force=force)
    page = html_report(read_result_file(file), "stdin" if str(file) == "-" else file.name)
    write_whole(output, page.encode())
    note(f"written to {output}")
