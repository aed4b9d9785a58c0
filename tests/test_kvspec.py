from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from pdtx.errors import SpecError
from pdtx.kvspec import DTYPE_SIZES, FullAttentionSpec, dtype_size
from tests.vectors import Case, load_cases, load_essential

FIELDS = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "page_size_padded")
# Modes in which a page holds the elements and nothing else (FP8 per tensor keeps its one scale elsewhere).
WITHOUT_SCALES = (None, "NONE", "FP8_PER_TENSOR")


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


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (31, 2), (32, 2), (1000, 63)])
def test_a_request_occupies_whole_pages(tokens: int, pages: int) -> None:
    assert spec().max_memory_usage_bytes(tokens) == pages * 65_536


def test_value_heads_of_another_size() -> None:
    made = spec(head_size_v=64)
    assert made.page_size_bytes == 16 * 8 * (128 + 64) * 2


def test_padding_counts_in_the_page_only() -> None:
    made = spec(page_size_padded=70_000)
    assert (made.page_size_bytes, made.real_page_size_bytes) == (70_000, 65_536)
    assert made.max_memory_usage_bytes(17) == 140_000
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


def check_against_vllm(cases: Sequence[Case]) -> int:
    """Compare pages and usage; return the number of figures compared."""
    checked = 0
    for case in cases:
        fields = {name: case["parameters"][name] for name in FIELDS if name in case["parameters"]}
        made = FullAttentionSpec(**fields)
        for name in ("page_size_bytes", "real_page_size_bytes", "storage_block_size"):
            assert getattr(made, name) == case[name], (case["case_id"], name)
        alone = [u for u in case["usage"] if u["decode_context_parallel_size"] == 1]
        alone = [u for u in alone if u["prefill_context_parallel_size"] == 1]
        for usage in alone:
            assert made.max_memory_usage_bytes(usage["max_model_len"]) == usage["max_memory_usage_bytes"], case
        checked += 3 + len(alone)
    return checked


def test_essential_vector_cases() -> None:
    """Eight cases of vLLM 0.22, kept in the repository: block sizes, odd heads, unlike K and V, padding."""
    cases = load_essential("full_attention_specs.json")
    assert len(cases) == 8
    assert check_against_vllm(cases) == 8 * (3 + 3)


def test_full_attention_vector_cases(record_property: Any) -> None:  # noqa: ANN401 - pytest's own
    """Every FullAttentionSpec of the vector file that is stored without scales beside its elements."""
    cases = [case for case in load_cases("specs_0.22.json") if case["spec_class"] == "FullAttentionSpec"]
    covered = [c for c in cases if "error" not in c and c["parameters"].get("kv_quant_mode") in WITHOUT_SCALES]
    record_property("vector_cases", len(covered))
    record_property("vector_figures", check_against_vllm(covered))
    print(f"{len(covered)} of {len(cases)} FullAttentionSpec cases compared")  # noqa: T201 - shown by pytest -rP
    assert len(covered) >= 50
