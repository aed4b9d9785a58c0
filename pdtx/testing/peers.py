"""Processes to be killed and stopped, seen from the process that does it."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import msgspec

from pdtx.errors import DeadlineExceeded, PeerLost
from pdtx.testing.jobs import Job

_START_S = 60.0
_END_S = 5.0
_STOP_S = 10.0


class PeerProcess:
    """A peer_process. Use in a with statement; it is killed at the end, whatever state it is in."""

    def __init__(self, job: Job) -> None:
        command = [sys.executable, "-m", "pdtx.testing.peer_process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self.said = self._start(job)
        except BaseException:
            self.close()
            raise

    def _start(self, job: Job) -> str:
        """Hand over the job; return the first line, the address of a consumer."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise TypeError("a process without pipes")
        stdin.write(msgspec.json.encode(job) + b"\n")
        stdin.flush()
        begun = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(_START_S):
                raise DeadlineExceeded("its start", "a peer process", round(time.monotonic() - begun, 3))
        line = stdout.readline().decode().strip()
        if not line:
            raise PeerLost(f"the process of the {'producer' if job.producer else 'consumer'} ended before it worked")
        return line

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def kill(self) -> None:
        """Kill it; returns at once."""
        self._process.kill()

    def stop(self) -> None:
        """Let it do nothing any more; returns when none of its threads does."""
        stop_process(self._process.pid)

    def resume(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill it, and wait for its end."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait(_END_S)


def stop_process(pid: int) -> None:
    """Stop a process; returns when none of its threads does anything any more. Raises TimeoutError."""
    os.kill(pid, signal.SIGSTOP)
    # The signal stops one thread at once, the others when they are next interrupted.
    give_up = time.monotonic() + _STOP_S
    while not is_stopped(pid):
        if time.monotonic() > give_up:
            raise TimeoutError(f"process {pid} did not stop within {_STOP_S:g} s")
        time.sleep(0.005)


def is_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped, or gone."""
    return all(_state(task) in "TtZX" for task in Path(f"/proc/{pid}/task").glob("*/stat"))


def _state(stat: Path) -> str:
    try:
        # The name, in brackets, may hold anything; the state is the first word after it.
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
