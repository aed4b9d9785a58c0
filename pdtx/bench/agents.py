"""The agents that a sweep measures with: started here as children, or running elsewhere."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pdtx.bench.flags import PLACES, Flags
from pdtx.errors import DeadlineExceeded, InputError
from pdtx.process import Node

if TYPE_CHECKING:
    from pdtx.bench.fleet import Fleet

Say = Callable[[str], None]
"""Takes a line about progress; perhaps from another thread."""

_SHARE_OF_MEMORY = 0.8
_MODULES = {"prefill": "prefill_node", "decode": "decode_node"}


def agent_counts(flags: Flags) -> tuple[int, int]:
    """Return how many prefill and decode agents a run is going to have.

    Raises InputError where it is not said, or said in two ways, between whom it measures.
    """
    places = [f"--{flag}" for flag in PLACES if flags[flag]]
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
def open_fleet(flags: Flags, say: Say) -> Iterator["Fleet"]:
    """Start agents, or find those at the addresses given, and connect to them; ends what it has started.

    Raises what Fleet.connect raises, and PdtxError for an agent of ours that does not start.
    """
    from pdtx.bench.fleet import Fleet
    from pdtx.sidechannel import Security, read_security

    timeout_s = float(flags["connect-timeout"])
    with ExitStack() as stack:
        if flags["prefill"]:
            sides = _addresses(flags, "prefill"), _addresses(flags, "decode")
            peer_keys = [Path(path) for path in flags["peer-key"] or ()]
            security = read_security(flags["key"], peer_keys, insecure=bool(flags["insecure"]))
        else:
            sides = stack.enter_context(_started_here(flags, timeout_s, say))
            security = Security()  # all on loopback
        yield stack.enter_context(Fleet.connect(*sides, security=security, timeout_s=timeout_s, waiting=say))


@contextmanager
def _started_here(flags: Flags, timeout_s: float, say: Say) -> Iterator[tuple[list[str], list[str]]]:
    """Run agents as children of this process; yield the addresses of both sides'."""
    counts = {"prefill": int(flags["prefill-agents"]), "decode": int(flags["decode-agents"])}
    say(f"starting {counts['prefill']} prefill and {counts['decode']} decode agents here")
    most = flags["max-bytes"] or str(share_of_memory(sum(counts.values())))
    arguments = ["--bench", "--listen", "127.0.0.1:0", "--json", "--max-bytes", most, "--device", flags["device"]]
    deadline = time.monotonic() + timeout_s
    with ExitStack() as stack:
        # Children first, then their words: they take seconds to start, and do so side by side.
        nodes = {
            role: [
                stack.enter_context(
                    Node(f"{role} {number}", _MODULES[role], arguments, quiet=(f"{role} agent",), say=say)
                )
                for number in range(count)
            ]
            for role, count in counts.items()
        }
        every = [node for side in nodes.values() for node in side]
        stack.callback(_end_together, every)
        yield _listening(nodes["prefill"], deadline, timeout_s), _listening(nodes["decode"], deadline, timeout_s)


def share_of_memory(agents: int) -> int:
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
