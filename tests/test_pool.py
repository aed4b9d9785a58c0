"""Pools by hand-computed numbers (vLLM's own are in test_pool_vectors)."""

from dataclasses import replace
from typing import Any

import pytest

from pdtx.errors import InputError, PoolTooSmall, SpecError
from pdtx.kvspec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    ServingLimits,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from pdtx.pool import (
    DeviceMemory,
    KVCacheConfig,
    PoolSettings,
    align_hybrid_block_size,
    available_kv_cache_memory,
    blocks_per_request,
    bytes_per_block,
    get_kv_cache_groups,
    get_max_concurrency,
    plan_pool,
    resolve_kv_cache_block_sizes,
)

GIB = 2**30
LLAMA: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
V4: dict[str, Any] = {"num_kv_heads": 1, "head_size": 512, "dtype": "uint8", "alignment": 576}
V4 |= {"cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"}

FULL = FullAttentionSpec(**LLAMA)
NARROW = FullAttentionSpec(**LLAMA | {"num_kv_heads": 4})
SLIDING = SlidingWindowSpec(**LLAMA, sliding_window=1024)
HALF_PAGE = SlidingWindowSpec(**LLAMA | {"num_kv_heads": 4}, sliding_window=1024)
CHUNKED = ChunkedLocalAttentionSpec(**LLAMA, attention_chunk_size=512)
MAMBA = MambaSpec(block_size=8192, shapes=((3, 8192), (8192, 16)), dtypes=("bfloat16", "bfloat16"))
HIDDEN = HiddenStateCacheSpec(block_size=32, num_kv_heads=3, head_size=1024, dtype="bfloat16")
BIG = MLAAttentionSpec(**V4, block_size=256, compress_ratio=4)
SMALL = MLAAttentionSpec(**V4, block_size=256, compress_ratio=128)
WINDOW = SlidingWindowMLASpec(**V4, block_size=64, sliding_window=128)
SLIVER = SlidingWindowMLASpec(block_size=64, num_kv_heads=1, head_size=8, dtype="uint8", sliding_window=128)


def settings(tokens: int = 8192, **changes: Any) -> PoolSettings:  # noqa: ANN401 - any field
    limits = {name: changes.pop(name) for name in list(changes) if name in ServingLimits.__dataclass_fields__}
    return PoolSettings(limits=ServingLimits(max_model_len=tokens, **limits), **changes)


