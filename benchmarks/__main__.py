"""Run the benchmarks, print a table, write the rows as JSON."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import plans, tcp
from benchmarks.rows import Row, machine_to_ourselves, table

BENCHMARKS: dict[str, Callable[[], Sequence[Row]]] = {tcp.NAME: lambda: [tcp.measure()], plans.NAME: plans.measure}


def main() -> int:
    """Return the exit status: 1 if a bar is missed or an element is wrong."""
    parser = argparse.ArgumentParser(prog="benchmarks/run", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--only", choices=sorted(BENCHMARKS), metavar="NAME", help=", ".join(sorted(BENCHMARKS)))
    arguments = parser.parse_args()
    rows = list[Row]()
    for name, measure in BENCHMARKS.items():
        if arguments.only in (None, name):
            with machine_to_ourselves():
                rows += measure()
    sys.stdout.write(table(rows) + "\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([row.as_json() for row in rows], indent=2) + "\n")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
