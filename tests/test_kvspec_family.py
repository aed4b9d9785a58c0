"""The members of the family beside FullAttentionSpec, by hand-computed numbers (vLLM's own are in *_vectors)."""

from typing import Any

import pytest

from pdtx.errors import SpecError
from pdtx.kvspec import (
    TURBOQUANT_PRESETS,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    Growth,
    HiddenStateCacheSpec,
    KVCacheSpec,
    KVCacheSpecKind,
    MambaSpec,
    MLAAttentionSpec,
    ServingLimits,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    TQFullAttentionSpec,
    TurboQuantSlot,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_quant_mode,
    kv_cache_dtype_to_dtype,
)

LLAMA: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
V4: dict[str, Any] = {
    "num_kv_heads": 1,
    "head_size": 512,
    "dtype": "uint8",
    "cache_dtype_str": "fp8_ds_mla",
    "model_version": "deepseek_v4",
    "alignment": 576,
}
LATENT: dict[str, Any] = {"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": "bfloat16"}
STATES: dict[str, Any] = {"block_size": 16, "shapes": ((3, 8192), (8192, 16)), "dtypes": ("bfloat16", "bfloat16")}

FULL = FullAttentionSpec(**LLAMA)
SLIDING = SlidingWindowSpec(**LLAMA, sliding_window=4096)
CHUNKED = ChunkedLocalAttentionSpec(**LLAMA, attention_chunk_size=8192)
CROSS = CrossAttentionSpec(**LLAMA)
ENCODER = EncoderOnlyAttentionSpec(**LLAMA)
SINK = SinkFullAttentionSpec(**LLAMA, sink_len=32)
TURBO = TQFullAttentionSpec(**LLAMA | {"dtype": "uint8"}, tq_slot_size=134)
MLA = MLAAttentionSpec(**LATENT)
HIDDEN = HiddenStateCacheSpec(**LATENT)
SLIDING_MLA = SlidingWindowMLASpec(**V4, block_size=64, sliding_window=128)
MAMBA = MambaSpec(**STATES)
ONE_OF_EACH: tuple[KVCacheSpec, ...] = (
    FULL, SLIDING, CHUNKED, CROSS, ENCODER, SINK, TURBO, MLA, HIDDEN, SLIDING_MLA, MAMBA,
)  # fmt: skip


def limits(tokens: int, **changes: Any) -> ServingLimits:  # noqa: ANN401 - any field
    return ServingLimits(max_model_len=tokens, **changes)


@pytest.mark.parametrize(
    ("spec", "page"),
    [
        (SLIDING, 65_536),
        (CHUNKED, 65_536),
        (CROSS, 65_536),
        (ENCODER, 65_536),
        (SINK, 65_536),
        (TURBO, 16 * 8 * 134),
        (TQFullAttentionSpec(**LLAMA), 65_536),
        (MLA, 64 * 576 * 2),
        (MLAAttentionSpec(**LATENT | {"dtype": "uint8"}, cache_dtype_str="fp8_ds_mla"), 64 * 656),
        (MLAAttentionSpec(**V4, block_size=256, compress_ratio=4), 37_440),
        (MLAAttentionSpec(**V4, block_size=256, compress_ratio=128), 1_728),
        (MLAAttentionSpec(**V4 | {"alignment": None}, block_size=256, compress_ratio=128), 1_168),
        (HiddenStateCacheSpec(block_size=16, num_kv_heads=3, head_size=4096, dtype="bfloat16"), 393_216),
        (SLIDING_MLA, 37_440),
        (MAMBA, 311_296),
    ],
)
def test_page_of_each_class(spec: KVCacheSpec, page: int) -> None:
    assert spec.page_size_bytes == page


def test_values_of_another_size_count_in_windows_and_not_in_chunks() -> None:
    assert SlidingWindowSpec(**LLAMA, sliding_window=8, head_size_v=64).page_size_bytes == 16 * 8 * 192 * 2
    assert not hasattr(CHUNKED, "head_size_v")


