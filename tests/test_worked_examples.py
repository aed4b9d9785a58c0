"""Sizes worked out by hand for well-known models, and that the commands come to the same: bytes, blocks, requests.

Each says which unit it is in: KiB, MiB and GiB are powers of two, GB is 10^9 bytes. Mixing them is how 126 MiB became
"129 MB", and 28,672 blocks "28".
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pdtx.cli import app
from pdtx.cli.common import run_app
from pdtx.kvspec import FullAttentionSpec, MLAAttentionSpec, ServingLimits
from pdtx.models import layer_specs, load_config
from pdtx.units import format_bytes

KIB, MIB, GIB = 2**10, 2**20, 2**30
Command = Callable[..., dict[str, Any]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs a command of pdtx and reads its JSON."""

    def run(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["pdtx", *arguments, "--json"])
        with pytest.raises(SystemExit) as ended:
            run_app(app, "pdtx")
        assert ended.value.code in (0, None)
        record: dict[str, Any] = json.loads(capsys.readouterr().out)
        return record

    return run


# Llama 3 8B: 32 layers, 8 KV heads of 128 channels, bfloat16, blocks of 16 tokens.


def test_a_page_is_64_kib_and_a_row_2_mib(command: Command) -> None:
    (kind,) = command("kvcache", "llama-3-8b")["kinds"]
    assert kind["page_size_bytes"] == 2 * 16 * 8 * 128 * 2 == 65_536 == 64 * KIB
    assert format_bytes(kind["page_size_bytes"]) == "64 KiB"
    assert kind["layers"] * kind["page_size_bytes"] == 2_097_152 == 2 * MIB
    halves = command("granularity", "llama-3-8b", "--table", "descriptors")["descriptors"]
    assert halves[0]["nbytes"] == 32 * KIB


def test_128k_tokens_are_16_gib_or_17_point_18_gb(command: Command) -> None:
    nbytes = command("kvcache", "llama-3-8b", "--max-model-len", "131072")["max_memory_bytes"]
    assert nbytes == 17_179_869_184 == 16 * GIB
    assert nbytes / 1e9 == pytest.approx(17.18, abs=5e-3)
    moved = command("granularity", "llama-3-8b", "--tokens", "131072")
    assert (moved["request_bytes"], moved["kinds"][0]["blocks"]) == (nbytes, 8_192)


@pytest.mark.parametrize("tokens", ["1000", "1008"])
def test_63_blocks_are_126_mib_and_not_129(command: Command, tokens: str) -> None:
    nbytes = command("kvcache", "llama-3-8b", "--max-model-len", tokens)["max_memory_bytes"]
    assert nbytes == 63 * 65_536 * 32 == 132_120_576 == 126 * MIB
    assert format_bytes(nbytes) == "126 MiB"
    assert command("granularity", "llama-3-8b", "--tokens", tokens)["request_bytes"] == nbytes


@pytest.mark.parametrize(("memory", "blocks"), [("56GiB", 28_672), ("56GB", 26_702), ("56MiB", 28)])
def test_blocks_in_56_of_what(command: Command, memory: str, blocks: int) -> None:
    """28,672 needs 56 x 1024^3; 56 x 1024^2 gives 28, and 56 x 10^9 gives 26,702."""
    pool = command("kvcache", "llama-3-8b", "--memory", memory, "--max-model-len", "16")["pool"]
    assert pool["num_blocks"] == blocks


@pytest.mark.parametrize(
    ("tokens", "blocks", "requests"), [(2_000, 125, 229), (2_048, 128, 224), (131_072, 8_192, 3), (32_768, 2_048, 14)]
)
def test_requests_at_once(command: Command, tokens: int, blocks: int, requests: int) -> None:
    pool = command("kvcache", "llama-3-8b", "--memory", "56GiB", "--max-model-len", str(tokens))["pool"]
    assert (pool["blocks_per_request"], int(pool["max_concurrency"])) == (blocks, requests)


def test_three_and_a_half_requests_of_128k(command: Command) -> None:
    pool = command("kvcache", "llama-3-8b", "--memory", "56GiB", "--max-model-len", "131072")["pool"]
    assert pool["max_concurrency"] == 3.5
    assert pool["tokens"] == 458_752


# Windows, states, encoders.


@pytest.mark.parametrize(
    ("batched", "length", "blocks", "layer_bytes"),
    [
        (2_048, 32_768, 385, 25_231_360),
        (8_192, 32_768, 769, 50_397_184),
        (1, 32_768, 257, 257 * 65_536),
        (2_048, 4_096, 257, 257 * 65_536),
    ],
)
def test_what_mistrals_window_of_4096_reserves(
    command: Command, batched: int, length: int, blocks: int, layer_bytes: int
) -> None:
    """257 blocks are enough for one token a step, or a context of 4,096; a batch needs its own room."""
    limits = ["--max-num-batched-tokens", str(batched), "--max-model-len", str(length)]
    found = command("kvcache", "mistral-7b", "--memory", "40GiB", *limits)
    assert found["pool"]["blocks_per_request"] == blocks
    assert found["kinds"][0]["max_memory_bytes"] == 32 * layer_bytes


def test_what_mistrals_window_moves(command: Command) -> None:
    """Of 32,768 tokens the last 4,095 are still needed, in 256 blocks: less than is reserved."""
    (kind,) = command("granularity", "mistral-7b", "--tokens", "32768")["kinds"]
    assert (kind["positions"], kind["blocks"]) == ([28_673, 32_768], 256)


def test_cross_attention_reserves_a_batch_not_the_encoders_length(command: Command) -> None:
    kinds = command("kvcache", "whisper-large-v3", "--max-num-batched-tokens", "2048")["kinds"]
    assert kinds[1]["max_memory_bytes"] == 32 * 128 * 81_920
    assert command("granularity", "whisper-large-v3")["kinds"][1]["request_bytes"] == 32 * 94 * 81_920


