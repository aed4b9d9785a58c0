"""Copying the same runs within one process, on one thread: the limit of everything on one host."""

import time
from collections.abc import Callable
from statistics import median
from typing import Literal

import torch

from benchmarks.peers.base import CacheMemory, Peer, Workload
from benchmarks.peers.child import Child, awake
from pdtx.bench.turns import MOVES_A_ROUND
from pdtx.errors import InputError
from pdtx.native import Memory, library

Kind = Literal["c", "torch", "numpy"]
_DETAILS: dict[Kind, str] = {
    "c": "a C loop of memcpy over the runs",
    "torch": "index_select into new memory, index_copy_ out of it: two copies",
    "numpy": "fancy indexing on both sides: two copies",
}


class _Copier(CacheMemory):
    """The destination's cache, and the source's beside it."""

    def __init__(self, workload: Workload, kind: Kind) -> None:
        super().__init__(workload)
        self._source = CacheMemory(workload)
        self._source.fill()
        makers: dict[Kind, Callable[[], Callable[[], object]]] = {
            "c": self._by_c,
            "torch": self._by_torch,
            "numpy": self._by_numpy,
        }
        self._copy = makers[kind]()

    def move(self) -> float:
        """Copy once; return the seconds."""
        begun = time.perf_counter()
        self._copy()
        return time.perf_counter() - begun

    def _by_c(self) -> Callable[[], object]:
        native = library()
        if native is None:
            raise InputError("the C library of pdtx is not built; install pdtx where there is a C compiler")
        runs, nbytes = self.workload.runs, self.workload.memory_bytes
        here, there = Memory(self.address, nbytes), Memory(self._source.address, nbytes)
        return lambda: native.copy_runs(here, there, runs.dst, runs.src, runs.nbytes)

    def _by_torch(self) -> Callable[[], object]:
        src, dst = (torch.from_numpy(units) for units in (self.workload.src_units, self.workload.dst_units))
        there, here = (memory.view(-1, self.workload.unit) for memory in (self._source.tensor, self.tensor))
        return lambda: here.index_copy_(0, dst, there.index_select(0, src))

    def _by_numpy(self) -> Callable[[], object]:
        src, dst = self.workload.src_units, self.workload.dst_units
        there, here = self._source.words, self.words

        def copy() -> None:
            here[dst] = there[src]

        return copy


class Memcpy(Peer):
    """One process with both caches."""

    def __init__(self, kind: Kind = "c", workload: Workload | None = None) -> None:
        self._workload, self._kind = workload or Workload.random(), kind
        self._child: Child[_Copier] | None = None
        super().__init__(f"memcpy ({kind})", _DETAILS[kind], self._workload.nbytes)

    def start(self) -> None:
        """See Peer."""
        self._child = Child({}, _Copier, self._workload, self._kind)
        self._child.ready()
        self._child.pause()

    def round(self) -> float:
        """See Peer."""
        if self._child is None:
            raise InputError("a round outside of the with block")
        with awake(self._child):
            self._child.call(_Copier.poison)
            seconds = median(self._child.call(_Copier.move) for _ in range(MOVES_A_ROUND))
            self.wrong += self._child.call(_Copier.wrong)
        return seconds

    def stop(self) -> None:
        """See Peer."""
        if self._child is not None:
            self._child.end()
            self._child = None
