"""What `pdtx doctor` runs: python -m pdtx.doctor SECONDS NAME... tries movers and CUDA, and writes one line a trial."""

import logging
import sys
import time
from contextlib import closing

import msgspec

from pdtx.doctor.probe import MARK, try_all


def main() -> None:
    """Entry point: seconds within which all must have ended, and names."""
    begun = time.monotonic()
    logging.disable(logging.CRITICAL)
    with closing(try_all(sys.argv[2:], begun + float(sys.argv[1]))) as trials:
        for trial in trials:
            sys.stdout.write(f"\n{MARK}{msgspec.json.encode(trial).decode()}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
