"""Plots of a run: rate against size, times of moves, layers over time, and what computation hides."""

import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from pdtx.errors import InputError
from pdtx.report.cases import Row, constant_text
from pdtx.report.pictures import GRAY, INK, MARKERS, PALETTE, Axes, Figure, matplotlib, new_figure, note, styled
from pdtx.report.timeline import draw_timeline
from pdtx.results.figures import percentile
from pdtx.results.overlap import overlaps
from pdtx.results.params import AMOUNTS, named_case, row_label_names, varied
from pdtx.results.summary import counted_samples
from pdtx.text import printable
from pdtx.units import format_bytes, format_seconds

_BAD = "#d02c2c"
_MOST_SERIES = 12
_MOST_INSIDE = 4
_MOST_HOSTS = 4
_FEWEST_TICKS, _MOST_TICKS = 4, 9
_LEAST_WIDTH = 1.2
_FACTORS = ((1,), (1, 3), (1, 2, 5), range(1, 10))
"""Ticks in each decade of a logarithmic axis, from few to many."""


def draw_rate(rows: Sequence[Row]) -> Figure:
    """Draw the whole system's rate against bytes moved, with the references; bars where all cases move as much.

    Filled markers are verified, hollow ones unverified, crosses failed. Raises InputError where nothing was measured.
    """
    shown = [row for row in rows if row.summary.whole is not None]
    if not shown:
        raise InputError("there is no rate to draw: no case has an iteration that counts")
    if len({row.summary.nbytes for row in shown}) == 1:
        return _bars(shown)
    figure, axes = new_figure()
    with styled():
        for number, (label, series) in enumerate(_series(shown).items()):
            _rate_line(axes, series, label, number)
        _reference_lines(axes, shown)
        axes.set_xscale("log", base=2)
        _bytes_axis(axes, [row.summary.nbytes for row in shown])
        axes.set_ylim(bottom=0)
        _title(axes, "Rate of the whole system", shown)
        axes.set(xlabel="bytes received in one iteration", ylabel="GB/s (10⁹ bytes)")
        _legend(figure, axes)
        note(figure, _what_marks_mean(shown))
    return figure


def draw_latency(rows: Sequence[Row]) -> Figure:
    """Draw the share of moves that took so long or less, a step for each case; seconds of a link in one iteration."""
    shown = [row for row in rows if row.summary.move is not None]
    if not shown:
        raise InputError("there are no times to draw: no case has an iteration that counts")
    names = row_label_names([row.case.case for row in shown])
    figure, axes = new_figure()
    with styled():
        for number, row in enumerate(shown[:_MOST_SERIES]):
            moves = sorted(link.move_s for sample in counted_samples(row.case) for link in sample.links)
            share = np.arange(1, len(moves) + 1) / len(moves)
            line = "-" if number < len(PALETTE) else "--"
            colour = PALETTE[number % len(PALETTE)]
            label = named_case(row.case.case, names)
            axes.step([moves[0], *moves], [0, *share], line, where="post", color=colour, label=label)
        for level, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99")):
            axes.axhline(level, color=GRAY, linewidth=0.8, linestyle=":")
            where = {"xycoords": ("axes fraction", "data"), "xytext": (4, 0), "textcoords": "offset points"}
            axes.annotate(name, (1.0, level), **where, va="center", color=GRAY, fontsize=9)
        _seconds_axis(axes)
        axes.set_ylim(0, 1.02)
        left = f" (first {_MOST_SERIES} of {len(shown)} cases)" if len(shown) > _MOST_SERIES else ""
        _title(axes, f"Moves by their time{left}", shown[:_MOST_SERIES])
        axes.set(xlabel="a link's move in one iteration (logarithmic)", ylabel="share of moves")
        _legend(figure, axes)
    return figure


