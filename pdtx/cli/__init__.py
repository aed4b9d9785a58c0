"""The command line: one file a command. Heavy imports wait until a command needs them."""

import typer

from pdtx import __version__
from pdtx.cli import bench, demo, generate, granularity, keygen, kvcache, plan
from pdtx.cli.common import emit, run_app

app = typer.Typer(
    help="Move, verify and measure KV caches between prefill and decode nodes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
app.command(name="demo")(demo.demo)
app.command(name="generate")(generate.generate)
app.command(name="granularity")(granularity.granularity)
app.command(name="keygen")(keygen.keygen)
app.command(name="kvcache")(kvcache.kvcache)
app.command(name="plan")(plan.plan)


@app.command()
def version() -> None:
    """Print the version."""
    emit(__version__)


def main() -> None:
    """Entry point of `pdtx`."""
    run_app(app, "pdtx")
