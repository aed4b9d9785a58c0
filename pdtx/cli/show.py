"""`pdtx show`: a result file as a table."""

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from pdtx.cli.common import emit, note
from pdtx.cli.options import Json
from pdtx.cli.results import Markdown, ResultFile, emit_lines

if TYPE_CHECKING:
    from pdtx.report.cases import Row
    from pdtx.results.model import Result

JSON_VERSION = 1


class Style(StrEnum):
    """Whose names the columns have."""

    TABLE = "table"
    VLLM = "vllm"


def show(
    file: ResultFile,
    style: Annotated[
        Style, typer.Option(help="table, or vllm: the names of vLLM's log line, to lay beside a server's log.")
    ] = Style.TABLE,
    details: Annotated[bool, typer.Option("--details", help="Everything that is known of each case.")] = False,
    gbits: Annotated[
        bool, typer.Option("--gbits", help="Rates in Gb/s (10^9 bits), as network cards have it.")
    ] = False,
    markdown: Markdown = False,
    as_json: Json = False,
) -> None:
    """Show a result: a row for each case, no rate without what was found wrong. Reads results of older versions too."""
    from pdtx.report.cases import measured_rows
    from pdtx.results import read_result_file

    result = read_result_file(file)
    rows = measured_rows(result)
    if as_json:
        emit(json.dumps(_document(result, rows), indent=2))
    elif details:
        emit_lines(_details(result, rows))
    else:
        _table(result, rows, style, gbits=gbits, markdown=markdown)


def _table(result: "Result", rows: "list[Row]", style: Style, *, gbits: bool, markdown: bool) -> None:
    """Facts and remarks go to stderr where the table is to be pasted."""
    from pdtx.report.cases import VLLM_NOTE, case_table, facts_lines, remarks, vllm_table
    from pdtx.text import printable

    table = vllm_table(rows) if style is Style.VLLM else case_table(rows, gbits=gbits)
    after = [*([VLLM_NOTE] if style is Style.VLLM else []), *remarks(result, rows)]
    if markdown:
        emit_lines(table.markdown())
        for line in after:
            note(printable(line))
        return
    lines = [f"# {line}" for line in facts_lines(result)]
    emit_lines([*lines, *(table.text() if rows else ["no case was measured"]), *after])


def _details(result: "Result", rows: "list[Row]") -> list[str]:
    from pdtx.report.cases import details, facts_lines

    return [*(f"# {line}" for line in facts_lines(result)), *(line for row in rows for line in details(row))]


def _document(result: "Result", rows: "list[Row]") -> dict[str, object]:
    import msgspec

    from pdtx.report.csv_export import summary_json

    return {
        "version": JSON_VERSION,
        "command": result.command,
        "label": result.label,
        "started": result.started,
        "complete": result.complete,
        "nodes": msgspec.to_builtins(result.nodes),
        "cases": [summary_json(row) for row in rows],
        "skipped": {number: case.skipped for number, case in enumerate(result.cases) if case.skipped is not None},
    }
