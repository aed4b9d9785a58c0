"""A node's transport: the mover, what must carry its payload, and how it is sent."""

from pathlib import Path
from typing import TYPE_CHECKING

from pdtx.errors import InputError
from pdtx.node.config import MODES, REQUIRABLE, TransportConfig

if TYPE_CHECKING:
    from pdtx.plan import CostTable, Mode
    from pdtx.transports import Mover
    from pdtx.transports.base import PathKind

_RDMA_DEVICES = Path("/sys/class/infiniband")


def open_mover(config: TransportConfig, *, advertise: str | None = None) -> "Mover":
    """Make a mover. advertise: the host that others reach this node at, if not its own.

    Raises InputError for an unknown mover, or an option that it does not have or that is not of the option's type.
    """
    from pdtx.transports import make_mover
    from pdtx.transports.options import typed_options
    from pdtx.transports.registry import mover_class

    host = [f"advertise_host={advertise}"] if advertise is not None else []
    typed = typed_options(config.mover, mover_class(config.mover), [*(config.mover_option or []), *host])
    return make_mover(config.mover, **typed)


def shares_memory(mover: str) -> bool:
    """Whether a mover wants caches in memory that other processes of this host can map."""
    return mover == "shm"


def parse_require(text: str | None) -> "PathKind | None":
    """Return what must carry the payload. Raises InputError for what cannot be required, or cannot be had here."""
    found = next((kind for kind in REQUIRABLE if kind == text), None)
    if text is not None and found is None:
        raise InputError(f"--require takes {', '.join(REQUIRABLE)}, not {text!r}")
    # Before anything is loaded; with a device it is the running connection that shows.
    if found == "rdma" and not any(_RDMA_DEVICES.glob("*")):
        raise InputError(
            f"rdma is required, but this host has no RDMA device (nothing in {_RDMA_DEVICES}); possible here: tcp, "
            "and shm within the host; 'pdtx doctor --want rdma' tells what is missing"
        )
    return found


def parse_mode(text: str) -> "Mode":
    """Return a mode. Raises InputError for an unknown one."""
    from pdtx.plan import Mode

    if text not in MODES:
        raise InputError(f"mode {text!r} is not one of {', '.join(MODES)}")
    return Mode(text)


def read_costs() -> "CostTable":
    """Return the costs that mode auto picks by, where they have been measured. Raises InputError for a broken file."""
    from pdtx.plan import load_costs

    return load_costs()
