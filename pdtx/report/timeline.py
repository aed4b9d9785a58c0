"""One iteration drawn: when layers were computed, and when they were on their way, on every link."""

from collections.abc import Sequence

from pdtx.errors import InputError
from pdtx.report.cases import Row
from pdtx.report.pictures import GRAY, INK, Axes, Figure, matplotlib, new_figure, note, styled
from pdtx.report.trace import computations, lanes
from pdtx.results.model import CaseResult, Sample, Transfer
from pdtx.results.params import named_case, row_label_names
from pdtx.results.summary import counted_samples, move_seconds

_MOST_LINKS = 8
_MOST_LANES = 12
_COMPUTE = 0.55
_COLOURS = (0.12, 0.88)
"""The part of the colour map that shows on white and on dark grey."""


def typical_iteration(case: CaseResult) -> Sample | None:
    """Return the iteration with the median move, of those whose transfers are known."""
    known = [sample for sample in counted_samples(case) if sample.transfers]
    return sorted(known, key=move_seconds)[len(known) // 2] if known else None


def draw_timeline(rows: Sequence[Row]) -> Figure:
    """Draw the typical iteration of the first case whose transfers are known, for preference of one that computes.

    Bars are shaded by layer; the small bar inside is posting. Raises InputError where no transfers are known.
    """
    known = [(row, sample) for row in rows if (sample := typical_iteration(row.case)) is not None]
    if not known:
        raise InputError("no transfers are known of any iteration; results of version 1 have none")
    row, sample = next((pair for pair in known if pair[0].case.case.layer_compute_s > 0), known[0])
    links = sorted({one.link for one in sample.transfers})[:_MOST_LINKS]
    tracks = [(link, [one for one in sample.transfers if one.link == link]) for link in links]
    heights = [_height(row.case, transfers) for _, transfers in tracks]
    figure, axes = new_figure(height=max(3.4, 1.8 + 0.36 * sum(heights)))
    with styled():
        top, ticks = 0.0, list[tuple[float, str]]()
        for (link, transfers), height in zip(tracks, heights, strict=True):
            ticks += _track(axes, row.case, link, transfers, top)
            top += height
        axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks])
        axes.set_ylim(top - 0.3, -0.7)
        axes.set_xlim(left=0)
        axes.grid(visible=False, axis="y")
        left = len({one.link for one in sample.transfers}) - len(links)
        more = f"; {left} more links are not shown" if left else ""
        names = row_label_names([one.case.case for one in rows])
        axes.set(title=f"Layers over time: iteration {sample.iteration} of case {row.number}",
                 xlabel="ms since the iteration's begin")  # fmt: skip
        note(figure, f"{named_case(row.case.case, names)}; small inner bars: posting{more}")
        _colour_bar(figure, axes, sample)
    return figure


def _height(case: CaseResult, transfers: Sequence[Transfer]) -> float:
    """Lines that a link takes."""
    return (
        min(1 + max(lane for lane, _ in lanes(transfers)), _MOST_LANES) + (1 if case.case.layer_compute_s else 0) + 0.5
    )


def _track(
    axes: Axes, case: CaseResult, link: int, transfers: Sequence[Transfer], top: float
) -> list[tuple[float, str]]:
    """Draw one link from the line top downwards; return its labels."""
    labels = []
    last = max(one.layer_stop for one in transfers)
    if computed := computations(case, transfers):
        spans = [(1e3 * begin, 1e3 * (end - begin)) for begin, end, _ in computed]
        axes.broken_barh(spans, (top - _COMPUTE / 2, _COMPUTE), facecolors=[_colour(one, last) for *_, one in computed],
                         alpha=0.45, edgecolor=INK, linewidth=0.5)  # fmt: skip
        axes.axvline(1e3 * max(end for _, end, _ in computed), color=GRAY, linewidth=1, linestyle=":")
        labels.append((top, f"link {link}: compute"))
        top += 1
    placed = lanes(transfers)
    for lane, one in placed:
        place = top + min(lane, _MOST_LANES - 1)
        colour = _colour(one, last)
        axes.broken_barh([(1e3 * one.posted, 1e3 * (one.ended - one.posted))], (place - 0.38, 0.76), facecolors=colour,
                         edgecolor=INK, linewidth=0.4)  # fmt: skip
        axes.broken_barh([(1e3 * one.posted, 1e3 * (one.sent - one.posted))], (place + 0.2, 0.18), facecolors=INK,
                         alpha=0.65)  # fmt: skip
    middle = top + min(max(lane for lane, _ in placed), _MOST_LANES - 1) / 2
    return [*labels, (middle, f"link {link}: move")]


def _colour(transfer: Transfer, last: int) -> tuple[float, ...]:
    low, high = _COLOURS
    share = transfer.layer_start / max(last - 1, 1)
    colour: tuple[float, ...] = matplotlib().colormaps["viridis"](low + (high - low) * share)
    return colour


def _colour_bar(figure: Figure, axes: Axes, sample: Sample) -> None:
    """Say which colour is which layer."""
    last = max(one.layer_stop for one in sample.transfers) - 1
    if last < 1:
        return
    found = matplotlib()
    low, high = _COLOURS
    colours = found.colors.ListedColormap(found.colormaps["viridis"]([low + (high - low) * n / 63 for n in range(64)]))
    scale = found.cm.ScalarMappable(found.colors.Normalize(0, last), colours)
    bar = figure.colorbar(scale, ax=axes, pad=0.01, aspect=30)
    bar.set_label("layer")
    bar.outline.set_visible(False)
