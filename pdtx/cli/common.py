"""What every command does alike: errors in one line, progress on stderr, data on stdout."""

import logging
import signal
import sys

import typer

from pdtx.cli.logs import configure_logging, say
from pdtx.errors import PdtxError
from pdtx.process import follow_parent

__all__ = ["configure_logging", "emit", "note", "run_app"]


def note(text: str) -> None:
    """Say something about progress, on stderr."""
    say(text)


def emit(text: str) -> None:
    """Put data on stdout."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run_app(app: typer.Typer, name: str) -> None:
    """Run a command line; a PdtxError becomes one line on stderr and its exit code, Ctrl-C 130 and SIGTERM 143."""
    # As an exception, so that what was opened is closed, child processes above all.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    follow_parent()
    try:
        app(prog_name=name)
    except PdtxError as error:
        say(f"{name}: error: {error}", logging.ERROR)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        note(f"{name}: interrupted")
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
