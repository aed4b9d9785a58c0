"""The spec family against vLLM 0.22's own answers.

pdtx agrees in every figure, and refuses what vLLM refuses. Where vLLM takes nonsense, pdtx refuses by one of the
rules below; each looks at vLLM's answer only.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pdtx.errors import SpecError
from pdtx.kvspec import (
    KVCacheSpec,
    ServingLimits,
    TurboQuantSlot,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_quant_mode,
    kv_cache_dtype_to_dtype,
)
from tests.vectors import Case, field_differences, load_essential_vectors, load_vectors, make_spec

Record = Callable[[str, object], None]

LIMITS = {
    "max_model_len": "max_model_len",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_encoder_input_tokens": "max_num_encoder_input_tokens",
    "decode_context_parallel_size": "decode_context_parallel_size",
    "prefill_context_parallel_size": "prefill_context_parallel_size",
    "config_mamba_cache_mode": "mamba_cache_mode",
}
# vLLM's one latent vector has no value head; pdtx gives it the size of the key, which no formula uses.
UNUSED = {"SlidingWindowMLASpec": ("head_size_v",)}


def refused_by_rule(case: Case) -> str | None:
    """Return why pdtx refuses a spec that vLLM takes, or None."""
    if "error" in case:
        return None
    given = case["parameters"]
    if case["page_size_bytes"] == 0:
        return "a page of no bytes"
    if case["storage_block_size"] * given.get("compress_ratio", 1) != given["block_size"]:
        return "tokens of a block that have no place"
    if given.get("kv_quant_mode") == "NVFP4" and (given["head_size"] % 16 or given.get("head_size_v", 0) % 16):
        return "channels without a scale"
    return None


def limits_of(usage: Case) -> ServingLimits:
    return ServingLimits(**{ours: usage[theirs] for theirs, ours in LIMITS.items() if theirs in usage})


def check_usage(case: Case, spec: KVCacheSpec) -> int:
    for usage in case.get("usage") or []:
        limits, where = limits_of(usage), (case["case_id"], usage)
        if "error" in usage:
            with pytest.raises(SpecError):
                spec.max_memory_usage_bytes(limits)
        else:
            used = spec.max_memory_usage_bytes(limits)
            assert used == usage["max_memory_usage_bytes"], where
            assert used == usage["max_memory_usage_blocks"] * spec.page_size_bytes, where
        assert spec.max_admission_blocks_per_request(limits) == usage["max_admission_blocks_per_request"], where
    return 2 * len(case.get("usage") or [])


def check_page(case: Case, spec: KVCacheSpec) -> int:
    figures = [name for name in ("page_size_bytes", "real_page_size_bytes", "storage_block_size") if name in case]
    for name in figures:
        assert getattr(spec, name) == case[name], (case["case_id"], name)
    if "kind" in case:
        assert get_kv_cache_spec_kind(spec) == case["kind"], case["case_id"]
    unused = UNUSED.get(case["spec_class"], ())
    fields = {name: value for name, value in case.get("fields_after_init", {}).items() if name not in unused}
    assert not field_differences(spec, fields), case["case_id"]
    return len(figures) + len(fields)


def check_quantization(case: Case) -> None:
    """Compare what follows from the kv_cache_dtype that the case was made for."""
    given = case["parameters"]
    if case["note"].startswith("kv_cache_dtype="):
        kv_cache_dtype = case["note"].removeprefix("kv_cache_dtype=")
        assert kv_cache_dtype_to_dtype(kv_cache_dtype, "bfloat16") == given["dtype"], case["case_id"]
        assert get_kv_quant_mode(kv_cache_dtype) == given.get("kv_quant_mode", "NONE"), case["case_id"]
    if "turboquant" in case:
        slot = TurboQuantSlot(preset=case["turboquant"]["preset"], head_size=given["head_size"])
        assert {name: getattr(slot, name) for name in case["turboquant"]} == case["turboquant"], case["case_id"]


def check_spec(case: Case) -> tuple[str, int]:
    """Compare one spec; return how it came out and how many figures were compared."""
    refused = refused_by_rule(case)
    if refused or "error" in case:
        with pytest.raises(SpecError):
            make_spec(case["spec_class"], case["parameters"])
        return (f"refused by pdtx only: {refused}" if refused else "refused by both"), 0
    check_quantization(case)
    spec = make_spec(case["spec_class"], case["parameters"])
    return "agrees", check_page(case, spec) + check_usage(case, spec)


def check_uniform(case: Case) -> tuple[str, int]:
    """Compare the spec of several layers, or that there is none."""
    layers = {name: make_spec(layer["spec_class"], layer["fields"]) for name, layer in case["layers"].items()}
    if "error" in case:
        with pytest.raises(SpecError):
            UniformTypeKVCacheSpecs.from_specs(layers)
        return "refused by both", 1
    assert UniformTypeKVCacheSpecs.is_uniform_type(layers) is case["is_uniform_type"], case["case_id"]
    spec = UniformTypeKVCacheSpecs.from_specs(layers)
    if spec is None:
        return "refused by both", 1
    return "agrees", 1 + check_page(case, spec) + check_usage(case, spec)


def check_specs(cases: list[Case]) -> tuple[Counter[str], int]:
    outcomes, figures = Counter[str](), 0
    for case in cases:
        outcome, compared = check_uniform(case) if "layers" in case else check_spec(case)
        outcomes[outcome] += 1
        figures += compared
    assert outcomes.total() == len(cases)
    return outcomes, figures


def merged_losslessly(case: Case) -> bool:
    """Return whether vLLM's merged spec says of every layer what the layer's own spec said.

    A window may come from another layer, that is what merging is for. vLLM forgets alignment, after applying it.
    """
    merged = case["merged"]
    free = {"sliding_window", "attention_chunk_size", "alignment"}
    if merged["spec_class"].startswith("Sliding"):
        free = {"alignment"}

    def said(layer: Case) -> Case:
        return {name: value for name, value in layer["fields"].items() if name not in free}

    return all(layer["spec_class"] == merged["spec_class"] and said(layer) == said(merged) for layer in case["inputs"])


def check_merge(case: Case) -> str:
    """Compare one merge; return how it came out."""
    layers = [make_spec(layer["spec_class"], layer["fields"]) for layer in case["inputs"]]
    if "error" in case or not merged_losslessly(case):
        with pytest.raises(SpecError):
            layers[0].merge(layers)
        return "refused by both" if "error" in case else "refused by pdtx only: the merged spec is not every layer's"
    merged, expected = layers[0].merge(layers), case["merged"]
    assert type(merged).__name__ == expected["spec_class"], case["merge_case"]
    assert merged.page_size_bytes == expected["page_size_bytes"], case["merge_case"]
    kept = (*UNUSED.get(expected["spec_class"], ()), "alignment")
    assert not field_differences(merged, {n: v for n, v in expected["fields"].items() if n not in kept})
    assert getattr(merged, "alignment", None) == case["inputs"][0]["fields"].get("alignment"), case["merge_case"]
    return "agrees"


def check_merges(cases: list[Case]) -> Counter[str]:
    outcomes = Counter(check_merge(case) for case in cases)
    assert outcomes.total() == len(cases)
    return outcomes


def report(record_property: Record, what: str, outcomes: Counter[str], figures: int = 0) -> None:
    record_property(f"vector_{what}", dict(outcomes))
    text = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    print(f"{outcomes.total()} {what}: {text}" + (f"; {figures} figures" if figures else ""))  # noqa: T201 - pytest -rP


def test_essential_vector_specs() -> None:
    """Cases kept in the repository: each class, quantization and preset, what is refused, and context parallelism."""
    outcomes, figures = check_specs(load_essential_vectors("specs.json")["cases"])
    assert outcomes == {
        "agrees": 36,
        "refused by both": 3,
        "refused by pdtx only: a page of no bytes": 2,
    }
    assert figures == 309


def test_essential_vector_merges() -> None:
    outcomes = check_merges(load_essential_vectors("specs.json")["merge_cases"])
    assert outcomes == {
        "agrees": 6,
        "refused by both": 5,
        "refused by pdtx only: the merged spec is not every layer's": 4,
    }


def test_spec_vector_cases(record_property: Record) -> None:
    """Every case of the vector file, none left out."""
    outcomes, figures = check_specs(load_vectors("specs_0.22.json")["cases"])
    report(record_property, "specs", outcomes, figures)
    assert outcomes["agrees"] > 0.9 * outcomes.total()


def test_merge_vector_cases(record_property: Record) -> None:
    """Every merge of the vector file, none left out."""
    report(record_property, "merges", check_merges(load_vectors("specs_0.22.json")["merge_cases"]))


def test_rules_refuse_only_what_vllm_takes() -> None:
    taken: Any = {"case_id": "x", "spec_class": "MLAAttentionSpec", "parameters": {"block_size": 64}}
    assert refused_by_rule(taken | {"page_size_bytes": 0, "storage_block_size": 64}) == "a page of no bytes"
    assert refused_by_rule(taken | {"page_size_bytes": 1, "storage_block_size": 64}) is None
    lossy = taken | {"parameters": {"block_size": 64, "compress_ratio": 3}, "storage_block_size": 21}
    assert refused_by_rule(lossy | {"page_size_bytes": 1}) == "tokens of a block that have no place"
    assert refused_by_rule(lossy | {"error": "AssertionError"}) is None
