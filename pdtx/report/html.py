"""A run as one HTML file: nothing is fetched, nothing runs, and it reads in light and in dark."""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

import pdtx
from pdtx.errors import InputError
from pdtx.report.cases import Row, case_table, constant_line, details, measured_rows, numbered, remarks
from pdtx.report.pictures import INK, PAPER, Figure, matplotlib, rendered
from pdtx.report.plots import DRAWN
from pdtx.report.tables import Table
from pdtx.results.model import Result
from pdtx.results.params import flattened, named_case, row_label_names
from pdtx.results.stability import check_result, grouped
from pdtx.units import format_seconds

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_TITLES = {
    "rate": "Rate against size",
    "latency": "Times of moves",
    "timeline": "Layers over time",
    "overlap": "What computation hides",
}
_COLUMNS = (
    "<b>Per rank</b> is the mean over links of bytes over that link's own moving; <b>whole</b> is the bytes of all "
    "links over the time from the first begin to the last end. Bytes are counted by the receivers. GB is "
    "10<sup>9</sup> bytes. Percentiles are of all links' iterations that count, by linear interpolation."
)


def html_report(result: Result, name: str) -> str:
    """Return the page for a result that was read from the file called name. Raises InputError without matplotlib."""
    matplotlib()
    rows = measured_rows(result)
    parts = [
        _heading(result, name),
        _verdict(result, rows),
        f"<h2>Cases</h2><p class='dim'>all: {escape(constant_line(result))}</p>",
        _table(case_table(rows)) if rows else "<p>No case was measured.</p>",
        f"<p class='dim'>{_COLUMNS}</p>",
        _remarks(remarks(result, rows)),
        *(_plot(kind, rows) for kind in DRAWN),
        "<h2>Each case in full</h2>",
        *(_detail(row, row_label_names([one.case.case for one in rows])) for row in rows),
        _facts(result),
    ]
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    body = "\n".join(parts)
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<meta name='color-scheme' content='light dark'>"
        f"<title>pdtx: {escape(name)}</title>\n<style>{style}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _heading(result: Result, name: str) -> str:
    label = f" · {escape(result.label)}" if result.label else ""
    return (
        f"<h1>KV cache transfer: {escape(name)}</h1>"
        f"<p class='dim'>{escape(result.started or 'unknown date')} · {len(result.cases)} cases · "
        f"took {format_seconds(result.seconds)}{label}</p><pre>{escape(' '.join(result.command))}</pre>"
    )


def _verdict(result: Result, rows: Sequence[Row]) -> str:
    """What `pdtx check` says, first of all."""
    found = check_result(result)
    if not found:
        return f"<div class='verdict'><b class='good'>Stable.</b> {len(rows)} cases checked, nothing was found.</div>"
    items = "".join(
        f"<li>{numbered(numbers)}: {escape(finding.text)} <span class='dim'>({escape(finding.advice)})</span></li>"
        for numbers, finding in grouped(found)
    )
    return f"<div class='verdict bad'><b>Not to be relied on as it is:</b><ul>{items}</ul></div>"


def _table(table: Table) -> str:
    sides = ["left" if number in table.left else "" for number in range(len(table.heads))]
    heads = "".join(f"<th class='{side}'>{escape(head)}</th>" for head, side in zip(table.heads, sides, strict=True))
    wrong = table.heads.index("#wrong")
    lines = []
    for row in table.rows:
        shades = list(sides)
        if not row[wrong].startswith("0"):
            shades[wrong] = "bad"
        cells = "".join(f"<td class='{shade}'>{escape(cell)}</td>" for cell, shade in zip(row, shades, strict=True))
        lines.append(f"<tr>{cells}</tr>")
    return f"<div class='scroll'><table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _remarks(lines: Sequence[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>" if lines else ""


def _plot(kind: str, rows: Sequence[Row]) -> str:
    """A plot, or why there is none."""
    title = f"<h2>{_TITLES[kind]}</h2>"
    # Not what drawing raises without matplotlib: that has been asked for before.
    try:
        figure = DRAWN[kind](rows)
    except InputError as error:
        return f"{title}<p class='dim'>None: {escape(str(error))}.</p>"
    return f"{title}<figure>{inline_svg(figure, _TITLES[kind])}</figure>"


def inline_svg(figure: Figure, label: str) -> str:
    """Return a figure as an element of a page, in the page's own colours for ink and paper."""
    text = rendered(figure, "svg", transparent=True).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = text.replace(INK, "currentColor").replace(PAPER, "var(--paper)")
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def _detail(row: Row, names: Sequence[str]) -> str:
    title = f"case {row.number}: {named_case(row.case.case, names)}"
    return f"<details><summary>{escape(title)}</summary><pre>{escape(chr(10).join(details(row)))}</pre></details>"


def _facts(result: Result) -> str:
    """Nodes side by side, and the configuration."""
    columns = [
        {"host": node.host, **flattened(node.facts), "clock_error_s": f"{node.clock_error_s:g}"}
        for node in result.nodes
    ]
    names = list(dict.fromkeys(name for column in columns for name in column))
    heads = "".join(f"<th class='left'>{node.role} {node.rank}</th>" for node in result.nodes)
    lines = "".join(
        f"<tr><td class='left'>{escape(name)}</td>"
        + "".join(f"<td class='value'>{escape(str(column.get(name, '-')))}</td>" for column in columns)
        + "</tr>"
        for name in names
    )
    config = "\n".join(f"{name}: {value}" for name, value in flattened(result.config).items())
    return (
        f"<h2>Nodes</h2><div class='scroll'><table><thead><tr><th class='left'></th>{heads}</tr></thead>"
        f"<tbody>{lines}</tbody></table></div><h2>Configuration</h2><pre>{escape(config or 'defaults')}</pre>"
        f"<p class='dim'>format version {result.version}; page made by pdtx {escape(pdtx.__version__)}</p>"
    )
