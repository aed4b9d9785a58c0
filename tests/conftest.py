"""Shared by all tests: determinism, hypothesis profiles, and markers for hardware that may be absent."""

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from pdtx.kvspec import FullAttentionSpec

# Every change of a request is checked to come from the thread that owns it, in the nodes that tests start as well.
os.environ.setdefault("PDTX_DEBUG", "1")

# No clock and, in CI, no chance: a failure that can be run again is worth more than one more example.
_DEV = settings(max_examples=100, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", _DEV)
settings.register_profile("ci", _DEV, max_examples=300, derandomize=True, database=None)
settings.load_profile(os.environ.get("PDTX_HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def pytest_configure() -> None:
    torch.set_num_threads(1)
    # A shell's background job ignores Ctrl-C, and so would all that tests start and send it to.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Whatever has been measured on this machine, and in whatever home: tests go by the default costs.
    folder = Path(tempfile.mkdtemp(prefix="pdtx-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "costs.json").write_text('{"version": 1, "costs": []}')
    os.environ["PDTX_COSTS"] = str(folder / "costs.json")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = {
        "gpu": None if torch.cuda.is_available() else "no CUDA device",
        "rdma": None if any(Path("/sys/class/infiniband").glob("*")) else "no verbs device",
    }
    for item in items:
        for marker, reason in absent.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The same random numbers in every test, whichever tests run before it."""
    torch.manual_seed(0)


@pytest.fixture
def llama_spec() -> FullAttentionSpec:
    """One layer of Llama 3 8B as vLLM sees it."""
    return FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
