"""Hit rates by size, drawn: a line for each policy, and what a tier without end would have."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from pdtx.bench.hits import HitRow
from pdtx.errors import InputError

_GIB = 1 << 30
_LINES = ("o-", "s--", "^-.", "d:")
_UPPER = 1.15
"""Room above the highest line, for the words on it."""


def draw_hits(path: Path, title: str, rows: Sequence[HitRow]) -> None:
    """Draw the share of tokens that a tier has, against its size.

    Raises InputError without matplotlib, or where the file cannot be written.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise InputError("--plot needs matplotlib; install it with: pip install 'pdtx[plot]'") from None
    figure = figures.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    sized = [row for row in rows if row.size.nbytes is not None]
    for number, policy in enumerate(dict.fromkeys(row.policy for row in sized)):
        line = [row for row in sized if row.policy == policy]
        gibibytes = [(row.size.nbytes or 0) / _GIB for row in line]
        style = _LINES[number % len(_LINES)]
        axes.plot(gibibytes, [100 * row.token_rate for row in line], style, label=policy, markersize=5)
    for row in rows:
        if row.size.nbytes is None:
            axes.axhline(100 * row.token_rate, color="gray", linewidth=1, label="unbounded")
    axes.set(title=title, xlabel="size of the tier (GiB, logarithmic)", ylabel="prompt tokens found (%)")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    highest = max((100 * row.token_rate for row in rows), default=0.0)
    axes.set_ylim(0, max(1.0, highest * _UPPER))
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot draw into {path}: {error}") from None
