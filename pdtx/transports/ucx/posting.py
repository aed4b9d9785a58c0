"""Giving runs to UCX and taking the finished requests back: by pdtx's C library, or by a loop in Python."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdtx.native import Native
from pdtx.transports.ucx.libucp import Operation, Ucp
from pdtx.transports.ucx.status import IN_PROGRESS, OK, pointer_error

Int64s = npt.NDArray[np.int64]

BATCH_RUNS = 2048
BATCH_BYTES = 8 << 20
"""Given to UCX before anything else is looked at: where UCX copies at once (cma), this is how long a stop may take."""


class Transfer(NamedTuple):
    """What is to be moved. local, remote: addresses from which runs' offsets count."""

    endpoint: int
    key: int
    params: int
    local: int
    remote: int


class Batch(NamedTuple):
    """Runs: offsets on both sides and sizes, int64, all of one length."""

    local: Int64s
    remote: Int64s
    nbytes: Int64s


def batches(local: Int64s, remote: Int64s, nbytes: Int64s) -> Iterator[Batch]:
    """Cut runs into batches of at most BATCH_RUNS and BATCH_BYTES: longer runs are cut up, empty ones left out."""
    local, remote, nbytes = _without_empty(local, remote, nbytes)
    if len(nbytes) and int(nbytes.max()) > BATCH_BYTES:
        local, remote, nbytes = _cut(local, remote, nbytes)
    ends = np.cumsum(nbytes)
    start, done = 0, 0
    while start < len(nbytes):
        stop = min(int(ends.searchsorted(done + BATCH_BYTES, side="right")), start + BATCH_RUNS)
        yield Batch(local[start:stop], remote[start:stop], nbytes[start:stop])
        start, done = stop, int(ends[stop - 1])


def _without_empty(local: Int64s, remote: Int64s, nbytes: Int64s) -> Batch:
    if len(nbytes) and int(nbytes.min()) > 0:
        return Batch(*map(np.ascontiguousarray, (local, remote, nbytes)))
    some = nbytes > 0
    return Batch(local[some], remote[some], nbytes[some])


def _cut(local: Int64s, remote: Int64s, nbytes: Int64s) -> Batch:
    counts = -(-nbytes // BATCH_BYTES)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (np.arange(len(first), dtype=np.int64) - first) * BATCH_BYTES
    pieces = np.minimum(np.repeat(nbytes, counts) - offsets, BATCH_BYTES)
    return Batch(np.repeat(local, counts) + offsets, np.repeat(remote, counts) + offsets, pieces)


class Poster(ABC):
    """Operations under way, of one kind: puts or gets."""

    error = OK
    """The first status that was one, of posting or of an operation; nothing is posted after it."""

    @abstractmethod
    def post(self, transfer: Transfer, batch: Batch) -> None:
        """Begin to move a batch, up to the first error."""

    @abstractmethod
    def reap(self) -> None:
        """Free the requests that have ended, and note the first error."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """How many operations have not ended, as far as is known."""

    @property
    @abstractmethod
    def oldest(self) -> int:
        """A request that has not ended, as far as is known; there is one."""


class PythonPoster(Poster):
    """See Poster. 1 us a run."""

    def __init__(self, ucp: Ucp, operation: Operation) -> None:
        self._ucp, self._operation = ucp, operation
        self._pending = list[int]()

    def post(self, transfer: Transfer, batch: Batch) -> None:
        """See Poster."""
        operation, append = self._operation, self._pending.append
        endpoint, key, params = transfer.endpoint, transfer.key, transfer.params
        locals_, remotes = _absolute(batch.local, transfer.local), _absolute(batch.remote, transfer.remote)
        for local, remote, nbytes in zip(locals_, remotes, batch.nbytes.tolist(), strict=True):
            request = operation(endpoint, local, nbytes, remote, key, params)
            if request:
                if error := pointer_error(request):
                    self.error = self.error or error
                    return
                append(request)

    def reap(self) -> None:
        """See Poster."""
        left = list[int]()
        for request in self._pending:
            status = self._ucp.request_status(request)
            if status == IN_PROGRESS:
                left.append(request)
                continue
            self.error = self.error or min(status, OK)
            self._ucp.free_request(request)
        self._pending = left

    @property
    def pending(self) -> int:
        """See Poster."""
        return len(self._pending)

    @property
    def oldest(self) -> int:
        """See Poster."""
        return self._pending[0]


def _absolute(offsets: Int64s, base: int) -> list[int]:
    addresses: list[int] = (offsets.astype(np.uint64) + np.uint64(base)).tolist()
    return addresses


class NativePoster(Poster):
    """See Poster. 0.1 us a run, and Python's other threads run meanwhile."""

    def __init__(self, ucp: Ucp, native: Native, operation: str) -> None:
        self._native, self._operation = native, ucp.address_of(operation)
        self._status, self._free = ucp.address_of("ucp_request_check_status"), ucp.address_of("ucp_request_free")
        self._requests = np.zeros(BATCH_RUNS, np.uint64)
        self._count = 0

    def post(self, transfer: Transfer, batch: Batch) -> None:
        """See Poster."""
        self._make_room(len(batch.nbytes))
        room = self._requests[self._count :]
        posted, pending = self._native.post_runs(
            self._operation,
            transfer.endpoint,
            transfer.local,
            transfer.remote,
            batch.local,
            batch.remote,
            batch.nbytes,
            transfer.key,
            transfer.params,
            room,
        )
        self._count += pending
        if posted < len(batch.nbytes):
            self.error = self.error or pointer_error(int(room[pending]))

    def _make_room(self, count: int) -> None:
        if len(self._requests) - self._count < count:
            requests = np.zeros(2 * (self._count + count), np.uint64)
            requests[: self._count] = self._requests[: self._count]
            self._requests = requests

    def reap(self) -> None:
        """See Poster."""
        self._count, error = self._native.reap(self._status, self._free, self._requests, self._count)
        self.error = self.error or error

    @property
    def pending(self) -> int:
        """See Poster."""
        return self._count

    @property
    def oldest(self) -> int:
        """See Poster."""
        return int(self._requests[0])


def make_poster(ucp: Ucp, operation: str, native: Native | None) -> Poster:
    """Return a poster of "ucp_put_nbx" or "ucp_get_nbx"."""
    if native is not None:
        return NativePoster(ucp, native, operation)
    return PythonPoster(ucp, ucp.put if operation == "ucp_put_nbx" else ucp.get)
