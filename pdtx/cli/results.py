"""What the commands on result files have in common."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from pdtx.cli.common import emit
from pdtx.errors import InputError

ResultFile = Annotated[
    Path, typer.Argument(help="A result of pdtx bench, of pdtx demo or of pdtx-prefill; '-' is stdin.")
]
Markdown = Annotated[bool, typer.Option("--markdown", help="A table to paste into an issue.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file if it is there.")]


def emit_lines(lines: Iterable[str]) -> None:
    """Put lines on stdout. What a file says is another's, and may not steer the terminal."""
    from pdtx.text import printable

    emit("\n".join(printable(line) for line in lines))


def check_new(path: Path, *, force: bool) -> None:
    """Refuse to overwrite. Raises InputError for a path that exists, unless force says so."""
    if path.exists() and not force:
        raise InputError(f"{path} exists; give another name, or --force to overwrite it")


def parse_share(text: str, option: str) -> float:
    """Return '5%' or '0.05' as 0.05. Raises InputError for what is no share of 0 or more."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise InputError(f"{option} is a share such as 5% or 0.05, not {text!r}")
    return share
