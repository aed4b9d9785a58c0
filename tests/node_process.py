"""Programs of pdtx in processes of their own, with their output in files, started warm (see warm.py)."""

import json
import re
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.warm import WarmProcess


@dataclass
class Outcome:
    code: int
    stdout: str
    stderr: str

    @property
    def requests(self) -> dict[str, dict[str, Any]]:
        return {row["request_id"]: row for row in json.loads(self.stdout)["requests"]}

    @property
    def error(self) -> str:
        """The one line that begins with the program's name."""
        lines = [line for line in self.stderr.splitlines() if re.match(r"pdtx[a-z-]*: error: ", line)]
        assert len(lines) == 1, self.stderr
        assert "Traceback" not in self.stderr
        return lines[0]


def run(module: str, *arguments: str | Path, timeout: float = 120) -> Outcome:
    """Run a program to its end. It is killed after timeout seconds."""
    with tempfile.TemporaryDirectory() as folder, NodeProcess(Path(folder), "node", module, *arguments) as node:
        return Outcome(node.wait(timeout), node.printed, node.said)


class NodeProcess:
    """A program whose output goes to files. Leaving the context kills it, whatever state it is in."""

    def __init__(self, folder: Path, name: str, module: str, *arguments: str | Path) -> None:
        self._stdout, self._stderr = folder / f"{name}.out", folder / f"{name}.err"
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            self.process = WarmProcess.of_module(module, *map(str, arguments), stdout=stdout, stderr=stderr)

    @property
    def printed(self) -> str:
        return self._stdout.read_text()

    @property
    def said(self) -> str:
        return self._stderr.read_text()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_for(self, words: str, timeout_s: float, after: int = 0) -> re.Match[str]:
        """Wait until the log says words beyond its first characters."""
        return self._wait_for(self._stderr, words, timeout_s, after)

    def wait_for_address(self, timeout_s: float = 60.0) -> str:
        """Wait until a decode node with --json has printed where it listens."""
        first = self._wait_for(self._stdout, r"(.*)\n", timeout_s, 0)
        address: str = json.loads(first[1])["address"]
        return address

    def _wait_for(self, file: Path, words: str, timeout_s: float, after: int) -> re.Match[str]:
        limit = time.monotonic() + timeout_s
        while (found := re.search(words, file.read_text()[after:])) is None:
            assert self.process.poll() is None, f"it ended before there was {words!r}:\n{self.said}"
            assert time.monotonic() < limit, f"there was no {words!r} within {timeout_s:g} s:\n{self.said}"
            time.sleep(0.02)
        return found

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def stop(self) -> int:
        """Ask it to end, as a user does; return its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
