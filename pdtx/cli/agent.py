"""What `pdtx-prefill --bench` and `pdtx-decode --bench` do: serve an agent until they are told to stop."""

from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pdtx.cli.common import emit, note
from pdtx.cli.termination import Termination
from pdtx.errors import InputError
from pdtx.node import options as node
from pdtx.node.model import read_keys
from pdtx.node.options import BENCH, Option
from pdtx.units import parse_bytes

if TYPE_CHECKING:
    from pdtx.bench.work import Role


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
    key: node.Key = None
    peer_key: node.PeerKey = None
    insecure: node.Insecure = False

    def serve(self, role: "Role", *, json: bool) -> None:
        """Serve drivers; see serve_agent."""
        serve_agent(
            role,
            self.listen,
            advertise=self.advertise,
            key=self.key,
            peer_key=self.peer_key,
            insecure=self.insecure,
            device=self.device,
            max_bytes=self.max_bytes,
            json=json,
        )


def serve_agent(
    role: "Role",
    listen: str,
    *,
    advertise: str | None,
    key: Path | None,
    peer_key: list[Path] | None,
    insecure: bool,
    device: str,
    max_bytes: str | None,
    json: bool,
) -> None:
    """Serve drivers of `pdtx bench` one after another until SIGTERM or SIGINT.

    max_bytes: that the caches of a case may take, as text; None for four fifths of the memory that is free.
    json: say on stdout where the agent listens. Raises InputError and AddressInUse.
    """
    security = read_keys(key, peer_key, insecure=insecure)
    # Set before the slow imports: whoever has started us may end us at any time.
    stop = Termination()

    from pdtx.bench.agent import Agent, data_host, default_max_bytes
    from pdtx.bench.station import Station

    data_host(listen, advertise, security)
    most = parse_bytes(max_bytes) if max_bytes is not None else default_max_bytes()
    if most < 1:
        raise InputError(f"--max-bytes {max_bytes} leaves no room for a cache")
    station = Station(device=device, max_bytes=most)
    agent = Agent(
        station,
        role,
        listen,
        security=security,
        max_bytes=most,
        advertise=advertise,
        on_driver=lambda name: note(f"{role} agent: at work for {name}" if name else f"{role} agent: waiting"),
    )
    with agent:
        note(f"{role} agent listening on {agent.address}; Ctrl-C ends it")
        if json:
            emit(dumps({"event": "listening", "address": agent.address, "max_bytes": most}))
        stop.wait()
