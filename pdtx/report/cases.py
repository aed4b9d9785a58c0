"""A run's cases as tables: one row a case, no rate without what was found wrong beside it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pdtx.report.tables import Table
from pdtx.results.figures import Rate, Spread
from pdtx.results.model import Case, CaseResult, Result
from pdtx.results.params import FIELDS, label, shown, varied
from pdtx.results.summary import CaseSummary, summarize
from pdtx.units import format_bytes, format_seconds

_ALWAYS = ("tokens", "block_size")
_HEADS = (
    "bytes", "unique", "runs", "bytes each", "{unit} whole", "per rank", "% of ref", "#wrong",
    "move p50", "p90", "p99", "min", "max", "prepare", "post", "N", "via",
)  # fmt: skip
_LEFT = {"via", "model", "layout", "mover", "mover_options", "op", "mode", "pattern", "kv_cache_dtype", "block_tables"}
_TOLD_CONSTANT = (
    "model", "layers", "kv_cache_dtype", "layout", "tp", "batch", "mover", "op", "mode", "merge", "pattern",
)  # fmt: skip
"""Told though they are what a case has by default; of the others what is not."""


@dataclass(frozen=True)
class Row:
    """A case with its summary. number: its place in the result. hosts: that it ran on, each once."""

    number: int
    case: CaseResult
    summary: CaseSummary
    hosts: tuple[str, ...] = ()


def measured_rows(result: Result) -> list[Row]:
    """Return the cases that were not skipped."""
    hosts = tuple(dict.fromkeys(node.host for node in result.nodes if node.host))
    return [Row(n, case, summarize(case), hosts) for n, case in enumerate(result.cases) if case.skipped is None]


def case_table(rows: Sequence[Row], *, gbits: bool = False) -> Table:
    """Return the table of cases; of the parameters those that vary, and the tokens and blocks always.

    gbits: rates in Gb/s, as network cards are sold, instead of GB/s.
    """
    names = row_names(rows)
    unit = "Gb/s" if gbits else "GB/s"
    heads = ("case", *map(label, names), *(head.format(unit=unit) for head in _HEADS))
    lines = [(f"{row.number}", *(shown(row.case.case, name) for name in names), *_cells(row, gbits)) for row in rows]
    left = frozenset(number for number, head in enumerate(("case", *names, *_HEADS)) if head in _LEFT)
    return Table(heads, tuple(lines), left)


def row_names(rows: Sequence[Row]) -> list[str]:
    """Return the parameters that a table of these cases shows."""
    differing = varied([row.case.case for row in rows])
    return [name for name in FIELDS if name in _ALWAYS or name in differing]


def constant_line(result: Result) -> str:
    """Return the parameters that all cases share, for above a table."""
    return constant_text([case.case for case in result.cases], beside=_ALWAYS)


def constant_text(cases: Sequence[Case], beside: Sequence[str] = ("tokens",)) -> str:
    """Return the parameters that all cases share; beside: names that stand elsewhere anyway."""
    if not cases:
        return "no cases"
    differing, usual = {*beside, *varied(cases)}, Case()
    names = [one for one in FIELDS if one in _TOLD_CONSTANT or getattr(cases[0], one) != getattr(usual, one)]
    return ", ".join(f"{label(name)} {shown(cases[0], name)}" for name in names if name not in differing)


def facts_lines(result: Result) -> list[str]:
    """Return what the run was and where, a line each."""
    took = f"took {format_seconds(result.seconds)}" if result.seconds else "took unknown time"
    took += "" if result.complete else ", CUT OFF"
    lines = [
        f"command  {' '.join(result.command)}",
        f"started  {result.started or 'unknown'}, {took}, format version {result.version}",
    ]
    lines += [f"label    {result.label}"] if result.label else []
    for node in result.nodes:
        told = [f"{name} {node.facts[name]}" for name in ("processor", "cpus", "pdtx", "torch") if node.facts.get(name)]
        lines.append(
            f"{node.role:8} {node.rank} on {node.host or 'unknown host'}: {', '.join(told) or 'nothing known'}"
        )
    return [*lines, f"all      {constant_line(result)}"]


def remarks(result: Result, rows: Sequence[Row]) -> list[str]:
    """Return what a table has no column for: failures, first iterations apart, references, what was skipped.

    What is to be said of several cases alike is said once.
    """
    said = defaultdict[str, list[int]](list)
    for row in rows:
        for text in _remarks_of(row):
            said[text].append(row.number)
    for number, case in enumerate(result.cases):
        if case.skipped is not None:
            said[f"skipped: {case.skipped}"].append(number)
    return [f"{numbered(numbers)}: {text}" for text, numbers in said.items()]


def numbered(numbers: Sequence[int]) -> str:
    """Return 'case 3', 'cases 0 to 4' or 'cases 1, 4'; 'the run' for none."""
    if not numbers:
        return "the run"
    if len(numbers) == 1:
        return f"case {numbers[0]}"
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"cases {numbers[0]} to {numbers[-1]}"
    return f"cases {', '.join(map(str, numbers))}"


def _remarks_of(row: Row) -> list[str]:
    summary = row.summary
    lines = [f"FAILED: {text}" for text in summary.failures]
    if summary.first_s is not None and summary.move is not None and summary.count > 1:
        rest = format_seconds(summary.move.p50)
        lines.append(f"first iteration apart, for there was no warm-up: {format_seconds(summary.first_s)}; p50 {rest}")
    return lines + [f"reference {one.name} missing: {one.missing}" for one in row.case.references if one.missing]


def details(row: Row) -> list[str]:
    """Return everything that is known of a case, a line each, rates in every unit."""
    summary = row.summary
    lines = [f"case {row.number}: " + ", ".join(f"{name} {shown(row.case.case, name)}" for name in FIELDS)]
    spreads = ("prepare", "post", "move", "wall", "latency")
    lines += [f"  {name:12} {_spread(getattr(summary, name))}" for name in spreads if getattr(summary, name)]
    if summary.first_s is not None:
        lines.append(f"  {'first':12} {format_seconds(summary.first_s)}, apart, for nothing warmed up")
    lines.append(f"  {'per rank':12} {summary.per_rank or 'n/a'}")
    lines.append(f"  {'whole':12} {summary.whole or 'n/a'}")
    lines += [f"  {one.name:12} {one.rate}" + _percent_of(one.percent, one.limits) for one in summary.yardsticks]
    lines.append(f"  {'bytes':12} {summary.nbytes:,} B received an iteration; planned {_wire(summary)}")
    lines.append(f"  {'runs':12} {summary.runs:,}: {_sizes(summary)}; in {summary.transfers:,} transfers")
    lines.append(f"  {'transport':12} {summary.transport}")
    for link in row.case.links:
        lines.append(f"  {'link':12} {link.prefill} -> {link.decode}: {link.path.get('detail', '')} {link.mode_reason}")
    registered = format_bytes(summary.registered_bytes)
    took = format_seconds(summary.registration_s)
    lines.append(f"  {'registered':12} {registered} in {summary.registered_regions} regions, {took} in all")
    counted = f"{summary.count} of {summary.asked} asked for, {summary.warmups} to warm up"
    lines.append(f"  {'iterations':12} {counted}; delivered {summary.deliveries:,} of {summary.posts:,}")
    lines.append(f"  {'#wrong':12} {summary.verdict} {summary.first_wrong}".rstrip())
    if summary.hidden is not None:
        lines.append(f"  {'hidden':12} {summary.hidden:.0%} of the moving, behind the computation of later layers")
    return lines


def vllm_table(rows: Sequence[Row]) -> Table:
    """Return the figures under the names of vLLM's log line; its MB are 2^20 bytes, its throughput is of one rank."""
    heads = (
        "case", "Avg xfer time (ms)", "P90 xfer time (ms)", "Avg post time (ms)", "P90 post time (ms)",
        "Avg MB per transfer", "Throughput (MB/s)", "Avg number of descriptors", "#wrong",
    )  # fmt: skip
    return Table(heads, tuple(_vllm_cells(row) for row in rows))


