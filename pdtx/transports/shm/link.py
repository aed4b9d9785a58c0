"""One connection of the engine: regions are shared and opened, and copied from."""

import contextlib
import ctypes
import errno
import os
import secrets
import threading
import time

from pdtx.cache.shared import shared_file
from pdtx.errors import DeadlineExceeded, PdtxError, PeerLost, TransferAborted, TransferError
from pdtx.plan import Runs
from pdtx.transports.base import Path, Region
from pdtx.transports.onesided.fabric import Link, Progress, Shared
from pdtx.transports.shm.copying import Copier, Steps
from pdtx.transports.shm.cuda import open_cuda, share_cuda
from pdtx.transports.shm.keys import (
    NONCE_BYTES,
    VERSION,
    Greeting,
    InFile,
    InProcess,
    Key,
    OnDevice,
    pack,
    unpack_greeting,
    unpack_key,
)
from pdtx.transports.shm.peer import Peer
from pdtx.transports.shm.remote import Foreign, Mapped, OnCuda, Remote, map_file

_WAYS: dict[type[Key], str] = {InFile: "mapped memfd", InProcess: "cma", OnDevice: "cuda_ipc"}


class ShmLink(Link[Remote]):
    """See Link. Owns peer. expected: how the node's registered regions are reached, see way_to()."""

    def __init__(self, peer: Peer, copier: Copier, expected: frozenset[str]) -> None:
        self._peer, self._copier, self._expected = peer, copier, expected
        # Where the peer tries whether it can read here.
        self._nonce = ctypes.create_string_buffer(secrets.token_bytes(NONCE_BYTES), NONCE_BYTES)
        self._lock = threading.Lock()
        self._kept = dict[tuple[int, int], Region]()
        self._opened = list[Remote]()
        self._ways = set[str]()

    def greeting(self) -> bytes:
        """See Link."""
        return pack(Greeting(VERSION, ctypes.addressof(self._nonce), self._nonce.raw))

    def join(self, greeting: bytes, deadline: float) -> None:
        """See Link. Takes no time."""
        told = unpack_greeting(greeting)
        self._peer.try_reading(told.address, told.nonce)

    @property
    def path(self) -> Path:
        """See Link. detail: how the regions are reached that were shared or opened; before, those that are expected."""
        with self._lock:
            ways = self._ways or self._expected or {_WAYS[InFile], _WAYS[InProcess]}
            detail = " or ".join(sorted(ways))
        return Path("shm", detail, library=self._copier.library, possible=("shm",))

    def _goes(self, way: str) -> None:
        with self._lock:
            self._ways.add(way)

    def share(self, region: Region) -> Shared:
        """See Link."""
        key, descriptors = _share(region)
        self._goes(_WAYS[type(key)])
        with self._lock:
            self._kept[region.address, region.nbytes] = region
        return Shared(pack(key), descriptors)

    def open(self, shared: Shared, nbytes: int) -> Remote:
        """See Link."""
        try:
            key = unpack_key(shared.key)
            remote = _open(key, shared.descriptors, nbytes)
        finally:
            for descriptor in shared.descriptors:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._goes(_WAYS[type(key)])
        with self._lock:
            self._opened.append(remote)
        return remote

    def read(self, remote: Remote, region: Region, runs: Runs, deadline: float, progress: Progress) -> None:
        """See Link."""
        if isinstance(remote, Foreign) and self._peer.closed_to_us is not None:
            raise self._refused(self._peer.closed_to_us)
        try:
            self._drive(self._copier.copy(remote, region, runs, self._peer.pid), runs.total, deadline, progress)
        except OSError as error:
            raise self._translated(error) from None
        except RuntimeError as error:
            raise TransferError(f"memory of {self._peer} cannot be copied: {str(error).splitlines()[0]}") from None
        if isinstance(remote, Foreign) and self._peer.has_gone:
            # Its number, and with it the bytes, may have been another process's.
            raise PeerLost(f"{self._peer} has ended while its memory was read")

    def _drive(self, steps: Steps, total: int, deadline: float, progress: Progress) -> None:
        begun, done = time.monotonic(), 0
        while done < total:
            if progress.stopped:
                raise TransferAborted(f"given up after {done} of {total} bytes from {self._peer}")
            now = time.monotonic()
            if now >= deadline:
                detail = f"{done} of {total} bytes copied"
                raise DeadlineExceeded("bytes within this host", str(self._peer), round(now - begun, 3), detail)
            moved = next(steps)
            done += moved
            progress.moved(moved)

    def _translated(self, error: OSError) -> PdtxError:
        if error.errno == errno.ESRCH or self._peer.has_gone:
            return PeerLost(f"{self._peer} has ended")
        if error.errno == errno.EFAULT:
            return TransferError(f"{self._peer} has no memory any more where it said that its region is")
        return self._refused(error.strerror or str(error))

    def _refused(self, reason: str) -> TransferError:
        return TransferError(
            f"the private memory of {self._peer} cannot be read: {reason}; it is another user's, in another container, "
            "or kernel.yama.ptrace_scope forbids it: start both nodes with caches in shared memory"
        )

    def revoke(self) -> bool:
        """See Link. No peer can ever write here."""
        return True

    def close(self) -> None:
        """See Link."""
        with self._lock:
            opened, self._opened = self._opened, []
            self._kept.clear()
        for remote in opened:
            if isinstance(remote, Mapped):
                remote.mapping.close()
        self._peer.close()


def way_to(region: Region) -> str:
    """Return the name of the way in which other processes reach a region."""
    if region.memory.is_cuda:
        return _WAYS[OnDevice]
    return _WAYS[InProcess] if shared_file(region.memory) is None else _WAYS[InFile]


def _share(region: Region) -> tuple[Key, tuple[int, ...]]:
    """Return how a peer reaches a region, and the descriptors that it needs for that. Raises TransferError."""
    if region.memory.is_cuda:
        return share_cuda(region), ()
    if not region.on_cpu:
        raise TransferError(f"memory of {region.memory.device} cannot be shared with other processes")
    file = shared_file(region.memory)
    if file is None:
        return InProcess(region.address), ()
    descriptor, offset = file
    return InFile(offset), (descriptor,)


def _open(key: Key, descriptors: tuple[int, ...], nbytes: int) -> Remote:
    match key:
        case InFile():
            return map_file(descriptors, key.offset, nbytes)
        case OnDevice():
            return OnCuda(open_cuda(key, nbytes))
    return Foreign(key.address, nbytes)
