"""The agents that `pdtx bench` measures with: started here, running elsewhere, or met by a rendezvous."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from pdtx.cli.bench_flags import Flags
from pdtx.cli.common import note
from pdtx.cli.processes import Node
from pdtx.errors import DeadlineExceeded, InputError
from pdtx.node.config import SecurityConfig
from pdtx.node.model import open_security
from pdtx.units import parse_bytes

if TYPE_CHECKING:
    from pdtx.bench.fleet import Fleet
    from pdtx.bench.rendezvous import Rendezvous

_SHARE_OF_MEMORY = 0.8
_LOCAL_WORLD = "LOCAL_WORLD_SIZE"
"""How many processes torchrun has started on this host."""

_MODULES = {"prefill": "prefill_node", "decode": "decode_node"}


def agent_counts(flags: Flags) -> tuple[int, int]:
    """Return how many prefill and decode agents a run is going to have.

    Raises InputError where it is not said, or said in two ways, between whom it measures.
    """
    places = [f"--{flag}" for flag in ("local", "prefill", "decode", "rendezvous") if flags[flag]]
    if len(places) > 1 and places != ["--prefill", "--decode"]:
        raise InputError(
            f"{' and '.join(places)} do not go together; take --local, --prefill with --decode, or --rendezvous"
        )
    if places in (["--prefill"], ["--decode"]):
        raise InputError(f"{places[0]} alone names one side only; give HOST:PORT of both with --prefill and --decode")
    if flags["prefill"]:
        return len(_addresses(flags, "prefill")), len(_addresses(flags, "decode"))
    return flags["prefill-agents"], flags["decode-agents"]


def _addresses(flags: Flags, role: str) -> list[str]:
    found = [part.strip() for part in str(flags[role]).split(",")]
    if not all(found) or len(set(found)) < len(found):
        raise InputError(f"--{role} takes HOST:PORT, each once, with one comma between them, not {flags[role]!r}")
    return found


@contextmanager
def open_fleet(flags: Flags) -> Iterator["Fleet"]:
    """Start or find the agents and connect to them; ends what it has started.

    Raises what Fleet.connect raises, and PdtxError for an agent of ours that does not start.
    """
    from pdtx.bench.fleet import Fleet

    timeout_s = float(flags["connect-timeout"])
    with ExitStack() as stack:
        if flags["rendezvous"]:
            yield stack.enter_context(_joined(flags)).fleet()
            return
        if flags["prefill"]:
            sides = _addresses(flags, "prefill"), _addresses(flags, "decode")
            keys = SecurityConfig(flags["key"], flags["peer-key"], bool(flags["insecure"]))
        else:
            sides = stack.enter_context(_started_here(flags, timeout_s))
            keys = SecurityConfig()  # all on loopback
        security = open_security(keys)
        fleet = stack.enter_context(Fleet.connect(*sides, security=security, timeout_s=timeout_s, waiting=note))
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
    most = parse_bytes(flags["max-bytes"]) if flags["max-bytes"] else _share(int(here) if here.isdecimal() else 1)
    return Rendezvous(
        place,
        Station(device=flags["device"], max_bytes=most),
        max_bytes=most,
        timeout_s=float(flags["connect-timeout"]),
        advertise=flags["advertise"],
    )


@contextmanager
def _started_here(flags: Flags, timeout_s: float) -> Iterator[tuple[list[str], list[str]]]:
    """Run agents as children of this process; yield the addresses of both sides'."""
    counts = {"prefill": int(flags["prefill-agents"]), "decode": int(flags["decode-agents"])}
    note(f"starting {counts['prefill']} prefill and {counts['decode']} decode agents here")
    most = flags["max-bytes"] or str(_share(sum(counts.values())))
    arguments = ["--bench", "--listen", "127.0.0.1:0", "--json", "--max-bytes", most, "--device", flags["device"]]
    deadline = time.monotonic() + timeout_s
    with ExitStack() as stack:
        # Children first, then their words: they take seconds to start, and do so side by side.
        nodes = {
            role: [
                stack.enter_context(Node(f"{role} {number}", _MODULES[role], arguments, quiet=(f"{role} agent",)))
                for number in range(count)
            ]
            for role, count in counts.items()
        }
        every = [node for side in nodes.values() for node in side]
        stack.callback(_end_together, every)
        yield _listening(nodes["prefill"], deadline, timeout_s), _listening(nodes["decode"], deadline, timeout_s)


def _share(agents: int) -> int:
    """Return the bytes that each of so many agents on this machine may take."""
    import psutil

    return int(psutil.virtual_memory().available * _SHARE_OF_MEMORY) // max(1, agents)


def _listening(nodes: Sequence[Node], deadline: float, timeout_s: float) -> list[str]:
    found = list[str]()
    for node in nodes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("event 'listening'", node.name, timeout_s)
        found.append(str(node.event("listening", left)["address"]))
    return found


def _end_together(nodes: Sequence[Node]) -> None:
    """Tell all to end before the first one is waited for."""
    for node in nodes:
        if node.process.poll() is None:
            node.process.terminate()
