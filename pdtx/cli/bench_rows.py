"""Rows of `pdtx bench` as they finish: figures of a case, each with what it is compared with and what was wrong."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdtx.results.figures import Rate, Spread
from pdtx.results.model import Case, CaseResult
from pdtx.results.params import FIELDS, shown, varied
from pdtx.results.summary import CaseSummary, summarize
from pdtx.units import format_bytes, format_seconds

_ALWAYS = ("tokens",)
_CONSTANT = (
    "model",
    "layers",
    "kv_cache_dtype",
    "block_size",
    "layout",
    "tp",
    "batch",
    "mean_run",
    "mover",
    "op",
    "mode",
)
_WORDS = {"layer_compute_s": "layer_compute", "kv_cache_dtype": "dtype", "block_size": "block"}


@dataclass(frozen=True)
class Column:
    """A column of figures. width: that cells fit into as a rule; a longer one moves the rest of its row."""

    head: str
    width: int
    cell: Callable[[CaseSummary], str]


class RowTable:
    """Lines of a table that is printed as it grows, so that widths are settled before there are figures."""

    def __init__(self, cases: Sequence[Case], *, gbits: bool = False) -> None:
        """cases: all that are going to come; what is alike in all of them stands above the table."""
        differing = varied(cases) if cases else []
        self._cases = cases
        self._names = [name for name in FIELDS if name in _ALWAYS or name in differing]
        self._columns = _columns(gbits)
        self._widths = [max(len(_word(name)), *(len(shown(case, name)) for case in cases), 0) for name in self._names]

    def heads(self) -> list[str]:
        """Return what stands above the rows."""
        constant = [f"{_word(name)} {shown(self._cases[0], name)}" for name in _CONSTANT if name not in self._names]
        heads = [_word(name).ljust(width) for name, width in zip(self._names, self._widths, strict=True)]
        heads += [column.head.rjust(column.width) for column in self._columns]
        return [", ".join(constant), "", "  ".join(heads)]

    def label(self, case: Case) -> str:
        """Return what tells a case from the others."""
        return ", ".join(f"{_word(name)} {shown(case, name)}" for name in self._names)

    def line(self, result: CaseResult) -> str:
        """Return a case's row: its figures, and why it has none or they are worth nothing."""
        cells = [shown(result.case, name).ljust(width) for name, width in zip(self._names, self._widths, strict=True)]
        if result.skipped is not None:
            return "  ".join([*cells, f"skipped: {result.skipped}"])
        summary = summarize(result)
        if summary.count:
            cells += [column.cell(summary).rjust(column.width) for column in self._columns]
            if result.case.mode == "auto":
                cells[-1] += "".join(f", {mode}" for mode in _chosen(result))
        if summary.failures:
            cells.append(f"FAILED: {summary.failures[0]}")
        return "  ".join(cells)


def _chosen(result: CaseResult) -> list[str]:
    """Return the modes that were taken, each with its number of transfers where there are several."""
    modes = Counter[str]()
    for link in result.links:
        modes.update(link.modes)
    return [mode if len(modes) == 1 else f"{mode} {count}" for mode, count in modes.items()]


def _word(name: str) -> str:
    return _WORDS.get(name, name)


def _columns(gbits: bool) -> tuple[Column, ...]:
    unit = "Gb/s" if gbits else "GB/s"

    def rate(found: Rate | None) -> str:
        return "-" if found is None else f"{found.gbit_per_s if gbits else found.gb_per_s:.3f}"

    return (
        Column("runs x each", 18, _runs),
        Column("bytes", 10, lambda summary: format_bytes(summary.nbytes)),
        Column("prepare", 7, lambda summary: _time(summary.prepare, "p50")),
        Column("post", 7, lambda summary: _time(summary.post, "p50")),
        Column("move p50", 8, lambda summary: _time(summary.move, "p50")),
        Column("p90", 7, lambda summary: _time(summary.move, "p90")),
        Column("p99", 7, lambda summary: _time(summary.move, "p99")),
        Column(f"{unit} per rank", 13, lambda summary: rate(summary.per_rank)),
        Column(f"{unit} whole", 10, lambda summary: rate(summary.whole)),
        Column("% of ref", 11, _percent),
        Column("#wrong", 6, lambda summary: summary.verdict),
        Column("via", 3, lambda summary: summary.transport),
    )


def _runs(summary: CaseSummary) -> str:
    if summary.bytes_each is None:
        return f"{summary.runs:,}"
    about = "" if len(summary.run_sizes) == 1 else "~"
    return f"{summary.runs:,} x {about}{format_bytes(round(summary.bytes_each))}"


def _time(spread: Spread | None, name: str) -> str:
    return "-" if spread is None else format_seconds(getattr(spread, name))


def _percent(summary: CaseSummary) -> str:
    limit = summary.limit
    return "-" if limit is None or limit.percent is None else f"{limit.percent:.0f}% {limit.name}"
