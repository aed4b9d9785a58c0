"""One row a request: what was moved, how fast, and how much of it is wrong."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from pdtx.errors import InputError
from pdtx.results.files import write_whole
from pdtx.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

_TABLE_WIDTH = 120


class RequestRow(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What became of one request. Sizes in bytes, times in seconds.

    num_runs: runs that the plans had, contiguous on both sides. gb_per_s: nbytes over move_s, in 10^9 bytes.
    hidden: share of move_s behind the request's prefill, 0 to 1. transport: the mover.
    carried_by: what the payload went over, as found from the running connection: rdma, tcp, shm, inproc or other;
    emulated: whether the mover's operations were carried out in software.
    mode: pieces moved each way, as in "staged 30, direct 2", and mode_reason why.
    wrong: elements that differ from the source's; None where nobody looked.
    cached_tokens: tokens of the prompt that tiers gave the prefill node, which did not compute them; cached_from: which
    tiers, as in "cpu, peer"; load_s, load_bytes: what that took. peer_cached_tokens: those that the decode node had in
    its own, which were not sent.
    """

    request_id: str
    prompt_tokens: int
    token_ids: list[int] = []
    text: str = ""
    nbytes: int = 0
    num_runs: int = 0
    prepare_s: float = 0.0
    post_s: float = 0.0
    move_s: float = 0.0
    gb_per_s: float = 0.0
    hidden: float = 0.0
    wrong: int | None = None
    transport: str = ""
    carried_by: str = ""
    emulated: bool = False
    mode: str = ""
    mode_reason: str = ""
    cached_tokens: int = 0
    cached_from: str = ""
    load_s: float = 0.0
    load_bytes: int = 0
    peer_cached_tokens: int = 0
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the request came to its end and nothing wrong is known of it."""
        return self.error is None and not self.wrong


def console_for(stream: TextIO) -> "Console":
    """Return a console that is wide enough for the table: a line too long for a terminal beats a figure cut off."""
    from rich.console import Console

    console = Console(file=stream)
    console.width = max(console.width if stream.isatty() else 0, _TABLE_WIDTH)
    return console


def render_rows(rows: Sequence[RequestRow], console: "Console") -> None:
    """Print what was generated, a line each, then the rows as a table, then what went wrong."""
    for row in rows:
        if row.error is None:
            console.print(f"[{row.request_id}] {row.text!r}", markup=False, highlight=False, soft_wrap=True)
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("request")
    for name in ("tokens", "bytes", "runs", "prepare", "post", "move", "GB/s", "hidden", "#wrong"):
        table.add_column(name, justify="right")
    table.add_column("via")
    table.add_column("pieces")
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    for row in rows:
        if row.error is not None:
            line = f"{row.request_id}: {row.error}"
            console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)


def _cells(row: RequestRow) -> list[str]:
    moved = row.move_s > 0
    return [
        row.request_id,
        f"{row.prompt_tokens}",
        format_bytes(row.nbytes),
        f"{row.num_runs}",
        format_seconds(row.prepare_s),
        format_seconds(row.post_s),
        format_seconds(row.move_s),
        f"{row.gb_per_s:.3f}" if moved else "-",
        f"{row.hidden:.0%}" if moved else "-",
        "unverified" if row.wrong is None else f"{row.wrong}",
        _via(row),
        row.mode,
    ]


def _via(row: RequestRow) -> str:
    """The mover, and what really carried the payload where that is something else."""
    carried = f" over {row.carried_by}" if row.carried_by not in ("", row.transport) else ""
    return f"{row.transport}{carried}{', emulated' if row.emulated else ''}"


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a result file whole or not at all. Raises InputError where that is impossible."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


class ResultDocument(msgspec.Struct):
    """What of a node's result other commands read. path: what carried the payload; registered: by the node's mover."""

    requests: list[RequestRow]
    path: dict[str, Any] | None = None
    registered_bytes: int = 0
    registration_s: float = 0.0


def read_result(text: str) -> ResultDocument:
    """Return a result document. Raises InputError if it is none."""
    try:
        return msgspec.json.decode(text, type=ResultDocument)
    except msgspec.MsgspecError as error:
        raise InputError(f"not a result of pdtx-prefill: {error}") from None
