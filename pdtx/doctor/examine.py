"""All checks, in the order in which people read them."""

from collections.abc import Sequence
from typing import get_args

from pdtx.doctor.addresses import check_addresses
from pdtx.doctor.finding import Finding, Want, judged
from pdtx.doctor.gpu import check_gpu
from pdtx.doctor.infiniband import check_infiniband
from pdtx.doctor.machine import Machine
from pdtx.doctor.memory import check_memory
from pdtx.doctor.movers import TRIAL_S, check_movers, try_all
from pdtx.doctor.network import check_network
from pdtx.doctor.nixl import check_nixl, find_nixl
from pdtx.doctor.processor import check_processor
from pdtx.doctor.ucx import check_ucx, find_copies
from pdtx.errors import InputError

WANTS: tuple[Want, ...] = get_args(Want)
"""What can be asked for."""


def parse_wants(texts: Sequence[str]) -> tuple[Want, ...]:
    """Return wants; each text may be several with commas. Raises InputError for an unknown one."""
    words = [word.strip() for text in texts for word in text.split(",")]
    for word in words:
        if word not in WANTS:
            raise InputError(f"--want takes {', '.join(WANTS)}, not {word!r}")
    return tuple(want for want in WANTS if want in words)


def examine(
    machine: Machine,
    wants: Sequence[Want],
    *,
    listen: Sequence[str] = (),
    reach: Sequence[str] = (),
    advertise: str | None = None,
    two_nodes: bool = False,
    timeout_s: float = 5.0,
    trial_s: float = TRIAL_S,
) -> list[Finding]:
    """Look at everything. timeout_s: for connecting to each of reach; trial_s: for starting each mover.

    Raises InputError for what is no address.
    """
    # First of all: wrong addresses are to be told before the trials, which take seconds.
    addresses = list(
        check_addresses(listen=listen, reach=reach, advertise=advertise, two_nodes=two_nodes, timeout_s=timeout_s)
    )
    findings = [
        *check_gpu(machine),
        *check_network(machine),
        *check_infiniband(machine),
        *check_memory(machine),
        *check_processor(machine),
        *check_ucx(machine, find_copies()),
        *check_nixl(machine, find_nixl()),
        *check_movers(try_all(machine, trial_s=trial_s)),
        *addresses,
    ]
    return judged(findings, wants)
