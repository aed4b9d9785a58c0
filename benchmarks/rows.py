"""What a measurement is reported as."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median


@dataclass(frozen=True)
class Row:
    """One measurement: ours against a reference, round by round, both in unit (larger is better).

    at_least: the bar for the ratio of the medians. wrong: elements that did not arrive as they were sent.
    """

    name: str
    unit: str
    ours: list[float]
    reference: list[float]
    at_least: float
    wrong: int

    @property
    def value(self) -> float:
        """The median of ours."""
        return median(self.ours)

    @property
    def ratio(self) -> float:
        """The median of ours over the median of the reference."""
        return self.value / median(self.reference)

    @property
    def passed(self) -> bool:
        """Whether the bar is met with every element right."""
        return self.ratio >= self.at_least and self.wrong == 0

    def as_json(self) -> dict[str, object]:
        """Return the row for the result file."""
        fields = asdict(self)
        rounds = {"ours": fields.pop("ours"), "reference": fields.pop("reference")}
        more = {"value": self.value, "reference": median(self.reference), "ratio": self.ratio, "passed": self.passed}
        return {**fields, **more, "rounds": rounds}


def table(rows: list[Row]) -> str:
    """Return the rows as text."""
    lines = [f"{'name':32} {'ours':>9} {'reference':>9} {'unit':5} {'ratio':>6} {'bar':>5} {'#wrong':>7}"]
    lines += [
        f"{row.name:32} {row.value:9.3f} {median(row.reference):9.3f} {row.unit:5} {row.ratio:6.3f} "
        f"{row.at_least:5.2f} {row.wrong:7} {'ok' if row.passed else 'MISSED'}"
        for row in rows
    ]
    return "\n".join(lines)


@contextmanager
def machine_to_ourselves() -> Iterator[None]:
    """Hold the lock that keeps measurements on one machine apart."""
    path = os.path.join(tempfile.gettempdir(), "pdtx-benchmarks.lock")
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