@pytest.mark.parametrize(
    ("batched", "tokens", "blocks"),
    [(1, 32_768, 257), (2048, 32_768, 385), (8192, 131_072, 769), (8192, 4096, 257), (2048, 1, 2)],
)
def test_blocks_of_a_window(batched: int, tokens: int, blocks: int) -> None:
    """Mistral 7B: the window before the newest token and one batch, and a block for a window that starts inside one."""
    most = limits(tokens, max_num_batched_tokens=batched)
    assert SLIDING.max_admission_blocks_per_request(most) == blocks
    assert SLIDING.max_memory_usage_bytes(most) == blocks * 65_536


def test_blocks_of_a_chunk_and_of_an_encoder() -> None:
    assert CHUNKED.max_admission_blocks_per_request(limits(131_072)) == (8192 + 2048) // 16
    assert CHUNKED.max_memory_usage_bytes(limits(100)) == 7 * 65_536
    assert CROSS.max_memory_usage_bytes(limits(448, max_num_encoder_input_tokens=1500)) == 94 * 65_536
    assert CROSS.max_memory_usage_bytes(limits(448)) == 128 * 65_536, "one batch where nothing else is said"
    assert ENCODER.max_memory_usage_bytes(limits(448)) == 0


@pytest.mark.parametrize(("mode", "pages"), [("none", 1), ("align", 2), ("all", 7)])
def test_states_follow_the_mode_of_the_server(mode: str, pages: int) -> None:
    spec = MambaSpec(**STATES, num_speculative_blocks=3, mamba_cache_mode="all")
    assert spec.max_memory_usage_bytes(limits(100, mamba_cache_mode=mode)) == (pages + 3) * 311_296


def test_windows_refuse_decode_context_parallelism() -> None:
    spread = limits(4096, decode_context_parallel_size=2)
    for spec in (SLIDING, SLIDING_MLA):
        with pytest.raises(SpecError, match="decode_context_parallel_size 2; set it to 1"):
            spec.max_memory_usage_bytes(spread)
    assert CHUNKED.max_memory_usage_bytes(spread) == CHUNKED.max_memory_usage_bytes(limits(4096))


def test_sink_takes_its_blocks_once() -> None:
    assert SINK.num_sink_blocks == 2
    assert SINK.max_memory_usage_bytes(limits(16)) == 65_536
    for sink_len in (None, 24):
        with pytest.raises(SpecError, match=f"sink_len must be a multiple of block_size 16, not {sink_len}"):
            _ = SinkFullAttentionSpec(**LLAMA, sink_len=sink_len).num_sink_blocks


@pytest.mark.parametrize(
    ("head_size", "slots"), [(64, (100, 70, 62, 54)), (128, (196, 134, 118, 102)), (256, (388, 262, 230, 198))]
)
def test_turboquant_slots(head_size: int, slots: tuple[int, ...]) -> None:
    made = [TurboQuantSlot(preset=preset, head_size=head_size) for preset in TURBOQUANT_PRESETS]
    assert tuple(slot.slot_bytes_aligned for slot in made) == slots


def test_an_odd_slot_is_rounded_up() -> None:
    slot = TurboQuantSlot(preset="turboquant_k8v4", head_size=65)
    assert (slot.key_packed_bytes, slot.value_packed_bytes, slot.slot_bytes, slot.slot_bytes_aligned) == (
        65, 37, 102, 102,
    )  # fmt: skip
    assert TurboQuantSlot(preset="turboquant_k8v4", head_size=63).slot_bytes_aligned == 100
    with pytest.raises(SpecError, match=r"unknown TurboQuant preset 'k8v4'; one of turboquant_k8v4"):
        TurboQuantSlot(preset="k8v4", head_size=64)


