"""What nodes print, line by line as it comes."""

import sys
from pathlib import Path


class Output:
    """The growing file of a node's output; whole lines go to standard output with the node's number before them."""

    def __init__(self, path: Path, node: int) -> None:
        self._path, self._prefix, self._at, self._rest = path, f"{node}: ".encode(), 0, b""

    def show(self, last: bool = False) -> None:
        """Show what is new; with last also a line that has no end."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if last and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        if lines:
            sys.stdout.buffer.write(b"".join(self._prefix + line + b"\n" for line in lines))
            sys.stdout.flush()
