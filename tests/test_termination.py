"""SIGTERM is heeded whenever it comes, also within what waits for it, and within what takes note of it."""

import subprocess
import sys
from textwrap import dedent

import pytest

_STORM = dedent("""
    import signal, sys
    from pdtx.cli import agent
    from pdtx.cli.termination import Termination

    left = 300

    def storm(frame, event, argument):
        global left
        frame.f_trace_opcodes = True
        if event == "opcode" and left:
            left -= 1
            signal.raise_signal(signal.SIGTERM)
        return storm
""")
"""storm as a trace function: SIGTERM comes before every step of Python that is taken from then on."""

_WAITING = "stop = Termination(); sys.settrace(storm); assert stop.wait(60.0)"
_NOTING = "stop = Termination(); sys.settrace(storm); signal.raise_signal(signal.SIGTERM); assert stop.is_set()"
_AGENT = dedent("""
    agent.emit = lambda text: sys.settrace(storm)  # it says where it listens
    agent.serve_agent("decode", agent.AgentOptions(listen="127.0.0.1:0", max_bytes="1MiB"), json=True)
""")


@pytest.mark.parametrize("program", [_WAITING, _NOTING, _AGENT], ids=["waiting", "noting", "agent"])
def test_sigterm_ends_what_waits_for_it_whenever_it_comes(program: str) -> None:
    command = [sys.executable, "-c", f"{_STORM}\n{program}\nassert left < 300"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
