"""Boots the machines, waits for their commands, and stops them, however it ends."""

import time

from rdma_lab.job import Job
from rdma_lab.machine import Machine, Setup
from rdma_lab.output import Output
from rdma_lab.say import LabError, say

TIMED_OUT = 124
"""Exit status when time is up, as of timeout(1)."""

_TICK_S = 0.1
_WIRE_S = 20.0
_GRACE_S = 15.0
"""How long the other node has to end after one has failed."""


class Lab:
    """Machines of one run. Use in a with statement."""

    def __init__(self, setup: Setup, job: Job, timeout_s: float) -> None:
        self._setup, self._job = setup, job
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        self._machines = list[Machine]()
        self._outputs = [Output(setup.share / ".lab" / f"out.{node}", node) for node in range(1, job.nodes + 1)]

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self._machines:
            machine.stop()
        self._keep_consoles()

    def boot(self) -> None:
        """Start the machines. Raises LabError if one does not start."""
        for node in range(1, self._job.nodes + 1):
            machine = Machine(self._setup, node, self._job.nodes)
            self._machines.append(machine)
            if node == 1 and self._job.nodes == 2:
                self._wait_for_wire(machine)

    def _wait_for_wire(self, machine: Machine) -> None:
        """The second machine dials the first one's socket."""
        limit = time.monotonic() + _WIRE_S
        while not self._setup.wire.exists():
            if not machine.running:
                raise LabError(f"machine 1 ended at once: {machine.last_words()}")
            if time.monotonic() > limit:
                raise LabError(f"machine 1 has made no wire within {_WIRE_S:.0f} s: {machine.last_words()}")
            time.sleep(_TICK_S / 5)

    def wait(self) -> int:
        """Return the exit status: 0 if all nodes' is, else that of the one that failed first, 124 when time is up.

        Raises LabError if a machine dies.
        """
        failed, grace = None, float("inf")
        while True:
            # One reading for all that follows: a status that came in between would end the loop unseen.
            statuses = [machine.status for machine in self._machines]
            self._show()
            for machine, status in zip(self._machines, statuses, strict=True):
                if status not in (None, 0) and failed is None:
                    say(f"node {machine.node} has failed with exit status {status}")
                    failed, grace = status, time.monotonic() + _GRACE_S
                if status is None and not machine.running and machine.status is None:
                    raise LabError(f"machine {machine.node} died: {machine.last_words()}")
            if None not in statuses:
                break
            if time.monotonic() > grace:
                say(f"the other node has not ended {_GRACE_S:.0f} s later, and is stopped")
                break
            if time.monotonic() > self._deadline:
                self._tell_timeout()
                return TIMED_OUT
            time.sleep(_TICK_S)
        self._show(last=True)
        return failed or 0

    def _show(self, last: bool = False) -> None:
        for output in self._outputs:
            output.show(last)

    def _tell_timeout(self) -> None:
        self._show(last=True)
        for machine in self._machines:
            if machine.status is None:
                lab = self._setup.share / ".lab"
                phase = "runs the command" if (lab / f"ready.{machine.node}").exists() else "boots"
                say(f"not ended after {self._timeout_s:g} s: node {machine.node} still {phase}; {machine.last_words()}")

    def _keep_consoles(self) -> None:
        for machine in self._machines:
            target = self._setup.share / ".lab" / machine.console.name
            if machine.console.exists():
                target.write_bytes(machine.console.read_bytes())