@pytest.mark.parametrize(
    ("text", "mode", "dtype"),
    [
        ("auto", "NONE", "float16"),
        ("float16", "NONE", "float16"),
        ("fp8_e5m2", "FP8_PER_TENSOR", "uint8"),
        ("fp8_ds_mla", "FP8_PER_TENSOR", "uint8"),
        ("fp8_per_token_head", "FP8_PER_TOKEN_HEAD", "uint8"),
        ("int8_per_token_head", "INT8_PER_TOKEN_HEAD", "int8"),
        ("nvfp4", "NVFP4", "uint8"),
        ("turboquant_3bit_nc", "NONE", "uint8"),
    ],
)
def test_kv_cache_dtype_strings(text: str, mode: str, dtype: str) -> None:
    assert get_kv_quant_mode(text) == mode
    assert kv_cache_dtype_to_dtype(text, "float16") == dtype
    with pytest.raises(SpecError, match="unknown dtype"):
        kv_cache_dtype_to_dtype("int4", "float16")


@pytest.mark.parametrize("spec", ONE_OF_EACH, ids=lambda spec: type(spec).__name__)
def test_growth_is_what_usage_does(spec: KVCacheSpec) -> None:
    """TOKENS: a longer request needs more. WINDOW: no longer; but a larger batch does. STATES: neither."""
    most = limits(1 << 20, max_num_encoder_input_tokens=1500)
    longer = limits(1 << 21, max_num_encoder_input_tokens=1500)
    batch = limits(1 << 20, max_num_batched_tokens=4096, max_num_encoder_input_tokens=1500)
    picture = limits(1 << 20, max_num_encoder_input_tokens=3000)
    used = spec.max_memory_usage_bytes(most)
    grows = {
        Growth.TOKENS: spec.max_memory_usage_bytes(longer) > used,
        Growth.WINDOW: spec.max_memory_usage_bytes(batch) > used,
        Growth.ENCODER: spec.max_memory_usage_bytes(picture) > used,
    }
    assert [growth for growth, does in grows.items() if does] == [g for g in grows if g is spec.growth(most)]
    bounded = spec.max_admission_blocks_per_request(most)
    assert (bounded is not None) == (spec.growth(most) is Growth.WINDOW)
    assert (used == 0) == (spec.growth(most) is Growth.NOTHING)
    assert MAMBA.growth(limits(1, mamba_cache_mode="all")) is Growth.TOKENS


