"""`pdtx-decode`: receive K/V from prefill nodes and generate from them."""

from json import dumps

from pdtx.cli.agent import AgentOptions, serve_agent
from pdtx.cli.common import emit, note, run_app
from pdtx.cli.options import LogOptions
from pdtx.cli.signature import Given, config_command
from pdtx.cli.termination import Termination
from pdtx.node import DecodeConfig, DecodeNode


def decode(given: Given) -> None:
    """Serve prefill nodes: receive K/V into this node's own layout, verify them if asked to, and generate."""
    logs, agent = given.make(LogOptions), given.make(AgentOptions)
    logs.configure()
    if agent.bench:
        serve_agent("decode", agent, json=logs.json)
        return
    config = given.make(DecodeConfig)
    stop = Termination()
    with DecodeNode(config, on_note=note) as node:
        if logs.json:
            event = {
                "event": "listening",
                "address": node.address,
                "mover": config.transport.mover,
                "registered_bytes": node.registration.nbytes,
                "registration_s": node.registration.seconds,
                "tier_address": node.tier_address,
            }
            emit(dumps(event))
        served = node.run(stop=stop)
        if logs.json and node.tiers is not None:
            emit(dumps({"event": "tiers", "tiers": served.tiers}))


def main() -> None:
    """Entry point of `pdtx-decode`."""
    run_app(config_command(decode, DecodeConfig, AgentOptions, LogOptions, env_prefix="PDTX_DECODE"), "pdtx-decode")


if __name__ == "__main__":
    main()
