"""A sweep from Python: pdtx.bench.run()."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pdtx.bench.agents import agent_counts, open_fleet
from pdtx.bench.flags import flags_of
from pdtx.bench.measuring import How, Observer, measure_all, new_result, read_sweep, refuse_impossible
from pdtx.results.model import Result


def run_sweep(
    config: str | Path | Mapping[str, Any] | None,
    given: Mapping[str, Any],
    observer: Observer | None,
    log: Callable[[str], None] | None,
) -> Result:
    """Measure a sweep, see pdtx.bench.run."""
    flags = flags_of(config, given)
    sweep, counts = read_sweep(flags), agent_counts(flags)
    refuse_impossible(sweep, counts)
    how, result = How.of(flags), new_result(flags, ["pdtx.bench.run"])
    began = time.monotonic()
    with open_fleet(flags, log or _drop) as fleet:
        measure_all(fleet, sweep, counts, how, result, observer or Observer())
    result.seconds = time.monotonic() - began
    return result


def _drop(text: str) -> None:
    """Do nothing with a line."""
