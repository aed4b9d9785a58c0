"""What a measurement is reported as."""

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

SIGNIFICANT = 6
"""Digits that are written down."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement: ours against a reference, round by round, both in unit.

    less_is_better: of times and bytes; ratio says all the same how many times as good as the reference ours is.
    at_least: the bar for the ratio of the medians; 0 where there is none.
    wrong: elements that did not arrive as they were sent, on either side.
    against: what the reference is. detail: what both ran with. limit: what keeps it from being faster.
    missing: why it was not measured; then there are no figures, and the row counts as missed.
    failed: it is missing because something broke, and not because something is not installed.
    """

    name: str
    unit: str
    ours: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    at_least: float = 0.0
    wrong: int = 0
    less_is_better: bool = False
    against: str = ""
    detail: str = ""
    limit: str = ""
    missing: str = ""
    failed: bool = False

    @property
    def value(self) -> float | None:
        """The median of ours."""
        return median(self.ours) if self.ours else None

    @property
    def reference_value(self) -> float | None:
        """The median of the reference."""
        return median(self.reference) if self.reference else None

    @property
    def ratio(self) -> float | None:
        """How many times as good as the reference ours is, by the medians; larger is better, whatever the unit."""
        good, base = self.value, self.reference_value
        if self.less_is_better:
            good, base = base, good
        return good / base if good is not None and base else None

    @property
    def passed(self) -> bool:
        """Whether it was measured, the bar is met, and every element is right."""
        return not self.missing and self.wrong == 0 and (self.ratio or 0.0) >= self.at_least

    @property
    def verdict(self) -> str:
        """A word for the table."""
        if self.missing:
            return f"{'FAILED' if self.failed else 'not measured'}: {self.missing}"
        if self.wrong:
            return "WRONG"
        if not self.at_least:
            return "-"
        return "ok" if self.passed else "MISSED"

    def as_json(self) -> dict[str, object]:
        """Return the row for the result file."""
        return {
            "name": self.name,
            "value": _rounded(self.value),
            "unit": self.unit,
            "reference": _rounded(self.reference_value),
            "ratio": _rounded(self.ratio),
            "at_least": self.at_least,
            "passed": self.passed,
            "wrong": self.wrong,
            "less_is_better": self.less_is_better,
            "against": self.against,
            "detail": self.detail,
            "limit": self.limit,
            "missing": self.missing,
            "failed": self.failed,
            "rounds": {
                "ours": [_rounded(number) for number in self.ours],
                "reference": [_rounded(number) for number in self.reference],
            },
        }


def _rounded(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.{SIGNIFICANT}g}")


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, wide enough for the longest name."""
    width = max([len(row.name) for row in rows] + [4])
    lines = [
        f"{'name':{width}} {'ours':>9} {'reference':>9} {'unit':7} {'ratio':>6} {'bar':>5} {'#wrong':>6}  "
        f"{'verdict':8} against; detail"
    ]
    return "\n".join(lines + [_line(row, width) for row in rows])


def _line(row: Row, width: int) -> str:
    bar = f"{row.at_least:.3g}" if row.at_least else "-"
    figures = f"{_figure(row.value)} {_figure(row.reference_value)} {row.unit:7} {_figure(row.ratio, 6)} {bar:>5}"
    words = "; ".join(part for part in (row.against, row.detail) if part)
    line = f"{row.name:{width}} {figures} {row.wrong:6}  {row.verdict:8} {words}".rstrip()
    # A bar that is missed without a reason said is no result.
    return f"{line}\n{'':{width}} limited by: {row.limit}" if row.limit and row.verdict == "MISSED" else line


def _figure(number: float | None, width: int = 9) -> str:
    return f"{'-':>{width}}" if number is None else f"{number:{width}.3f}"


@contextmanager
def machine_to_ourselves() -> Iterator[None]:
    """Hold the lock that keeps measurements on one machine apart."""
    path = os.path.join(tempfile.gettempdir(), "pdtx-benchmarks.lock")
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
