"""A table as plain text, and as Markdown that can be pasted into an issue."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Cells of text below heads. left: columns of words; the others are figures and stand at the right."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[int] = frozenset({0})

    def text(self) -> list[str]:
        """Return the lines, columns below one another."""
        return [self._line(row, widths).rstrip() for widths in [self._widths()] for row in (self.heads, *self.rows)]

    def markdown(self) -> list[str]:
        """Return the lines as Markdown has them; a bar in a cell does not end it."""
        safe = Table(_escaped(self.heads), tuple(map(_escaped, self.rows)), self.left)
        widths = [max(3, width) for width in safe._widths()]
        rule = ["-" * (width - 1) + ("-" if number in self.left else ":") for number, width in enumerate(widths)]
        lines = [safe._line(safe.heads, widths, " | "), " | ".join(rule)]
        lines += [safe._line(row, widths, " | ") for row in safe.rows]
        return [f"| {line} |" for line in lines]

    def _widths(self) -> list[int]:
        table = (self.heads, *self.rows)
        return [max(len(row[column]) for row in table) for column in range(len(self.heads))]

    def _line(self, row: Sequence[str], widths: Sequence[int], between: str = "  ") -> str:
        cells = zip(row, widths, strict=True)
        return between.join(
            cell.ljust(width) if number in self.left else cell.rjust(width)
            for number, (cell, width) in enumerate(cells)
        )


def _escaped(row: Sequence[str]) -> tuple[str, ...]:
    return tuple(cell.replace("\\", "\\\\").replace("|", "\\|") for cell in row)