def draw_overlap(rows: Sequence[Row]) -> Figure:
    """Draw for each case how much of the moving hides behind computation. Raises InputError where none was emulated."""
    shown = [row for row in rows if row.summary.hidden is not None]
    if not shown:
        raise InputError("no case computes while it moves; measure with --layer-compute, as in --layer-compute 500us")
    names = row_label_names([row.case.case for row in shown])
    found = [[one for sample in counted_samples(row.case) for one in overlaps(row.case.case, sample)] for row in shown]
    hidden = [1e3 * percentile([one.hidden for one in case], 50) for case in found]
    exposed = [1e3 * percentile([one.exposed for one in case], 50) for case in found]
    computed = [1e3 * percentile([one.computed for one in case], 50) for case in found]
    places = np.arange(len(shown))
    figure, axes = new_figure(height=1.6 + 0.75 * len(shown))
    with styled():
        axes.barh(places - 0.2, computed, 0.34, color=GRAY, alpha=0.55, label="computing")
        axes.barh(places + 0.2, hidden, 0.34, color=PALETTE[2], label="moving, hidden")
        axes.barh(places + 0.2, exposed, 0.34, left=hidden, color=PALETTE[1], label="moving, exposed")
        for place, length, end in zip(places, hidden, np.add(hidden, exposed), strict=True):
            text = f"{length / end if end > 0 else 0:.0%} hidden"
            axes.annotate(text, (end, place + 0.2), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set_yticks(places, [named_case(row.case.case, names) for row in shown])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.14)
        _title(axes, "Moving behind computation", shown)
        axes.set_xlabel("ms, medians of a link's iterations")
        figure.legend(loc="outside lower center", ncols=3)
    return figure


DRAWN: dict[str, Callable[[Sequence[Row]], Figure]] = {
    "rate": draw_rate,
    "latency": draw_latency,
    "timeline": draw_timeline,
    "overlap": draw_overlap,
}
"""Kinds of plots by name."""


def _series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Cases that differ in nothing but how much they move, in the order of their sizes."""
    names = [name for name in varied([row.case.case for row in rows]) if name not in AMOUNTS]
    found = defaultdict[str, list[Row]](list)
    for row in sorted(rows, key=lambda row: row.summary.nbytes):
        found[named_case(row.case.case, names) if names else row.summary.transport].append(row)
    return dict(found)


def _rate_line(axes: Axes, rows: Sequence[Row], label: str, number: int) -> None:
    colour, marker = PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]
    sizes = [row.summary.nbytes for row in rows]
    axes.plot(sizes, _gigabytes(rows, "whole"), color=colour, label=label)
    axes.fill_between(sizes, _gigabytes(rows, "whole_low"), _gigabytes(rows, "whole_high"), color=colour, alpha=0.16,
                      linewidth=0)  # fmt: skip
    if any(len(row.case.links) > 1 for row in rows):
        axes.plot(sizes, _gigabytes(rows, "per_rank"), ":", color=colour, label=f"{label}, per rank")
    for row in rows:
        _mark(axes, row.summary.nbytes, row, colour, marker)


def _mark(axes: Axes, place: float, row: Row, colour: str, marker: str) -> None:
    """A point that says whether it may be believed."""
    rate = _gigabytes([row], "whole")
    if row.summary.failures:
        axes.plot([place], rate, "x", color=_BAD, markersize=10, markeredgewidth=2.5, zorder=5)
    else:
        face = colour if row.summary.wrong is not None else "white"
        axes.plot([place], rate, marker, color=colour, markerfacecolor=face, zorder=4)


def _reference_lines(axes: Axes, rows: Sequence[Row]) -> None:
    """References in grey, dashed, with their names beside their ends: they are of one link."""
    points = defaultdict[str, dict[int, list[float]]](lambda: defaultdict(list))
    for row in rows:
        for one in row.summary.yardsticks:
            points[one.name][row.summary.nbytes].append(one.rate.gb_per_s)
    for number, (name, of_size) in enumerate(points.items()):
        sizes = sorted(of_size)
        rates = [percentile(of_size[size], 50) for size in sizes]
        axes.plot(sizes, rates, ("--", "-.", ":")[number % 3], color=GRAY, linewidth=1.3, label=f"reference {name}")
        axes.annotate(name, (sizes[-1], rates[-1]), xytext=(6, 0), textcoords="offset points", va="center", color=GRAY,
                      fontsize=9)  # fmt: skip


def _bars(rows: Sequence[Row]) -> Figure:
    """Rates of cases that move as much as one another."""
    names = row_label_names([row.case.case for row in rows])
    figure, axes = new_figure(height=1.9 + 0.45 * len(rows))
    places = np.arange(len(rows))
    rates = _gigabytes(rows, "whole")
    spread = [
        np.subtract(rates, _gigabytes(rows, "whole_low")),
        np.subtract(_gigabytes(rows, "whole_high"), rates),
    ]
    with styled():
        axes.barh(places, rates, 0.6, color=PALETTE[0], alpha=0.85, xerr=np.maximum(spread, 0),
                  error_kw={"ecolor": INK, "elinewidth": 1.2, "capsize": 3})  # fmt: skip
        for place, row in zip(places, rows, strict=True):
            for one in row.summary.yardsticks:
                axes.plot([one.rate.gb_per_s] * 2, [place - 0.38, place + 0.38], color=GRAY, linewidth=2)
                axes.annotate(
                    one.name, (one.rate.gb_per_s, place - 0.4), ha="center", va="bottom", color=GRAY, fontsize=8
                )
            if row.summary.failures:
                axes.annotate("failed", (0, place), xytext=(6, 0), textcoords="offset points", va="center", color=_BAD)
            elif row.summary.wrong is None:
                axes.annotate("unverified", (0, place), xytext=(6, 0), textcoords="offset points", va="center")
        axes.set_yticks(places, [named_case(row.case.case, names) for row in rows])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        size = format_bytes(rows[0].summary.nbytes)
        _title(axes, f"Rate of the whole system, {size} an iteration", rows)
        axes.set_xlabel("GB/s (10⁹ bytes), p10 to p90")
    return figure


def _gigabytes(rows: Sequence[Row], name: str) -> list[float]:
    return [rate.gb_per_s if (rate := getattr(row.summary, name)) is not None else 0.0 for row in rows]


def _what_marks_mean(rows: Sequence[Row]) -> str:
    words = ["line: median of the iterations; band: p10 to p90"]
    if any(len(row.case.links) > 1 for row in rows):
        words.append("dotted: mean of the links")
    if any(row.summary.yardsticks for row in rows):
        words.append("grey: references, of one link")
    if any(row.summary.wrong is None for row in rows):
        words.append("hollow: unverified")
    if any(row.summary.failures for row in rows):
        words.append("red cross: failed")
    return "; ".join(words)


def _bytes_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """Ticks at powers of two that a reader knows, eight at most."""
    low, high = int(np.floor(np.log2(min(sizes)))), int(np.ceil(np.log2(max(sizes))))
    step = max(1, -(-(high - low) // 8))
    ticks = [2**power for power in range(low, high + 1, step)]
    axes.set_xticks(ticks, [format_bytes(tick) for tick in ticks])
    axes.minorticks_off()


def _seconds_axis(axes: Axes) -> None:
    """A logarithmic axis in ms or us, with so many figures between its ends as there is room for."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    if high < _LEAST_WIDTH * low:  # moves that are all alike: figures with three digits would be alike too
        middle = (low * high) ** 0.5
        low, high = middle / _LEAST_WIDTH**0.5, middle * _LEAST_WIDTH**0.5
        axes.set_xlim(low, high)
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    for factors in _FACTORS:
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        inside = [tick for tick in ticks if low <= tick <= high]
        if _FEWEST_TICKS <= len(inside) <= _MOST_TICKS:
            break
    else:  # less than a decade, or more of them than there is room for
        steps = matplotlib().ticker.MaxNLocator(nbins=8, steps=[1, 2, 5, 10], min_n_ticks=_FEWEST_TICKS)
        spaced = steps.tick_values(low, high) if high < 10 * low else np.geomspace(low, high, _FEWEST_TICKS)
        inside = [float(one) for one in spaced if low <= one <= high]
    axes.set_xticks(inside, [format_seconds(tick) for tick in inside])
    axes.minorticks_off()


