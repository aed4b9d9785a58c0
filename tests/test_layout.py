from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from pdtx.errors import LayoutError
from pdtx.kvspec import FullAttentionSpec
from pdtx.layout import LAYOUT_ORDERS, Axis, KVCacheLayout, layout_name, make_layout
from tests.vectors import Case, load_cases, load_essential

PRESETS = tuple(LAYOUT_ORDERS)
SMALL = FullAttentionSpec(block_size=4, num_kv_heads=3, head_size=5, dtype="float16")

# The order of the axes in the tensor that vLLM hands to a backend.
VLLM_AXES = {
    "FLASH_ATTN": ("kv", "block", "token", "head", "channel"),
    "FLASHINFER": ("block", "kv", "token", "head", "channel"),
}


@pytest.mark.parametrize(
    ("name", "strides"),
    [
        # Llama 3 8B, 2 layers, 7 blocks of 16 tokens: layer, block, kv, head, token, channel.
        ("flash_attn_nhd", (458_752, 32_768, 229_376, 256, 2_048, 2)),
        ("flash_attn_hnd", (458_752, 32_768, 229_376, 4_096, 256, 2)),
        ("flashinfer_nhd", (458_752, 65_536, 32_768, 256, 2_048, 2)),
        ("flashinfer_hnd", (458_752, 65_536, 32_768, 4_096, 256, 2)),
    ],
)
def test_strides_of_the_presets(name: str, strides: tuple[int, ...], llama_spec: FullAttentionSpec) -> None:
    layout = make_layout(name, llama_spec, num_layers=2, num_blocks=7)
    found = tuple(layout.stride(axis) for axis in ("layer", "block", "kv", "head", "token", "channel"))
    assert found == strides
    assert layout.size_bytes == 2 * 7 * llama_spec.page_size_bytes
    assert (layout.block_size, layout.bytes_per_token) == (16, 4096)


@pytest.mark.parametrize("name", PRESETS)
def test_every_element_has_its_own_place(name: str) -> None:
    """Written out by coordinates: no two elements share a byte, and together they fill the region."""
    layout = make_layout(name, SMALL, num_layers=2, num_blocks=3)
    places = [
        sum(axis.stride * step for axis, step in zip(layout.axes, steps, strict=True))
        for steps in product(*(range(axis.extent) for axis in layout.axes))
    ]
    assert places == list(range(0, layout.size_bytes, 2)), "axes must be listed outermost first"


def vector_covered(case: Case) -> bool:
    """Whether a case is one of the presets: one page a block, nothing beside the elements."""
    fields = case["spec"]["fields"]
    whole = fields["block_size"] == case["kernel_block_size"] and fields["page_size_padded"] is None
    plain = fields["kv_quant_mode"] in ("NONE", "FP8_PER_TENSOR")
    return case["backend"] in VLLM_AXES and whole and plain and "error" not in case


def check_against_vllm(cases: Sequence[Case]) -> None:
    for case in cases:
        fields = case["spec"]["fields"]
        spec = FullAttentionSpec(**{n: fields[n] for n in ("block_size", "num_kv_heads", "head_size", "dtype")})
        name = f"{case['backend']}:{case['kv_cache_layout_setting']}"
        layout = make_layout(name, spec, num_layers=1, num_blocks=case["num_blocks"])
        axes = VLLM_AXES[case["backend"]]
        assert [layout.extent(axis) for axis in axes] == case["view_shape"], case["case_id"]
        assert [layout.stride(axis) for axis in axes] == case["view_stride_bytes"], case["case_id"]
        assert contiguous_runs(layout) == (case["one_block_contiguous_runs"], case["one_block_bytes_per_run"])


def contiguous_runs(layout: KVCacheLayout) -> tuple[int, int]:
    """Number and bytes of the pieces in which one block of one layer lies in memory, by listing its elements."""
    places = np.zeros(1, np.int64)
    for axis in layout.axes:
        if axis.name not in ("layer", "block"):
            places = np.add.outer(places, np.arange(axis.extent) * axis.stride).reshape(-1)
    places.sort()
    pieces = 1 + int((np.diff(places) != layout.itemsize).sum())
    return pieces, len(places) * layout.itemsize // pieces


def test_essential_vector_layouts() -> None:
    """Two cases of vLLM 0.22 for each preset, kept in the repository."""
    cases = load_essential("layouts.json")
    assert len(cases) == 8
    assert all(vector_covered(case) for case in cases)
    check_against_vllm(cases)


