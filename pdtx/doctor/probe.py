"""Trials: to make a mover, or to ask torch for CUDA.

Libraries that a trial loads may hang, print or take the process down; none of that is to end an examination. So each
trial has a process of its own, forked from one that has imported what all need: torch alone takes seconds, on slow
machines a minute.
"""

import ctypes
import os
import signal
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess

import msgspec

from pdtx.errors import PdtxError

CUDA = "cuda"
MARK = "pdtx-trial "
"""What a trial's line of JSON begins with: libraries print on stdout too."""

_PR_SET_PDEATHSIG = 1
_TICK_S = 0.05
_SEE = "; to see more: python -m pdtx.doctor 60 "


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """How a trial ended. error: why the thing cannot be had here; empty if it can.

    lanes: transports and devices that its UCX may use. kinds: what those are: rdma, tcp, shm.
    mapped: libucp files in the process, where two of one name would be mixed up.
    """

    name: str
    error: str = ""
    detail: str = ""
    lanes: list[str] = []
    kinds: list[str] = []
    mapped: list[str] = []


def try_mover(name: str) -> Trial:
    """Make a mover, and see what the UCX that it has loaded, if any, could use."""
    from pdtx.transports import make_mover
    from pdtx.transports.ucx.library import mapped

    try:
        mover = make_mover(name)
    except PdtxError as error:
        return Trial(name=name, error=str(error), mapped=[str(path) for path in mapped()])
    try:
        found = mapped()
        lanes, kinds, detail = _lanes(str(found[-1])) if found else ([], [], "")
        return Trial(name=name, lanes=lanes, kinds=kinds, detail=detail, mapped=[str(path) for path in found])
    finally:
        mover.close()


def _lanes(path: str) -> tuple[list[str], list[str], str]:
    """Return lanes, their kinds and the version of a library that is loaded."""
    from pdtx.transports.ucx.lanes import lanes_of_context
    from pdtx.transports.ucx.library import load

    try:
        ucp = load(path)
        context = ucp.create_context()
    except PdtxError as error:
        return [], [], f"its transports remain unknown: {error}"
    try:
        lanes = lanes_of_context(ucp.context_info(context))
    finally:
        ucp.destroy_context(context)
    return [str(lane) for lane in lanes], sorted({lane.kind for lane in lanes}), f"UCX {ucp.version_text}"


def try_cuda() -> Trial:
    """Ask torch for a CUDA device, and let it fill some memory."""
    import torch

    if torch.version.cuda is None:
        return Trial(name=CUDA, error=f"torch {torch.__version__} is built without CUDA")
    try:
        count = torch.cuda.device_count()
        if not torch.cuda.is_available() or not count:
            return Trial(name=CUDA, error=f"torch {torch.__version__} for CUDA {torch.version.cuda} sees no device")
        torch.ones(1 << 10, device=CUDA).sum().item()
        names = [torch.cuda.get_device_name(number) for number in range(count)]
    except (RuntimeError, AssertionError) as error:
        return Trial(name=CUDA, error=f"torch {torch.__version__}: {str(error).splitlines()[0]}")
    return Trial(name=CUDA, detail=f"torch {torch.__version__}, CUDA {torch.version.cuda}: {', '.join(names)}")


def try_all(names: Sequence[str], limit: float) -> Generator[Trial]:
    """Try all at once; one that has not ended at limit (time.monotonic) is killed, and told as an error."""
    import_module("pdtx.transports")
    forked, under_way = get_context("fork"), list[tuple[str, Connection, ForkProcess]]()
    try:
        with _interrupts_held_back():
            for name in names:
                ours, theirs = forked.Pipe(duplex=False)
                process = forked.Process(target=_tell, args=(name, theirs, os.getpid()), daemon=True)
                process.start()
                theirs.close()
                under_way.append((name, ours, process))
        for name, ours, process in under_way:
            yield _hear(name, ours, process, limit)
    finally:
        for _, _, process in under_way:
            _kill(process)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let Ctrl-C wait: in a fork's hooks it would be lost, and right after a fork the trial be known to nobody.

    By a handler, for a mask would be the main thread's alone, and the signal come through one of those of libraries.
    """
    come = list[int]()
    before = signal.signal(signal.SIGINT, lambda number, _: come.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if come:
            signal.raise_signal(signal.SIGINT)


def _kill(process: ForkProcess) -> None:
    """With what it has started. What it has loaded may ignore signals, or crash at its end."""
    if process.pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _tell(name: str, end: Connection, parent: int) -> None:
    """In the trial's process, which ends with the one that it was forked from and prints nowhere."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # killed before that was asked for
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which it was forked without
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    end.send_bytes(msgspec.json.encode(try_cuda() if name == CUDA else try_mover(name)))


def _hear(name: str, end: Connection, process: ForkProcess, limit: float) -> Trial:
    # A process that is dead has not always closed its end: others that it has started may hold it.
    while not end.poll(_TICK_S) and process.is_alive():
        if not time.monotonic() < limit:
            return Trial(name=name, error=f"it has not started in time{_SEE}{name}")
    try:
        if end.poll(0):
            return msgspec.json.decode(end.recv_bytes(), type=Trial)
    except EOFError:
        pass
    return Trial(name=name, error=f"its process died{_SEE}{name}")
