"""`pdtx check`: whether a result is stable, and if not, why and what to do."""

import json

import typer

from pdtx.cli.common import emit
from pdtx.cli.options import Json
from pdtx.cli.results import ResultFile, emit_lines

JSON_VERSION = 1


def check(file: ResultFile, as_json: Json = False) -> None:
    """Tell whether a result is stable, and if not, why and what to do. Exit code 0: stable; 1: not."""
    from pdtx.report.cases import numbered
    from pdtx.results import read_result_file
    from pdtx.results.stability import check_result, grouped

    result = read_result_file(file)
    found = check_result(result)
    if as_json:
        findings = [
            {"case": number if number >= 0 else None, "code": one.code, "text": one.text, "advice": one.advice}
            for number, one in found
        ]
        emit(json.dumps({"version": JSON_VERSION, "stable": not found, "findings": findings}, indent=2))
    elif found:
        emit_lines(f"{numbered(numbers)}: {finding}" for numbers, finding in grouped(found))
    else:
        measured = sum(case.skipped is None for case in result.cases)
        emit(f"stable: nothing was found in {measured} cases")
    if found:
        raise typer.Exit(1)
