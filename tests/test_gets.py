"""The handle of a get: who ends it waits for nobody, and it ends only when its region is left alone."""

import threading
import time

import pytest

from pdtx.errors import DeadlineExceeded, TransferAborted
from pdtx.transports import TransferHandle, TransferKey, TransferState
from pdtx.transports.gets import GetHandle, Stopped
from pdtx.transports.outbox import DeadlineWatch, Outbox

KEY = TransferKey("request", 0, 1, 0, 16)
FOREVER = float("inf")
WAIT_S = 10.0


def get(deadline: float = FOREVER) -> GetHandle:
    handle = GetHandle(KEY, 1, "peer", deadline)
    handle.post()
    return handle


def test_a_get_that_is_being_filled_holds_up_no_other_deadline() -> None:
    watch, filled, other = DeadlineWatch("pdtx-test"), get(time.monotonic()), get(time.monotonic() + 0.1)
    ended = threading.Event()
    other.on_end(lambda _: ended.set())
    with filled.filling():
        watch.add(filled)
        watch.add(other)
        assert ended.wait(WAIT_S)
        assert not filled.state.final
    assert filled.state is TransferState.FAILED
    assert isinstance(filled.error, DeadlineExceeded)
    watch.close()


def test_a_get_that_is_being_filled_does_not_hold_up_the_end_of_its_connection() -> None:
    watch = DeadlineWatch("pdtx-test")
    outbox = Outbox[None](watch)
    filled, other = get(), get()
    outbox.put(filled, None)
    outbox.put(other, None)
    closing = threading.Thread(target=outbox.close)
    with filled.filling():
        closing.start()
        closing.join(WAIT_S)
        assert not closing.is_alive()
        assert other.state.final
        assert not filled.state.final
    assert filled.state is TransferState.FAILED
    assert isinstance(filled.error, TransferAborted)
    watch.close()


def test_the_first_end_counts_and_stops_further_steps() -> None:
    handle, ends = get(), list[TransferHandle]()
    handle.on_end(ends.append)
    with handle.filling():
        with handle.filling():  # by another of the connection's streams
            assert handle.abort("enough")
            assert handle.ending
            assert not handle.finish()
            with pytest.raises(Stopped), handle.filling():
                pass
        assert not ends
    assert ends == [handle]
    assert isinstance(handle.error, TransferAborted)
    assert not handle.expire()


def test_who_waits_gets_the_region_back_only_after_the_step_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, expired, left, seen = get(time.monotonic()), threading.Event(), threading.Event(), list[bool]()
    expire = handle.expire

    def noting() -> bool:
        try:
            return expire()
        finally:
            expired.set()

    def wait() -> None:
        with pytest.raises(DeadlineExceeded):
            handle.wait()
        seen.append(left.is_set())

    monkeypatch.setattr(handle, "expire", noting)
    waiting = threading.Thread(target=wait)
    with handle.filling():
        waiting.start()
        assert expired.wait(WAIT_S)
        waiting.join(0.1)  # it would have gone on in this time
        left.set()
    waiting.join(WAIT_S)
    assert seen == [True]
