"""Processes that are forked from one that has imported: what their owner may rely on."""

import os
import signal

import pytest

from tests.warm import WarmProcess


def test_exit_status_is_the_process_s_own() -> None:
    with WarmProcess(os._exit, 7) as process:
        assert process.wait(30) == 7


def test_killed_process_tells_its_signal() -> None:
    with WarmProcess(signal.pause) as process:
        process.kill()
        assert process.wait(30) == -signal.SIGKILL


def test_signal_to_a_process_whose_end_is_not_told_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As subprocess.Popen: whoever kills a process cannot know that it has ended by itself a moment ago."""
    with WarmProcess(os._exit, 0) as process:
        process.wait(30)
        monkeypatch.setattr(process, "poll", lambda: None)
        process.send_signal(signal.SIGCONT)  # harmless, should the number be another's by now