def test_states_in_mode_all_have_one_block_for_each_block_size_tokens() -> None:
    state = next(iter(layer_specs(load_config("jamba"), max_model_len=64).values()))
    limits = ServingLimits(max_model_len=1_000, mamba_cache_mode="all")
    assert state.max_memory_usage_bytes(limits) == 16 * 311_296


def test_context_parallelism_divides_full_attention_only() -> None:
    limits = ServingLimits(max_model_len=131_072, decode_context_parallel_size=4, prefill_context_parallel_size=2)
    full = next(iter(layer_specs(load_config("llama-3-8b")).values()))
    assert full.max_memory_usage_bytes(limits) == 131_072 // 8 * 4_096
    state = next(iter(layer_specs(load_config("jamba")).values()))
    assert state.max_memory_usage_bytes(limits) == 311_296


# Latent vectors: DeepSeek V3 and V3.2.


def test_latent_vectors_are_a_fraction_of_keys_and_values(command: Command) -> None:
    """1/3.56 of Llama's grouped heads, 1/14.2 of 32 heads of 128, 1/71 of V3's own keys and values uncompressed."""
    (latent,) = command("kvcache", "deepseek-v3")["kinds"]
    (grouped,) = command("kvcache", "llama-3-8b")["kinds"]
    heads = FullAttentionSpec(block_size=16, num_kv_heads=32, head_size=128, dtype="bfloat16")
    own = FullAttentionSpec(block_size=16, num_kv_heads=128, head_size=192, head_size_v=128, dtype="bfloat16")
    assert latent["bytes_per_token"] == 1_152
    assert own.page_size_bytes // 16 == 81_920
    assert grouped["bytes_per_token"] / 1_152 == pytest.approx(3.56, abs=5e-3)
    assert heads.page_size_bytes / 16 / 1_152 == pytest.approx(14.2, abs=5e-2)
    assert own.page_size_bytes / 16 / 1_152 == pytest.approx(71.1, abs=5e-2)


def test_v32_keeps_788_bytes_a_token_and_layer(command: Command) -> None:
    """656 of the record, which no compression divides, and 132 of the indexer's keys."""
    kinds = command("kvcache", "deepseek-v3.2", "--kv-cache-dtype", "fp8_ds_mla", "--block-size", "64")["kinds"]
    assert [kind["bytes_per_token"] for kind in kinds] == [656, 132]
    assert [kind["page_size_bytes"] for kind in kinds] == [41_984, 8_448]


@pytest.mark.parametrize(("ratio", "real", "padded"), [(4, 37_376, 37_440), (128, 1_168, 1_728)])
def test_v4_pages_are_aligned_to_576_bytes(ratio: int, real: int, padded: int) -> None:
    spec = MLAAttentionSpec(
        block_size=256,
        num_kv_heads=1,
        head_size=512,
        dtype="uint8",
        cache_dtype_str="fp8_ds_mla",
        compress_ratio=ratio,
        alignment=576,
        model_version="deepseek_v4",
    )
    assert (spec.real_page_size_bytes, spec.page_size_bytes) == (real, padded)


# Groups and quantization.


def test_gemmas_groups_are_of_ten_layers_and_not_of_52(command: Command) -> None:
    pool = command("kvcache", "gemma-3-27b", "--memory", "40GiB")["pool"]
    assert sorted(group["layers"] for group in pool["groups"]) == [8, 8, 9, 9, 9, 9, 10]
    assert pool["num_blocks"] == 32_768


@pytest.mark.parametrize(
    ("dtype", "head"),
    [
        ("auto", 2 * 256),
        ("fp8", 2 * 128),
        ("nvfp4", 2 * 72),
        ("int8_per_token_head", 2 * 132),
        ("fp8_per_token_head", 2 * 132),
    ],
)
def test_bytes_of_a_quantized_head(command: Command, dtype: str, head: int) -> None:
    """Key and value of one token and head; NVFP4 has 64 bytes of data and 8 of scales for each."""
    (kind,) = command("kvcache", "llama-3-8b", "--kv-cache-dtype", dtype)["kinds"]
    assert kind["page_size_bytes"] == 16 * 8 * head


@pytest.mark.parametrize(
    ("dtype", "slot"),
    [("k8v4", 196), ("4bit_nc", 134), ("k3v4_nc", 118), ("3bit_nc", 102)],
)
def test_turboquant_slots_hold_key_and_value(command: Command, dtype: str, slot: int) -> None:
    kinds = command("kvcache", "llama-3-8b", "--kv-cache-dtype", f"turboquant_{dtype}")["kinds"]
    assert 16 * 8 * slot in [kind["page_size_bytes"] for kind in kinds]


# Offloading.


def test_16_gib_of_the_host_hold_128k_tokens(command: Command) -> None:
    offload = command("granularity", "llama-3-8b", "--tokens", "131072", "--table", "offload")["offload"]
    first, simple = offload["pools"][:2]
    assert (first["memory"], first["blocks"], first["tokens"]) == (16 * GIB, 8_192, 131_072)
    assert (simple["memory"], simple["blocks"]) == (8 * GIB, 4_096)
    assert offload["bus_seconds"] == pytest.approx(0.69, abs=5e-3)


def test_16_blocks_of_the_gpu_are_32_mib_of_the_host(command: Command) -> None:
    arguments = ["--offload-block-size", "256", "--table", "offload", "--vllm", "0.22"]
    offload = command("granularity", "llama-3-8b", *arguments)["offload"]
    assert offload["block_size_factor"] == 16
    assert offload["units"][0]["cpu_bytes"] == 32 * MIB
