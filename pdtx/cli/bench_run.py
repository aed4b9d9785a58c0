"""Run a sweep: measure case after case, print and keep each as it finishes, whatever ends the run."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pdtx.cli.bench_agents import agent_counts, only_serves, open_fleet, serve
from pdtx.cli.bench_flags import Flags
from pdtx.cli.bench_rows import RowTable
from pdtx.cli.bench_teller import Teller
from pdtx.cli.common import emit, note
from pdtx.errors import InputError, PdtxError, VerificationError
from pdtx.results.files import names_beside, write_result_file
from pdtx.results.model import Case, CaseResult, NodeFacts, Result
from pdtx.results.summary import summarize
from pdtx.units import counted, format_bytes

if TYPE_CHECKING:
    from pdtx.bench.fleet import Progress
    from pdtx.bench.sweep import Point, Sweep

_WRITING_SHARE = 0.05
"""Of a run's time that may go into writing its file again and again."""


class Measures(Protocol):
    """What is used of a fleet, see pdtx.bench.fleet.Fleet."""

    current: CaseResult | None
    failure: PdtxError | None

    @property
    def nodes(self) -> tuple[NodeFacts, ...]:
        """The agents."""

    @property
    def max_bytes(self) -> int:
        """What a case's caches may take at every agent."""

    def measure(
        self,
        case: Case,
        *,
        iterations: int,
        warmup: int,
        verify: bool,
        references: Sequence[str],
        deadline: float,
        told: "Callable[[Progress], None]",
    ) -> CaseResult:
        """Measure a case."""


@dataclass(frozen=True)
class How:
    """How every case is measured. deadline: time.monotonic() of the whole run."""

    iterations: int
    warmup: int
    verify: bool
    references: tuple[str, ...]
    deadline: float


class Record:
    """A run's result, and its file, which is whole at any time; there is none before anything was measured.

    path: of the file; another name beside it if something is there by then, for what was measured must not be lost.
    """

    def __init__(self, path: Path, result: Result, *, force: bool) -> None:
        """Look whether the file can be written. Raises InputError if not, or it exists and force does not say so."""
        if path.exists() and not force:
            raise InputError(f"{path} exists; give another name, or --force to overwrite it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot make the folder {path.parent}: {error.strerror}") from None
        if not os.access(path.parent, os.W_OK):
            raise InputError(f"cannot write into {path.parent}; give another --output")
        self.path, self.result, self._force = path, result, force
        self._began = self._written = time.monotonic()
        self._took = 0.0

    @property
    def measured(self) -> bool:
        """Whether there is a sample to keep; reasons for having none were told on stderr."""
        return any(case.samples for case in self.result.cases)

    def add(self, case: CaseResult) -> None:
        """Keep a case; in the file as well, unless that has just been written and takes long."""
        self.result.cases.append(case)
        if time.monotonic() - self._written >= self._took / _WRITING_SHARE:
            self.save()

    def save(self) -> None:
        """Write what there is, if anything was measured."""
        if not self.measured:
            return
        began = time.monotonic()
        self.result.seconds = began - self._began
        self.path = write_result_file(self.path, self.result, force=self._force, numbered=True)
        self._force = True  # what is there now is ours
        self._written = time.monotonic()
        self._took = self._written - began


def run_bench(flags: Flags, *, as_json: bool) -> None:
    """Do what the flags say: measure, print, write the result file.

    Raises InputError for flags that cannot be used or a run in which nothing can be measured, VerificationError and
    PdtxError for cases that failed or were cut off, after everything has been written.
    """
    from pdtx.report import machine_facts

    sweep, counts = read_sweep(flags), agent_counts(flags)
    references = read_references(flags["reference"])
    label = ", ".join(f"{key}={value}" for key, value in flags.pairs("label").items())
    _refuse_impossible(sweep, counts)  # in every process of a rendezvous, so that none waits for the others
    if only_serves(flags):
        serve(flags)
        return
    deadline = time.monotonic() + float(flags["deadline"])
    how = How(flags["iterations"], flags["warmup"], flags["verify"], references, deadline)
    result = Result(
        command=["pdtx", *sys.argv[1:]],
        config=flags.as_config(),
        label=label,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        driver=dict(machine_facts()),
    )
    record = Record(_path(flags["output"]), result, force=bool(flags["force"]))
    try:
        with open_fleet(flags) as fleet:
            measure_all(fleet, sweep, counts, how, record, gbits=bool(flags["gbits"]), quiet=as_json)
    finally:
        record.save()
        if record.measured:
            what = "result" if result.complete else "incomplete result"
            note(f"{what} in {record.path}; go on with pdtx show, plot, report or compare")
    if as_json:
        emit(json.dumps(msgspec.to_builtins(result), indent=2))
    judge(result, fleet.failure)


