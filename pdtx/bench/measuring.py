"""Measure a sweep, case after case, and keep what was measured, whatever ends the run."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pdtx.bench.axes import Reference, one_of, values
from pdtx.bench.flags import Flags
from pdtx.bench.fleet import Fleet
from pdtx.bench.fleet_case import Progress
from pdtx.bench.sweep import AXES, Point, Sweep, expand
from pdtx.errors import InputError, PdtxError, VerificationError
from pdtx.report import machine_facts
from pdtx.results.model import Case, CaseResult, Result
from pdtx.results.summary import summarize
from pdtx.units import counted


@dataclass(frozen=True)
class How:
    """How every case is measured. deadline: time.monotonic() of the whole run."""

    iterations: int
    warmup: int
    verify: bool
    references: tuple[str, ...]
    deadline: float

    @classmethod
    def of(cls, flags: Flags) -> "How":
        """Read flags; the run's time begins now. Raises InputError."""
        references = references_of(flags)
        deadline = time.monotonic() + float(flags["deadline"])
        return cls(flags["iterations"], flags["warmup"], flags["verify"], references, deadline)


class Observer:
    """Learns how far a run is; this one keeps it to itself."""

    def begun(self, points: Sequence[Point], how: How) -> None:
        """Learn what is going to be measured."""

    def case(self, case: Case) -> None:
        """Learn that a case begins."""

    def progress(self, progress: Progress) -> None:
        """Learn how far it is."""

    def done(self, found: CaseResult) -> None:
        """Learn what a case came to; it is in the result by now."""

    def late(self, left: int, total: int) -> None:
        """Learn that the deadline has passed with so many cases left."""

    def ended(self) -> None:
        """Learn that nothing more will be measured, however the run ended; an interrupted case is yet to be done()."""


def new_result(flags: Flags, command: Sequence[str]) -> Result:
    """Return a result in which nothing has been measured yet."""
    return Result(
        command=list(command),
        config=flags.as_config(),
        label=", ".join(f"{key}={value}" for key, value in flags.pairs("label").items()),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        driver=dict(machine_facts()),
    )


def read_sweep(flags: Flags) -> Sweep:
    """Return the sweep that flags say. Raises InputError."""
    tables: Any = ()
    if flags["block-tables"] is not None:
        from pdtx.results.capture import read_block_tables

        tables = read_block_tables(flags["block-tables"])
    return Sweep.of(
        flags.texts(list(AXES)),
        mover_options=flags.pairs("mover-option"),
        block_tables=tables,
        isolated=bool(flags["isolated"]),
        seed=flags["seed"],
    )


def references_of(flags: Flags) -> tuple[str, ...]:
    """Return the references that are to be measured; none at all for 'none'. Raises InputError."""
    text = flags["reference"]
    found = values("reference", text, one_of(Reference))
    if "none" in found and len(found) > 1:
        raise InputError(f"--reference {text} says none and some; give one or the other")
    return () if found == ("none",) else found


def refuse_impossible(sweep: Sweep, counts: tuple[int, int]) -> None:
    """Raise InputError for a sweep of which no case can be measured, before any agent is started."""
    skipped = [point.skipped for point in expand(sweep, counts)]
    if None not in skipped:
        raise InputError(_nothing(skipped))


def _nothing(reasons: Sequence[str | None]) -> str:
    return f"nothing could be measured: {reasons[0]}" if reasons else "there is nothing to measure"


def measure_all(
    fleet: Fleet, sweep: Sweep, counts: tuple[int, int], how: How, result: Result, observer: Observer
) -> None:
    """Measure every case of a sweep, and put it into result.

    However it ends, what has been measured is there. Raises what ends a run: a lost agent, a signal.
    """
    result.nodes = list(fleet.nodes)
    points = expand(sweep, counts, (fleet.max_bytes, fleet.max_bytes))
    observer.begun(points, how)
    try:
        for point in points:
            if time.monotonic() >= how.deadline:
                observer.late(len(points) - len(result.cases), len(points))
                return
            if point.skipped is None:
                observer.case(point.case)
            result.cases.append(_measured(fleet, point, how, observer))
            observer.done(result.cases[-1])
        result.complete = not any(_cut_off(case, how) for case in result.cases[-1:])
    finally:
        observer.ended()
        if fleet.current is not None:
            # Interrupted in the middle of a case: what it has so far is worth keeping.
            broken = fleet.current
            broken.error = broken.error or "interrupted"
            result.cases.append(broken)
            observer.done(broken)
        result.nodes = list(fleet.nodes)


def _measured(fleet: Fleet, point: Point, how: How, observer: Observer) -> CaseResult:
    if point.skipped is not None:
        return CaseResult(
            case=point.case, iterations=how.iterations, warmup=how.warmup, verified=how.verify, skipped=point.skipped
        )
    return fleet.measure(
        point.case,
        iterations=how.iterations,
        warmup=how.warmup,
        verify=how.verify,
        references=how.references,
        deadline=how.deadline,
        told=observer.progress,
    )


def _cut_off(case: CaseResult, how: How) -> bool:
    return case.error is not None and time.monotonic() >= how.deadline


def judge(result: Result, failure: PdtxError | None = None) -> None:
    """Raise what a run's exit code is to say: cases that failed, had wrong elements, or are missing.

    failure: of the case that failed last. Where no case came to a single sample, and for something that was given, the
    run failed for that.
    """
    measured = [case for case in result.cases if case.skipped is None]
    if result.complete and not measured:
        raise InputError(_nothing([case.skipped for case in result.cases]))
    wrong = sum(sample.wrong or 0 for case in measured for sample in case.samples)
    failed = [case for case in measured if not summarize(case).ok]
    if wrong:
        first = next(text for case in failed if (text := summarize(case).first_wrong))
        raise VerificationError(
            f"{wrong:,} elements are wrong, so figures beside them mean nothing; first: {first}", wrong
        )
    if failed:
        none = not any(case.samples for case in measured)
        kind = InputError if none and isinstance(failure, InputError) else PdtxError
        raise kind(
            f"{len(failed)} of {counted(len(measured), 'case')} failed; first: {summarize(failed[0]).failures[0]}"
        )
    if not result.complete:
        raise PdtxError("cut off before all cases were measured; give a longer --deadline or fewer cases")
