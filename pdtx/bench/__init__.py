"""What `pdtx bench` measures, and run(), which measures a sweep from Python.

Sweeps over shapes, layouts and transports between agents; tiers against the machine's limit; hit rates of a trace.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdtx.bench.measuring import Observer
    from pdtx.results.model import Result

__all__ = ["judge", "run"]


def run(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    observer: "Observer | None" = None,
    log: Callable[[str], None] | None = None,
    **flags: Any,  # noqa: ANN401 - texts, numbers, lists: see pdtx.bench.flags
) -> "Result":
    """Measure a sweep as `pdtx bench` does, and return its result. Nothing is printed, and no file written.

    config: a YAML file, a scenario's name ("quick") or a mapping; flags, by the same names as on the command line (with
    _ for -), count before it: run(tokens=[512, 2048], layers=4, iterations=5). Agents are started as children of this
    process, unless prefill and decode name HOST:PORT of some; `pdtx bench --rendezvous` has no counterpart here.
    observer: learns how far it is, case by case. log: takes lines about progress and what agents write on stderr,
    perhaps in other threads; None drops them.
    Every wait has a deadline: flag deadline is that of the whole run (what has been measured by then is in the result,
    whose complete is False), connect_timeout that of the agents' start.
    What failed is in the result, case by case: pdtx.bench.judge(result) raises it as the command's exit code says.

    Raises InputError for flags that cannot be used, and PeerError, DeadlineExceeded or PdtxError if agents do not start
    or are lost.
    """
    from pdtx.bench.run_sweep import run_sweep

    return run_sweep(config, flags, observer, log)


def judge(result: "Result") -> None:
    """Raise unless every case of a result was measured and every element was right.

    Raises VerificationError for wrong elements, InputError if nothing could be measured, PdtxError for other failures.
    """
    from pdtx.bench import measuring

    measuring.judge(result)
