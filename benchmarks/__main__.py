"""Run the benchmarks, print their rows as tables, write them as JSON.

Exit status 1 if a bar is missed, an element is wrong, or something could not be measured.
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import growth, latency, layouts, memory, modes, movers, plans, tiers
from benchmarks.rows import Row, machine_to_ourselves, table
from benchmarks.settings import LEAST_ROUNDS, ROUNDS, Settings
from benchmarks.surroundings import surroundings
from pdtx.errors import PdtxError
from pdtx.report import write_json

BENCHMARKS: dict[str, Callable[[Settings], list[Row]]] = {
    "tcp": movers.tcp,
    "shm": movers.shm,
    "ucx-tcp": movers.ucx_tcp,
    "ucx-host": movers.ucx_host,
    "layouts": layouts.layouts,
    "contiguous": layouts.contiguous,
    "growth": growth.growth,
    "plans": plans.plans,
    "latency": latency.latency,
    "memory": memory.memory,
    "mla": movers.mla,
    "modes": modes.modes,
    "tiers": tiers.tiers,
}
_QUICK_ROUNDS = 2

logger = logging.getLogger("benchmarks")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.write_costs is not None and options.only and "modes" not in options.only:
        parser.error("--write-costs writes what modes measures, which --only leaves out")
    if options.write_costs == "" and options.quick:
        parser.error("--quick measures no costs that anyone should go by: give --write-costs a FILE to look at them")
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else ROUNDS)
    if options.quick:
        logger.warning("quick: the figures mean nothing, and bars are not held")
    elif rounds < LEAST_ROUNDS:
        logger.warning("a median of %d rounds says little: %d is the least that counts", rounds, LEAST_ROUNDS)
    settings = Settings(rounds=rounds, quick=options.quick, write_costs=options.write_costs)
    try:
        rows = _measure(options.only or list(BENCHMARKS), settings, options.json)
    except PdtxError as error:
        sys.stderr.write(f"benchmarks: {error}\n")
        return error.exit_code
    return 0 if all(_good(row, options.allow_missing, quick=options.quick) for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks/run", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write machine, settings and rows there")
    add("--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    add("--rounds", type=_positive, metavar="N", help=f"of each measurement (default {ROUNDS}), whose median counts")
    add("--quick", action="store_true", help="next to no bytes: shows that everything works; no bar counts")
    add("--allow-missing", action="store_true", help="what is not installed is no failure")
    add("--write-costs", nargs="?", const="", metavar="FILE", help="write what modes measures, for mode auto to use")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is no number of rounds")
    return number


def _measure(names: Sequence[str], settings: Settings, file: Path | None) -> list[Row]:
    """Run benchmarks; the file is written anew after each, so that a long run that is cut off leaves what it had."""
    rows = list[Row]()
    with machine_to_ourselves():
        for name in names:
            begun = time.monotonic()
            found = BENCHMARKS[name](settings)
            rows += found
            sys.stdout.write(table(found) + "\n\n")
            sys.stdout.flush()
            logger.info("%s took %.0f s", name, time.monotonic() - begun)
            if file is not None:
                write_json(file, {**surroundings(settings), "rows": [row.as_json() for row in rows]})
    return rows


def _good(row: Row, allow_missing: bool, *, quick: bool) -> bool:
    if row.missing:
        return allow_missing and not row.failed
    return row.wrong == 0 if quick else row.passed


if __name__ == "__main__":
    sys.exit(main())
