"""Trials: to make a mover, or to ask torch for CUDA.

Libraries that a trial loads may hang, print or take the process down; none of that is to end an examination. So each
trial has a process of its own, forked from one that has imported what all need: torch alone takes seconds, on slow
machines a minute.
"""

import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection

import msgspec

from pdtx.errors import PdtxError

CUDA = "cuda"
MARK = "pdtx-trial "
"""What a trial's line of JSON begins with: libraries print on stdout too."""

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


def try_all(names: Sequence[str], limit: float) -> Iterator[Trial]:
    """Try all at once; one that has not ended at limit (time.monotonic) is killed, and told as an error."""
    import_module("pdtx.transports")
    forked = get_context("fork")
    under_way = []
    for name in names:
        ours, theirs = forked.Pipe(duplex=False)
        process = forked.Process(target=_tell, args=(name, theirs), daemon=True)
        process.start()
        # The trial's own end of the pipe is the last one: when it dies, the pipe says so.
        theirs.close()
        under_way.append((name, ours, process))
    for name, ours, process in under_way:
        yield _hear(name, ours, limit)
        # What it has loaded may crash at its end.
        process.kill()
        process.join()


def _tell(name: str, end: Connection) -> None:
    end.send_bytes(msgspec.json.encode(try_cuda() if name == CUDA else try_mover(name)))


def _hear(name: str, end: Connection, limit: float) -> Trial:
    if not end.poll(max(limit - time.monotonic(), 0)):
        return Trial(name=name, error=f"it has not started in time{_SEE}{name}")
    try:
        return msgspec.json.decode(end.recv_bytes(), type=Trial)
    except EOFError:
        return Trial(name=name, error=f"its process died{_SEE}{name}")
