"""Movers with one fault each, which the contract must catch."""

import dataclasses
import threading
from collections.abc import Callable

import numpy as np

from pdtx.errors import PdtxError
from pdtx.plan import Runs, Slices
from pdtx.testing import WrappedConnection
from pdtx.transports import Connection, Mover, Placement, Receiver, Region, TransferHandle, TransferKey
from pdtx.transports.inproc import InprocMover, copy_slices


class _Wrapped(Mover):
    """An in-process mover whose receiver and connections can be tampered with."""

    name = "broken"

    def __init__(self) -> None:
        self._inner = InprocMover()

    def listen(self, address: str, receiver: Receiver) -> str:
        return self._inner.listen(address, self.tampered_receiver(receiver))

    def connect(self, address: str, session_id: str, token: bytes, deadline: float) -> Connection:
        return self.tampered_connection(self._inner.connect(address, session_id, token, deadline))

    def close(self) -> None:
        self._inner.close()

    def tampered_receiver(self, receiver: Receiver) -> Receiver:
        return receiver

    def tampered_connection(self, connection: Connection) -> Connection:
        return connection


class _Connection(WrappedConnection):
    """Hands every put to a function instead of the connection."""

    def __init__(self, inner: Connection, put: Callable[..., TransferHandle]) -> None:
        super().__init__(inner)
        self._put = put

    def put(
        self, key: TransferKey, region: Region, runs: Runs, deadline: float, *, staged: bool = False
    ) -> TransferHandle:
        return self._put(self.inner, key, region, runs, deadline)


class SwapsTwoRuns(_Wrapped):
    """Sends the first two runs of the same length in each other's place."""

    def tampered_connection(self, connection: Connection) -> Connection:
        def put(inner: Connection, key: TransferKey, region: Region, runs: Runs, deadline: float) -> TransferHandle:
            alike = np.flatnonzero(runs.nbytes == runs.nbytes[:1])[:2]
            src = runs.src.copy()
            src[alike] = src[alike[::-1]]
            return inner.put(key, region, Runs(src, runs.dst, runs.nbytes), deadline)

        return _Connection(connection, put)


class _Placing:
    """A receiver whose placements are changed on their way to the mover."""

    def __init__(self, inner: Receiver, change: Callable[[Placement], Placement]) -> None:
        self._change = change
        self.admit, self.placed, self.closed = inner.admit, inner.placed, inner.closed
        self.offer, self.offered, self.notified = inner.offer, inner.offered, inner.notified
        self._place = inner.place

    def place(self, session_id: str, key: TransferKey) -> Placement:
        return self._change(self._place(session_id, key))


class DropsTheLastRun(_Wrapped):
    """Writes the last run into memory of its own, and says that all has arrived."""

    def tampered_receiver(self, receiver: Receiver) -> Receiver:
        def change(placement: Placement) -> Placement:
            memory, slices = placement.region.memory, placement.slices
            if not len(slices):
                return placement
            last = int(slices.offsets[-1]), int(slices.nbytes[-1])
            kept = memory[last[0] : last[0] + last[1]].clone()
            self._restore.append(lambda: memory[last[0] : last[0] + last[1]].copy_(kept))
            return placement

        placing = _Placing(receiver, change)
        placed = placing.placed

        def restoring(session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
            for restore in self._restore:
                restore()
            self._restore.clear()
            placed(session_id, key, nbytes, error)

        placing.placed = restoring
        return placing

    def __init__(self) -> None:
        super().__init__()
        self._restore = list[Callable[[], object]]()


class WritesOutside(_Wrapped):
    """Writes every payload where it belongs, and its first byte into block 0 as well."""

    def tampered_receiver(self, receiver: Receiver) -> Receiver:
        def change(placement: Placement) -> Placement:
            one = Slices(np.zeros(1, np.int64), np.ones(1, np.int64))
            copy_slices(
                Placement(Region(placement.region.memory[:1] ^ 0xFF), one), dataclasses.replace(placement, slices=one)
            )
            return placement

        return _Placing(receiver, change)


class ReportsDoneTooEarly(_Wrapped):
    """Ends a transfer as DONE when it is put; the bytes follow."""

    def __init__(self) -> None:
        super().__init__()
        self._late = list[threading.Thread]()

    def tampered_connection(self, connection: Connection) -> Connection:
        def put(inner: Connection, key: TransferKey, region: Region, runs: Runs, deadline: float) -> TransferHandle:
            handle = TransferHandle(key, runs.total, "nobody", deadline)
            handle.post()
            handle.finish()
            thread = threading.Timer(0.05, inner.put, (key, region, runs, deadline))
            thread.start()
            self._late.append(thread)
            return handle

        return _Connection(connection, put)

    def close(self) -> None:
        for thread in self._late:
            thread.join()
        super().close()
