"""NIXL as vLLM's connector uses it: descriptor lists prepared once, one transfer made of indices for each request."""

import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from benchmarks.peers.base import CacheMemory, PairPeer, Workload
from benchmarks.peers.child import Child
from pdtx.errors import InputError, PdtxError

Op = Literal["READ", "WRITE"]

_PATIENCE_S = 60.0


class _Agent(CacheMemory):
    """One side, with all of its units as one prepared list."""

    def __init__(self, workload: Workload, threads: int, progress_thread: bool) -> None:
        super().__init__(workload)
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise InputError(f"NIXL does not load ({error}); install the extra: pip install 'pdtx[nixl]'") from None
        config = nixl_agent_config(num_threads=threads, enable_prog_thread=progress_thread)
        self._agent = nixl_agent(f"{id(self)}-{time.monotonic_ns()}", config)
        self._agent.register_memory(self._agent.get_reg_descs(self._rows(self.address, workload.pool), "DRAM"))

    def _rows(self, base: int, units: int) -> npt.NDArray[np.uint64]:
        """Cut a cache at base into rows (address, bytes, device) of so many units each."""
        step = units * self.workload.unit
        rows = np.zeros((self.workload.memory_bytes // step, 3), np.uint64)
        rows[:, 0] = base + np.arange(len(rows), dtype=np.uint64) * np.uint64(step)
        rows[:, 1] = step
        return rows

    def greeting(self) -> tuple[bytes, int]:
        """Return what the other side needs to know: metadata and address."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata, self.address

    def join(self, metadata: bytes, base: int) -> None:
        self._remote = self._agent.add_remote_agent(metadata)
        self._lists = [
            self._agent.prep_xfer_dlist(name, self._agent.get_xfer_descs(self._rows(address, 1), "DRAM"))
            for name, address in (("NIXL_INIT_AGENT", self.address), (self._remote, base))
        ]

    def move(self, op: Op) -> float:
        """Carry out one request; return the seconds from its making to its end."""
        here, there = self._lists
        units = [self.workload.src_units.astype(np.int32), self.workload.dst_units.astype(np.int32)]
        local, remote = units if op == "WRITE" else reversed(units)
        begun = time.perf_counter()
        request = self._agent.make_prepped_xfer(op, here, local, there, remote, b"done")
        state = self._agent.transfer(request)
        while state == "PROC":
            state = self._agent.check_xfer_state(request)
        seconds = time.perf_counter() - begun
        self._agent.release_xfer_handle(request)
        if state != "DONE":
            raise PdtxError(f"NIXL ended a {op} as {state}")
        return seconds

    def hear(self) -> None:
        """Wait for the notification of a request; without a thread for progress, this is what makes it."""
        limit = time.monotonic() + _PATIENCE_S
        while not self._agent.get_new_notifs():
            if time.monotonic() > limit:
                raise PdtxError(f"NIXL's notification did not come within {_PATIENCE_S:g} s")


class NixlPeer(PairPeer[_Agent]):
    """READ: the destination fetches. WRITE: the source brings. threads: those of NIXL's backend beside its own.

    tls: None for the fastest way that NIXL finds within the host, "tcp" for TCP, or any UCX_TLS. devices: interfaces,
    as UCX_NET_DEVICES; None for UCX's own choice, which spreads TCP over all there are.
    progress_thread: NIXL's default, and vLLM's; it takes a processor core on either side whether it moves anything or
    not. Without it the side that waits looks for the notification all the time, which lets the transfer go on.
    """

    def __init__(
        self,
        op: Op = "WRITE",
        *,
        threads: int = 0,
        tls: str | None = None,
        devices: str | None = None,
        progress_thread: bool = True,
        workload: Workload | None = None,
    ) -> None:
        without = "" if progress_thread else ", no progress thread"
        over = "".join(f", {setting}" for setting in (tls, devices) if setting)
        name = f"NIXL {op}, {threads} threads{over}{without}"
        self._op, self._threads, self._progress_thread = op, threads, progress_thread
        self._environment = {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"}
        if tls is not None:
            self._environment["UCX_TLS"] = tls
        if devices is not None:
            self._environment["UCX_NET_DEVICES"] = devices
        setting = ", ".join(f"{name}={value}" for name, value in self._environment.items() if "LOG" not in name)
        super().__init__(name, setting or "UCX's own choice", workload or Workload.random())

    def children(self) -> Sequence[Child[_Agent]]:
        """See PairPeer."""
        options = self.workload, self._threads, self._progress_thread
        return [Child(self._environment, _Agent, *options) for _ in range(2)]

    def connect(self, source: Child[_Agent], destination: Child[_Agent]) -> None:
        """See PairPeer."""
        for one, other in ((source, destination), (destination, source)):
            one.call(_Agent.join, *other.call(_Agent.greeting))

    def move(self, source: Child[_Agent], destination: Child[_Agent]) -> float:
        """See PairPeer."""
        active, passive = (source, destination) if self._op == "WRITE" else (destination, source)
        if self._progress_thread:
            seconds = active.call(_Agent.move, self._op)
            passive.call(_Agent.hear)
            return seconds
        hearing = passive.begin(_Agent.hear)
        seconds = active.call(_Agent.move, self._op)
        hearing.result()
        return seconds
