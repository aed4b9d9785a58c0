"""What UCX says about the protocols that it chooses: the only way to see what carries NIXL's payload.

NIXL hides UCX's endpoints. But UCX prints a table for each endpoint that comes to be used (UCX_PROTO_INFO=y), headed
by the name of NIXL's agent and the operation, with a line for each range of sizes:

    | pdtx-5f0c intra-node cfg#1                               |
    | remote memory write by ucp_put* from host memory to host |
    | Range  | Description | Config |
    | 0..inf | zero-copy   | tcp/lo |

Here it prints them into memory, where they are read back.
"""

import ctypes
import logging
import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from pdtx.transports.ucx.lanes import Route, route_of_request

logger = logging.getLogger(__name__)

PUT, GET = "ucp_put", "ucp_get"

_TABLE = re.compile(r"^\[[^\]]*\] \[([^\]]*)\]\s+([+|].*[+|])\s*$")
"""A table's line, and who prints it: host, process and thread."""
_OWNER = re.compile(r"(\S+) \S+ cfg#\d+$")
_RANGE = re.compile(r"(\d+)(?:\.\.(\d+|inf))?$")
_LEFT = "was not returned to mpool"
_PUNCH_HOLE = 1 | 2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_libc = ctypes.CDLL(None)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True)
class Choice:
    """How messages of up to most bytes are carried: description and lanes, in UCX's words."""

    most: float
    text: str


class Tables:
    """The tables read so far; the last one of a kind counts. choices: by agent and operation, in the order of sizes."""

    def __init__(self) -> None:
        self.choices = dict[tuple[str, str], list[Choice]]()
        # By who prints: several threads do so at the same time. Each has a table under way: its agent and operation.
        self._under_way = dict[str, tuple[str, str]]()

    def read(self, lines: Iterable[str]) -> list[str]:
        """Read whole lines, which go on where the last ones ended; return those that belong to no table."""
        others = list[str]()
        for line in lines:
            table = _TABLE.match(line)
            if table is None:
                others += [line] if line.strip() else []
            elif table[2].startswith("|"):
                self._read_cells(table[1], [cell.strip() for cell in table[2].strip("|").split("|")])
        return others

    def _read_cells(self, printer: str, cells: list[str]) -> None:
        owner, operation = self._under_way.get(printer, ("", ""))
        if len(cells) == 1 and (head := _OWNER.match(cells[0])):
            self._under_way[printer] = head[1], operation
        elif len(cells) == 1:
            operation = next((name for name in (PUT, GET) if name + "*" in cells[0]), "")
            self._under_way[printer] = owner, operation
            if operation:
                self.choices[owner, operation] = []
        elif operation and (sizes := _RANGE.match(cells[0])):
            choice = Choice(float(sizes[2] or sizes[1]), " ".join(cells[1:]))
            self.choices[owner, operation].append(choice)


class ProtocolLog:
    """UCX's log file in memory. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file = os.memfd_create("pdtx-ucx-log", os.MFD_CLOEXEC)
        self._read = 0
        self._unfinished = ""
        self._tables = Tables()

    def settings(self) -> dict[str, str]:
        """Return the environment variables that make UCX write here."""
        return {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": f"/proc/self/fd/{self._file}"}

    def route(self, agent: str, operation: str, nbytes: int) -> Route | None:
        """Return how an agent's endpoint carries out an operation of nbytes; None if UCX has not said.

        operation: PUT or GET.
        """
        with self._lock:
            self._update()
            choices = list(self._tables.choices.get((agent, operation), []))
        choice = next((choice for choice in choices if nbytes <= choice.most), None)
        return route_of_request(choice.text) if choice is not None else None

    def forget(self, agent: str) -> None:
        """Drop what is known of an agent that is gone."""
        with self._lock:
            self._update()
            for operation in (PUT, GET):
                self._tables.choices.pop((agent, operation), None)

    def _update(self) -> None:
        _libc.fflush(None)  # UCX leaves its last lines in the C library's buffer
        nbytes = os.fstat(self._file).st_size - self._read
        if nbytes <= 0:
            return
        text = self._unfinished + os.pread(self._file, nbytes, self._read).decode(errors="replace")
        self._read += nbytes
        # What has been read needs no memory any more; UCX goes on writing behind it.
        _libc.fallocate(self._file, _PUNCH_HOLE, 0, self._read)
        *lines, self._unfinished = text.split("\n")
        for line in self._tables.read(lines):
            # An agent that is cut off in the middle of a transfer leaves requests behind.
            logger.log(logging.DEBUG if _LEFT in line else logging.WARNING, "NIXL's UCX: %s", line)
