"""What `pdtx doctor` runs: python -m pdtx.doctor SECONDS NAME... tries movers and CUDA, and writes one line a trial.

Instead of SECONDS, @TIME is the time.monotonic() at which all must have ended: whoever ends the process itself must not
count from an earlier time than it does.
"""

import logging
import sys
import time
from contextlib import closing

import msgspec

from pdtx.doctor.probe import MARK, try_all


def main() -> None:
    """Entry point: when all must have ended, and names."""
    limit = _limit(sys.argv[1])
    logging.disable(logging.CRITICAL)
    with closing(try_all(sys.argv[2:], limit)) as trials:
        for trial in trials:
            sys.stdout.write(f"\n{MARK}{msgspec.json.encode(trial).decode()}\n")
            sys.stdout.flush()


def _limit(text: str) -> float:
    return float(text[1:]) if text.startswith("@") else time.monotonic() + float(text)


if __name__ == "__main__":
    main()
