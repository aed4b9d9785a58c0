"""`pdtx-prefill`: run prompts through a model here and send their K/V to a decode node."""

import sys

import typer

from pdtx.cli.agent import AgentOptions, serve_agent
from pdtx.cli.common import emit, note, run_app
from pdtx.cli.options import LogOptions, PromptOptions
from pdtx.cli.signature import Given, config_command
from pdtx.errors import InputError
from pdtx.node import PrefillConfig, PrefillNode, read_prompts


def prefill(given: Given) -> None:
    """Compute prompts, ship their K/V to a decode node as layers finish, and print what it generates."""
    logs, agent, asked = given.make(LogOptions), given.make(AgentOptions), given.make(PromptOptions)
    logs.configure()
    if agent.bench:
        serve_agent("prefill", agent, json=logs.json)
        return
    if not given.has("connect"):
        raise InputError("no decode node to send to; give --connect HOST:PORT, or --bench to be measured with")
    config = given.make(PrefillConfig)
    prompts = read_prompts(asked.prompt, asked.prompts)
    with PrefillNode(config, on_note=note) as node:
        rows = node.run(prompts)
        document = node.document(rows, sys.argv)

    import msgspec

    from pdtx.report import console_for, render_rows, write_json

    if logs.json:
        emit(msgspec.json.encode(document).decode())
    else:
        render_rows(rows, console_for(sys.stdout))
    if asked.output is not None:
        write_json(asked.output, document)
    if not all(row.ok for row in rows):
        raise typer.Exit(1)


def main() -> None:
    """Entry point of `pdtx-prefill`."""
    configs = (PrefillConfig, PromptOptions, AgentOptions, LogOptions)
    first, without = ("connect", "prompt", "prompts"), ("synthetic", "layers", "prefill_rate")
    run_app(config_command(prefill, *configs, env_prefix="PDTX_PREFILL", first=first, without=without), "pdtx-prefill")


if __name__ == "__main__":
    main()
