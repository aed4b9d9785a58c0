from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from pdtx.errors import SpecError
from pdtx.kvspec import DTYPE_SIZES, FullAttentionSpec, Growth, KVQuantMode, ServingLimits, dtype_size


def spec(**changes: Any) -> FullAttentionSpec:  # noqa: ANN401 - also wrong types, to be refused
    fields: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
    return FullAttentionSpec(**fields | changes)


@pytest.mark.parametrize(
    ("model", "block_size", "heads", "head_size", "dtype", "page"),
    [
        ("Llama 3 8B", 16, 8, 128, "bfloat16", 65_536),
        ("Llama 3 8B, float8", 16, 8, 128, "float8_e4m3fn", 32_768),
        ("SmolLM2 135M", 16, 3, 64, "float32", 24_576),
        ("SmolLM2 135M", 16, 3, 64, "bfloat16", 12_288),
        ("SmolLM2 360M", 32, 5, 64, "float16", 40_960),
        ("Qwen2.5 0.5B", 16, 2, 64, "bfloat16", 8_192),
        ("one of everything", 1, 1, 1, "int8", 2),
    ],
)
def test_page_of_a_model(model: str, block_size: int, heads: int, head_size: int, dtype: str, page: int) -> None:
    made = FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=head_size, dtype=dtype)
    assert made.page_size_bytes == made.real_page_size_bytes == page, model
    assert made.storage_block_size == block_size
    assert made.head_size_v == head_size


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (15, 1), (16, 1), (17, 2), (31, 2), (32, 2), (1000, 63)])
def test_a_request_occupies_whole_pages(tokens: int, pages: int) -> None:
    assert spec().max_memory_usage_bytes(ServingLimits(max_model_len=tokens)) == pages * 65_536


def test_value_heads_of_another_size() -> None:
    made = spec(head_size_v=64)
    assert made.page_size_bytes == 16 * 8 * (128 + 64) * 2


def test_padding_counts_in_the_page_only() -> None:
    made = spec(page_size_padded=70_000)
    assert (made.page_size_bytes, made.real_page_size_bytes) == (70_000, 65_536)
    assert made.max_memory_usage_bytes(ServingLimits(max_model_len=17)) == 140_000
    assert spec(page_size_padded=65_536).page_size_bytes == 65_536


@pytest.mark.parametrize("field", ["block_size", "num_kv_heads", "head_size", "head_size_v"])
@pytest.mark.parametrize("value", [-1, 1.5, "16", True])
def test_refuses_what_is_not_a_positive_int(field: str, value: object) -> None:
    with pytest.raises(SpecError, match=rf"FullAttentionSpec\.{field} must be an int of 1 or more, not {value!r}"):
        spec(**{field: value})


@pytest.mark.parametrize("field", ["block_size", "num_kv_heads", "head_size"])
def test_refuses_zero(field: str) -> None:
    with pytest.raises(SpecError, match=rf"{field} must be an int of 1 or more, not 0"):
        spec(**{field: 0})


def test_refuses_padding_below_the_page() -> None:
    with pytest.raises(SpecError, match=r"page_size_padded 65535 is smaller than the page, 65536 bytes"):
        spec(page_size_padded=65_535)


@pytest.mark.parametrize("dtype", ["bf16", "BFLOAT16", "float4", ""])
def test_refuses_an_unknown_dtype(dtype: str) -> None:
    with pytest.raises(SpecError, match=r"unknown dtype .*; one of .*bfloat16"):
        spec(dtype=dtype)
    with pytest.raises(SpecError, match="unknown dtype"):
        dtype_size(dtype)


@pytest.mark.parametrize(("dtype", "size"), DTYPE_SIZES.items())
def test_dtype_scales_the_page(dtype: str, size: int) -> None:
    assert spec(dtype=dtype).page_size_bytes == 32_768 * size


def test_another_block_size() -> None:
    made = spec(head_size_v=64).copy_with_new_block_size(64)
    assert made == spec(head_size_v=64, block_size=64)
    assert type(made) is FullAttentionSpec
    with pytest.raises(SpecError, match="block_size"):
        made.copy_with_new_block_size(0)


def test_specs_are_values() -> None:
    made = spec()
    assert made == spec()
    assert len({made, spec(), spec(block_size=32)}) == 2
    with pytest.raises(FrozenInstanceError):
        made.block_size = 32  # type: ignore[misc]


@pytest.mark.parametrize(("dcp", "pcp", "pages"), [(1, 1, 63), (2, 1, 32), (1, 2, 32), (4, 2, 8), (1000, 1, 1)])
def test_context_parallel_ranks_share_the_tokens(dcp: int, pcp: int, pages: int) -> None:
    limits = ServingLimits(max_model_len=1000, decode_context_parallel_size=dcp, prefill_context_parallel_size=pcp)
    assert limits.tokens_per_rank == -(-1000 // (dcp * pcp))
    assert spec().max_memory_usage_bytes(limits) == pages * 65_536


def test_full_attention_has_no_bound_of_its_own() -> None:
    limits = ServingLimits(max_model_len=1000)
    assert spec().max_admission_blocks_per_request(limits) is None
    assert spec().growth(limits) is Growth.TOKENS


@pytest.mark.parametrize(
    ("mode", "dtype", "real", "page"),
    [
        ("NONE", "bfloat16", 65_536, 65_536),
        ("FP8_PER_TENSOR", "uint8", 32_768, 32_768),
        ("INT8_PER_TOKEN_HEAD", "int8", 32_768, 32_768 + 2 * 16 * 8 * 4),
        ("FP8_PER_TOKEN_HEAD", "uint8", 32_768, 32_768 + 2 * 16 * 8 * 4),
        ("NVFP4", "uint8", 2 * 16 * 8 * (64 + 8), 2 * 16 * 8 * (64 + 8)),
    ],
)
def test_quantization_modes(mode: str, dtype: str, real: int, page: int) -> None:
    made = spec(kv_quant_mode=mode, dtype=dtype)
    assert made.kv_quant_mode is KVQuantMode(mode)
    assert (made.real_page_size_bytes, made.page_size_bytes) == (real, page)
    with pytest.raises(SpecError, match=f"smaller than the page, {page} bytes"):
        spec(kv_quant_mode=mode, dtype=dtype, page_size_padded=page - 1)


def test_refuses_unknown_modes_and_channels_without_a_scale() -> None:
    with pytest.raises(SpecError, match=r"kv_quant_mode must be one of NONE, .*NVFP4, not 'INT4'"):
        spec(kv_quant_mode="INT4")
    with pytest.raises(SpecError, match="NVFP4 needs head sizes that are multiples of 16, not 72"):
        spec(kv_quant_mode="NVFP4", dtype="uint8", head_size=72)
