"""What `pdtx-prefill --bench` and `pdtx-decode --bench` do: serve an agent until they are told to stop."""

from dataclasses import dataclass
from json import dumps
from typing import TYPE_CHECKING, Annotated

from pdtx.cli.common import emit, note
from pdtx.cli.termination import Termination
from pdtx.errors import InputError
from pdtx.node import options as node
from pdtx.node.config import SecurityConfig
from pdtx.node.model import open_security
from pdtx.node.options import BENCH, Option
from pdtx.units import parse_bytes

if TYPE_CHECKING:
    from pdtx.bench.work import Role


_NO_KEYS = SecurityConfig()


@dataclass(frozen=True)
class AgentOptions:
    """How a node serves `pdtx bench` instead of other nodes.

    max_bytes: as text; None for four fifths of the memory that is free.
    """

    bench: Annotated[
        bool, Option("Load no model; be an agent that `pdtx bench` measures with.", BENCH, flags=("--bench",))
    ] = False
    listen: Annotated[str, Option("With --bench: HOST:PORT to serve `pdtx bench` at; port 0 takes any.", BENCH)] = (
        "127.0.0.1:5601"
    )
    advertise: Annotated[
        str | None,
        Option(
            "With --bench: host that others reach this one at, if not the one listened on.", BENCH, show_default=False
        ),
    ] = None
    max_bytes: Annotated[
        str | None,
        Option(
            "With --bench: most memory for caches, as 8GiB, and again for references; default: 80 % of the free.",
            BENCH,
            show_default=False,
        ),
    ] = None
    device: node.Device = "cpu"
    security: SecurityConfig = _NO_KEYS


def serve_agent(role: "Role", options: AgentOptions, *, json: bool) -> None:
    """Serve drivers of `pdtx bench` one after another until SIGTERM or SIGINT.

    json: report on stdout where the agent listens. Raises InputError and AddressInUse.
    """
    security = open_security(options.security)
    # Set before the slow imports: whoever has started us may end us at any time.
    stop = Termination()

    from pdtx.bench.agent import Agent, data_host, default_max_bytes
    from pdtx.bench.station import Station

    data_host(options.listen, options.advertise, security)
    most = parse_bytes(options.max_bytes) if options.max_bytes is not None else default_max_bytes()
    if most < 1:
        raise InputError(f"--max-bytes {options.max_bytes} leaves no room for a cache")
    station = Station(device=options.device, max_bytes=most)
    agent = Agent(
        station,
        role,
        options.listen,
        security=security,
        max_bytes=most,
        advertise=options.advertise,
        on_driver=lambda name: note(f"{role} agent: at work for {name}" if name else f"{role} agent: waiting"),
    )
    with agent:
        note(f"{role} agent listening on {agent.address}; Ctrl-C ends it")
        if json:
            emit(dumps({"event": "listening", "address": agent.address, "max_bytes": most}))
        stop.wait()
