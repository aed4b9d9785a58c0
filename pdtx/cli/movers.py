"""Movers from the command line: a name, and options as KEY=VALUE."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdtx.errors import InputError

if TYPE_CHECKING:
    from pdtx.plan import CostTable, Mode
    from pdtx.transports import Mover
    from pdtx.transports.base import PathKind

_REQUIRABLE: tuple["PathKind", ...] = ("rdma", "tcp", "shm")
_RDMA_DEVICES = Path("/sys/class/infiniband")


def open_mover(name: str, options: Sequence[str] | None, *, advertise: str | None = None) -> "Mover":
    """Make a mover. options: as given; advertise: the host that others reach this node at, if not the one listened at.

    Raises InputError for an unknown mover, or an option that it does not have or that is not of the option's type.
    """
    from pdtx.transports import make_mover
    from pdtx.transports.options import typed_options
    from pdtx.transports.registry import mover_class

    if name == "inproc":
        raise InputError("the mover inproc works within one process, and nodes are two; on one host use shm")
    typed = typed_options(name, mover_class(name), options or [])
    if advertise is not None:
        typed.setdefault("advertise_host", advertise)
    return make_mover(name, **typed)


def shares_memory(mover: str) -> bool:
    """Whether a mover wants caches in memory that other processes of this host can map."""
    return mover == "shm"


def parse_require(text: str | None) -> "PathKind | None":
    """Return what must carry the payload. Raises InputError for what cannot be required, or cannot be had here."""
    found = next((kind for kind in _REQUIRABLE if kind == text), None)
    if text is not None and found is None:
        raise InputError(f"--require takes {', '.join(_REQUIRABLE)}, not {text!r}")
    # Said before anything is loaded; with a device it is the running connection that tells.
    if found == "rdma" and not any(_RDMA_DEVICES.glob("*")):
        raise InputError(
            f"rdma is required, but this host has no RDMA device (nothing in {_RDMA_DEVICES}); possible here: tcp, "
            "and shm within the host; 'pdtx doctor --want rdma' tells what is missing"
        )
    return found


def parse_mode(text: str) -> "Mode":
    """Return a mode. Raises InputError for an unknown one."""
    from pdtx.plan import Mode

    if text not in tuple(Mode):
        raise InputError(f"mode {text!r} is not one of {', '.join(Mode)}")
    return Mode(text)


def read_costs() -> "CostTable":
    """Return the costs that auto picks by, where somebody measured them. Raises InputError for a broken file."""
    from pdtx.plan import load_costs

    return load_costs()


def mover_flags(mover: str, options: Sequence[str] | None) -> list[str]:
    """Return the flags that give a node the same mover."""
    return ["--mover", mover, *(part for option in options or () for part in ("--mover-option", option))]
