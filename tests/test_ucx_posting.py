"""Runs cut into batches and given to something that behaves as UCX does, by the C library and by Python."""

import ctypes
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtx.native import library as native_library
from pdtx.transports.ucx.posting import BATCH_BYTES, BATCH_RUNS, Batch, Int64s, Poster, Transfer, batches, make_poster
from pdtx.transports.ucx.status import CONNECTION_RESET, IN_PROGRESS, OK

_OPERATION = ctypes.CFUNCTYPE(
    ctypes.c_void_p, *[ctypes.c_void_p] * 2, ctypes.c_size_t, ctypes.c_uint64, *[ctypes.c_void_p] * 2
)
_CHECK = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def int64s(*values: int) -> Int64s:
    return np.array(values, np.int64)


# -- batches -----------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 3 * BATCH_BYTES), max_size=40))
def test_batches_hold_every_byte_once_and_in_order(sizes: list[int]) -> None:
    nbytes = int64s(*sizes)
    local = np.cumsum(nbytes) - nbytes
    remote = local[::-1].copy() + 7
    whole = [run for run in zip(local.tolist(), remote.tolist(), sizes, strict=True) if run[2]]
    pieces = list[tuple[int, int, int]]()
    for batch in batches(local, remote, nbytes):
        assert 0 < len(batch.nbytes) <= BATCH_RUNS
        assert 0 < int(batch.nbytes.sum()) <= BATCH_BYTES
        assert int(batch.nbytes.min()) > 0
        pieces += zip(*(side.tolist() for side in batch), strict=True)
    assert _merged(pieces) == _merged(whole)


def _merged(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbours joined that touch on both sides: the same for a run and its pieces."""
    result = list[tuple[int, int, int]]()
    for run in runs:
        last = result[-1] if result else None
        if last is not None and (last[0] + last[2], last[1] + last[2]) == run[:2]:
            result[-1] = last[0], last[1], last[2] + run[2]
        else:
            result.append(run)
    return result


def test_many_small_runs_make_full_batches() -> None:
    count = 3 * BATCH_RUNS + 5
    offsets = np.arange(count, dtype=np.int64) * 8
    lengths = [len(batch.nbytes) for batch in batches(offsets, offsets, np.full(count, 8, np.int64))]
    assert lengths == [BATCH_RUNS] * 3 + [5]


def test_strided_arrays_are_made_contiguous() -> None:
    offsets = np.arange(20, dtype=np.int64)[::2]
    for batch in batches(offsets, offsets, np.full(10, 1, np.int64)):
        assert all(side.flags.c_contiguous for side in batch)


# -- posters -----------------------------------------------------------------------------------------------------------


@dataclass
class FakeUcp:
    """UCX's functions on the memory of this process. Every third operation is not done at once."""

    fail_at: int = -1
    calls: int = 0
    waiting: dict[int, int] = field(default_factory=dict)  # status by request
    freed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._functions = {
            "ucp_put_nbx": _OPERATION(self.put),
            "ucp_get_nbx": _OPERATION(self.put),
            "ucp_request_check_status": _CHECK(self.request_status),
            "ucp_request_free": _FREE(self.free_request),
        }

    def address_of(self, name: str) -> int:
        return ctypes.cast(self._functions[name], ctypes.c_void_p).value or 0

    def put(self, endpoint: int, local: int, nbytes: int, remote: int, key: int, params: int) -> int | None:
        assert (endpoint, key, params) == (11, 22, 33)
        number, self.calls = self.calls, self.calls + 1
        if number == self.fail_at:
            return CONNECTION_RESET + (1 << 64)
        ctypes.memmove(remote, local, nbytes)
        if number % 3:
            return None
        self.waiting[1000 + number] = IN_PROGRESS
        return 1000 + number

    get = put

    def request_status(self, request: int) -> int:
        return self.waiting[request]

    def free_request(self, request: int) -> None:
        del self.waiting[request]
        self.freed.append(request)


@pytest.fixture(params=["native", "python"])
def native(request: pytest.FixtureRequest) -> object:
    if request.param == "native" and native_library() is None:
        pytest.skip("pdtx's C library is not built")
    return native_library() if request.param == "native" else None


def posted(ucp: FakeUcp, native: object, count: int = 10) -> tuple[Poster, np.ndarray, np.ndarray]:
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    poster = make_poster(ucp, "ucp_put_nbx", native)  # type: ignore[arg-type]
    transfer = Transfer(11, 22, 33, source.ctypes.data, target.ctypes.data)
    offsets = np.arange(count, dtype=np.int64) * 10
    poster.post(transfer, Batch(offsets, offsets[::-1].copy(), np.full(count, 10, np.int64)))
    return poster, source, target


def test_runs_are_posted_with_their_addresses(native: object) -> None:
    ucp = FakeUcp()
    poster, source, target = posted(ucp, native)
    assert target.reshape(10, 10).tolist() == source.reshape(10, 10)[::-1].tolist()
    assert poster.error == OK
    assert poster.pending == 4
    assert poster.oldest == 1000


def test_finished_requests_are_freed_and_others_kept(native: object) -> None:
    ucp = FakeUcp()
    poster, *_ = posted(ucp, native)
    ucp.waiting[1003] = OK
    poster.reap()
    assert (poster.pending, ucp.freed, poster.error) == (3, [1003], OK)
    for request in ucp.waiting:
        ucp.waiting[request] = OK
    poster.reap()
    assert (poster.pending, ucp.waiting, poster.error) == (0, {}, OK)


def test_error_of_a_request_is_noted_and_the_first_stands(native: object) -> None:
    ucp = FakeUcp()
    poster, *_ = posted(ucp, native)
    ucp.waiting[1003] = CONNECTION_RESET
    poster.reap()
    ucp.waiting[1006] = -16
    poster.reap()
    assert poster.error == CONNECTION_RESET
    assert poster.pending == 2


def test_error_of_posting_ends_the_batch(native: object) -> None:
    ucp = FakeUcp(fail_at=5)
    poster, _, target = posted(ucp, native)
    assert poster.error == CONNECTION_RESET
    assert ucp.calls == 6
    assert poster.pending == 2
    assert not target.reshape(10, 10)[:5].any()


def test_requests_of_several_batches_add_up(native: object) -> None:
    ucp = FakeUcp()
    poster, *_ = posted(ucp, native, 3)
    source, target = np.zeros(5000, np.uint8), np.zeros(5000, np.uint8)
    offsets = np.arange(5000, dtype=np.int64)
    transfer = Transfer(11, 22, 33, source.ctypes.data, target.ctypes.data)
    poster.post(transfer, Batch(offsets, offsets, np.ones(5000, np.int64)))
    assert poster.pending == len(ucp.waiting) == 1 + 1667
    for request in ucp.waiting:
        ucp.waiting[request] = OK
    poster.reap()
    assert poster.pending == 0
    assert sorted(ucp.freed) == ucp.freed
