"""The watch over deadlines: what stuck callbacks, and gets that are being filled, hold up."""

import logging
import threading
import time

import pytest

from pdtx.testing import Gate
from pdtx.transports import TransferHandle, TransferKey
from pdtx.transports.outbox import DeadlineWatch

KEY = TransferKey("request", 0, 1, 0, 16)


def test_a_watch_leaves_a_stuck_callback_behind(caplog: pytest.LogCaptureFixture) -> None:
    gate, watch = Gate(), DeadlineWatch("pdtx-test")
    late = TransferHandle(KEY, 1, "peer", time.monotonic())
    late.on_end(lambda _: gate.hold())
    watch.add(late)
    gate.wait_reached()
    closing = threading.Thread(target=watch.close)
    closing.start()
    try:
        with caplog.at_level(logging.WARNING):
            closing.join(10)  # and the gate opens after 30 by itself
        assert not closing.is_alive()
        assert "pdtx-test-deadlines is stuck in a callback and left behind" in caplog.text
    finally:
        gate.open()
        closing.join()
