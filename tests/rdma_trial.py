"""The trial of RDMA on two nodes: python -m tests.rdma_trial [STAGE...], the same on both, in deploy/rdma-lab.

SHARE holds a model, prompts and keys (scripts/test-rdma puts them there); each node leaves its report in report.N.json.
Exit status 1 if something is not as it must be.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tests.rdma_children import Child, import_all
from tests.rdma_node import Node, counters, device, grown
from tests.rdma_nodes import WAYS, load_once, run_decode, run_prefill

_MOVERS = ("ucx", "nixl")
_STAGE_S = 600.0
_FAULTS = {
    "producer": {"loss", "link down", "network cut", "consumer killed"},
    "consumer": {"loss", "link down", "network cut", "producer killed"},
    "victim": set[str](),
}


class Trial:
    """What one node does, and its report: a list of what was tried, each with "ok"."""

    def __init__(self, node: Node) -> None:
        self.node, self.report = node, list[dict[str, Any]]()
        self._begun = time.monotonic()

    def note(self, text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - self._begun:6.1f} s  {text}\n")
        sys.stdout.flush()

    def add(self, stage: str, name: str, problems: Sequence[str], **facts: object) -> None:
        """Put one thing that was tried into the report; problems: what is not as it must be."""
        self.report.append({"stage": stage, "name": name, "ok": not problems, "problems": list(problems), **facts})
        self._save(ended=False)
        self.note(f"{stage} {name}: {'; '.join(problems) or 'ok'}")

    def run(self, stage: str) -> None:
        """Do a stage; what goes wrong in it is in the report, and the other stages are done all the same."""
        together = stage in _TOGETHER
        begun = time.monotonic()
        try:
            if together:
                self.node.meet(f"begin-{stage}", _STAGE_S)
            _STAGES[stage](self)
        except (TimeoutError, subprocess.TimeoutExpired, ValueError, OSError) as error:
            self.add(stage, "itself", [f"{type(error).__name__}: {error}"])
        self.note(f"{stage} took {time.monotonic() - begun:.0f} s")
        if together:
            with contextlib.suppress(TimeoutError):
                self.node.meet(f"end-{stage}", _STAGE_S)

    def _save(self, *, ended: bool) -> None:
        """So that what was seen is there also when time is up in the midst of it."""
        path = self.node.share / f"report.{self.node.number}.json"
        half = path.with_suffix(".half")
        half.write_text(json.dumps({"ended": ended, "entries": self.report}, indent=2))
        half.rename(path)

    def end(self) -> int:
        self._save(ended=True)
        return 0 if self.report and all(entry["ok"] for entry in self.report) else 1


def nodes(trial: Trial) -> None:
    """pdtx-prefill on node 1, pdtx-decode on node 2, every element verified."""
    for way in WAYS:
        (run_prefill if trial.node.number == 1 else run_decode)(trial.node, way, partial(trial.add, "nodes"))


def contract(trial: Trial) -> None:
    """nixl's on node 1, ucx's on node 2, each over the node's own card."""
    mover = _MOVERS[2 - trial.node.number]
    chosen = "ucx or transports" if mover == "ucx" else mover
    # Plain: what is imported already cannot be rewritten, and warnings are errors.
    words = ["-q", "-rf", "--assert=plain", "-m", "rdma", "-p", "no:cacheprovider", "--timeout", "150", "-k", chosen]

    def run() -> object:
        import pytest

        return int(pytest.main([*words, "tests/test_rdma_contract.py"]))

    before, settings = counters(), {"UCX_NET_DEVICES": f"{device()}:1", "PDTX_RDMA_SLOW": "1"}
    with Child(f"contract-{mover}", trial.node.share, run, settings) as child:
        status = child.wait(_STAGE_S)
        lines = child.out.read_text().splitlines()
    problems = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if status and not problems:
        problems = [f"exit status {status}: {child.last_words()}"]
    result = next((line.strip("= ") for line in reversed(lines) if " passed" in line), "")
    trial.add("contract", mover, problems, result=result, counters=grown(before))


def faults(trial: Trial) -> None:
    """Loss, link down and killed peers, for both movers one after the other."""
    roles = ("producer",) if trial.node.number == 1 else ("consumer", "victim")
    for mover in _MOVERS:
        with contextlib.ExitStack() as stack:
            children = {role: stack.enter_context(_fault(trial, role, mover)) for role in roles}
            for role, child in children.items():
                _add_fault(trial, role, mover, child, child.wait(_STAGE_S / 2))


def _fault(trial: Trial, role: str, mover: str) -> Child:
    def run() -> object:
        from tests.rdma_faults import run as play

        play(role, mover)
        return 0

    settings = {"UCX_NET_DEVICES": f"{device()}:1", "UCX_TLS": "rc,ud"}
    return Child(f"{role}-{mover}", trial.node.share, run, settings)


def _add_fault(trial: Trial, role: str, mover: str, child: Child, status: int) -> None:
    expected = 0 if role == "consumer" else -signal.SIGKILL
    seen = [json.loads(line) for line in child.out.read_text().splitlines() if line.startswith("{")]
    lacking = _FAULTS[role] - {one["fault"] for one in seen}
    problems = [f"not seen: {', '.join(sorted(lacking))}"] if lacking else []
    if status != expected:
        problems.insert(0, f"exit status {status}: {child.last_words()}")
    trial.add("faults", f"{mover}, {role}", problems, seen=seen)


def doctor(trial: Trial) -> None:
    """pdtx doctor sees the card, and says that RDMA can be had. On node 2, whose contract takes less time."""
    if trial.node.number == 1:
        return
    done = subprocess.run(
        [sys.executable, "-m", "pdtx", "doctor", "--want", "rdma", "--json", "--trial-timeout", "250"],
        env=os.environ | {"UCX_NET_DEVICES": f"{device()}:1,eth0"},
        capture_output=True,
        text=True,
        timeout=_STAGE_S / 2,
        check=False,
    )
    (trial.node.share / f"doctor.{trial.node.number}.json").write_text(done.stdout)
    problems = [] if device() in done.stdout else [f"it does not name {device()}"]
    problems += [] if done.returncode == 0 else [f"exit status {done.returncode}"]
    trial.add("doctor", "--want rdma", problems)


_TOGETHER = ("nodes", "faults")
"""Stages that both nodes begin and end at once; in the others each is by itself."""

_STAGES: dict[str, Callable[[Trial], None]] = {
    "nodes": nodes,
    "faults": faults,
    "contract": contract,
    "doctor": doctor,
}


def main() -> int:
    trial = Trial(Node.of_environment())
    import_all()
    stages = sys.argv[1:] or list(_STAGES)
    if "nodes" in stages:
        load_once(trial.node)
    trial.note("imported")
    for stage in stages:
        trial.run(stage)
    return trial.end()


if __name__ == "__main__":
    sys.exit(main())
