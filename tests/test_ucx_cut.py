"""A put that is cut off by its deadline must not take the process with it."""

import subprocess
import sys

import pytest

from tests.contract_subjects import usable_mover


@pytest.mark.parametrize("piece", [32 << 10, 8 << 20])
def test_a_process_outlives_puts_that_were_cut_off(piece: int) -> None:
    """UCX ends a process that destroys a worker while a copy within the host is under way."""
    usable_mover("ucx")
    command = [sys.executable, "-m", "tests.ucx_cutter", str(piece), "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 0, "not one put was cut off"
