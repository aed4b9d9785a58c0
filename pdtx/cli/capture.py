"""`pdtx capture`: run a command whose prefill nodes record what they do."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from pdtx.cli.common import note
from pdtx.cli.options import CaptureTokens
from pdtx.errors import InputError


def capture(
    output: Annotated[Path, typer.Argument(help="A new file; of several prefill nodes the second writes FILE.2.")],
    command: Annotated[list[str], typer.Argument(help="After --: pdtx-prefill with its flags, a script, ...")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    capture_tokens: CaptureTokens = False,
) -> None:
    """Run a command; each prefill node in it records arrivals, lengths, shared prefixes, block tables and layer times.

    What is recorded says which prompts begin alike, and no more of them. 'pdtx replay FILE' repeats it.
    """
    if output.exists() and not force:
        raise InputError(f"{output} is there already; choose another name, or --force")
    if not output.parent.is_dir():
        raise InputError(f"there is no folder {output.parent} to record into")
    output.unlink(missing_ok=True)
    environment = {**os.environ, "PDTX_CAPTURE": str(output.absolute())}
    if capture_tokens:
        environment["PDTX_PREFILL_CAPTURE_TOKENS"] = "1"
    note(f"recording into {output}: {command[0]}")
    sys.stdout.flush()
    try:
        # In this process: signals and the exit code are the command's own, and nothing outlives anything.
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise InputError(f"cannot run {command[0]}: {error.strerror}") from None
