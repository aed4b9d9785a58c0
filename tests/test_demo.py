"""`pdtx demo` as users run it."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdtx.runner import demo_model_directory
from tests.node_process import Outcome, run
from tests.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Long enough for the demo's prompt of 1,100 tokens.
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


def demo(output: Path, *arguments: str | Path) -> Outcome:
    return run("pdtx", "demo", "--output", output, *arguments, timeout=360)


def test_demo_ends_well_and_writes_its_result(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "result.json"
    done = demo(output, "--model", model, "--dtype", "float32")
    assert done.code == 0, done.stderr
    result = json.loads(output.read_text())
    assert result["ok"] is True
    assert result["tokens_equal_one_process"] is True
    rows = {row["request_id"]: row for row in result["requests"]}
    assert {name: row["prompt_tokens"] for name, row in rows.items() if name != "sentence"} == {
        "long": 1100, "one-token": 1, "one-block": 16, "block+1": 17,
    }  # fmt: skip
    assert all(row["wrong"] == 0 for row in rows.values())
    assert {(row["carried_by"], row["emulated"], row["transport"]) for row in rows.values()} == {("tcp", False, "tcp")}
    assert all(row["mode"] and row["mode_reason"] for row in rows.values())
    assert result["path"]["kind"] == "tcp"
    assert result["mover"] == {"name": "tcp", "options": []}
    assert set(result["registration"]) == {"prefill", "decode"}
    assert "the payload goes over tcp (" in done.stderr
    assert "#wrong" in done.stdout
    assert "ok: every element verified" in done.stderr


def test_a_required_path_that_is_not_there_ends_both_nodes(model: Path, tmp_path: Path) -> None:
    done = demo(tmp_path / "result.json", "--model", model, "--dtype", "float32", "--require", "shm")
    assert done.code == 2
    assert "shm is required, but the payload would go over tcp" in done.error
    assert "possible with this mover here: tcp" in done.error
    assert not (tmp_path / "result.json").exists()


def test_a_wrong_permutation_fails_and_names_the_coordinate(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = demo(output, "--model", model, "--inject-fault", "token,head", "--json")
    assert done.code == 1
    assert "ok: every element" not in done.stderr
    rows = json.loads(output.read_text())["requests"]
    errors = {row["request_id"]: row["error"] for row in rows}
    assert all(row["wrong"] > 0 and not row["token_ids"] for row in rows)
    assert "elements are wrong; first: buffer full layer 0 K token" in errors["long"]
    assert "holds the value of buffer full layer 0 K token" in errors["long"]
    assert json.loads(output.read_text())["ok"] is False


def test_different_dtypes_are_refused_and_nothing_is_left(model: Path, tmp_path: Path) -> None:
    done = demo(tmp_path / "result.json", "--model", model, "--prefill-dtype", "float32")
    assert done.code == 2
    assert "dtype of buffer full is float32 on the prefill side and bfloat16 on the decode side" in done.error
    assert not (tmp_path / "result.json").exists()
    left = subprocess.run(["pgrep", "-f", str(model)], capture_output=True, text=True, check=False).stdout.split()
    assert left in ([], [str(os.getpid())])


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_no_process_behind(model: Path, tmp_path: Path, sent: signal.Signals) -> None:
    command = [sys.executable, "-m", "pdtx", "demo", "--model", str(model), "--output", str(tmp_path / "r.json")]
    # A shell starts its background jobs with SIGINT ignored, and these tests may be one.
    heeded = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=heeded) as process:
        assert process.stderr is not None
        while "listening" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(sent)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}[sent]
    assert "Traceback" not in stderr
    limit = time.monotonic() + 20
    while subprocess.run(["pgrep", "-f", str(model)], capture_output=True, check=False).stdout:
        assert time.monotonic() < limit
        time.sleep(0.1)


def test_a_killed_node_ends_the_demo(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pdtx", "demo", "--model", str(model), "--output", str(tmp_path / "r.json")]
    # A shell starts its background jobs with SIGINT ignored, and these tests may be one.
    heeded = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=heeded) as process:
        assert process.stderr is not None
        while "listening" not in process.stderr.readline():
            assert process.poll() is None
        subprocess.run(["pkill", "-KILL", "-f", f"decode_node.*{model}"], check=True)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in stderr


@pytest.mark.skipif(
    not (demo_model_directory() / "config.json").exists() and "CI" not in os.environ,
    reason="the demo model is not in the cache; run scripts/demo once",
)
@pytest.mark.parametrize(
    ("dtype", "prefill", "decode"),
    [
        ("float32", ("flash_attn_nhd", "16"), ("flashinfer_hnd", "32")),
        ("bfloat16", ("flashinfer_hnd", "32"), ("flash_attn_nhd", "16")),
    ],
)
def test_the_real_model(tmp_path: Path, dtype: str, prefill: tuple[str, str], decode: tuple[str, str]) -> None:
    done = demo(
        tmp_path / "result.json", "--dtype", dtype, "--max-tokens", "8",
        "--prefill-layout", prefill[0], "--prefill-block-size", prefill[1],
        "--decode-layout", decode[0], "--decode-block-size", decode[1],
    )  # fmt: skip
    assert done.code == 0, done.stderr
