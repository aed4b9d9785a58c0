"""Waiting for a UCX worker, with functions in UCX's place: by the C library and by Python."""

import ctypes
import os
import time
from collections.abc import Iterator

import pytest

from pdtx.native import library as native_library
from pdtx.transports.ucx.pump import Pump, make_pump
from pdtx.transports.ucx.status import BUSY, IN_PROGRESS, OK, UcsError

_PROGRESS = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p)
_STATUS = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)
WORKER, REQUEST = 77, 99


class FakeUcp:
    """A worker that has something to do `events` times; what arming it says; and one request."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.events, self.armings, self.armed = 0, list[int](), 0
        self.request = IN_PROGRESS
        self._functions = {
            "ucp_worker_progress": _PROGRESS(self.progress),
            "ucp_worker_arm": _STATUS(self._arm),
            "ucp_request_check_status": _STATUS(self.request_status),
        }

    def event_descriptor(self, worker: int) -> int:
        assert worker == WORKER
        return self._descriptor

    def address_of(self, name: str) -> int:
        return ctypes.cast(self._functions[name], ctypes.c_void_p).value or 0

    def progress(self, worker: int) -> int:
        assert worker == WORKER
        self.events -= 1
        return int(self.events >= 0)

    def _arm(self, worker: int) -> int:
        assert worker == WORKER
        self.armed += 1
        return self.armings.pop(0) if self.armings else OK

    def arm(self, worker: int) -> bool:
        status = self._arm(worker)
        if status not in (OK, BUSY):
            raise self.error("wait for events", status)
        return status == OK

    def request_status(self, request: int) -> int:
        assert request == REQUEST
        return OK if self.events < 0 and self.request == OK else IN_PROGRESS

    def signal(self, worker: int) -> None:
        os.eventfd_write(self._descriptor, 1)

    def error(self, doing: str, status: int) -> UcsError:
        return UcsError(doing, status, "its words")


@pytest.fixture
def ucp() -> Iterator[FakeUcp]:
    descriptor = os.eventfd(0)
    yield FakeUcp(descriptor)
    os.close(descriptor)


@pytest.fixture(params=["native", "python"])
def pump(request: pytest.FixtureRequest, ucp: FakeUcp) -> Pump:
    native = native_library()
    if request.param == "native" and native is None:
        pytest.skip("pdtx's C library is not built")
    return make_pump(ucp, WORKER, native if request.param == "native" else None)  # type: ignore[arg-type]


def soon() -> float:
    return time.monotonic() + 10


def test_request_that_ends_after_some_progress(pump: Pump, ucp: FakeUcp) -> None:
    ucp.events, ucp.request = 100, OK
    assert pump.run(soon(), request=REQUEST)
    assert ucp.events == -1
    assert ucp.armed == 0, "a busy worker is not waited for"


def test_event_wakes_the_pump(pump: Pump, ucp: FakeUcp) -> None:
    os.eventfd_write(ucp.event_descriptor(WORKER), 1)
    begun = time.monotonic()
    assert not pump.run(begun + 0.2)
    assert ucp.armed > 1, "it goes on after an event"


def test_worker_that_cannot_be_armed_yet_is_driven_on(pump: Pump, ucp: FakeUcp) -> None:
    ucp.armings = [BUSY, BUSY, BUSY]
    assert not pump.run(time.monotonic() + 0.2)
    assert ucp.armings == []
    assert ucp.armed == 4


def test_worker_that_cannot_be_waited_for(pump: Pump, ucp: FakeUcp) -> None:
    ucp.armings = [-22]
    with pytest.raises(UcsError, match="UCX failed to wait for events: its words") as caught:
        pump.run(soon())
    assert caught.value.status == -22


def test_descriptor_is_seen_in_the_middle_of_a_stream(pump: Pump, ucp: FakeUcp) -> None:
    ucp.events = 1 << 30
    readable, writable = os.pipe()
    try:
        os.write(writable, b"x")
        assert pump.run(soon(), descriptor=readable)
        assert ucp.events > 1 << 29
    finally:
        os.close(readable)
        os.close(writable)


def test_time_is_up_in_the_middle_of_a_stream(pump: Pump, ucp: FakeUcp) -> None:
    ucp.events = 1 << 30
    begun = time.monotonic()
    assert not pump.run(begun + 0.05)
    assert time.monotonic() - begun < 5
    assert not pump.run(begun)


def test_interrupt_before_a_run_ends_it(pump: Pump, ucp: FakeUcp) -> None:
    pump.interrupt()
    begun = time.monotonic()
    assert not pump.run(soon())
    assert time.monotonic() - begun < 5
