"""Layouts beyond the four basic ones: places of single elements, what may be cut, padding, kernel blocks, refusals."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pdtx.errors import LayoutError
from pdtx.kvspec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    TQFullAttentionSpec,
)
from pdtx.layout import (
    ELEMENT_ORDERS,
    LAYOUT_ORDERS,
    PARTED_ORDERS,
    RECORD_ORDERS,
    STATE_ORDERS,
    AnyLayout,
    Axis,
    KVCacheLayout,
    Layout,
    Part,
    PartedLayout,
    RecordLayout,
    any_layout,
    layout_name,
    make_layout,
    make_parted_layout,
    make_record_layout,
    preset_name,
)
from tests.test_layout_vectors import contiguous_runs, pieces_of, places
from tests.vectors import DATA, Case, load_vectors

PLAIN = FullAttentionSpec(block_size=4, num_kv_heads=3, head_size=6, dtype="float16")
UNLIKE = replace(PLAIN, head_size_v=2)
INT8 = FullAttentionSpec(
    block_size=4, num_kv_heads=3, head_size=6, dtype="int8", kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD
)
NVFP4 = FullAttentionSpec(block_size=4, num_kv_heads=3, head_size=16, dtype="uint8", kv_quant_mode=KVQuantMode.NVFP4)
TURBOQUANT = TQFullAttentionSpec(block_size=4, num_kv_heads=3, head_size=16, dtype="uint8", tq_slot_size=22)
MLA = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype="bfloat16")
SPARSE = replace(MLA, dtype="uint8", cache_dtype_str="fp8_ds_mla")
INDEXER = replace(MLA, head_size=132, dtype="uint8")
V4 = MLAAttentionSpec(
    block_size=256, num_kv_heads=1, head_size=512, dtype="uint8", cache_dtype_str="fp8_ds_mla",
    alignment=576, compress_ratio=4, model_version="deepseek_v4",
)  # fmt: skip
COMPRESSOR = SlidingWindowMLASpec(
    block_size=4, num_kv_heads=1, head_size=512, dtype="float32", sliding_window=8, alignment=576
)
HIDDEN = HiddenStateCacheSpec(block_size=4, num_kv_heads=3, head_size=8, dtype="bfloat16")
STATES = MambaSpec(block_size=512, shapes=((3, 8), (2, 4, 5)), dtypes=("float16", "float16"))

RECORD_SPECS: dict[str, AttentionSpec] = {
    "mla": SPARSE, "deepseek_v4": V4, "deepseek_indexer": INDEXER, "deepseek_v4_compressor": COMPRESSOR,
    "turboquant": TURBOQUANT, "hidden_states": HIDDEN, "per_token_head": INT8, "nvfp4": NVFP4,
}  # fmt: skip


def attention_for(name: str) -> AttentionSpec:
    """A spec that a preset can hold."""
    if name in RECORD_ORDERS:
        return RECORD_SPECS[max((kind for kind in RECORD_SPECS if kind in name), key=len)]
    return UNLIKE if "diffkv" in name else PLAIN


def spec_for(name: str) -> KVCacheSpec:
    return STATES if name in STATE_ORDERS else attention_for(name)


EVERY_NAME = (*ELEMENT_ORDERS, *PARTED_ORDERS, *RECORD_ORDERS, *STATE_ORDERS)


class TestEveryPreset:
    @pytest.mark.parametrize("name", EVERY_NAME)
    def test_every_element_has_its_own_place(self, name: str) -> None:
        """No two elements share a byte; without padding they fill the region."""
        spec = spec_for(name)
        layout = any_layout(name, spec, num_layers=2, num_blocks=3)
        found, itemsize = places(layout), pieces_of(layout)[0][1].itemsize
        assert (np.diff(found) >= itemsize).all()
        assert layout.size_bytes == 2 * 3 * spec.page_size_bytes
        if layout.bytes_per_block == spec.page_size_bytes:
            assert contiguous_runs(layout) == (1, layout.size_bytes)

    def test_no_name_has_two_meanings(self) -> None:
        assert len(EVERY_NAME) == len(set(EVERY_NAME))

    @pytest.mark.parametrize("name", EVERY_NAME)
    def test_names_are_their_own_spelling(self, name: str) -> None:
        assert preset_name(name) == name
        assert preset_name(name.upper().replace("_", "-")) == name

    def test_other_kinds_are_not_plain_layouts(self) -> None:
        """What needs more than one stride an axis is not offered where the cache asks for a layout."""
        assert layout_name("TRITON_ATTN:HND") == "triton_hnd"
        for name in (*PARTED_ORDERS, *RECORD_ORDERS, *STATE_ORDERS):
            with pytest.raises(LayoutError, match="unknown layout"):
                layout_name(name)

    def test_the_basic_four_are_still_four(self) -> None:
        assert tuple(LAYOUT_ORDERS) == ("flash_attn_nhd", "flash_attn_hnd", "flashinfer_nhd", "flashinfer_hnd")


def test_sglang_keeps_a_tensor_of_slots_for_each_layers_k_and_v() -> None:
    """k_buffer[layer] and v_buffer[layer]: (slots, heads, channels); here one behind the other."""
    layout = make_layout("sglang", PLAIN, num_layers=2, num_blocks=5)
    slot = 3 * 6 * 2
    tensor = 5 * 4 * slot
    assert (layout.stride("channel"), layout.stride("head")) == (2, 6 * 2)
    assert (layout.stride("token"), layout.stride("block")) == (slot, 4 * slot)
    assert (layout.stride("layer"), layout.stride("kv")) == (tensor, 2 * tensor)


class TestParted:
    """place(part, token, channel) written out for one head of one block of one layer."""

    @staticmethod
    def place(part: Part, token: int, channel: int) -> int:
        layout = part.layout
        return part.offset + token * layout.stride("token") + channel * layout.stride("channel")

    def test_keys_of_vllm_032_on_cpus_are_transposed(self) -> None:
        """Observed in a running engine: element (t, d) of K at d * 128 + t, then V row by row."""
        spec = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=16, dtype="bfloat16")
        layout = make_parted_layout("cpu_attn_lbhnc", spec, num_layers=2, num_blocks=3)
        assert self.place(layout.key, token=5, channel=3) == (3 * 128 + 5) * 2
        assert self.place(layout.value, token=5, channel=3) == 128 * 16 * 2 + (5 * 16 + 3) * 2
        assert layout.key.layout.stride("head") == layout.value.layout.stride("head") == 2 * 128 * 16 * 2
        plain = make_layout("vllm_lbhnc", spec, num_layers=2, num_blocks=3)
        for axis in ("layer", "block", "head"):
            assert layout.key.layout.stride(axis) == plain.stride(axis), "the shape does not tell"

    def test_diffkv_keeps_v_behind_k(self) -> None:
        layout = make_parted_layout("flash_attn_diffkv_nhd", UNLIKE, num_layers=1, num_blocks=3)
        assert self.place(layout.key, token=1, channel=5) == (3 * 8 + 5) * 2
        assert self.place(layout.value, token=1, channel=1) == (3 * 8 + 6 + 1) * 2
        assert layout.bytes_per_token == 3 * 8 * 2
        assert layout.block_size == 4

    @pytest.mark.parametrize("name", ELEMENT_ORDERS)
    def test_plain_layouts_fall_into_parts(self, name: str) -> None:
        plain = make_layout(name, PLAIN, num_layers=2, num_blocks=3)
        parted = PartedLayout.of(plain)
        assert places(parted).tolist() == places(plain).tolist()
        assert parted.value.offset == plain.stride("kv")
        assert parted.bytes_per_token == plain.bytes_per_token

    def test_refuses_parts_that_do_not_belong_together(self) -> None:
        key, value = make_parted_layout("diffkv_lbnhc", UNLIKE, num_layers=2, num_blocks=3).parts
        size = 2 * 3 * UNLIKE.page_size_bytes
        with pytest.raises(LayoutError, match="value lies outside the region"):
            PartedLayout("wrong", key, replace(value, offset=value.offset + 2), size)
        shorter = make_parted_layout("diffkv_lbnhc", UNLIKE, num_layers=2, num_blocks=2).value
        with pytest.raises(LayoutError, match="keys have 3 steps of block, values 2"):
            PartedLayout("wrong", key, shorter, size)
        whole = make_layout("vllm_lbnhc", PLAIN, num_layers=2, num_blocks=3)
        with pytest.raises(LayoutError, match="key must have one step of kv"):
            PartedLayout("wrong", Part("key", 0, whole), value, whole.size_bytes)
        assert isinstance(key.layout, KVCacheLayout)
        with pytest.raises(LayoutError, match="1 steps of kv, not keys and values"):
            PartedLayout.of(key.layout)


class TestRecords:
    @pytest.mark.parametrize(
        ("name", "sliceable"),
        [
            ("mla", {"layer", "block", "token", "head"}),
            ("turboquant", {"layer", "block", "token", "head"}),
            ("hidden_states", {"layer", "block", "token", "head"}),
            ("deepseek_v4_compressor", {"layer", "block", "token", "head"}),
            ("triton_per_token_head_hnd", {"layer", "block", "kv", "token", "head"}),
            ("per_token_head_lbnhc", {"layer", "block", "kv", "token", "head"}),
            # Data first, then scales: a token or head is not where the strides say.
            ("deepseek_v4", {"layer", "block"}),
            ("deepseek_v4_bhlnc", {"layer", "block", "head"}),
            ("deepseek_indexer", {"layer", "block"}),
            ("flashinfer_nvfp4_nhd", {"layer", "block", "kv"}),
            ("flashinfer_nvfp4_nhd_cross_layer", {"layer", "block", "kv"}),
            ("flashinfer_nvfp4_hnd_cross_layer", {"block", "kv"}),
            ("nvfp4_lbhnc", {"layer", "block", "kv"}),
            ("nvfp4_lbnhc", {"layer", "block"}),
            ("nvfp4_lhbnc", {"layer", "kv"}),
        ],
    )
    def test_what_may_be_cut(self, name: str, sliceable: set[str]) -> None:
        layout = make_record_layout(name, attention_for(name), num_layers=2, num_blocks=3)
        assert layout.sliceable == sliceable

    @pytest.mark.parametrize("name", [name for name in RECORD_ORDERS if "nvfp4" in name or "deepseek_v4" in name])
    def test_a_box_of_uncut_axes_has_nothing_else_inside(self, name: str) -> None:
        """Everything that may be cut lies around what may not."""
        layout = make_record_layout(name, spec_for(name), num_layers=2, num_blocks=3)
        stepped = [axis.name for axis in layout.axes if axis.extent > 1]
        cut = [axis in layout.sliceable for axis in stepped]
        assert cut == sorted(cut, reverse=True)

    def test_bytes(self) -> None:
        def record(name: str, spec: AttentionSpec) -> RecordLayout:
            return make_record_layout(name, spec, num_layers=1, num_blocks=2)

        assert record("mla", MLA).extent("byte") == 1152
        assert record("mla", SPARSE).extent("byte") == 656
        v4 = record("deepseek_v4", V4)
        assert (v4.extent("byte"), v4.stride("block"), v4.bytes_per_block) == (584, 37_440, 37_376)
        assert (v4.extent("token"), v4.tokens_per_step, v4.block_size) == (64, 4, 256)
        assert record("flashinfer_nvfp4_nhd", NVFP4).extent("byte") == 9
        assert record("triton_per_token_head_nhd", INT8).extent("byte") == 10
        assert record("triton_per_token_head_nhd", INT8).bytes_per_block == INT8.page_size_bytes

    @pytest.mark.parametrize(
        ("name", "spec"),
        [
            ("mla", PLAIN), ("mla", V4), ("mla", HIDDEN), ("mla", COMPRESSOR), ("mla", replace(MLA, num_kv_heads=2)),
            ("mla", replace(SPARSE, compress_ratio=2)),
            ("deepseek_v4", MLA), ("deepseek_indexer", V4), ("deepseek_v4_compressor", MLA),
            ("turboquant", PLAIN), ("turboquant", replace(TURBOQUANT, tq_slot_size=0)), ("hidden_states", MLA),
            ("triton_per_token_head_nhd", PLAIN), ("triton_per_token_head_nhd", NVFP4),
            ("flashinfer_nvfp4_nhd", INT8), ("per_token_head_lbnhc", replace(INT8, head_size_v=4)),
        ],
    )  # fmt: skip
    def test_refuses_specs_it_cannot_hold(self, name: str, spec: AttentionSpec) -> None:
        with pytest.raises(LayoutError, match=rf"{name} (does not hold|keeps a record for every token)"):
            make_record_layout(name, spec, num_layers=1, num_blocks=1)

    @pytest.mark.parametrize(
        "axes",
        [
            ("layer", "block", "token", "byte"),
            ("layer", "block", "head", "token", "token", "byte"),
            ("layer", "block", "head", "token", "channel", "byte"),
            ("layer", "block", "head", "byte", "token"),
        ],
    )
    def test_refuses_impossible_axes(self, axes: tuple[str, ...]) -> None:
        with pytest.raises(LayoutError, match=r"needs layer, .* perhaps kv|innermost axis is byte"):
            RecordLayout("wrong", tuple(Axis(name, 1, 1) for name in axes), 1, 1)

    def test_bytes_are_opaque(self) -> None:
        layout = make_record_layout("mla", MLA, num_layers=1, num_blocks=1)
        with pytest.raises(LayoutError, match="innermost axis is byte, opaque"):
            replace(layout, opaque=("token",))
        with pytest.raises(LayoutError, match="records are bytes"):
            replace(layout, itemsize=2)


def test_vector_v4_tokens_do_not_lie_where_the_view_says() -> None:
    """Which bytes vLLM's kernel writes for a token: not those of the view, but always inside the token's block."""
    probe: list[Case] = load_vectors("v4_block_probe.json")["cases"]
    layout = make_record_layout("deepseek_v4", replace(V4, compress_ratio=1, block_size=64), num_layers=1, num_blocks=9)
    assert layout.stride("block") == 37_440
    elsewhere = 0
    for case in probe:
        runs = case["byte_runs_written_[start,end)"]
        seen = case["position_in_block"] * layout.stride("token")
        assert all(0 <= start < stop <= layout.bytes_per_block for start, stop in runs), case
        elsewhere += any(not seen <= start < stop <= seen + 584 for start, stop in runs)
    assert probe
    assert elsewhere == len(probe)


class TestPadding:
    @pytest.mark.parametrize(
        "name",
        [
            "flashinfer_nhd",
            "flashinfer_hnd",
            "triton_nhd",
            "flash_attn_mamba",
            "vllm_lbnhc",
            "vllm_blhnc",
            "cpu_attn_lbhnc",
        ],
    )
    def test_pages_lie_padded_apart(self, name: str) -> None:
        spec = replace(PLAIN, page_size_padded=512)
        padded = any_layout(name, spec, num_layers=2, num_blocks=3)
        packed = any_layout(name, PLAIN, num_layers=2, num_blocks=3)
        assert padded.size_bytes == 2 * 3 * 512
        pages = [places(layout, "layer", "block").tolist() for layout in (padded, packed)]
        assert pages[0] == pages[1], "padding is behind a page, not in it"
        assert set(places(padded) // 512) == set(range(6))

    @pytest.mark.parametrize(
        "name",
        ["flash_attn_nhd", "cpu_attn", "rocm_attn", "sglang", "vllm_lhbnc", "vllm_bhlnc", "diffkv_bhlnc",
         "flash_attn_nhd_cross_layer", "flashinfer_hnd_cross_layer", "flash_attn_diffkv_nhd_cross_layer"],
    )  # fmt: skip
    def test_refuses_padding_for_pages_in_pieces(self, name: str) -> None:
        """vLLM 0.22 lets FlashAttention's K and V overlap there and fails in the cross-layer forms; 0.32 asserts."""
        with pytest.raises(LayoutError, match=f"{name} has no padded form; page_size_padded is 512"):
            any_layout(name, replace(PLAIN, page_size_padded=512), num_layers=2, num_blocks=3)

    def test_refuses_half_elements(self) -> None:
        with pytest.raises(LayoutError, match=r"page_size_padded is 511, not whole elements of 2 bytes"):
            make_layout("flashinfer_nhd", replace(PLAIN, page_size_padded=511), num_layers=2, num_blocks=3)

    def test_a_padded_layout_cannot_be_swapped(self) -> None:
        layout = make_layout("flashinfer_nhd", replace(PLAIN, page_size_padded=512), num_layers=2, num_blocks=3)
        with pytest.raises(LayoutError, match="only packed layouts can be swapped"):
            layout.with_swapped("head", "token")