def _title(axes: Axes, text: str, rows: Sequence[Row]) -> None:
    """What is drawn, and below it, smaller, what all cases have in common and between which hosts they moved."""
    common = constant_text([row.case.case for row in rows], beside=())
    hosts = f"; on {' and '.join(rows[0].hosts[:_MOST_HOSTS])}" if rows[0].hosts else ""
    hosts += f" and {len(rows[0].hosts) - _MOST_HOSTS} more" if len(rows[0].hosts) > _MOST_HOSTS else ""
    lines = textwrap.wrap(printable(f"{common}{hosts}").replace("$", r"\$"), 120, max_lines=3, placeholder=" ...")
    axes.set_title(text, pad=10 + 11 * len(lines))
    axes.annotate("\n".join(lines), (0, 1), xycoords="axes fraction", xytext=(0, 6), textcoords="offset points",
                  va="bottom", color=GRAY, fontsize=8.5)  # fmt: skip


def _legend(figure: Figure, axes: Axes) -> None:
    """Name the lines: among them where they are few, above them otherwise, for there is no room."""
    lines = len(axes.get_legend_handles_labels()[0])
    if lines > _MOST_INSIDE:
        figure.set_figheight(figure.get_figheight() + 0.25 * -(-lines // 2))
        figure.legend(loc="outside upper left", ncols=2)
    elif lines:
        axes.legend(loc="best")
