"""Mooncake's transfer engine over TCP: one batch for each request, runs joined where they touch."""

import time
from collections.abc import Sequence

from benchmarks.peers.base import CacheMemory, PairPeer, Workload
from benchmarks.peers.child import Child
from pdtx.errors import InputError, PdtxError

_ENVIRONMENT = {
    # It refuses batches of more than about 2,048 runs otherwise.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "2",
}
_HOST = "127.0.0.1"


class _Engine(CacheMemory):
    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise InputError(
                f"Mooncake does not load ({error}); install the package mooncake-transfer-engine-non-cuda, "
                "and libibverbs1 of the system"
            ) from None
        self._engine = TransferEngine()
        self._require(self._engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", ""), "starting")
        step = workload.pool * workload.unit
        addresses = [self.address + region * step for region in range(workload.regions)]
        self._require(self._engine.batch_register_memory(addresses, [step] * workload.regions), "registering memory")

    def greeting(self) -> tuple[int, int]:
        """Return the port and the cache's address."""
        return self._engine.get_rpc_port(), self.address

    def join(self, port: int, base: int) -> None:
        runs = self.workload.runs
        self._request = (
            f"{_HOST}:{port}",
            (runs.src + self.address).tolist(),
            (runs.dst + base).tolist(),
            runs.nbytes.tolist(),
        )

    def move(self) -> float:
        """Write everything into the other's cache; return the seconds."""
        begun = time.perf_counter()
        status = self._engine.batch_transfer_sync_write(*self._request)
        seconds = time.perf_counter() - begun
        self._require(status, "a transfer")
        return seconds

    def _require(self, status: int, what: str) -> None:
        if status != 0:
            raise PdtxError(f"Mooncake ended {what} with status {status}")


class MooncakePeer(PairPeer[_Engine]):
    """The source writes into the destination's cache over TCP on loopback."""

    def __init__(self, workload: Workload | None = None) -> None:
        workload = workload or Workload.random()
        super().__init__("Mooncake TE tcp", f"batch of {len(workload.runs)} writes, queues of 65535", workload)

    def children(self) -> Sequence[Child[_Engine]]:
        """See PairPeer."""
        return [Child(_ENVIRONMENT, _Engine, self.workload) for _ in range(2)]

    def connect(self, source: Child[_Engine], destination: Child[_Engine]) -> None:
        """See PairPeer."""
        source.call(_Engine.join, *destination.call(_Engine.greeting))

    def move(self, source: Child[_Engine], destination: Child[_Engine]) -> float:
        """See PairPeer."""
        return source.call(_Engine.move)
