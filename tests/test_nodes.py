"""The nodes as users run them: real processes, real sockets, a tiny real model."""

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdtx.errors import InputError
from pdtx.node.prompts import read_prompts
from tests.node_process import NodeProcess, Outcome, run
from tests.tiny_models import tiny_checkpoint

# Lengths at the edges of blocks of 16 and 32 tokens.
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63)
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"id": f"n{n}", "token_ids": [(7 * i + n) % 256 for i in range(n)]} for n in LENGTHS]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.fixture(scope="module")
def alone(model: Path, prompts: Path) -> dict[str, list[int]]:
    """What one process doing both generates."""
    done = run("pdtx", "generate", "--model", model, *WORK, "--prompts", prompts, "--json")
    assert done.code == 0, done.stderr
    return {name: row["token_ids"] for name, row in done.requests.items()}


WORK = ("--dtype", "float32", "--threads", "1", "--max-tokens", "8", "--ignore-eos", "--chunk-size", "20")
NODE = ("--dtype", "float32", "--threads", "1")


def decode_node(folder: Path, *arguments: str | Path) -> NodeProcess:
    """A decode node that serves until it is stopped."""
    return NodeProcess(folder, "decode", "decode_node", "--listen", "127.0.0.1:0", "--json", *arguments)


@pytest.fixture(scope="module")
def decode(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """One decode node for many tests: it must outlive whatever a prefill node does."""
    folder = tmp_path_factory.mktemp("decode")
    with decode_node(folder, "--model", model, *NODE, "--verify", "--num-blocks", "24") as node:
        yield node
        assert node.process.poll() is None, node.said
        assert node.stop() == 0
        assert "Traceback" not in node.said


@pytest.fixture
def prefill(model: Path, prompts: Path, decode: NodeProcess) -> Callable[..., Outcome]:
    def go(*arguments: str | Path) -> Outcome:
        given = [*arguments]
        defaults: dict[str, str | Path] = {
            "--model": model,
            "--prompts": prompts,
            "--connect": decode.wait_for_address(),
        }
        if "--prompt" in given:
            del defaults["--prompts"]
        for flag, value in defaults.items():
            if flag not in given:
                given += [flag, value]
        return run("prefill_node", *WORK, "--json", *given)

    return go


def assert_serves(prefill: Callable[..., Outcome], alone: dict[str, list[int]]) -> None:
    """A clean run ends well: every element verified, the tokens those of one process."""
    done = prefill()
    assert done.code == 0, done.stderr
    assert {name: row["token_ids"] for name, row in done.requests.items()} == alone
    assert {row["wrong"] for row in done.requests.values()} == {0}


def test_disaggregated_equals_one_process(prefill: Callable[..., Outcome], alone: dict[str, list[int]]) -> None:
    done = prefill()
    assert done.code == 0, done.stderr
    rows = done.requests
    assert {name: row["token_ids"] for name, row in rows.items()} == alone
    assert all(row["wrong"] == 0 and row["error"] is None and row["transport"] == "tcp" for row in rows.values())
    # 3 layers, K and V, 2 heads of 16 channels, 4 bytes each.
    assert {name: row["nbytes"] for name, row in rows.items()} == {f"n{n}": n * 3 * 2 * 2 * 16 * 4 for n in LENGTHS}
    assert all(row["move_s"] > 0 and 0 <= row["hidden"] <= 1 and row["num_runs"] > 0 for row in rows.values())


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_a_result_says_what_carried_the_payload_and_how(
    prefill: Callable[..., Outcome], alone: dict[str, list[int]], mode: str
) -> None:
    done = prefill("--mode", mode, "--require", "tcp", "--mover-option", "stall-s=20")
    assert done.code == 0, done.stderr
    assert "the payload goes over tcp (" in done.stderr
    result, rows = json.loads(done.stdout), done.requests
    assert {name: row["token_ids"] for name, row in rows.items()} == alone
    assert result["path"]["kind"] == "tcp"
    assert result["mover"] == {"name": "tcp", "options": ["stall-s=20"]}
    assert result["registered_bytes"] >= 0
    assert result["registration_s"] >= 0
    for row in rows.values():
        assert (row["carried_by"], row["emulated"], row["wrong"]) == ("tcp", False, 0)
        assert re.fullmatch(rf"{mode} \d+", row["mode"])
        assert row["mode_reason"].startswith(f"{mode}: ")


def test_a_pool_smaller_than_all_prompts_makes_them_wait(
    prefill: Callable[..., Outcome], alone: dict[str, list[int]]
) -> None:
    done = prefill("--num-blocks", "6", "--max-num-seqs", "8")
    assert done.code == 0, done.stderr
    assert {name: row["token_ids"] for name, row in done.requests.items()} == alone


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--layout", "flashattn_nhdx"), 2, "unknown layout 'flashattn_nhdx'; one of flash_attn_nhd"),
        (("--model", "/nowhere/at/all"), 2, "/nowhere/at/all"),
        (("--dtype", "float8"), 2, "float8"),
        (("--device", "cuda:77"), 2, "cuda:77"),
        (
            ("--dtype", "bfloat16"),
            2,
            "dtype of buffer full is bfloat16 on the prefill side and float32 on the decode side",
        ),
        (("--block-size", "24"), 2, "block_size of group full is 24 on the prefill side and 32 on the decode side"),
        (("--connect", "127.0.0.1"), 2, "not an address: '127.0.0.1'"),
        (("--connect", "127.0.0.1:9", "--connect-timeout", "1"), 1, "nobody answers at 127.0.0.1:9"),
        (("--connect", "192.0.2.1:5600"), 2, "--insecure"),
        (("--layout", "mamba_sd,mamba_ds"), 2, "mamba_sd and mamba_ds are for the same layers"),
        (("--tp", "3"), 2, "2 KV heads cannot be divided over tensor_parallel_size 3"),
        (("--prompts", "/nowhere/prompts"), 2, "cannot read prompts from /nowhere/prompts"),
        (("--prompt", ""), 2, "--prompt is empty"),
        (("--mover", "pigeon"), 2, "unknown mover 'pigeon'; one of inproc"),
        (("--mover", "shm"), 2, "mover is shm on the prefill side and tcp on the decode side"),
        (("--mover-option", "colour=red"), 2, "mover tcp has no option 'colour'"),
        (("--mover-option", "stall_s=soon"), 2, "option 'stall_s' of mover tcp must be a number, not 'soon'"),
        (("--mode", "fast"), 2, "mode 'fast' is not one of direct, staged, auto"),
        (("--require", "carrier"), 2, "--require takes rdma, tcp, shm, not 'carrier'"),
        (("--require", "shm"), 2, "shm is required, but the payload would go over tcp"),
        (("--require", "rdma"), 2, "rdma is required, but "),
        (("--key", "/nowhere/a.key_secret"), 2, "--key and --peer-key go together"),
    ],
)
def test_bad_input_is_one_line_and_the_peer_serves_on(
    prefill: Callable[..., Outcome], arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = prefill(*arguments)
    assert done.code == code, done.stderr
    assert words in done.error
    assert not done.stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"token_ids": [-1]}', "token_ids"),
        ('{"token_ids": [99999999999999999999]}', "1: not a prompt"),
        ('{"token_ids": []}', "token_ids"),
        ('{"prompt": "a", "token_ids": [1]}', "either prompt or token_ids"),
        ("{}", "either prompt or token_ids"),
        ('{"prompt": "a", "tokens": 3}', "tokens"),
        ('{"id": "a b", "prompt": "a"}', "$.id"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "prompts"
    file.write_text(f"fine\n{line}\n")
    with pytest.raises(InputError, match=re.escape(f"{file}:2: not a prompt")) as caught:
        read_prompts(None, file)
    assert words in str(caught.value) or words == "1: not a prompt"


def test_prompts_are_read_as_written(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(b'\xef\xbb\xbf{"token_ids": [1, 2]}\r\n{"prompt": "a\xe2\x80\xa8b"}\n\nplain\xc2\x85text\n')
    assert [(one.id, one.prompt, one.token_ids) for one in read_prompts(None, file)] == [
        ("p0", None, [1, 2]),
        ("p1", "a\u2028b", None),
        ("p2", "plain\x85text", None),
    ]


def test_another_model_is_refused_by_name(
    prefill: Callable[..., Outcome], alone: dict[str, list[int]], tmp_path: Path
) -> None:
    other_weights = prefill("--model", tiny_checkpoint(tmp_path, seed=1))
    assert (other_weights.code, "fingerprint" in other_weights.error) == (2, True)
    other_heads = prefill("--model", tiny_checkpoint(tmp_path, seed=2, num_key_value_heads=4))
    assert (other_heads.code, "num_kv_heads of buffer full is 4" in other_heads.error) == (2, True)
    assert_serves(prefill, alone)


def test_a_request_too_large_for_the_decode_pool_fails_alone(prefill: Callable[..., Outcome]) -> None:
    done = prefill("--prompt", "x" * 20, "--prompt", "y" * 100, "--max-tokens", "150", "--chunk-size", "64")
    assert done.code == 0, done.stderr
    done = prefill("--prompt", "x" * 20, "--prompt", "y" * 250, "--max-tokens", "8")
    assert done.code == 1
    short, long = done.requests["p0"], done.requests["p1"]
    assert short["error"] is None
    assert short["wrong"] == 0
    assert "exceed the model's 256" in long["error"]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More prompts than are done before a test is."""
    file = tmp_path_factory.mktemp("many") / "many.jsonl"
    lines = [{"id": f"k{i}", "token_ids": [(i + j) % 256 for j in range(200)]} for i in range(200)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def busy_prefill_node(folder: Path, model: Path, many: Path, decode: NodeProcess) -> NodeProcess:
    common = (*WORK, "--model", model, "--connect", decode.wait_for_address(), "--prompts", many, "--json")
    node = NodeProcess(folder, "prefill", "prefill_node", *common, "--log-level", "info")
    node.wait_for(r"request k\d+ ended well", 60.0)
    return node


def test_a_killed_prefill_node_leaves_the_decode_node_serving(
    model: Path,
    many: Path,
    decode: NodeProcess,
    prefill: Callable[..., Outcome],
    alone: dict[str, list[int]],
    tmp_path: Path,
) -> None:
    with busy_prefill_node(tmp_path, model, many, decode):
        pass
    assert_serves(prefill, alone)


def test_a_killed_decode_node_ends_the_prefill_node_at_once(model: Path, many: Path, tmp_path: Path) -> None:
    with decode_node(tmp_path, "--model", model, *NODE) as node:
        with busy_prefill_node(tmp_path, model, many, node) as survivor:
            node.process.kill()
            began = time.monotonic()
            assert survivor.wait(60.0) == 1
            assert time.monotonic() - began < 10
        assert "Traceback" not in survivor.said
        errors = [row["error"] for row in json.loads(survivor.printed)["requests"] if row["error"]]
        assert errors
        assert any("lost" in error for error in errors)


def test_a_taken_port_is_one_line(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("decode_node", "--model", model, *NODE, "--listen", address)
    assert done.code == 1
    assert f"cannot listen on {address}" in done.error


def test_a_wildcard_needs_a_name_to_be_reached_by(model: Path) -> None:
    done = run("decode_node", "--model", model, *NODE, "--listen", "0.0.0.0:0")
    assert done.code == 2
    assert "0.0.0.0 is not a loopback address" in done.error
    done = run("decode_node", "--model", model, *NODE, "--listen", "0.0.0.0:0", "--insecure")
    assert done.code == 2
    assert "give --advertise HOST" in done.error


def test_curve_keys_work_and_are_needed(
    model: Path, prompts: Path, alone: dict[str, list[int]], tmp_path: Path
) -> None:
    for name in ("prefill", "decode", "stranger"):
        assert run("pdtx", "keygen", name, "-d", tmp_path).code == 0
    assert os.stat(tmp_path / "decode.key_secret").st_mode & 0o077 == 0
    keys = ("--key", tmp_path / "decode.key_secret", "--peer-key", tmp_path / "prefill.key")
    with decode_node(tmp_path, "--model", model, *NODE, "--verify", *keys) as node:
        address = node.wait_for_address()
        common = ("--model", model, *WORK, "--connect", address, "--prompts", prompts, "--json")
        for own in ("stranger", "prefill"):
            keys = ("--key", tmp_path / f"{own}.key_secret", "--peer-key", tmp_path / "decode.key")
            done = run("prefill_node", *common, *keys)
            assert done.code == (0 if own == "prefill" else 1), done.stderr
        assert {name: row["token_ids"] for name, row in done.requests.items()} == alone
        bare = run("prefill_node", *common, "--connect-timeout", "3")
        assert bare.code == 1
        assert bare.error
        secret = (tmp_path / "decode.key_secret").read_text().split("secret-key = ")[1].strip().strip('"')
        assert secret not in node.said
        assert node.stop() == 0
