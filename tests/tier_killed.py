"""A process that stores request after request in a disk tier, to be killed while it does.

Arguments: the folder. Prints "stored N" after each request of BLOCKS blocks, N = 0, 1, ... Does not end by itself.
"""

import signal
import sys
from pathlib import Path

from tests.tier_disks import open_disk, plain, store

BLOCKS = 9
REQUESTS = 20


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    cache = plain()
    tier = open_disk(Path(sys.argv[1]), cache)
    say("open")
    for seed in range(REQUESTS):
        store(tier, cache, BLOCKS, seed)
        say(f"stored {seed}")
    signal.pause()  # however late the kill comes


if __name__ == "__main__":
    main()
