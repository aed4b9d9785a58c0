"""A run as CSV: one row a case, or one row a link's iteration. Plain numbers, and heads that have the unit."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pdtx.report.cases import Row
from pdtx.results.figures import Rate, Spread
from pdtx.results.params import FIELDS

_SPREADS = ("prepare", "post", "move", "wall", "latency")
_FIGURES = ("p50", "p90", "p99", "min", "max", "mean")
_RATES = ("per_rank", "whole")
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")
_LINK_FIELDS = (
    ("prepare_s", "prepare_s"), ("post_s", "post_s"), ("move_s", "move_s"), ("begun", "begun_s"), ("ended", "ended_s"),
    ("claimed_bytes", "claimed_bytes"), ("received_bytes", "received_bytes"), ("posts", "posts"),
    ("deliveries", "deliveries"),
)  # fmt: skip


def cases_csv(rows: Sequence[Row]) -> str:
    """Return one row a case."""
    records = [_case_record(row) for row in rows]
    return _csv(list(records[0]) if records else ["case"], (list(record.values()) for record in records))


def samples_csv(rows: Sequence[Row]) -> str:
    """Return one row for each link of each iteration, warm-ups and failed ones too."""
    of_sample = ("iteration", "warmup", "wall_s", "link")
    of_link = (head for _, head in _LINK_FIELDS)
    heads = ["case", *FIELDS, *of_sample, *of_link, "wrong_elements", "error"]
    return _csv(heads, _sample_lines(rows))


def _sample_lines(rows: Sequence[Row]) -> Iterable[list[Any]]:
    for row in rows:
        fixed = [row.number, *_parameters(row).values()]
        for sample in row.case.samples:
            of_sample = [*fixed, sample.iteration, int(sample.warmup), sample.wall_s]
            outcome = [sample.wrong, sample.error]
            for link in sample.links:
                yield [*of_sample, link.link, *(getattr(link, name) for name, _ in _LINK_FIELDS), *outcome]
            if not sample.links:
                yield [*of_sample, None, *[None] * len(_LINK_FIELDS), *outcome]


def _case_record(row: Row) -> dict[str, Any]:
    summary = row.summary
    record = {"case": row.number, **_parameters(row)}
    record |= {
        "iterations_asked": summary.asked,
        "iterations_counted": summary.count,
        "warmup_iterations": summary.warmups,
    }
    record["first_s"] = summary.first_s
    for name in _SPREADS:
        record |= _spread(name, getattr(summary, name))
    record |= {name: getattr(summary, name) for name in ("nbytes", "wire_bytes", "unique_bytes", "runs")}
    record["run_bytes_mean"] = summary.bytes_each
    for name in _RATES:
        record |= _rate(name, getattr(summary, name))
    limit = summary.limit
    record["reference"] = limit.name if limit is not None else None
    record |= _rate("reference", limit.rate if limit is not None else None)
    record["per_rank_percent_of_reference"] = limit.percent if limit is not None else None
    record |= {
        "transport": summary.transport,
        "verified": int(summary.wrong is not None),
        "wrong_elements": summary.wrong,
    }
    record |= {"posts": summary.posts, "deliveries": summary.deliveries}
    record |= {"registered_bytes": summary.registered_bytes, "registered_regions": summary.registered_regions}
    record |= {"registration_s": summary.registration_s, "hidden_share": summary.hidden}
    return record | {"failures": "; ".join(summary.failures)}


def summary_json(row: Row) -> dict[str, Any]:
    """Return a case and its summary for programs."""
    return {"number": row.number, "case": msgspec.to_builtins(row.case.case), "summary": row.summary.as_json()}


def _parameters(row: Row) -> dict[str, Any]:
    """Parameters as single cells: pairs as PREFILL:DECODE, the rest of what is no number as JSON."""
    found = {}
    for name in FIELDS:
        value = getattr(row.case.case, name)
        if isinstance(value, tuple):
            value = ":".join(map(str, value))
        elif isinstance(value, dict | list):
            value = msgspec.json.encode(value).decode()
        found[name] = int(value) if isinstance(value, bool) else value
    return found


def _spread(name: str, spread: Spread | None) -> dict[str, float | None]:
    return {f"{name}_{figure}_s": getattr(spread, figure) if spread is not None else None for figure in _FIGURES}


def _rate(name: str, rate: Rate | None) -> dict[str, float | None]:
    units = ("gb_per_s", "gib_per_s", "gbit_per_s")
    return {f"{name}_{unit}": getattr(rate, unit) if rate is not None else None for unit in units}


def _csv(heads: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows([_cell(value) for value in line] for line in lines)
    return text.getvalue()


def _cell(value: object) -> object:
    """A cell that no spreadsheet takes for a formula; numbers stay what they are."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULAS) else value