def test_kinds() -> None:
    kinds = [get_kv_cache_spec_kind(spec).value for spec in ONE_OF_EACH]
    assert kinds == [
        "full_attention", "sliding_window", "chunked_local_attention", "cross_attention", "encoder_only_attention",
        "sink_full_attention", "full_attention", "mla_attention", "mla_attention", "sliding_window_mla", "mamba",
    ]  # fmt: skip
    mixed = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": SINK})
    assert get_kv_cache_spec_kind(mixed) is KVCacheSpecKind.UNKNOWN


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (
            MLAAttentionSpec,
            V4 | {"block_size": 64, "compress_ratio": 128},
            "not a multiple of compress_ratio 128",
        ),
        (MLAAttentionSpec, V4 | {"block_size": 256, "compress_ratio": 3}, "256 is not a multiple of compress_ratio 3"),
        (MLAAttentionSpec, V4 | {"block_size": 256, "alignment": 0}, "alignment must be an int of 1 or more, not 0"),
        (MLAAttentionSpec, V4 | {"block_size": 64, "page_size_padded": 37_376}, "smaller than the aligned page, 37440"),
        (SlidingWindowMLASpec, V4 | {"block_size": 64, "sliding_window": 8, "model_version": "v5"}, "not v5"),
        (SlidingWindowSpec, LLAMA | {"sliding_window": 0}, "sliding_window must be an int of 1 or more, not 0"),
        (ChunkedLocalAttentionSpec, LLAMA | {"attention_chunk_size": -1}, "attention_chunk_size must be an int of 1"),
        (TQFullAttentionSpec, LLAMA | {"tq_slot_size": -2}, "tq_slot_size must be an int of 0 or more, not -2"),
        (SinkFullAttentionSpec, LLAMA | {"sink_len": 0}, "sink_len must be an int of 1 or more, not 0"),
        (FullAttentionSpec, LLAMA | {"sliding_window": 1.5}, "sliding_window must be an int of 1 or more, not 1.5"),
        (MambaSpec, STATES | {"dtypes": ("bfloat16",)}, "2 shapes and 1 dtypes; give one for each"),
        (MambaSpec, STATES | {"shapes": ((3, 0), (1,))}, "shapes must hold ints of 1 or more"),
        (MambaSpec, STATES | {"shapes": (), "dtypes": ()}, "a page of 0 bytes holds nothing"),
        (MambaSpec, STATES | {"page_size_padded": 311_295}, "311295 is smaller than the page, 311296 bytes"),
        (
            MambaSpec,
            STATES | {"mamba_cache_mode": "some"},
            "must be one of none, align, all, not 'some'",
        ),
        (ServingLimits, {"max_model_len": 0}, "max_model_len must be an int of 1 or more, not 0"),
        (ServingLimits, {"max_model_len": 1, "decode_context_parallel_size": 0}, "context_parallel_size must be"),
        (ServingLimits, {"max_model_len": 1, "max_num_encoder_input_tokens": -1}, "an int of 0 or more, not -1"),
        (ServingLimits, {"max_model_len": 1, "mamba_cache_mode": "no"}, "mamba_cache_mode must be one of none"),
    ],
)
def test_refuses_impossible_fields(cls: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        cls(**fields)


def test_a_page_may_be_padded_beyond_its_alignment() -> None:
    spec = SlidingWindowMLASpec(**V4, block_size=64, sliding_window=128, page_size_padded=40_320)
    assert spec.page_size_bytes == 40_320
    assert MLAAttentionSpec(**V4, block_size=64).page_size_padded == 37_440
    assert MLAAttentionSpec(**V4, block_size=72).page_size_padded is None, "aligned as it is"


def test_another_block_size_is_aligned_anew() -> None:
    for made in (SLIDING_MLA, MLAAttentionSpec(**V4, block_size=64)):
        assert made.copy_with_new_block_size(128).page_size_bytes == 74_880
        assert made.copy_with_new_block_size(128).copy_with_new_block_size(64) == made
    assert MLAAttentionSpec(**LATENT, page_size_padded=80_000).copy_with_new_block_size(32).page_size_bytes == 80_000


def test_merging_records_the_one_window() -> None:
    recorded = FullAttentionSpec(**LLAMA, sliding_window=1024)
    assert FULL.merge([FULL, recorded, recorded]) == recorded
    assert SLIDING.merge([SLIDING, SLIDING]) == SLIDING


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ((FULL, SLIDING), "its own class only, not FullAttentionSpec, SlidingWindowSpec; group them apart"),
        ((FULL, TURBO), "not FullAttentionSpec, TQFullAttentionSpec"),
        ((TURBO, FULL), "not TQFullAttentionSpec, FullAttentionSpec"),
        ((FULL, SINK), "not FullAttentionSpec, SinkFullAttentionSpec"),
        ((MLA, HIDDEN), "not MLAAttentionSpec, HiddenStateCacheSpec"),
        ((SINK, SinkFullAttentionSpec(**LLAMA, sink_len=16)), "sink_len is 32 in one and 16 in another"),
        ((FULL, FullAttentionSpec(**LLAMA, head_size_v=64)), "head_size_v is 128 in one and 64 in another"),
        ((MLA, MLAAttentionSpec(**LATENT | {"head_size": 132})), "head_size is 576 in one and 132 in another"),
        ((SLIDING, SlidingWindowSpec(**LLAMA, sliding_window=8)), "sliding_window is 4096 in one and 8 in another"),
        (
            (FullAttentionSpec(**LLAMA, sliding_window=8), FullAttentionSpec(**LLAMA, sliding_window=16)),
            "one group cannot hold layers with sliding_window 8 and 16",
        ),
        (
            (FullAttentionSpec(**LLAMA, sliding_window=8), FullAttentionSpec(**LLAMA, attention_chunk_size=16)),
            "cannot merge layers with sliding_window 8 and attention_chunk_size 16",
        ),
    ],
)
def test_refuses_to_merge_what_differs(specs: tuple[KVCacheSpec, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        specs[0].merge(specs)


def test_refuses_to_merge_nothing() -> None:
    with pytest.raises(SpecError, match=r"FullAttentionSpec\.merge needs a layer at least"):
        FullAttentionSpec.merge([])


def test_layers_of_one_family_fill_together() -> None:
    narrow = FullAttentionSpec(**LLAMA | {"num_kv_heads": 4})
    both = UniformTypeKVCacheSpecs.from_specs({"a": FULL, "b": narrow})
    assert both is not None
    assert (both.page_size_bytes, both.block_size) == (65_536 + 32_768, 16)
    assert both.max_memory_usage_pages(limits(100)) == 7
    assert both.max_memory_usage_bytes(limits(100)) == 7 * (65_536 + 32_768)
    assert both.growth(limits(1)) is Growth.TOKENS
    assert both.copy_with_new_block_size(32).page_size_bytes == 2 * (65_536 + 32_768)


@pytest.mark.parametrize(
    ("one", "other", "uniform"),
    [
        (FULL, SINK, True),
        (FULL, TURBO, True),
        (MLA, HIDDEN, True),
        (FULL, MLA, False),  # block sizes 16 and 64
        (FULL, SLIDING, False),
        (SLIDING, SlidingWindowSpec(**LLAMA | {"num_kv_heads": 2}, sliding_window=4096), True),
        (SLIDING, SlidingWindowSpec(**LLAMA, sliding_window=8), False),
        (SLIDING_MLA, SlidingWindowSpec(**LLAMA | {"block_size": 64}, sliding_window=128), False),
        (SlidingWindowSpec(**LLAMA | {"block_size": 64}, sliding_window=128), SLIDING_MLA, False),
        (CHUNKED, ChunkedLocalAttentionSpec(**LLAMA, attention_chunk_size=8), False),
        (CROSS, CrossAttentionSpec(**LLAMA | {"num_kv_heads": 2}), True),
        (MAMBA, MambaSpec(**STATES, num_speculative_blocks=1), False),
        (MAMBA, MambaSpec(**STATES | {"shapes": ((3, 8), (8, 16))}), True),
    ],
)
def test_families(one: KVCacheSpec, other: KVCacheSpec, uniform: bool) -> None:
    layers = {"a": one, "b": other}
    assert UniformTypeKVCacheSpecs.is_uniform_type(layers) is uniform
    if not uniform:
        assert UniformTypeKVCacheSpecs.from_specs(layers) is None
        with pytest.raises(SpecError, match="needs layers of one family"):
            UniformTypeKVCacheSpecs(block_size=one.block_size, kv_cache_specs=layers)


def test_refuses_a_container_that_is_none() -> None:
    with pytest.raises(SpecError, match="needs layers of one family"):
        UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={})
    with pytest.raises(SpecError, match="block_size 32 is not the layers', 16"):
        UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": FULL})
    with pytest.raises(SpecError, match="EncoderOnlyAttentionSpec cannot share a group"):
        UniformTypeKVCacheSpecs.is_uniform_type({"a": ENCODER})
    assert not UniformTypeKVCacheSpecs.is_uniform_type({"a": FULL, "b": ENCODER})


def test_a_container_keeps_its_own_layers() -> None:
    layers: dict[str, KVCacheSpec] = {"a": FULL}
    both = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers)
    layers["b"] = SLIDING
    assert list(both.kv_cache_specs) == ["a"]
