"""`pdtx keygen`: keys that let two nodes trust one another off loopback."""

from pathlib import Path
from typing import Annotated

import typer

from pdtx.cli.common import emit


def keygen(
    name: Annotated[str, typer.Argument(help="Name of the node, for example 'prefill' or 'decode'.")],
    directory: Annotated[Path, typer.Option("--directory", "-d", help="Folder to write to.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Replace keys that are there.")] = False,
) -> None:
    """Make a CURVE key pair: NAME.key to give to peers, NAME.key_secret to keep."""
    from pdtx.sidechannel import generate_keys

    for path in generate_keys(directory, name, force=force):
        emit(str(path))
