"""Pools against vLLM 0.22's own answers: groups, blocks, tensors, concurrency, errors.

Where vLLM takes nonsense, pdtx differs by one of the rules below; each looks at the vector only.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pdtx.errors import PoolTooSmall, SpecError
from pdtx.kvspec import AttentionSpec, KVCacheSpec, MambaSpec, ServingLimits, UniformTypeKVCacheSpecs
from pdtx.pool import (
    KVCacheConfig,
    KVCacheGroupSpec,
    PoolPlan,
    PoolSettings,
    align_hybrid_block_size,
    bytes_per_block,
    get_max_concurrency,
    max_memory_usage_bytes,
    plan_pool,
    resolve_kv_cache_block_sizes,
)
from tests.vectors import Case, field_differences, load_essential_vectors, load_vectors, make_spec

Record = Callable[[str, object], None]

# What the vectors' stub of a configuration has where a case sets nothing else.
STUB: dict[str, Any] = {"max_model_len": 8192, "max_num_batched_tokens": 2048}
LIMITS = {
    "max_model_len": "max_model_len",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_encoder_input_tokens": "max_num_encoder_input_tokens",
    "dcp": "decode_context_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "mamba_cache_mode": "mamba_cache_mode",
}
POOL = {
    "block_size": "block_size",
    "num_gpu_blocks_override": "num_gpu_blocks_override",
    "disable_hybrid": "disable_hybrid_kv_cache_manager",
}


def settings_of(case: Case) -> PoolSettings:
    given = dict(case["settings"])
    auto_fit = given.pop("original_max_model_len", 0) == -1
    unknown = given.keys() - LIMITS.keys() - POOL.keys()
    assert not unknown, f"{case['case_id']}: a setting that this test does not know: {unknown}"
    limits = {ours: given[theirs] for theirs, ours in LIMITS.items() if theirs in given}
    if (tokens := encoder_tokens(case)) is not None:
        limits.setdefault("max_num_encoder_input_tokens", tokens)
    pool = {ours: given[theirs] for theirs, ours in POOL.items() if theirs in given}
    return PoolSettings(limits=ServingLimits(**STUB | limits), auto_fit_max_model_len=auto_fit, **pool)


def encoder_tokens(case: Case) -> int | None:
    """Return the encoder's tokens, which the vectors leave out of the settings: those of cross attention's usage."""
    for group in (group for worker in case.get("workers", []) for group in worker["groups"]):
        if group["spec"]["spec_class"] == "CrossAttentionSpec":
            pages = group["max_memory_usage_bytes"] // group["spec"]["page_size_bytes"]
            return int(pages * group["spec"]["fields"]["block_size"])
    return None


def given_fields(spec: Case) -> Case:
    """Return a spec's fields without the padding that its alignment comes to, which pdtx has to find itself."""
    fields: Case = spec["fields"]
    return fields | {"page_size_padded": None} if fields.get("alignment") else fields


def workers_of(case: Case) -> list[dict[str, KVCacheSpec]]:
    specs = [make_spec(spec["spec_class"], given_fields(spec)) for spec in case["distinct_specs"]]
    for spec, vector in zip(specs, case["distinct_specs"], strict=True):
        assert spec.page_size_bytes == vector["page_size_bytes"], case["case_id"]
    return [{name: specs[index] for name, index in worker.items()} for worker in case["layer_to_spec_index_per_worker"]]


def refused_by_rule(case: Case) -> str | None:
    """Return why pdtx refuses layers that vLLM takes, or None."""
    if any(spec["spec_class"] == "EncoderOnlyAttentionSpec" for spec in case["distinct_specs"]):
        return "encoder-only layers, which keep nothing"
    workers = case["layer_to_spec_index_per_worker"]
    if any(workers) and not all(workers):
        return "a worker without a layer"
    return None


def merged_wrongly(case: Case) -> bool:
    """Return whether vLLM gave one spec to layers of unlike pages or classes (and no window was converted)."""
    if case["settings"].get("disable_hybrid"):
        return False
    kinds = case["distinct_specs"]
    for worker, layers in zip(case["workers"], case["layer_to_spec_index_per_worker"], strict=True):
        for group in worker["groups"]:
            own = {
                (kinds[layers[name]]["spec_class"], kinds[layers[name]]["page_size_bytes"])
                for name in group["layer_names"]
            }
            if group["spec"]["spec_class"] != "UniformTypeKVCacheSpecs" and len(own) > 1:
                return True
    return False


def check_group(group: KVCacheGroupSpec, expected: Case, limits: ServingLimits, case_id: str) -> None:
    spec, theirs = group.kv_cache_spec, expected["spec"]
    assert list(group.layer_names) == expected["layer_names"], case_id
    assert not expected["is_eagle_group"], f"{case_id}: draft layers, of which pdtx knows nothing"
    assert type(spec).__name__ == theirs["spec_class"], case_id
    if group.layer_names:
        assert spec.page_size_bytes == theirs["page_size_bytes"], case_id
    # vLLM forgets alignment when it merges, after applying it, and has no value head in latent windows.
    fields = {name: value for name, value in theirs["fields"].items() if not (name == "alignment" and value is None)}
    differences = field_differences(spec, fields)
    if theirs["spec_class"] == "SlidingWindowMLASpec":
        differences.pop("head_size_v", None)
    assert not differences, case_id
    if isinstance(spec, UniformTypeKVCacheSpecs):
        pages = {name: layer.page_size_bytes for name, layer in spec.kv_cache_specs.items()}
        assert pages == theirs["per_layer_page_size_bytes"], case_id
    assert spec.max_memory_usage_bytes(limits) == expected["max_memory_usage_bytes"], case_id


