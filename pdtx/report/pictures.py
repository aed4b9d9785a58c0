"""What all plots share: matplotlib, colours, axes, and saving."""

import importlib
import io
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

from pdtx.errors import InputError
from pdtx.results.files import write_whole

INK = "#1f2430"
PAPER = "#ffffff"
PALETTE = ("#2f6fde", "#e07b00", "#12966a", "#c2387e", "#7a5bd6", "#8a6d1d", "#1795a8", "#c0442f")
"""Told apart on white and on dark grey, and by most who don't see all colours; lines have markers as well."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GRAY = "#8a8f99"
FORMATS = ("png", "svg", "pdf")

Figure = Any
Axes = Any
_STYLE = {
    "font.size": 10.5, "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "legend.frameon": False, "legend.fontsize": 9.5,
    "lines.linewidth": 1.8, "lines.markersize": 5.5, "svg.fonttype": "none", "svg.hashsalt": "pdtx",
    "font.family": ["DejaVu Sans"],
}  # fmt: skip


def matplotlib() -> ModuleType:
    """Return matplotlib. Raises InputError without it."""
    try:
        importlib.import_module("matplotlib.figure")
        return importlib.import_module("matplotlib")
    except ImportError:
        raise InputError("plots need matplotlib; install it with: pip install 'pdtx[plot]'") from None


def new_figure(width: float = 9.0, height: float = 5.0) -> tuple[Figure, Axes]:
    """Return a figure of inches and its axes; no window is opened and no global state is touched."""
    found = matplotlib()
    with found.rc_context(_STYLE):
        figure = found.figure.Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
    axes.grid(visible=True, color=GRAY, alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def styled() -> AbstractContextManager[None]:
    """Return the context in which what is added to a figure looks as it should."""
    found: AbstractContextManager[None] = matplotlib().rc_context(_STYLE)
    return found


def note(figure: Figure, text: str) -> None:
    """Say below a figure what its marks mean."""
    figure.supxlabel(text, fontsize=8.5, color=GRAY, x=0.01, ha="left")


def save(figure: Figure, path: Path) -> None:
    """Save a figure; the file's ending says how. Raises InputError for another ending, or a file it cannot write."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise InputError(
            f"cannot draw into {path}: its name ends with none of {', '.join(f'.{one}' for one in FORMATS)}"
        )
    write_whole(path, rendered(figure, kind))


def rendered(figure: Figure, kind: str, *, transparent: bool = False) -> bytes:
    """Return a figure as the bytes of a png, svg or pdf; the same figure gives the same bytes."""
    content = io.BytesIO()
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with styled():
        figure.savefig(
            content, format=kind, dpi=160, metadata=dates.get(kind), facecolor="none" if transparent else PAPER
        )
    return content.getvalue()
