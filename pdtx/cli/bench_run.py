"""Run a sweep: measure case after case, print and keep each as it finishes, whatever ends the run."""

import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from pdtx.bench.agents import agent_counts
from pdtx.bench.flags import Flags
from pdtx.cli.bench_agents import only_serves, open_fleet, serve
from pdtx.cli.common import emit, note
from pdtx.errors import InputError
from pdtx.results.files import names_beside, write_result_file
from pdtx.results.model import Result

_WRITING_SHARE = 0.05
"""Of a run's time that may go into writing its file again and again."""


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

    def save_soon(self) -> None:
        """Write what there is, unless that has just been done and takes long."""
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
    from pdtx.bench.measuring import How, judge, measure_all, new_result, read_sweep, refuse_impossible
    from pdtx.cli.bench_printer import Printer

    # All flags in every process of a rendezvous, so that none waits for others that refuse them.
    sweep, counts = read_sweep(flags), agent_counts(flags)
    how, result = How.of(flags), new_result(flags, ["pdtx", *sys.argv[1:]])
    refuse_impossible(sweep, counts)
    if only_serves(flags):
        serve(flags)
        return
    record = Record(_path(flags["output"]), result, force=bool(flags["force"]))
    try:
        with open_fleet(flags) as fleet:
            printer = Printer(record.save_soon, gbits=bool(flags["gbits"]), quiet=as_json)
            measure_all(fleet, sweep, counts, how, result, printer)
    finally:
        record.save()
        if record.measured:
            what = "result" if result.complete else "incomplete result"
            note(f"{what} in {record.path}; go on with pdtx show, plot, report or compare")
    if as_json:
        emit(json.dumps(msgspec.to_builtins(result), indent=2))
    judge(result, fleet.failure)


def _path(given: Path | None) -> Path:
    """Return where the result goes; unless somebody says, where nothing is yet."""
    if given is not None:
        return given
    path = Path(f"results/bench-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
    return next(name for name in names_beside(path) if not name.exists())
