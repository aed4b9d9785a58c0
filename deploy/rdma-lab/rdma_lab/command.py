"""The command line: deploy/rdma-lab/run."""

import argparse
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rdma_lab.folder import run_folder
from rdma_lab.host import install_programs, require_programs
from rdma_lab.initrd import write_initrd
from rdma_lab.job import Job
from rdma_lab.lab import Lab
from rdma_lab.machine import WIRE_MTU, Setup
from rdma_lab.parts import open_parts
from rdma_lab.say import LabError, say

USAGE, UNABLE = 2, 125
"""Exit statuses: of arguments that are wrong, and of a lab that cannot be had or broke."""

_GUEST = Path(__file__).resolve().parent.parent / "guest"
_LEAST_MIB = 256
_EPILOG = """\
On every node the command runs in this folder, on the host's own files (what it writes there is gone with the node),
with NODE (1 or 2), SELF and PEER (IPv4 addresses) and SHARE (a folder that both nodes and the host see). Its output
comes back with "1: " or "2: " before each line. Exit status: 0 if the command's was 0 on every node, else the first
other one; 124 when time was up, 125 if the lab cannot be had here, 128 + the signal that ended it.
"""


class _Stopped(Exception):
    """A signal asks the lab to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(words: Sequence[str]) -> int:
    """Run the lab; return its exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        return _run(_parsed(words))
    except LabError as error:
        say(str(error))
        return UNABLE
    except _Stopped as stopped:
        say(f"stopped by {signal.Signals(stopped.number).name}; nothing is left running")
        return 128 + stopped.number


def _stop(number: int, _: FrameType | None) -> NoReturn:
    # One is enough: what comes while the machines are being stopped is not to keep that from ending.
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise _Stopped(number)


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="deploy/rdma-lab/run",
        description="Run a command on two virtual machines that are joined by Soft-RoCE (verbs without a card).",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--single", action="store_true", help="one machine, with Soft-RoCE on a dummy device")
    parser.add_argument("--memory", type=int, default=1024, metavar="MIB", help="of each machine (default 1024)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for all of it (default 600)")
    parser.add_argument("--loss", default="", metavar="PERCENT", help="of packets, each way, e.g. 1%%")
    parser.add_argument("--delay", default="", metavar="TIME", help="of packets, each way, e.g. 1ms")
    parser.add_argument("--share", type=Path, metavar="DIR", help="keep what nodes leave in SHARE, with logs in .lab")
    parser.add_argument("--fetch", action="store_true", help="first get what is missing: packages (as root) and kernel")
    parser.add_argument("--check", action="store_true", help="only say whether all is here; fetches the kernel")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what the nodes run")
    given = parser.parse_args(words)
    if given.command[:1] == ["--"]:
        del given.command[0]
    if not given.command and not given.fetch and not given.check:
        parser.error("no command; give it after --")
    if given.memory < _LEAST_MIB:
        parser.error(f"--memory {given.memory}: at least {_LEAST_MIB} MiB")
    if not 0 < given.timeout < float("inf"):
        parser.error(f"--timeout {given.timeout}: seconds, more than 0")
    for name, shape in (("loss", r"\d+(\.\d+)?%"), ("delay", r"\d+(\.\d+)?(us|ms|s)")):
        if getattr(given, name) and not re.fullmatch(shape, getattr(given, name)):
            parser.error(f"--{name} {getattr(given, name)}: such as {'1%' if name == 'loss' else '1ms'}")
    if (given.loss or given.delay) and given.single:
        parser.error("--single has no wire for --loss and --delay")
    return given


def _run(given: argparse.Namespace) -> int:
    if given.fetch:
        install_programs()
    require_programs()
    parts = open_parts()
    if given.check or not given.command:
        say(f"all is here: kernel {parts.kernel.version}")
        return 0
    netem = " ".join(f"{name} {getattr(given, name)}" for name in ("delay", "loss") if getattr(given, name))
    job = Job(given.command, 1 if given.single else 2, Path.cwd(), WIRE_MTU, netem)
    with run_folder() as folder:
        share = folder / "share" if given.share is None else given.share.resolve()
        share.mkdir(parents=True, exist_ok=True)
        _forget_last_run(share)
        initrd = folder / "initrd"
        write_initrd(initrd, parts.kernel, _GUEST / "init")
        job.write(share, _GUEST, parts)
        say(f"booting {job.nodes} of {given.memory} MiB, kernel {parts.kernel.version}")
        with Lab(Setup(parts.kernel, initrd, folder, share, given.memory), job, given.timeout) as lab:
            lab.boot()
            return lab.wait()


def _forget_last_run(share: Path) -> None:
    """A status of an earlier run must not be taken for one of this."""
    for path in (share / ".lab").glob("*"):
        path.unlink()
