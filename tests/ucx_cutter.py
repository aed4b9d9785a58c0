"""Puts that are cut off at moments all over their way, in a process that must outlive them."""

import secrets
import sys
import time

import numpy as np
import torch

from pdtx.cache.memory import allocate
from pdtx.errors import DeadlineExceeded, PdtxError
from pdtx.plan import Runs
from pdtx.testing.open_receiver import STRAIGHT, OpenReceiver, key_of
from pdtx.transports import Region, make_mover

NBYTES = 32 << 20


def main(piece: int, rounds: int) -> None:
    """Cut off as many puts, of runs of piece bytes, and say how many of them the deadline ended."""
    token = secrets.token_bytes(32)
    here, there = (Region(allocate(NBYTES, torch.device("cpu")).fill_(fill)) for fill in (1, 2))
    consumer, producer = make_mover("ucx"), make_mover("ucx")
    address = consumer.listen("127.0.0.1:0", OpenReceiver(there, token))
    offsets = np.arange(0, NBYTES, piece, dtype=np.int64)
    runs = Runs(offsets, offsets, np.full(len(offsets), piece, np.int64))
    cut = 0
    for number in range(rounds):
        connection = producer.connect(address, "session", token, time.monotonic() + 10.0)
        deadline = time.monotonic() + 0.01 * number / rounds
        try:
            connection.put(key_of(0, NBYTES, STRAIGHT), here, runs, deadline).wait()
        except DeadlineExceeded:
            cut += 1
        except PdtxError as error:
            sys.stderr.write(f"{error}\n")
        connection.close()
    producer.close()
    consumer.close()
    sys.stdout.write(f"{cut}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
