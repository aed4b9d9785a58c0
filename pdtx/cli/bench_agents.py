"""The agents that `pdtx bench` measures with: started here, running elsewhere, or met by a rendezvous."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pdtx.bench import agents
from pdtx.bench.agents import share_of_memory
from pdtx.bench.flags import Flags
from pdtx.cli.common import note
from pdtx.units import parse_bytes

if TYPE_CHECKING:
    from pdtx.bench.fleet import Fleet
    from pdtx.bench.rendezvous import Rendezvous

_LOCAL_WORLD = "LOCAL_WORLD_SIZE"
"""How many processes torchrun has started on this host."""


@contextmanager
def open_fleet(flags: Flags) -> Iterator["Fleet"]:
    """Start or find the agents and connect to them; ends what it has started.

    Raises what Fleet.connect raises, and PdtxError for an agent of ours that does not start.
    """
    if flags["rendezvous"]:
        with _joined(flags) as rendezvous:
            yield rendezvous.fleet()
        return
    with agents.open_fleet(flags, note) as fleet:
        yield fleet


def only_serves(flags: Flags) -> bool:
    """Whether this process is one of many in which another one measures. Raises what Place.from_environment raises."""
    if not flags["rendezvous"]:
        return False
    from pdtx.bench.rendezvous import Place

    return not Place.from_environment(os.environ, flags["prefill-agents"], flags["decode-agents"]).drives


def serve(flags: Flags) -> None:
    """Be an agent until the process that measures has done. Raises what Rendezvous.serve raises."""
    with _joined(flags) as rendezvous:
        rendezvous.serve(note)


def _joined(flags: Flags) -> "Rendezvous":
    """Take part in the run that a launcher has started."""
    from pdtx.bench.rendezvous import Place, Rendezvous
    from pdtx.bench.station import Station

    place = Place.from_environment(os.environ, flags["prefill-agents"], flags["decode-agents"])
    here = os.environ.get(_LOCAL_WORLD, "1")
    most = (
        parse_bytes(flags["max-bytes"]) if flags["max-bytes"] else share_of_memory(int(here) if here.isdecimal() else 1)
    )
    return Rendezvous(
        place,
        Station(device=flags["device"], max_bytes=most),
        max_bytes=most,
        timeout_s=float(flags["connect-timeout"]),
        advertise=flags["advertise"],
    )
