"""A cancel over a slow link: what has not been begun never crosses, and little is begun ahead."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slow_link import run

_ROOT = Path(__file__).resolve().parent.parent
_NETWORK = """
ip link set lo mtu 1500 up && tc qdisc add dev lo root tbf rate 7200kbit burst 16kb latency 100ms || exit 77
exec "$@"
"""


@pytest.mark.parametrize("gets", [False, True], ids=["puts", "gets"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"streams": 3, "part_bytes": 20_000}, marks=pytest.mark.thorough),
        pytest.param({"bounce": True, "bounce_bytes": 20_000}, marks=pytest.mark.thorough),
    ],
    ids=["one stream", "three streams", "bounce"],
)
def test_at_most_one_more_piece_crosses_after_a_cancel(options: dict[str, Any], gets: bool) -> None:
    """At a fifth of 4 MB in 31 pieces at 900 kB/s; the next request follows at once, on the same connection."""
    cancelled = run(gets=gets, proxy=True, **options)
    # The one that crosses, which the peer may have been asked for before, and one more.
    assert cancelled.moving <= 2
    assert cancelled.after[-1] == "next"
    assert cancelled.after[:-1] in ([], ["cancelled"], ["cancelled"] * 2)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["puts", "gets"])
def test_at_most_one_more_piece_crosses_a_network_of_that_rate(kind: str) -> None:
    """The same where the kernel shapes the traffic, in a network namespace of its own."""
    command = ["unshare", "--net", "sh", "-c", _NETWORK, "sh", sys.executable, "-m", "tests.slow_link", kind]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=_ROOT)
    if ended.returncode in (1, 77) and "Traceback" not in ended.stderr:
        pytest.skip(f"no network namespace or traffic control here: {ended.stderr.strip()}")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() in (["next"], ["cancelled", "next"])
