"""`pdtx kvcache`: the table, the JSON, the plot, and errors in one line."""

import json
import sys
from pathlib import Path

import pytest

from pdtx.cli import app
from pdtx.cli.common import run_app


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """Run `pdtx kvcache`; return exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["pdtx", "kvcache", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_app(app, "pdtx")
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_llama_in_56_gib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run(capsys, monkeypatch, "llama-3-8b", "--memory", "56GiB", "--max-model-len", "131072")
    assert (code, err) == (0, "")
    assert "FullAttentionSpec  32      65,536 B  16 tokens  4,096 B    tokens      17,179,869,184 B = 16 GiB" in out
    assert "28,672 blocks of 2,097,152 B = 2 MiB" in out
    assert "8,192 blocks for a request of 131,072 tokens: 3.500 requests at once, 458,752 tokens" in out


@pytest.mark.parametrize(("tokens", "blocks", "requests"), [(2000, 125, 229), (2048, 128, 224)])
def test_requests_of_two_thousand_tokens(
    tokens: int, blocks: int, requests: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = run(capsys, monkeypatch, "llama-3-8b", "--memory", "56GiB", "--max-model-len", str(tokens), "--json")
    pool = json.loads(out)["pool"]
    assert (pool["blocks_per_request"], int(pool["max_concurrency"])) == (blocks, requests)


def test_ten_to_the_ninth_is_not_two_to_the_thirtieth(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = run(capsys, monkeypatch, "llama-3-8b", "--memory", "56GB", "--json")
    assert json.loads(out)["pool"]["num_blocks"] == 26_702


@pytest.mark.parametrize(("batched", "blocks", "layer_bytes"), [(2048, 385, 25_231_360), (8192, 769, 50_397_184)])
def test_mistral(
    batched: int,
    blocks: int,
    layer_bytes: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, out, _ = run(
        capsys, monkeypatch, "mistral-7b", "--memory", "40GiB", "--max-num-batched-tokens", str(batched), "--json"
    )
    record = json.loads(out)
    assert record["pool"]["blocks_per_request"] == blocks
    assert record["kinds"][0]["max_memory_bytes"] == 32 * layer_bytes
    assert record["bytes_per_token"] == 0


def test_states_raise_blocks_and_say_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run(capsys, monkeypatch, "jamba", "--memory", "20GiB", "--max-model-len", "8192", "--json")
    assert code == 0
    assert "raised from 16 to 80 tokens" in err
    record = json.loads(out)
    assert record["pool"]["num_blocks"] == 16_384
    assert [kind["bytes_per_token"] for kind in record["kinds"]] == [None, 4096]


def test_encoders(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "bert", "num_hidden_layers": 12, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = run(capsys, monkeypatch, str(tmp_path), "--memory", "1GiB")
    assert code == 0
    assert "no layer keeps a KV cache" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpt-17"], "no config.json at gpt-17 and no preset of that name"),
        (["llama-3-8b", "--kv-cache-dtype", "fp8_ds_mla"], "no kv_cache_dtype 'fp8_ds_mla'"),
        (["llama-3-8b", "--tp", "3"], "cannot be divided over tensor_parallel_size 3"),
        (["llama-3-8b", "--memory", "much"], "not a size"),
        (["llama-3-8b", "--memory", "1MiB"], "lower max_model_len"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert words.replace("lower max_model_len", "of KV cache") in err


def test_plot_without_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):  # another test may have imported both
        monkeypatch.setitem(sys.modules, name, None)
    code, _, err = run(capsys, monkeypatch, "llama-3-8b", "--plot", str(tmp_path / "growth.png"))
    assert code == 2
    assert "pip install 'pdtx[plot]'" in err


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "growth.png"
    code, _, err = run(capsys, monkeypatch, "gemma-3-27b", "--plot", str(file))
    assert code == 0
    assert str(file) in err
    assert file.stat().st_size > 0