class TestKernelBlocks:
    @staticmethod
    def halves(name: str) -> AnyLayout:
        spec = spec_for(name)
        return any_layout(name, spec, num_layers=2, num_blocks=3, kernel_block_size=spec.block_size // 2)

    @pytest.mark.parametrize(
        "name", ["flash_attn_nhd", "flashinfer_hnd", "vllm_lbnhc", "turboquant", "flash_attn_diffkv_hnd"]
    )
    def test_a_block_is_some_steps_of_the_block_axis(self, name: str) -> None:
        for _, layout in pieces_of(self.halves(name)):
            assert (layout.extent("block"), layout.extent("token"), layout.blocks_per_manager_block) == (6, 2, 2)
            assert layout.block_steps([2, 0]).tolist() == [4, 5, 0, 1]
        assert self.halves(name).block_steps(np.array([2, 0])).tolist() == [4, 5, 0, 1]

    def test_steps_are_blocks_where_nothing_is_split(self) -> None:
        layout = make_layout("flash_attn_nhd", PLAIN, num_layers=2, num_blocks=3)
        steps = layout.block_steps([2, 0])
        assert steps.tolist() == [2, 0]
        assert steps.dtype == np.int64
        assert layout.block_steps([]).tolist() == []

    def test_k_and_v_alternate_within_a_block(self) -> None:
        """A manager's block of FlashInfer holds K, V, K, V; one of FlashAttention lies in each half in one piece."""
        layout = make_layout("flashinfer_nhd", PLAIN, num_layers=1, num_blocks=3, kernel_block_size=2)
        half = 2 * 3 * 6 * 2
        assert (layout.stride("kv"), layout.stride("block")) == (half, 2 * half)
        layout = make_layout("flash_attn_nhd", PLAIN, num_layers=1, num_blocks=3, kernel_block_size=2)
        assert (layout.stride("kv"), layout.stride("block")) == (6 * half, half)

    def test_swapped_layouts_keep_their_kernel_blocks(self) -> None:
        layout = make_layout("flash_attn_nhd", PLAIN, num_layers=1, num_blocks=3, kernel_block_size=2)
        assert layout.with_swapped("head", "token").blocks_per_manager_block == 2

    @pytest.mark.parametrize(
        "name", ["vllm_lhbnc", "vllm_blhnc", "vllm_blnhc", "vllm_bhlnc", "diffkv_blnhc", "nvfp4_blnhc"]
    )
    def test_vllm_032_splits_dense_pages_only(self, name: str) -> None:
        with pytest.raises(LayoutError, match="cannot be split into 2 kernel blocks"):
            self.halves(name)

    @pytest.mark.parametrize("tokens", [0, -2, 3, 8])
    def test_refuses_kernel_blocks_that_do_not_divide(self, tokens: int) -> None:
        with pytest.raises(LayoutError, match=f"kernel blocks of {tokens} tokens do not divide a block of 4"):
            make_layout("flash_attn_nhd", PLAIN, num_layers=1, num_blocks=3, kernel_block_size=tokens)

    def test_refuses_to_split_padded_pages_and_compressed_vectors(self) -> None:
        with pytest.raises(LayoutError, match="pages padded to 512 bytes cannot be split into 2 kernel blocks"):
            make_layout(
                "flashinfer_nhd", replace(PLAIN, page_size_padded=512), num_layers=1, num_blocks=3, kernel_block_size=2
            )
        compressed = replace(MLA, compress_ratio=64)
        with pytest.raises(LayoutError, match="blocks of 32 tokens hold no whole number of vectors for 64 tokens"):
            make_record_layout("mla", compressed, num_layers=1, num_blocks=3, kernel_block_size=32)

    def test_refuses_a_pool_of_broken_blocks(self) -> None:
        layout = make_layout("flash_attn_nhd", PLAIN, num_layers=1, num_blocks=3)
        with pytest.raises(LayoutError, match="3 blocks, not a multiple of the 2 in a manager's block"):
            replace(layout, blocks_per_manager_block=2)


def test_refuses_specs_of_another_kind() -> None:
    encoder = EncoderOnlyAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float16")
    for spec in (encoder, MLA, TURBOQUANT, COMPRESSOR, STATES):
        for name in ("triton_nhd", "diffkv_lbnhc"):
            with pytest.raises(LayoutError, match=f"{name} holds plain keys and values, not {type(spec).__name__}"):
                any_layout(name, spec, num_layers=1, num_blocks=1)
    with pytest.raises(LayoutError, match="mla does not hold MambaSpec"):
        any_layout("mla", STATES, num_layers=1, num_blocks=1)
    for name in ("cpu_attn_lbhnc", "vllm_lbnhc"):
        with pytest.raises(LayoutError, match=f"{name} keeps K and V alike"):
            any_layout(name, UNLIKE, num_layers=1, num_blocks=1)
    with pytest.raises(LayoutError, match="plain keys and values, not FullAttentionSpec with INT8_PER_TOKEN_HEAD"):
        make_layout("triton_nhd", INT8, num_layers=1, num_blocks=1)
    with pytest.raises(LayoutError, match="triton_nhd does not part keys and values"):
        make_parted_layout("triton_nhd", PLAIN, num_layers=1, num_blocks=1)
    with pytest.raises(LayoutError, match="triton_nhd does not hold records"):
        make_record_layout("triton_nhd", PLAIN, num_layers=1, num_blocks=1)


class TestEveryClassOfKeysAndValues:
    """A page does not tell which tokens a layer forgets: same preset, same heads, same strides."""

    WINDOW = SlidingWindowSpec(block_size=4, num_kv_heads=3, head_size=6, dtype="float16", sliding_window=7)
    CHUNK = ChunkedLocalAttentionSpec(
        block_size=4, num_kv_heads=3, head_size=6, dtype="float16", attention_chunk_size=8
    )
    SINK = SinkFullAttentionSpec(block_size=4, num_kv_heads=3, head_size=6, dtype="float16", sink_len=4)
    CROSS = CrossAttentionSpec(block_size=4, num_kv_heads=3, head_size=6, dtype="float16")
    OTHERS = (WINDOW, CHUNK, SINK, CROSS)

    @pytest.mark.parametrize("spec", OTHERS, ids=lambda spec: type(spec).__name__)
    @pytest.mark.parametrize("name", [*ELEMENT_ORDERS, "cpu_attn_lbhnc"])
    def test_plain_presets(self, name: str, spec: AttentionSpec) -> None:
        assert any_layout(name, spec, num_layers=2, num_blocks=3) == any_layout(name, PLAIN, num_layers=2, num_blocks=3)

    @pytest.mark.parametrize("name", [name for name in PARTED_ORDERS if "diffkv" in name])
    def test_value_heads_of_another_size(self, name: str) -> None:
        """Only where the spec's class can have them."""
        expected = any_layout(name, UNLIKE, num_layers=2, num_blocks=3)
        for unlike in (replace(self.WINDOW, head_size_v=2), replace(self.SINK, head_size_v=2)):
            assert any_layout(name, unlike, num_layers=2, num_blocks=3) == expected
        for spec in (self.CHUNK, self.CROSS):
            with pytest.raises(LayoutError, match=f"{name} needs a spec with head_size_v, which {type(spec).__name__}"):
                any_layout(name, spec, num_layers=2, num_blocks=3)

    def test_unlike_heads_are_refused_in_windows_too(self) -> None:
        window = replace(self.WINDOW, head_size_v=2)
        for name in ("flashinfer_hnd", "cpu_attn_lbhnc"):
            with pytest.raises(LayoutError, match="keeps K and V alike; head_size 6 and head_size_v 2 differ"):
                any_layout(name, window, num_layers=2, num_blocks=3)

    @pytest.mark.parametrize("name", [name for name in RECORD_ORDERS if "per_token_head" in name or "nvfp4" in name])
    @pytest.mark.parametrize("spec", OTHERS, ids=lambda spec: type(spec).__name__)
    def test_quantized_presets(self, name: str, spec: AttentionSpec) -> None:
        full = attention_for(name)
        if isinstance(spec, SlidingWindowSpec | SinkFullAttentionSpec):
            spec = replace(spec, head_size=full.head_size, head_size_v=full.head_size)
        other = replace(spec, kv_quant_mode=full.kv_quant_mode, dtype=full.dtype, head_size=full.head_size)
        layout = any_layout(name, other, num_layers=2, num_blocks=3)
        assert layout == any_layout(name, full, num_layers=2, num_blocks=3)
        assert layout.size_bytes == 6 * other.page_size_bytes


class TestTheCommonInterface:
    """What a plan, a cache and a description ask of any layout."""

    @pytest.mark.parametrize("name", EVERY_NAME)
    def test_every_layout_answers(self, name: str) -> None:
        spec = spec_for(name)
        layout = any_layout(name, spec, num_layers=2, num_blocks=3)
        assert isinstance(layout, Layout)
        padding = 6 * (spec.page_size_bytes - layout.bytes_per_block)
        ours = sum(part.layout.itemsize * math.prod(a.extent for a in part.layout.axes) for part in layout.parts)
        assert ours + padding == layout.size_bytes, "the parts hold all there is"
        assert layout.block_size == (1 if name in STATE_ORDERS else spec.block_size)
        assert layout.blocks_per_manager_block == 1
        assert layout.sliceable == frozenset.intersection(*(part.layout.sliceable for part in layout.parts))

    def test_one_part_or_several(self) -> None:
        plain = make_layout("sglang", PLAIN, num_layers=2, num_blocks=3)
        assert plain.parts == (Part("", 0, plain),)
        record = make_record_layout("mla", MLA, num_layers=2, num_blocks=3)
        assert record.parts == (Part("", 0, record),)
        parted = make_parted_layout("diffkv_lbnhc", UNLIKE, num_layers=2, num_blocks=3)
        assert [part.name for part in parted.parts] == ["key", "value"]
        assert parted.bytes_per_block == 4 * 3 * 8 * 2

    @pytest.mark.parametrize("name", EVERY_NAME)
    def test_blocks_that_cannot_be_moved_say_so(self, name: str) -> None:
        """NVFP4 where a block or a layer steps inside the data and scales of another, whose order is not known."""
        stuck = {
            "flashinfer_nvfp4_hnd_cross_layer": "layer",
            "nvfp4_bhlnc": "layer",
            "nvfp4_lhbnc": "block",
        }
        layout = any_layout(name, spec_for(name), num_layers=2, num_blocks=3)
        assert layout.movable is (name not in stuck)
        if name not in stuck:
            layout.require_movable()
            return
        with pytest.raises(LayoutError, match=f"{name} cannot be transferred: in memory its axis {stuck[name]} lies"):
            layout.require_movable()

    def test_an_axis_of_one_step_stands_in_no_way(self) -> None:
        layout = any_layout("nvfp4_bhlnc", NVFP4, num_layers=1, num_blocks=3)
        assert "layer" not in layout.sliceable
        assert layout.movable


def test_the_essential_vectors_are_kept() -> None:
    for name in ("layouts.json", "layouts_0.22.json", "layouts_0.32.json"):
        assert (DATA / name).is_file()


def test_all_axes_of_plain_layouts_may_be_cut() -> None:
    layout = make_layout("sglang", PLAIN, num_layers=2, num_blocks=3)
    assert layout.sliceable == set(KVCacheLayout.names)
    assert PartedLayout.of(layout).sliceable == layout.sliceable
