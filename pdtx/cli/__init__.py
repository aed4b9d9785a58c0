"""The command line: one file a command. Heavy imports wait until a command needs them."""

import typer

from pdtx import __version__
from pdtx.cli import (
    bench,
    capture,
    check,
    compare,
    demo,
    doctor,
    export,
    generate,
    granularity,
    keygen,
    kvcache,
    plan,
    plot,
    replay,
    report,
    show,
)
from pdtx.cli.common import emit, run_app

app = typer.Typer(
    help="Move, verify and measure KV caches between prefill and decode nodes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
app.command(name="capture")(capture.capture)
app.command(name="check")(check.check)
app.command(name="compare")(compare.compare)
app.command(name="demo")(demo.demo)
app.command(name="doctor")(doctor.doctor)
app.command(name="export")(export.export)
app.command(name="generate")(generate.generate)
app.command(name="granularity")(granularity.granularity)
app.command(name="keygen")(keygen.keygen)
app.command(name="kvcache")(kvcache.kvcache)
app.command(name="plan")(plan.plan)
app.command(name="plot")(plot.plot)
app.command(name="replay")(replay.replay)
app.command(name="report")(report.report)
app.command(name="show")(show.show)


@app.command()
def version() -> None:
    """Print the version."""
    emit(__version__)


def main() -> None:
    """Entry point of `pdtx`."""
    run_app(app, "pdtx")
