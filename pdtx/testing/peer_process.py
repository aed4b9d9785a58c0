"""A node in a process of its own, for checks that kill or stop it: python -m pdtx.testing.peer_process.

The first line of stdin is a Job as JSON. The first line of stdout says that it is at work: a consumer's address, or
"ready" of a producer, which then puts and gets, four transfers at a time, for ever. It ends with stdin.
"""

import itertools
import sys
import threading
import time
from collections import deque

import msgspec
import torch

from pdtx.cache.memory import allocate
from pdtx.errors import PdtxError
from pdtx.testing.jobs import Job
from pdtx.testing.open_receiver import OpenReceiver, key_of, runs_of
from pdtx.transports import Connection, Mover, Region, TransferHandle, make_mover

_WINDOW = 4
_PIECES = 2
_PATIENCE_S = 60.0


def _work(connection: Connection, region: Region, job: Job, ready: threading.Event) -> None:
    """Put and get pieces of the memory in turns, to and from the same place of the consumer's."""
    moves = [*([connection.put] if job.puts else []), *([connection.get] if job.gets else [])]
    window = deque[TransferHandle]()
    piece = region.nbytes // _PIECES
    for number in itertools.count():
        start = number % _PIECES * piece
        key, runs, deadline = (
            key_of(start, start + piece),
            runs_of(start, start + piece),
            time.monotonic() + _PATIENCE_S,
        )
        window.append(moves[number % len(moves)](key, region, runs, deadline))
        if len(window) == _WINDOW:
            window.popleft().wait()
            ready.set()


def _work_until_it_fails(connection: Connection, region: Region, job: Job, ready: threading.Event) -> None:
    try:
        _work(connection, region, job, ready)
    except PdtxError as error:
        sys.stderr.write(f"the producer stops: {error}\n")


def _begin(mover: Mover, job: Job, region: Region) -> str:
    """Listen or connect; return what to say."""
    if not job.producer:
        return mover.listen(job.address, OpenReceiver(region, job.token))
    connection = mover.connect(job.address, job.session_id, job.token, time.monotonic() + _PATIENCE_S)
    ready = threading.Event()
    threading.Thread(target=_work_until_it_fails, args=(connection, region, job, ready), daemon=True).start()
    ready.wait(_PATIENCE_S)
    return "ready"


def main() -> None:
    """Do the job on stdin."""
    torch.set_num_threads(1)
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    mover = make_mover(job.mover, **job.options)
    region = Region(allocate(job.nbytes, torch.device("cpu"), shared=job.shared).fill_(job.fill))
    sys.stdout.write(_begin(mover, job, region) + "\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    mover.close()


if __name__ == "__main__":
    main()