VLLM_NOTE = (
    "as in vLLM: MB is 2^20 bytes, a transfer is a link's iteration, and Throughput is bytes over summed times, "
    "the rate of one rank and not of the system"
)


def _vllm_cells(row: Row) -> tuple[str, ...]:
    summary, links = row.summary, max(len(row.case.links), 1)
    move, post = summary.move, summary.post
    if move is None or post is None:
        return (f"{row.number}", *["-"] * 7, summary.verdict)
    mebibytes = summary.nbytes / links / 2**20
    return (
        f"{row.number}",
        f"{1e3 * move.mean:.3f}",
        f"{1e3 * move.p90:.3f}",
        f"{1e3 * post.mean:.3f}",
        f"{1e3 * post.p90:.3f}",
        f"{mebibytes:.3f}",
        f"{mebibytes / move.mean:.3f}" if move.mean > 0 else "-",
        f"{summary.runs / links:.1f}",
        summary.verdict,
    )


def _cells(row: Row, gbits: bool) -> tuple[str, ...]:
    summary = row.summary
    percent = summary.limit.percent if summary.limit is not None else None
    name = summary.limit.name if summary.limit is not None else ""
    return (
        format_bytes(summary.nbytes),
        format_bytes(summary.unique_bytes) if summary.unique_bytes else "-",
        f"{summary.runs:,}",
        format_bytes(round(summary.bytes_each)) if summary.bytes_each is not None else "-",
        rate_cell(summary.whole, gbits),
        rate_cell(summary.per_rank, gbits),
        f"{percent:.0f}% {name}" if percent is not None else "-",
        summary.verdict,
        *(_time(summary.move, name) for name in ("p50", "p90", "p99", "min", "max")),
        _time(summary.prepare, "p50"),
        _time(summary.post, "p50"),
        f"{summary.count}" if summary.count == summary.asked else f"{summary.count} of {summary.asked}",
        summary.transport,
    )


def rate_cell(rate: Rate | None, gbits: bool = False) -> str:
    """Return a rate for a column whose head has the unit."""
    if rate is None:
        return "-"
    return f"{rate.gbit_per_s if gbits else rate.gb_per_s:.3f}"


def _time(spread: Spread | None, name: str) -> str:
    return format_seconds(getattr(spread, name)) if spread is not None else "-"


def _spread(spread: Spread) -> str:
    figures = ", ".join(
        f"{name} {format_seconds(getattr(spread, name))}" for name in ("p50", "p90", "p99", "min", "max")
    )
    return f"{figures} (mean {format_seconds(spread.mean)}; of {spread.count})"


def _percent_of(percent: float | None, limits: bool) -> str:
    limiting = ", the limiting reference" if limits else ""
    return f"{limiting}; a rank reaches {percent:.1f}% of it" if percent is not None else limiting


def _wire(summary: CaseSummary) -> str:
    times = f", {summary.amplification:.3g} times as much" if (summary.amplification or 1) != 1 else ""
    return f"{summary.wire_bytes:,} B on the wire, {summary.unique_bytes:,} B of them unique{times}"


def _sizes(summary: CaseSummary) -> str:
    sizes = [f"{count:,} of {format_bytes(nbytes)}" for nbytes, count in summary.run_sizes]
    return ", ".join(sizes[:6]) + (f" and {len(sizes) - 6} more sizes" if len(sizes) > 6 else "") or "sizes unknown"
