"""The nodes as users run them, killed and stopped on either side: typed errors in time, and the next prompts served."""

import itertools
import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract_subjects import sampled, usable_mover
from tests.node_process import NodeProcess
from tests.ports import free_port
from tests.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.timeout(240)

DEADLINE_S = 3.0
START_S = 120.0
WELL_S = 60.0
"""Within which one of many requests ends well, however busy the machine is."""
WELL = r"request k\d+ ended well"
"""What a prefill node says of its own requests: what a decode node has verified may have come too late for them."""
WELL_AGAIN = rf"(?s)({WELL}.*?){{5}}"
"""More than are under way at once: the last one has begun since the fault."""
PROMPTS = 600
NODE = ("--dtype", "float32", "--threads", "1", "--json")
TYPED = re.compile(
    r"deadline of [0-9.]+ s exceeded while waiting for .+ from |lost decode-|decode-\w+ failed in |"
    r"the data connection to decode-|connection to .+ (broke|closed)|.+ closed the connection|.+ is gone: |"
    r"refused request k.* was not granted$|\d+ blocks did not become free within "
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "many.jsonl"
    lines = [{"id": f"k{i}", "token_ids": [(i + j) % 256 for j in range(200)]} for i in range(PROMPTS)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def outcome(row: dict[str, Any]) -> str:
    """A row's end, in one word; an error must be of a kind that says what happened, with whom."""
    if row["error"] is None:
        assert row["wrong"] == 0
        return "verified"
    assert TYPED.search(row["error"]), row["error"]
    return "failed"


@pytest.mark.parametrize("mover", sampled(["tcp", "shm", "ucx"], ["shm"]))
def test_both_nodes_live_through_kills_and_stops(mover: str, model: Path, prompts: Path, tmp_path: Path) -> None:
    usable_mover(mover)
    address = f"127.0.0.1:{free_port()}"
    common = ("--model", model, "--mover", mover, *NODE)
    sends = (
        *common, "--connect", address, "--connect-timeout", str(START_S), "--prompts", prompts, "--max-tokens", "2",
        "--chunk-size", "40", "--deadline", str(DEADLINE_S), "--log-level", "info",
    )  # fmt: skip
    serves = ("--verify", "--num-blocks", "200", "--log-level", "info")
    start: Callable[..., NodeProcess] = lambda name, *rest: NodeProcess(tmp_path, name, *rest)  # noqa: E731
    with (
        start("decode", "decode_node", *common, "--listen", address, *serves) as decode,
        start("victim", "prefill_node", *sends) as victim,
        start("prefill", "prefill_node", *sends) as prefill,
    ):
        # Killed: what it had ends at once.
        victim.wait_for("connected to", START_S)
        victim.wait_for(WELL, WELL_S)
        heard = len(decode.said)
        victim.signal(signal.SIGKILL)
        decode.wait_for(
            "request k.* from prefill-.* failed: (lost prefill-|the data connection of prefill-)", 10.0, heard
        )

        # Stopped: what it had ends at the deadline, and when it goes on it is served again.
        prefill.wait_for("connected to", START_S)
        prefill.wait_for(WELL, WELL_S)
        heard = len(decode.said)
        prefill.signal(signal.SIGSTOP)
        late = r"deadline of [0-9.]+ s exceeded while waiting for (payload|reference data).* from prefill-"
        decode.wait_for(f"request k.* failed: {late}", DEADLINE_S + 5.0, heard)
        heard = len(prefill.said)
        prefill.signal(signal.SIGCONT)
        prefill.wait_for(WELL_AGAIN, WELL_S, heard)

        # The other one stopped, for longer than the deadline.
        decode.signal(signal.SIGSTOP)
        time.sleep(DEADLINE_S + 1.0)
        heard = len(prefill.said)
        decode.signal(signal.SIGCONT)
        prefill.wait_for(WELL_AGAIN, WELL_S, heard)

        # And killed.
        decode.signal(signal.SIGKILL)
        assert prefill.wait(15.0) == 1
        assert "Traceback" not in decode.said
        assert "Traceback" not in prefill.said
        rows = json.loads(prefill.printed)["requests"]
        course = [word for word, _ in itertools.groupby(outcome(row) for row in rows)]
        assert len(rows) == PROMPTS
        assert rows[-1]["error"] is not None, "it must still have been at work when the decode node was killed"
        assert re.search(r"a new session with decode-\w+ cannot be had: nobody answers", rows[-1]["error"])
        # Verified before, between and after the faults.
        assert course.count("verified") >= 3, course
