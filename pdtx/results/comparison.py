"""Two results side by side: which cases are the same, how they differ, and what else is different between the runs."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any, Literal

import msgspec

from pdtx.errors import InputError
from pdtx.results.model import Case, CaseResult, Result, Sample
from pdtx.results.params import AMOUNTS, FIELDS, flattened, parameters, shown
from pdtx.results.significance import Difference, differences
from pdtx.results.stability import UNSTEADY, check_case, check_result, grouped
from pdtx.results.summary import CaseSummary, counted_samples, move_seconds, summarize

Metric = Literal["move", "wall", "post", "prepare"]
METRICS: dict[Metric, Callable[[Sample], float]] = {
    "move": move_seconds,
    "wall": lambda sample: sample.wall_s,
    "post": lambda sample: max(link.post_s for link in sample.links),
    "prepare": lambda sample: max(link.prepare_s for link in sample.links),
}
"""Seconds of an iteration that can be compared; of several links the slowest counts."""
_UNTOLD = frozenset(
    {"date", "output", "json", "force", "label", "address", "max_bytes", "max-bytes", "key", "peer-key", "rendezvous"}
)
"""What differs between any two runs and explains nothing; the label is told by itself, first."""
_ADDRESSES = frozenset({"prefill", "decode"})
"""Flags with HOST:PORT: ports are free ones, and others each time."""


@dataclass(frozen=True)
class Compared:
    """One case of both results. failures: of either side, which make a comparison worthless.

    missed: why nothing has been shown of their speeds, a line each. unsteady: 'load in A' and the like, for the eye.
    """

    case: Case
    before: CaseSummary
    after: CaseSummary
    difference: Difference
    failures: tuple[str, ...]
    missed: tuple[str, ...] = ()
    unsteady: tuple[str, ...] = ()

    def slower_than(self, share: float) -> bool:
        """Whether it is significantly slower by more than share, 0.05 for 5 %."""
        return self.difference.verdict == "slower" and self.difference.ratio > 1 + share


@dataclass(frozen=True)
class Comparison:
    """Two results. differing: what else differs between the runs, a line each; only_before, only_after: cases.

    unsteady: what pdtx check finds in either that moves times by itself: A or B, and the finding.
    """

    rows: tuple[Compared, ...]
    differing: tuple[str, ...]
    only_before: tuple[Case, ...]
    only_after: tuple[Case, ...]
    unsteady: tuple[tuple[str, str], ...] = ()

    @property
    def geometric_mean(self) -> float | None:
        """Of the ratios of times of all cases that can be compared; None where there are none."""
        logs = [
            log(row.difference.ratio)
            for row in self.rows
            if row.difference.verdict != "too few" and not row.failures and row.difference.ratio > 0
        ]
        return exp(sum(logs) / len(logs)) if logs else None


def compare_results(before: Result, after: Result, *, metric: Metric = "move", noise: float = 0.05) -> Comparison:
    """Compare two results case by case.

    Cases match where all parameters do. A parameter that is the same throughout each result and differs between them
    (as the mover, where movers are compared) is told as a difference of the runs and does not stand in the way, unless
    it says how many bytes move. Raises InputError where no case matches, or scipy is missing.
    """
    ignored = _set_apart(before, after)
    pairs, only_before, only_after = _matched(before.cases, after.cases, ignored)
    if not pairs:
        raise InputError(
            "no case of one result has the parameters of a case of the other; compare runs of the same sweep "
            "(pdtx show FILE tells the parameters)"
        )
    seconds = [(_seconds(one, metric), _seconds(other, metric)) for one, other in pairs]
    found = differences(seconds, noise)
    rows = [
        _compared((one, before), (other, after), difference, metric)
        for (one, other), difference in zip(pairs, found, strict=True)
    ]
    unsteady = [(name, text) for name, result in (("A", before), ("B", after)) for text in _unsteady_run(result)]
    differing = _differing(before, after, ignored)
    return Comparison(tuple(rows), tuple(differing), only_before, only_after, tuple(unsteady))


def _compared(
    before: tuple[CaseResult, Result], after: tuple[CaseResult, Result], difference: Difference, metric: Metric
) -> Compared:
    first, second = summarize(before[0]), summarize(after[0])
    failures = [f"A: {text}" for text in first.failures] + [f"B: {text}" for text in second.failures]
    missed = [*failures, *_missed(first, second, difference)]
    for name, case in (("A", before[0]), ("B", after[0])):
        if zeros := sum(METRICS[metric](one) <= 0 for one in counted_samples(case, cold=False)):
            missed.append(f"{name}: {zeros} iterations took 0 seconds ({metric}), which is no measurement")
    unsteady = []
    for name, (case, result), summary in (("A", before, first), ("B", after, second)):
        codes = [one.code for one in check_case(case, summary, result.nodes) if one.code in UNSTEADY]
        unsteady += [f"{'load' if 'load' in codes else codes[0]} in {name}"] if codes else []
    return Compared(before[0].case, first, second, difference, tuple(failures), tuple(missed), tuple(unsteady))


def _missed(before: CaseSummary, after: CaseSummary, difference: Difference) -> list[str]:
    """What keeps a case from having shown how fast it is, though nothing failed."""
    missed = [f"{difference}"] if difference.verdict == "too few" else []
    if before.wrong is not None and after.wrong is None:
        missed.append("B: nobody has looked at what arrived, as in A; run it again with --verify")
    return missed


def _unsteady_run(result: Result) -> list[str]:
    """What the check of a run finds that moves times; where it is the load, that alone, for it explains the others."""
    found = [one for _, one in grouped(check_result(result)) if one.code in UNSTEADY]
    loads = [one for one in found if one.code == "load"]
    return [one.text for one in loads or found]


def _seconds(case: CaseResult, metric: Metric) -> list[float]:
    """Seconds of the iterations that count and are not cold; zeros are no measurement."""
    found = [METRICS[metric](sample) for sample in counted_samples(case, cold=False)]
    return [one for one in found if one > 0]


def _set_apart(before: Result, after: Result) -> list[str]:
    """Parameters with one value in all cases of each result, and another in the other result."""
    names = []
    for name in FIELDS:
        values = [{_key(case.case, (name,)) for case in result.cases} for result in (before, after)]
        if name not in AMOUNTS and all(len(one) == 1 for one in values) and values[0] != values[1]:
            names.append(name)
    return names


def _key(case: Case, names: Sequence[str]) -> str:
    fields = parameters(case)
    return msgspec.json.encode([fields[name] for name in names], order="sorted").decode()


def _matched(
    before: Sequence[CaseResult], after: Sequence[CaseResult], ignored: Sequence[str]
) -> tuple[list[tuple[CaseResult, CaseResult]], tuple[Case, ...], tuple[Case, ...]]:
    """Pairs in the order of the first; of equal cases the first with the first, and so on."""
    names = [name for name in FIELDS if name not in ignored]
    waiting = defaultdict[str, list[CaseResult]](list)
    for case in after:
        if case.skipped is None:
            waiting[_key(case.case, names)].append(case)
    pairs, alone = [], []
    for case in before:
        if case.skipped is not None:
            continue
        others = waiting[_key(case.case, names)]
        if others:
            pairs.append((case, others.pop(0)))
        else:
            alone.append(case.case)
    return pairs, tuple(alone), tuple(case.case for cases in waiting.values() for case in cases)


def _differing(before: Result, after: Result, ignored: Sequence[str]) -> list[str]:
    """What differs between two runs besides their times, for the eye."""
    labels = [result.label or "-" for result in (before, after)]
    lines = [f"label {' | '.join(labels)}"] if labels[0] != labels[1] else []
    lines += [f"{name} {shown(before.cases[0].case, name)} | {shown(after.cases[0].case, name)}" for name in ignored]
    told: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("config", _portless(before.config), _portless(after.config))
    ]
    lines += [f"nodes {len(before.nodes)} | {len(after.nodes)}"] if len(before.nodes) != len(after.nodes) else []
    for one, other in zip(before.nodes, after.nodes, strict=False):
        role = f"{one.role} {one.rank}"
        told.append((role, {"host": one.host, **one.facts}, {"host": other.host, **other.facts}))
    for where, first, second in told:
        flat, others = flattened(first), flattened(second)
        lines += [
            f"{where}: {name} {flat.get(name, '-')} | {others.get(name, '-')}"
            for name in dict.fromkeys([*flat, *others])
            if flat.get(name) != others.get(name) and name not in _UNTOLD
        ]
    return lines


def _portless(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration whose addresses have no ports."""
    return {
        name: re.sub(r":\d+(?=\s|,|$)", "", _list(value)) if name in _ADDRESSES else value
        for name, value in config.items()
    }


def _list(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