def read_sweep(flags: Flags) -> "Sweep":
    """Return the sweep that flags say. Raises InputError."""
    from pdtx.bench.sweep import AXES, Sweep

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


def _refuse_impossible(sweep: "Sweep", counts: tuple[int, int]) -> None:
    """Raise InputError for a sweep of which no case can be measured, before any agent is started."""
    from pdtx.bench.sweep import expand

    skipped = [point.skipped for point in expand(sweep, counts)]
    if None not in skipped:
        raise InputError(_nothing(skipped))


def _nothing(reasons: Sequence[str | None]) -> str:
    return f"nothing could be measured: {reasons[0]}" if reasons else "there is nothing to measure"


def read_references(text: str) -> tuple[str, ...]:
    """Return the references that a text names; none at all for 'none'. Raises InputError."""
    from pdtx.bench.axes import Reference, one_of, values

    found = values("reference", text, one_of(Reference))
    if "none" in found and len(found) > 1:
        raise InputError(f"--reference {text} says none and some; give one or the other")
    return () if found == ("none",) else found


def _path(given: Path | None) -> Path:
    """Return where the result goes; unless somebody says, where nothing is yet."""
    if given is not None:
        return given
    path = Path(f"results/bench-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
    return next(name for name in names_beside(path) if not name.exists())


def measure_all(
    fleet: Measures,
    sweep: "Sweep",
    counts: tuple[int, int],
    how: How,
    record: Record,
    *,
    gbits: bool = False,
    quiet: bool = False,
) -> None:
    """Measure every case of a sweep and keep it; quiet: without rows on stdout.

    However it ends, what has been measured is in the record. Raises what ends a run: a lost agent, a signal.
    """
    from pdtx.bench.sweep import expand

    record.result.nodes = list(fleet.nodes)
    points = expand(sweep, counts, (fleet.max_bytes, fleet.max_bytes))
    todo = [point for point in points if point.skipped is None]
    note(_plan_text(points, todo, how))
    table = RowTable([point.case for point in points], gbits=gbits)
    teller = Teller(len(todo), how.deadline)
    say: Callable[[str], None] = (lambda text: None) if quiet else teller.row
    for line in table.heads():
        say(line)
    try:
        for point in points:
            if time.monotonic() >= how.deadline:
                note(
                    f"the deadline has passed with {len(points) - len(record.result.cases)} of {len(points)} cases left"
                )
                return
            if point.skipped is None:
                teller.case(table.label(point.case))
            found = _measured(fleet, point, how, teller)
            record.add(found)
            say(table.line(found))
        record.result.complete = not any(_cut_off(case, how) for case in record.result.cases[-1:])
    finally:
        teller.clear()
        if fleet.current is not None:
            # Interrupted in the middle of a case: what it has so far is worth keeping.
            broken = fleet.current
            broken.error = broken.error or "interrupted"
            record.result.cases.append(broken)
            say(table.line(broken))
        record.result.nodes = list(fleet.nodes)


def _measured(fleet: Measures, point: "Point", how: How, teller: Teller) -> CaseResult:
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
        told=teller,
    )


def _cut_off(case: CaseResult, how: How) -> bool:
    return case.error is not None and time.monotonic() >= how.deadline


def _plan_text(points: Sequence["Point"], todo: Sequence["Point"], how: How) -> str:
    """Return how much there is to do."""
    rounds = how.iterations + how.warmup
    nbytes = sum(point.request_bytes * point.case.batch for point in todo)
    skipped = f", {len(points) - len(todo)} skipped as impossible" if len(todo) < len(points) else ""
    return (
        f"{counted(len(todo), 'case')}{skipped}; {how.warmup} + {how.iterations} iterations each, about "
        f"{format_bytes(nbytes * rounds)} a link in all{'' if how.verify else '; nothing is verified'}"
    )


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