def check_worker(config: KVCacheConfig, expected: Case, limits: ServingLimits, case_id: str) -> None:
    assert config.num_blocks == expected["num_blocks"], case_id
    for group, theirs in zip(config.kv_cache_groups, expected["groups"], strict=True):
        check_group(group, theirs, limits, case_id)
    tensors = [{"size_bytes": t.size, "shared_by_layers": list(t.shared_by)} for t in config.kv_cache_tensors]
    assert tensors == expected["tensors"], case_id
    assert sum(tensor.size for tensor in config.kv_cache_tensors) == expected["total_tensor_bytes"], case_id
    if not config.kv_cache_groups:
        return
    groups = config.kv_cache_groups
    assert bytes_per_block(groups) == expected["bytes_per_block_all_tensors"], case_id
    assert get_max_concurrency(groups, config.num_blocks, limits) == expected["max_concurrency"], case_id
    needed = max_memory_usage_bytes(groups, limits)
    assert needed == expected["max_memory_usage_bytes_one_request_from_groups"], case_id


def check_block_sizes(plan: PoolPlan, settings: PoolSettings, case: Case) -> None:
    expected, groups = case["scheduler_block_size_and_hash_block_size"], plan.configs[0].kv_cache_groups
    if isinstance(expected, list):
        assert list(resolve_kv_cache_block_sizes(groups, settings)) == expected, case["case_id"]
    else:
        with pytest.raises(SpecError):
            resolve_kv_cache_block_sizes(groups, settings)


def check_error(case: Case) -> None:
    """Compare a refusal: what kind, and the request that would have fitted where vLLM names it."""
    with pytest.raises((SpecError, PoolTooSmall)) as caught:
        plan_pool(workers_of(case), case["available_memory_bytes_per_worker"], settings_of(case))
    too_small = any(words in case["error"] for words in ("No available memory", "is larger than", "Cannot auto-fit"))
    assert isinstance(caught.value, PoolTooSmall) is too_small, case["case_id"]
    if isinstance(caught.value, PoolTooSmall) and "estimated maximum model length is" in case["error"]:
        fitting = case["error"].split("estimated maximum model length is ")[1].split(".")[0]
        assert caught.value.fitting_model_len == int(fitting), case["case_id"]


def check_unlike_layers(case: Case) -> None:
    """Where vLLM gave all layers the first one's page, each has its own in pdtx, and all fit the memory."""
    memory = case["available_memory_bytes_per_worker"]
    workers = workers_of(case)
    plan = plan_pool(workers, memory, settings_of(case))
    for config, layers, available in zip(plan.configs, workers, memory, strict=True):
        assert sum(tensor.size for tensor in config.kv_cache_tensors) <= available, case["case_id"]
        for tensor in config.kv_cache_tensors:
            assert all(tensor.size >= layers[name].page_size_bytes * config.num_blocks for name in tensor.shared_by)


def check_alignment(case: Case) -> None:
    """Compare how attention and states came to pages of one size, starting from blocks of 16 tokens."""
    specs = [make_spec(spec["spec_class"], spec["fields"]) for spec in case["distinct_specs"]]
    attention = next(spec for spec in specs if isinstance(spec, AttentionSpec))
    state = next(spec for spec in specs if isinstance(spec, MambaSpec))
    expected = case["hybrid_alignment"]
    raised, padded = align_hybrid_block_size(
        attention.copy_with_new_block_size(16), replace(state, page_size_padded=None)
    )
    found = (raised.block_size, padded.block_size, padded.page_size_padded)
    assert found == tuple(
        expected[f"{n}"] for n in ("attention_block_size", "mamba_block_size", "mamba_page_size_padded")
    )
    assert (raised, padded) == (attention, state), case["case_id"]


def check_pool(case: Case) -> str:
    """Compare one pool; return how it came out."""
    if "hybrid_alignment" in case:
        check_alignment(case)
    if "error" in case:
        check_error(case)
        return "refused by both"
    if (rule := refused_by_rule(case)) is not None:
        with pytest.raises(SpecError):
            plan_pool(workers_of(case), case["available_memory_bytes_per_worker"], settings_of(case))
        return f"refused by pdtx only: {rule}"
    if merged_wrongly(case):
        check_unlike_layers(case)
        return "kept apart by pdtx only: layers of unlike pages or classes"
    settings = settings_of(case)
    plan = plan_pool(workers_of(case), case["available_memory_bytes_per_worker"], settings)
    assert plan.limits.max_model_len == case["max_model_len_after"], case["case_id"]
    for config, expected in zip(plan.configs, case["workers"], strict=True):
        check_worker(config, expected, plan.limits, case["case_id"])
    check_block_sizes(plan, settings, case)
    return "agrees"


def check_pools(cases: list[Case]) -> Counter[str]:
    outcomes = Counter(check_pool(case) for case in cases)
    assert outcomes.total() == len(cases)
    return outcomes


def test_essential_vector_pools() -> None:
    """Cases kept in the repository: plain, hybrid, states, DeepSeek V4, and what is refused."""
    assert check_pools(load_essential_vectors("pools.json")["cases"]) == {"agrees": 4, "refused by both": 5}


def test_pool_vector_cases(record_property: Record) -> None:
    """Every pool of the vector file, none left out."""
    outcomes = check_pools(load_vectors("pools_0.22.json")["cases"])
    record_property("vector_pools", dict(outcomes))
    text = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    print(f"{outcomes.total()} pools: {text}")  # noqa: T201 - shown by pytest -rP
    assert outcomes["agrees"] > 0.5 * outcomes.total()
