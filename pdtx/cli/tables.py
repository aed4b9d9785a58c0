"""Text that several commands print alike: columns, sizes, names."""

from collections.abc import Iterable, Sequence

from pdtx.units import format_bytes

_NAMES_SHOWN = 8


def aligned(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return lines with the cells of heads and rows below one another."""
    table = [heads, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(heads))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def both_sizes(nbytes: int) -> str:
    """Return a size exactly, and in binary units: '65,536 B = 64 KiB'."""
    return f"{nbytes:,} B = {format_bytes(nbytes)}"


def named(things: Sequence[object]) -> str:
    """Return a list for a sentence, at a bearable length."""
    rest = len(things) - _NAMES_SHOWN
    return ", ".join(map(str, things[:_NAMES_SHOWN])) + (f" and {rest} more" if rest > 0 else "")