def layers(**counts_and_specs: tuple[int, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    return {f"{kind}.{i}": spec for kind, (count, spec) in counts_and_specs.items() for i in range(count)}


def plan_one(model: dict[str, KVCacheSpec], memory: int, asked: PoolSettings) -> KVCacheConfig:
    (config,) = plan_pool([model], [memory], asked).configs
    return config


def test_a_model_of_equal_layers() -> None:
    """Llama 3 8B in 56 GiB: 28,672 blocks of 2 MiB, 3.5 requests of 128 Ki tokens."""
    config = plan_one(layers(attn=(32, FULL)), 56 * GIB, settings(131_072))
    assert config.num_blocks == 28_672
    assert [tensor.shared_by for tensor in config.kv_cache_tensors] == [(f"attn.{i}",) for i in range(32)]
    assert {tensor.size for tensor in config.kv_cache_tensors} == {28_672 * 65_536}
    (group,) = config.kv_cache_groups
    assert group.kv_cache_spec == FULL
    assert get_max_concurrency(config.kv_cache_groups, config.num_blocks, ServingLimits(max_model_len=131_072)) == 3.5


def test_a_model_without_caches_has_the_null_block() -> None:
    plan = plan_pool([{}, {}], [GIB, 0], settings())
    assert plan.configs == (KVCacheConfig(num_blocks=1, kv_cache_tensors=(), kv_cache_groups=()),) * 2


def test_layers_of_one_family_have_tensors_of_their_own_size() -> None:
    config = plan_one({"a": FULL, "b": NARROW}, GIB, settings())
    assert config.num_blocks == GIB // (65_536 + 32_768)
    assert [tensor.size // config.num_blocks for tensor in config.kv_cache_tensors] == [65_536, 32_768]
    assert isinstance(config.kv_cache_groups[0].kv_cache_spec, UniformTypeKVCacheSpecs)


def test_unlike_latent_layers_are_never_given_one_page() -> None:
    """vLLM 0.22 merges these two, and sizes both by the first."""
    main = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype="bfloat16")
    index = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=132, dtype="uint8")
    config = plan_one({"main": main, "index": index}, GIB, settings())
    assert [tensor.size // config.num_blocks for tensor in config.kv_cache_tensors] == [73_728, 8_448]


@pytest.mark.parametrize(
    ("full", "sliding", "groups", "tensors"),
    [
        (10, 52, [10, 9, 9, 9, 9, 8, 8], 10),  # Gemma 3 27B: as many as the rarer kind has
        (12, 13, [12, 13], 13),  # near enough: as many as the commoner
        (10, 14, [10, 14], 14),
        (10, 15, [10, 8, 7], 10),  # 1.5 is not near
        (1, 3, [1, 1, 1, 1], 1),
    ],
)
def test_hybrid_groups(full: int, sliding: int, groups: list[int], tensors: int) -> None:
    config = plan_one(layers(full=(full, FULL), sw=(sliding, SLIDING)), 20 * GIB, settings())
    assert [len(group.layer_names) for group in config.kv_cache_groups] == groups
    assert len(config.kv_cache_tensors) == tensors
    assert config.num_blocks == 20 * GIB // 65_536 // tensors
    named = sorted(name for tensor in config.kv_cache_tensors for name in tensor.shared_by)
    assert named == sorted(layers(full=(full, FULL), sw=(sliding, SLIDING))), "each layer lives in one tensor"


def test_layers_are_dealt_out_so_that_stages_have_some_of_each_group() -> None:
    model = layers(full=(2, FULL), sw=(4, SLIDING))
    groups = get_kv_cache_groups(model)
    assert [group.layer_names for group in groups] == [("full.0", "full.1"), ("sw.0", "sw.2"), ("sw.1", "sw.3")]


def test_smaller_pages_get_more_tokens() -> None:
    groups = get_kv_cache_groups(layers(full=(2, FULL), sw=(2, HALF_PAGE)))
    assert [group.kv_cache_spec.block_size for group in groups] == [16, 32]
    assert resolve_kv_cache_block_sizes(groups, settings()) == (32, 16)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (MAMBA, r"layer 'full.0' has a page of 65536 bytes, which no block_size makes the largest page, 311296 bytes"),
        (replace(HALF_PAGE, page_size_padded=32_768), r"layer 'x.0' has a page of 32768 bytes"),
    ],
)
def test_refuses_pages_that_cannot_be_made_equal(other: KVCacheSpec, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        get_kv_cache_groups(layers(full=(1, FULL), x=(1, other)))


def test_hidden_states_fill_a_page_of_the_others() -> None:
    groups = get_kv_cache_groups(layers(h=(2, HIDDEN), full=(2, FULL), sw=(2, SLIDING)))
    assert [group.layer_names for group in groups[2:]] == [("h.0",), ("h.1",)]
    for group in groups[2:]:
        assert group.kv_cache_spec.block_size == 65_536 // (3 * 1024 * 2) == 10
        assert group.kv_cache_spec.page_size_bytes == 65_536
    with pytest.raises(SpecError, match="hidden states of 196608 bytes a token do not fit the pool's pages of 65536"):
        get_kv_cache_groups(layers(h=(1, replace(HIDDEN, head_size=32_768)), full=(2, FULL), sw=(2, SLIDING)))
    with pytest.raises(SpecError, match="hidden states of different block sizes need a layer of another kind"):
        get_kv_cache_groups({"a": HIDDEN, "b": replace(HIDDEN, block_size=8)})


def test_windows_without_the_hybrid_manager_keep_all_tokens() -> None:
    for windowed, name in ((SLIDING, "sliding_window"), (CHUNKED, "attention_chunk_size")):
        size = getattr(windowed, name)
        groups = get_kv_cache_groups(layers(w=(3, windowed), full=(1, FULL)), disable_hybrid=True)
        assert [group.kv_cache_spec for group in groups] == [replace(FULL, **{name: size})]
        assert len(groups[0].layer_names) == 4
    alike = get_kv_cache_groups(layers(sw=(3, SLIDING)), disable_hybrid=True)
    assert alike[0].kv_cache_spec == SLIDING, "windows alone share one group as they are"


def test_latent_windows_without_the_hybrid_manager() -> None:
    (group,) = get_kv_cache_groups({"big": BIG, "window": WINDOW}, disable_hybrid=True)
    spec = group.kv_cache_spec
    assert isinstance(spec, UniformTypeKVCacheSpecs)
    assert spec.kv_cache_specs["window"] == MLAAttentionSpec(**V4, block_size=256)


def test_quantized_chunks_keep_their_scales() -> None:
    quantized: dict[str, Any] = {"dtype": "int8", "kv_quant_mode": "INT8_PER_TOKEN_HEAD"}
    model = {"a": replace(CHUNKED, **quantized), "b": replace(FULL, **quantized)}
    (group,) = get_kv_cache_groups(model, disable_hybrid=True)
    assert group.kv_cache_spec == replace(FULL, **quantized, attention_chunk_size=512)


@pytest.mark.parametrize(
    ("model", "disable", "message"),
    [
        ({"a": FULL, "b": CrossAttentionSpec(**LLAMA)}, True, "FullAttentionSpec, CrossAttentionSpec cannot share one"),
        ({"a": SLIDING, "b": CHUNKED}, True, "cannot share one group; leave the hybrid manager enabled"),
        (
            {"a": replace(FULL, sliding_window=8), "b": replace(FULL, sliding_window=16)},
            False,
            "one group cannot hold layers with sliding_window 8 and 16",
        ),
        ({"a": FULL, "e": EncoderOnlyAttentionSpec(**LLAMA)}, False, "layer 'e' is encoder-only and keeps no cache"),
    ],
)
def test_refuses_layers_that_cannot_share_a_pool(model: dict[str, KVCacheSpec], disable: bool, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        get_kv_cache_groups(model, disable_hybrid=disable)


def test_deepseek_v4_pages_are_shared_by_size() -> None:
    """Groups have two rows, as the first; the third window goes into a group of its own. States are padded."""
    state = SlidingWindowMLASpec(block_size=4, num_kv_heads=1, head_size=2048, dtype="float32", sliding_window=8)
    model = layers(big=(2, BIG), small=(1, SMALL), win=(3, WINDOW), state=(2, state))
    config = plan_one(model, GIB, settings(1024))
    assert [group.layer_names for group in config.kv_cache_groups] == [
        ("big.0", "big.1", "small.0"),
        ("win.0", "win.2"),
        ("win.1",),
        ("state.0", "state.1"),
    ]
    assert [(tensor.size // config.num_blocks, tensor.shared_by) for tensor in config.kv_cache_tensors] == [
        (1_728, ("small.0",)),
        (37_440, ("big.0", "win.0", "win.1", "state.0")),
        (1_728, ()),
        (37_440, ("big.1", "win.2", "state.1")),
    ]
    assert config.num_blocks == GIB // (2 * (1_728 + 37_440))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"w": WINDOW, "v": replace(WINDOW, sliding_window=8)}, "need an MLAAttentionSpec layer, in whose pages"),
        ({"m": SMALL, "w": WINDOW}, r"layer 'w' has a page of 37440 bytes, larger than any .* \(up to 1728\)"),
        ({"m": BIG, "w": WINDOW, "x": FULL}, "layer 'x', a FullAttentionSpec, cannot share a pool with latent windows"),
        (
            {"b": BIG, "s": SMALL, "w": WINDOW, "v": WINDOW, "u": SLIVER},
            r"need as many layers of each page size, not \{37440: 2, 1728: 1\}",
        ),
    ],
)
def test_refuses_latent_windows_that_do_not_fit(model: dict[str, KVCacheSpec], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        get_kv_cache_groups(model)


def test_all_workers_get_the_smallest_number_of_blocks() -> None:
    stages = [layers(first=(16, FULL)), layers(second=(16, FULL))]
    plan = plan_pool(stages, [20 * GIB, 24 * GIB], settings())
    assert [config.num_blocks for config in plan.configs] == [20_480, 20_480]
    assert [config.kv_cache_tensors[0].shared_by for config in plan.configs] == [("first.0",), ("second.0",)]
    ranks = plan_pool([stages[0], stages[0]], [GIB, GIB], settings())
    assert ranks.configs[0] == ranks.configs[1]


def test_a_stage_may_lack_a_group() -> None:
    plan = plan_pool([layers(full=(2, FULL), sw=(2, SLIDING)), layers(more=(1, SLIDING))], [GIB, GIB], settings())
    assert [len(group.layer_names) for group in plan.configs[1].kv_cache_groups] == [0, 1, 0]
    assert plan.configs[1].kv_cache_tensors[0].shared_by == ("more.0",)


@pytest.mark.parametrize(
    ("workers", "memory", "message"),
    [
        ([], [], "give the memory of each worker: 0 workers, 0 sizes"),
        ([{"a": FULL}], [1, 2], "1 workers, 2 sizes"),
        ([{"a": FULL}, {"a": NARROW}], [GIB, GIB], "layer 'a' has different specs on two workers"),
        ([{"a": FULL}, {}], [GIB, GIB], "worker 1 has no layer with a cache"),
        (
            [{"b": BIG, "s": SMALL, "w": WINDOW}, {"t": SMALL, "v": WINDOW}],
            [GIB, GIB],
            r"layer 'v' has a page of 37440 bytes, which no layer of the first group has \(1728\)",
        ),
    ],
)
def test_refuses_workers_that_do_not_match(
    workers: list[dict[str, KVCacheSpec]], memory: list[int], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        plan_pool(workers, memory, settings(64))


def test_an_override_replaces_memory() -> None:
    config = plan_one(layers(attn=(2, FULL)), 0, settings(num_gpu_blocks_override=777))
    assert (config.num_blocks, config.kv_cache_tensors[0].size) == (777, 777 * 65_536)
    with pytest.raises(PoolTooSmall) as caught:
        plan_one(layers(attn=(2, FULL)), 100 * GIB, settings(num_gpu_blocks_override=511))
    assert caught.value.fitting_model_len == 511 * 16


def test_a_pool_must_hold_one_request() -> None:
    model = layers(attn=(32, FULL))
    assert plan_one(model, GIB, settings(8192)).num_blocks == 512, "exactly one"
    with pytest.raises(PoolTooSmall) as caught:
        plan_one(model, GIB, settings(8193))
    error = caught.value
    assert (error.needed, error.available, error.fitting_model_len) == (513 * 2**21, GIB, 8192)
    assert str(error) == (
        "one request of max_model_len 8193 tokens needs 1.00 GiB of KV cache, 1 GiB are available; "
        "lower max_model_len to 8192 or give more memory (gpu_memory_utilization)"
    )
    for memory in (0, -5):
        with pytest.raises(PoolTooSmall, match="no memory is left for cache blocks; give more memory"):
            plan_one(model, memory, settings())
    with pytest.raises(PoolTooSmall, match="not even one token fits"):
        plan_one(model, 100, settings())


def test_a_pool_has_a_block_at_least() -> None:
    """Cross attention whose encoder may have no input needs nothing, and a pool of nothing is of no use."""
    with pytest.raises(PoolTooSmall):
        plan_one({"a": CrossAttentionSpec(**LLAMA)}, 100, settings(max_num_encoder_input_tokens=0))
    groups = get_kv_cache_groups({"a": CrossAttentionSpec(**LLAMA)})
    assert get_max_concurrency(groups, 5, ServingLimits(max_model_len=1, max_num_encoder_input_tokens=0)) == float(
        "inf"
    )


def test_max_model_len_is_fitted_to_the_smallest_worker() -> None:
    stages = [layers(a=(1, FULL)), layers(b=(1, FULL))]
    asked = settings(131_072, auto_fit_max_model_len=True)
    assert plan_pool(stages, [100 * 65_536, 90 * 65_536], asked).limits.max_model_len == 1440
    assert plan_pool(stages, [GIB, GIB], asked).limits.max_model_len == 131_072
    with pytest.raises(PoolTooSmall, match="not even one token fits"):
        plan_pool(stages, [GIB, 65_535], asked)


def test_a_request_takes_blocks_of_every_group() -> None:
    model = layers(full=(10, FULL), sw=(52, SLIDING))
    groups = get_kv_cache_groups(model)
    most = ServingLimits(max_model_len=131_072)
    assert blocks_per_request(groups, most) == 8192 + 6 * 193
    assert bytes_per_block(groups) == 10 * 65_536
    assert get_max_concurrency(groups, 32_768, most) == 32_768 / 9350


def test_context_parallelism_needs_one_group() -> None:
    spread = settings(decode_context_parallel_size=4, prefill_context_parallel_size=2)
    assert resolve_kv_cache_block_sizes(get_kv_cache_groups({"a": FULL}), spread) == (128, 128)
    with pytest.raises(SpecError, match="2 cache groups cannot be spread over 8 context-parallel ranks; use 1"):
        resolve_kv_cache_block_sizes(get_kv_cache_groups({"a": FULL, "b": CHUNKED}), spread)


def test_block_sizes_of_several_groups() -> None:
    groups = get_kv_cache_groups({"a": FULL, "b": HALF_PAGE})
    assert resolve_kv_cache_block_sizes(groups, settings(hashes_blocks=False)) == (32, 32)
    assert resolve_kv_cache_block_sizes(groups, settings(hash_block_size=8)) == (32, 8)
    with pytest.raises(SpecError, match="hash_block_size 32 must divide every group's block size: 16, 32"):
        resolve_kv_cache_block_sizes(groups, settings(hash_block_size=32))


@pytest.mark.parametrize(
    ("mode", "attention_block", "state_block"), [("none", 80, 8192), ("align", 80, 80), ("all", 256, 256)]
)
def test_attention_and_states_get_pages_of_one_size(mode: str, attention_block: int, state_block: int) -> None:
    attention, state = align_hybrid_block_size(FULL, replace(MAMBA, mamba_cache_mode=mode))
    assert (attention.block_size, state.block_size) == (attention_block, state_block)
    assert attention.page_size_bytes == state.page_size_bytes == attention_block * 4096
    groups = get_kv_cache_groups({"a": attention, "m": state})
    cut = settings(block_size=attention_block)
    assert resolve_kv_cache_block_sizes(groups, cut)[0] == (40_960 if mode == "none" else attention_block)


def test_alignment_keeps_what_is_large_enough() -> None:
    large = replace(FULL, block_size=128)
    attention, state = align_hybrid_block_size(large, MAMBA)
    assert attention == large
    assert state.page_size_padded == 128 * 4096
    exact = replace(MAMBA, shapes=((32, 1024),), dtypes=("bfloat16",))
    assert align_hybrid_block_size(FULL, exact) == (FULL, exact)
    with pytest.raises(SpecError, match="must be 1 or more, not 0 and 256"):
        align_hybrid_block_size(FULL, MAMBA, kernel_block_size=0)


def test_memory_left_for_the_pool() -> None:
    device = DeviceMemory(total_memory=1001, free_memory=1000, weights=300, peak_activation=50, non_torch=7)
    assert device.requested_memory == 901, "rounded up"
    assert available_kv_cache_memory(device) == 901 - 357
    assert available_kv_cache_memory(replace(device, cuda_graphs=44)) == 500
    assert available_kv_cache_memory(replace(device, kv_cache_memory_bytes=123)) == 123
    assert available_kv_cache_memory(replace(device, weights=2000)) < 0
    assert available_kv_cache_memory(replace(device, gpu_memory_utilization=0.5)) == 501 - 357


def test_refuses_memory_that_is_not_there() -> None:
    with pytest.raises(InputError, match=r"900 B of 1001 B are free, less than gpu_memory_utilization 0.9 asks for"):
        available_kv_cache_memory(DeviceMemory(total_memory=1001, free_memory=900))
    for share in (0.0, 1.1, -1.0, float("nan")):
        with pytest.raises(InputError, match="gpu_memory_utilization must be above 0 and at most 1"):
            DeviceMemory(total_memory=1, free_memory=1, gpu_memory_utilization=share)
    with pytest.raises(SpecError, match=r"DeviceMemory\.weights must be an int of 0 or more, not -1"):
        DeviceMemory(total_memory=1, free_memory=1, weights=-1)


def test_refuses_impossible_settings() -> None:
    for field in ("block_size", "num_gpu_blocks_override", "hash_block_size"):
        with pytest.raises(SpecError, match=rf"PoolSettings\.{field} must be an int of 1 or more, not 0"):
            settings(**{field: 0})
