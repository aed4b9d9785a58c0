"""A trial in a process of its own: `python -m pdtx.doctor.probe NAME` makes a mover, or asks torch for CUDA.

Libraries that it loads may hang, print or take the process down; none of that is to end an examination. It writes one
line of JSON, a Trial.
"""

import logging
import sys

import msgspec

from pdtx.errors import PdtxError

CUDA = "cuda"


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


def main() -> None:
    """Entry point: one name."""
    logging.disable(logging.CRITICAL)
    name = sys.argv[1]
    trial = try_cuda() if name == CUDA else try_mover(name)
    # With a mark before it, since libraries print on stdout too.
    sys.stdout.write(f"\n{MARK}{msgspec.json.encode(trial).decode()}\n")
    sys.stdout.flush()


MARK = "trial "

if __name__ == "__main__":
    main()
