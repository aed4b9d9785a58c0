"""`pdtx doctor`, run as its users do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdtx", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=dict(os.environ))


def test_want_tcp_is_well_and_json_tells_all() -> None:
    done = doctor("--want", "tcp", "--json", "--listen", "127.0.0.1:0")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["wants"] == ["tcp"]
    subjects = {finding["subject"] for finding in told["findings"]}
    assert subjects >= {
        "GPU",
        "network",
        "RDMA",
        "memory",
        "processor",
        "container",
        "UCX",
        "NIXL",
        "movers",
        "address",
    }


@pytest.mark.skipif(Path("/sys/class/infiniband").is_dir(), reason="has verbs devices")
def test_want_rdma_fails_without_a_card_and_says_what_it_needs() -> None:
    done = doctor("--want", "rdma")
    assert done.returncode == 1
    assert "RDMA needs a verbs card" in done.stdout
    assert "cannot run" in done.stderr
    assert "RDMA devices" in done.stderr.splitlines()[-1]


def test_wrong_words_exit_2_at_once() -> None:
    done = doctor("--want", "infiniband")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--want takes rdma, tcp" in done.stderr