def test_vector_layouts(record_property: Any) -> None:  # noqa: ANN401 - pytest's own
    """Shape, strides and contiguous pieces of every FlashAttention and FlashInfer case that a preset covers."""
    cases = [case for case in load_cases("layouts_0.22.json") if case["backend"] in VLLM_AXES]
    covered = [case for case in cases if vector_covered(case)]
    record_property("vector_cases", len(covered))
    print(f"{len(covered)} of {len(cases)} FLASH_ATTN and FLASHINFER cases compared")  # noqa: T201 - pytest -rP
    assert {(c["backend"], c["kv_cache_layout_setting"]) for c in covered} == {
        (backend, order) for backend in VLLM_AXES for order in ("NHD", "HND")
    }
    assert len(covered) >= 20
    check_against_vllm(covered)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("flash_attn_nhd", "flash_attn_nhd"),
        ("FLASH_ATTN:NHD", "flash_attn_nhd"),
        ("FlashAttention-HND", "flash_attn_hnd"),
        ("flashattn_hnd", "flash_attn_hnd"),
        ("FlashInfer-HND", "flashinfer_hnd"),
        (" flash-infer:nhd ", "flashinfer_nhd"),
    ],
)
def test_spellings(text: str, name: str) -> None:
    assert layout_name(text) == name
    assert make_layout(text, SMALL, num_layers=1, num_blocks=1).name == name


@pytest.mark.parametrize("text", ["", "nhd", "flash_attn", "mla", "flash_attn_nhd_", "(2, 7, 16, 8, 128)"])
def test_unknown_names_are_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(LayoutError, match=r"unknown layout .*; one of flash_attn_nhd, .*flashinfer_hnd"):
        layout_name(text)


@pytest.mark.parametrize(("layers", "blocks"), [(0, 1), (1, 0), (-1, 4)])
def test_refuses_an_empty_cache(layers: int, blocks: int) -> None:
    with pytest.raises(LayoutError, match=f"1 or more layers and blocks, not {layers} and {blocks}"):
        make_layout("flash_attn_nhd", SMALL, num_layers=layers, num_blocks=blocks)


def test_refuses_specs_it_cannot_hold() -> None:
    unlike = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, head_size_v=4, dtype="float16")
    with pytest.raises(LayoutError, match=r"head_size 8 and head_size_v 4 differ"):
        make_layout("flash_attn_nhd", unlike, num_layers=1, num_blocks=1)
    padded = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float16", page_size_padded=256)
    with pytest.raises(LayoutError, match=r"page_size_padded is 256"):
        make_layout("flash_attn_nhd", padded, num_layers=1, num_blocks=1)


def axes_of(**changes: tuple[int, int]) -> tuple[Axis, ...]:
    """A packed layout of 2-byte elements with some axes' (extent, stride) changed; 192 bytes."""
    packed = {
        "layer": (2, 96), "kv": (2, 48), "block": (2, 24), "token": (3, 8), "head": (2, 4), "channel": (2, 2),
    }  # fmt: skip
    return tuple(Axis(name, *sizes) for name, sizes in (packed | changes).items())


def test_the_axes_helper_is_right() -> None:
    KVCacheLayout("packed", axes_of(), 2, 192)


@pytest.mark.parametrize(
    ("axes", "size", "message"),
    [
        (axes_of()[1:], 192, "needs each of layer"),
        ((*axes_of(), Axis("token", 1, 1)), 192, "needs each of layer"),
        ((*axes_of()[1:], Axis("page", 2, 96)), 192, "needs each of layer"),
        (axes_of(), 191, "ends at byte 192, beyond its region of 191"),
        (axes_of(layer=(2, 100)), 192, "ends at byte 196, beyond its region of 192"),
        (axes_of(head=(0, 4)), 192, "1 or more"),
        (axes_of(head=(2, 0)), 192, "1 or more"),
        (axes_of(head=(2, -4)), 192, "1 or more"),
        (axes_of(head=(2, 3)), 192, "axis head steps 3 bytes, less than the 4 bytes of axis channel inside it"),
        (axes_of(kv=(2, 24)), 192, "axis kv steps 24 bytes, less than the 48 bytes of axis block inside it"),
        (axes_of(channel=(2, 1)), 192, "axis channel steps 1 bytes, less than the 2 bytes of axis element"),
        (tuple(reversed(axes_of())), 192, "less than"),
    ],
)
def test_refuses_impossible_axes(axes: tuple[Axis, ...], size: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        KVCacheLayout("wrong", axes, 2, size)


def test_gaps_between_pages_are_allowed() -> None:
    padded = KVCacheLayout("padded", axes_of(block=(2, 32), kv=(2, 64), layer=(2, 128)), 2, 256)
    assert padded.bytes_per_token == 16


def test_an_axis_of_one_step_overlaps_nothing() -> None:
    """vLLM gives such axes odd strides; with one step they put nothing beside itself."""
    KVCacheLayout("one head", axes_of(head=(1, 2)), 2, 192)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("first", "second"), [("head", "token"), ("kv", "block"), ("token", "channel")])
def test_swapped_reading(name: str, first: str, second: str) -> None:
    """The wrong reading for fault injection: same bytes, same extents, other places; twice is the original."""
    layout = make_layout(name, SMALL, num_layers=2, num_blocks=3)
    swapped = layout.with_swapped(first, second)
    assert swapped.size_bytes == layout.size_bytes
    assert {a.name: a.extent for a in swapped.axes} == {a.name: a.extent for a in layout.axes}
    assert swapped.axes != layout.axes
    assert first in swapped.name
    assert swapped.with_swapped(first, second).axes == layout.axes
