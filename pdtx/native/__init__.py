"""The optional C library: loops over runs, at the speed of the memory. Every user has a way without it.

It is built when pdtx is installed, if there is a C compiler, or by `python pdtx/native/build.py`. PDTX_NATIVE=0 in the
environment leaves it unused.
"""

import ctypes
import functools
import logging
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdtx.errors import InputError, PlanError
from pdtx.native.build import BUILT

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]

VERSION = 3
"""Of the functions in runs.c that are called here."""


class Memory(NamedTuple):
    """A region that is mapped here: the address of its first byte, and its size."""

    address: int
    nbytes: int


class Native:
    """The functions of the library at path. Safe to use from several threads; Python's others run meanwhile."""

    def __init__(self, path: Path) -> None:
        """Raise OSError for a file that is no such library, or one of another version."""
        library = ctypes.CDLL(str(path))
        pointer, int64 = ctypes.c_void_p, ctypes.c_int64
        try:
            version, self._copy = library.pdtx_version, library.pdtx_copy_runs
            self._post, self._reap, self._pump = library.pdtx_post_runs, library.pdtx_reap, library.pdtx_pump
        except AttributeError as error:
            raise OSError(f"{path} is no library of pdtx: {error}") from None
        for function in (version, self._copy, self._post, self._reap, self._pump):
            function.restype = int64
        if version() != VERSION:
            raise OSError(f"{path} is of version {version()}, not {VERSION}")
        self._copy.argtypes = (pointer, int64, pointer, int64, *[pointer] * 3, int64, *[ctypes.c_int] * 2)
        self._post.argtypes = (*[pointer] * 2, *[ctypes.c_uint64] * 2, *[pointer] * 3, int64, *[pointer] * 4)
        self._reap.argtypes = (*[pointer] * 3, int64, pointer)
        self._pump.argtypes = (*[pointer] * 3, *[ctypes.c_int] * 2, *[pointer] * 3, *[int64] * 2)

    def copy_runs(
        self,
        to: Memory,
        source: Memory,
        dst: Int64s,
        src: Int64s,
        nbytes: Int64s,
        *,
        past_caches: bool = False,
        threads: int = 1,
    ) -> None:
        """Copy runs, from offsets src of source to offsets dst of `to`; in their order, if by one thread.

        past_caches: faster for more bytes than the processor's caches hold, slower for fewer.
        threads: 16 at most; each takes a share of whole runs, and takes some 20 microseconds to start.
        Raises PlanError at the first run that leaves its region; those before it are copied.
        """
        count, arrays = _arrays(dst, src, nbytes)
        done = self._copy(*to, *source, *arrays, count, past_caches, threads)
        if done < count:
            raise PlanError(
                f"run {done} of {nbytes[done]} bytes from byte {src[done]} of {source.nbytes} to byte {dst[done]} "
                f"of {to.nbytes} leaves its region"
            )

    def post_runs(
        self,
        post: int,
        endpoint: int,
        local_base: int,
        remote_base: int,
        local: Int64s,
        remote: Int64s,
        nbytes: Int64s,
        key: int,
        param: int,
        pending: Uint64s,
    ) -> tuple[int, int]:
        """Call post(endpoint, local address, nbytes, remote address, key, param) for each run, as UCX's put and get.

        post, endpoint, key, param: addresses. local, remote: offsets from the bases; not checked here.
        Returns how many were posted, and how many of them are under way: their requests stand at the start of pending,
        uint64, which has room for one for each run. Fewer than there are runs: the next one failed, and UCX's error
        pointer stands behind the requests.
        """
        count, arrays = _arrays(local, remote, nbytes)
        room = _checked(pending, np.uint64, count)
        num_pending = ctypes.c_int64()
        posted = self._post(
            post, endpoint, local_base, remote_base, *arrays, count, key, param, room, ctypes.addressof(num_pending)
        )
        return int(posted), num_pending.value

    def reap(self, check: int, free_request: int, pending: Uint64s, num_pending: int) -> tuple[int, int]:
        """Free the requests that have ended, and move the others to the start of pending.

        check, free_request: addresses of ucp_request_check_status and ucp_request_free.
        Returns how many are left, and the first UCX status that was an error, or 0.
        """
        room = _checked(pending, np.uint64, num_pending)
        first_error = ctypes.c_int64()
        kept = self._reap(check, free_request, room, num_pending, ctypes.addressof(first_error))
        return int(kept), first_error.value

    def pump(
        self,
        progress: int,
        arm: int,
        worker: int,
        event: int,
        descriptor: int,
        check: int,
        request: int,
        interrupted: int,
        spin_ns: int,
        timeout_ns: int,
    ) -> int:
        """Let a UCX worker make progress until a request has ended or a descriptor can be read, and return 1.

        progress, arm, check: addresses of ucp_worker_progress, ucp_worker_arm and ucp_request_check_status.
        event: the worker's event descriptor. descriptor: -1 for none. request: 0 for none.
        interrupted: address of an int64 that another thread sets to end this early. spin_ns: how long to be awake
        with nothing to do. Returns 0 after timeout_ns or when interrupted, and UCX's status if waiting failed.
        """
        return int(
            self._pump(progress, arm, worker, event, descriptor, check, request, interrupted, spin_ns, timeout_ns)
        )


def _checked(array: npt.NDArray[np.int64] | npt.NDArray[np.uint64], dtype: type[np.generic], count: int) -> int:
    if array.dtype != dtype or array.ndim != 1 or len(array) < count or not array.flags.c_contiguous:
        raise InputError(f"needs a contiguous {np.dtype(dtype)} array of {count}, not {array.dtype} {array.shape}")
    return int(array.ctypes.data)


def _arrays(*sides: Int64s) -> tuple[int, list[int]]:
    """Number of runs, and the addresses of the arrays that describe them."""
    count = len(sides[0])
    if any(len(side) != count for side in sides):
        raise InputError(f"arrays of {', '.join(str(len(side)) for side in sides)} runs do not fit together")
    return count, [_checked(side, np.int64, count) for side in sides]


def library() -> Native | None:
    """Return the library, or None where it was not built, does not load, or is not wanted (PDTX_NATIVE=0)."""
    return None if os.environ.get("PDTX_NATIVE") == "0" else _load(BUILT)


@functools.cache
def _load(path: Path) -> Native | None:
    if not path.exists():
        return None
    try:
        return Native(path)
    except OSError as error:
        logger.warning("going on without pdtx's C library: %s; install pdtx again to build it anew", error)
        return None
