"""Every layout against what vLLM itself returns: shapes, strides, and how many pieces a block lies in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from pdtx import kvspec
from pdtx.errors import LayoutError
from pdtx.layout import (
    AnyLayout,
    KVCacheLayout,
    PartedLayout,
    QuantizedLayout,
    StridedLayout,
    any_layout,
)
from tests.vectors import Case, load_cases, load_essential, make_spec

ITEM_BYTES = {"bfloat16": 2, "float32": 4, "uint8": 1, "int8": 1}

# --- what the two versions share ----------------------------------------------------------------------------------


def pieces_of(layout: AnyLayout) -> list[tuple[int, StridedLayout]]:
    """The strided layouts that a layout consists of, each with its place in the region."""
    if isinstance(layout, QuantizedLayout):
        return [(0, layout.whole)]  # as vLLM sees it
    return [(part.offset, part.layout) for part in layout.parts]


def places(layout: AnyLayout, *left_out: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The bytes at which elements begin, in order, over all axes but those left out; duplicates show."""
    every = []
    for offset, piece in pieces_of(layout):
        found = np.full(1, offset, np.int64)
        for axis in piece.axes:
            if axis.name not in left_out:
                found = np.add.outer(found, np.arange(axis.extent) * axis.stride).reshape(-1)
        every.append(found)
    return np.sort(np.concatenate(every))


def contiguous_runs(layout: AnyLayout, *left_out: str) -> tuple[int, int]:
    """Number and bytes of the pieces in which one step of the axes left out lies in memory, by listing its elements."""
    found = places(layout, *left_out)
    itemsize = pieces_of(layout)[0][1].itemsize
    pieces = 1 + int((np.diff(found) != itemsize).sum())
    return pieces, len(found) * itemsize // pieces


def as_tensor(
    layout: AnyLayout, axes: tuple[str, ...], itemsize: int, separate: tuple[str, ...] = ()
) -> tuple[list[int], list[int]]:
    """Shape, and strides in bytes, of a tensor with these axes of elements of itemsize, as vLLM sees it.

    "content", the last, is what lies together inside the others: channels, a record, or a K and then a V of these
    where kv is neither among the axes nor separate.
    """
    *outer, content = axes
    assert content == "content"
    widths = list[int]()
    for offset, piece in pieces_of(layout):
        inner = "channel" if isinstance(piece, KVCacheLayout) else "byte"
        assert piece.stride(inner) == piece.itemsize
        assert offset == sum(widths), "V must follow K"
        widths.append(piece.extent(inner) * piece.itemsize)
        if "kv" in piece.by_name and piece.extent("kv") > 1 and "kv" not in (*outer, *separate):
            assert piece.stride("kv") == widths[-1], "V must follow K"
            widths.append(widths[-1])
    first = pieces_of(layout)[0][1]
    for _, piece in pieces_of(layout):
        assert all(piece.by_name[a] == first.by_name[a] for a in outer), "K and V must share their steps"
    shape = [*(first.extent(a) for a in outer), sum(widths) // itemsize]
    return shape, [*(first.stride(a) for a in outer), itemsize]


# --- vLLM 0.22 ----------------------------------------------------------------------------------------------------

KV_FIRST = ("kv", "block", "token", "head", "content")
BLOCK_FIRST = ("block", "kv", "token", "head", "content")
SLOTS = ("block", "token", "head", "content")
LATENT = ("block", "token", "content")

# backend -> preset and the axes of the tensor that vLLM hands to it. {} is NHD or HND.
BACKENDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "FLASH_ATTN": ("flash_attn_{}", KV_FIRST),
    "FLASHINFER": ("flashinfer_{}", BLOCK_FIRST),
    "TRITON_ATTN": ("triton_{}", BLOCK_FIRST),
    "FLASH_ATTN_DIFFKV": ("flash_attn_diffkv_{}", SLOTS),
    "FLEX_ATTENTION": ("flex_attn", KV_FIRST),
    "ROCM_ATTN": ("rocm_attn", KV_FIRST),
    "ROCM_AITER_FA": ("rocm_attn", KV_FIRST),
    "ROCM_AITER_UNIFIED": ("rocm_attn", KV_FIRST),
    "CPU_ATTN": ("cpu_attn", ("kv", "block", "head", "token", "content")),
    "TURBOQUANT": ("turboquant", SLOTS),
    "CACHE_ONLY(hidden states)": ("hidden_states", SLOTS),
    "FLASHMLA": ("mla", LATENT),
    "TRITON_MLA": ("mla", LATENT),
    "FLASH_ATTN_MLA": ("mla", LATENT),
    "FLASHMLA_SPARSE": ("mla", LATENT),
    "FLASHINFER_MLA_SPARSE": ("mla", LATENT),
    "DEEPSEEK_V32_INDEXER": ("deepseek_indexer", LATENT),
    "DEEPSEEK_V4_INDEXER": ("deepseek_indexer", LATENT),
    "DEEPSEEK_SPARSE_SWA": ("deepseek_v4", LATENT),
    "DEEPSEEK_V4_FLASHMLA": ("deepseek_v4", LATENT),
    "DEEPSEEK_V4_COMPRESSOR": ("deepseek_v4_compressor", LATENT),
}
HYBRIDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "FLASHINFER + MAMBA hybrid": ("flashinfer_nhd", BLOCK_FIRST),
    "FLASH_ATTN + MAMBA hybrid": ("flash_attn_mamba", KV_FIRST),
}


def not_covered_022(case: Case) -> str | None:
    """Why there is nothing to compare a case with, if there is not: a rule, not a list.

    A backend's kernel that takes no such block has no layout for it; the strides would be clear, so ours exists.
    """
    if "Block size must be a multiple of 16" in case.get("error", ""):
        return "the backend refuses blocks of 8 tokens, the layouts do not"
    return None


def preset_022(case: Case) -> str:
    preset, _ = BACKENDS[case["backend"]]
    mode = case["spec"]["fields"].get("kv_quant_mode")
    if mode == "NVFP4":
        preset = preset.replace("_{}", "_nvfp4_{}")
    elif "PER_TOKEN_HEAD" in str(mode):
        preset = preset.replace("_{}", "_per_token_head_{}")
    return preset.format(case["kv_cache_layout_setting"].lower())


def check_states(case: Case, name: str = "mamba_sd") -> None:
    """The tensors of a Mamba layer's states: shapes, strides, places, and the runs of a block."""
    spec = make_spec(case["spec"]["spec_class"], case["spec"]["fields"])
    blocks, page = case["num_blocks"], case["spec"]["page_size_bytes"]
    layout = any_layout(name, spec, num_layers=2, num_blocks=blocks)
    assert layout.size_bytes == 2 * blocks * page
    theirs, ours = list[Bytes](), list[Bytes]()
    for part, tensor in zip(layout.parts, case["state_tensors"], strict=True):
        own, item = part.layout, ITEM_BYTES[tensor["dtype"]]
        view = torch.empty_strided(tensor["shape"], tensor["stride_elements"], device="meta")
        axes = ("block", "step", "channel")
        if part.name == "ssm":
            view, axes = view.flatten(2), ("block", "head", "element")  # one dense matrix for each head
        assert (part.offset, own.itemsize) == (tensor["storage_offset_bytes"], item), case["case_id"]
        assert [own.extent(axis) for axis in axes] == list(view.shape), case["case_id"]
        assert [own.stride(axis) for axis in axes] == [step * item for step in view.stride()], case["case_id"]
        assert own.stride("layer") == blocks * page, "one tensor behind the other"
        theirs.append(bytes_of_a_block(tensor["storage_offset_bytes"], view.shape[1:], view.stride()[1:], item))
        inside = [axis for axis in own.axes if axis.name not in ("layer", "block")]
        extents, strides = [axis.extent for axis in inside], [axis.stride // item for axis in inside]
        ours.append(bytes_of_a_block(part.offset, extents, strides, item))
    assert runs_of(theirs) == runs_of(ours) == (1, spec_bytes(spec)), case["case_id"]


Bytes = np.ndarray[Any, np.dtype[np.int64]]


def bytes_of_a_block(start: int, shape: Sequence[int], steps: Sequence[int], itemsize: int) -> Bytes:
    """Every byte of a strided tensor of elements; steps in elements."""
    found = np.full(1, start, np.int64)
    for extent, step in zip((*shape, itemsize), (*(step * itemsize for step in steps), 1), strict=True):
        found = np.add.outer(found, np.arange(extent) * step).reshape(-1)
    return found


def runs_of(states: Sequence[Bytes]) -> tuple[int, int]:
    """Number and bytes of the pieces in which the states of a block lie, which need not be of one itemsize."""
    found = np.sort(np.concatenate(states))
    pieces = 1 + int((np.diff(found) != 1).sum())
    return pieces, len(found) // pieces


def spec_bytes(spec: kvspec.KVCacheSpec) -> int:
    assert isinstance(spec, kvspec.MambaSpec)
    return spec.real_page_size_bytes


def check_hybrid(case: Case) -> None:
    """The attention layer of a model with Mamba layers, of which the view is given; and the states beside it."""
    check_states(case)
    name, axes = HYBRIDS[case["backend"]]
    of = case["attention_spec"]
    spec = make_spec(of["spec_class"], of["fields"])
    kernel = case["attention_kernel_block_size"]
    layout = any_layout(name, as_attention(spec), num_layers=2, num_blocks=case["num_blocks"], kernel_block_size=kernel)
    itemsize = ITEM_BYTES[of["fields"]["dtype"]]
    shape, strides = as_tensor(layout, axes, itemsize)
    assert shape == case["attention_view_shape"], case["case_id"]
    assert strides == [step * itemsize for step in case["attention_view_stride_elements"]], case["case_id"]
    assert pieces_of(layout)[0][1].stride("layer") == case["num_blocks"] * spec.page_size_bytes


def as_attention(spec: kvspec.KVCacheSpec) -> kvspec.AttentionSpec:
    assert isinstance(spec, kvspec.AttentionSpec)
    return spec


def check_022(case: Case) -> None:
    if case["backend"] == "MAMBA only":
        check_states(case)
        return
    if case["backend"] in HYBRIDS:
        check_hybrid(case)
        return
    name, axes = preset_022(case), BACKENDS[case["backend"]][1]
    spec = as_attention(make_spec(case["spec"]["spec_class"], case["spec"]["fields"]))
    size = {"num_blocks": case["num_blocks"], "kernel_block_size": case["kernel_block_size"]}
    layout = any_layout(name, spec, num_layers=1, **size)
    shape, strides = as_tensor(layout, axes, ITEM_BYTES[case["view_dtype"]])
    assert shape == case["view_shape"], case["case_id"]
    assert strides == case["view_stride_bytes"], case["case_id"]
    runs = case["one_block_contiguous_runs"], case["one_block_bytes_per_run"]
    assert contiguous_runs(layout, "layer", "block") == runs, case["case_id"]
    assert layout.size_bytes == case["num_blocks"] * case["spec"]["page_size_bytes"], case["case_id"]
    two = any_layout(name, spec, num_layers=2, **size)
    assert as_tensor(two, axes, ITEM_BYTES[case["view_dtype"]]) == (shape, strides), "a tensor for each layer"
    assert pieces_of(two)[0][1].stride("layer") == layout.size_bytes, "one tensor behind the other"
    check_cross_layer(case, f"{name}_cross_layer", spec, axes, size)


def check_cross_layer(
    case: Case, name: str, spec: kvspec.AttentionSpec, axes: tuple[str, ...], size: Mapping[str, int]
) -> None:
    """The form with all layers in one tensor, where vLLM has one; where it fails, ours is refused or unknown."""
    if case.get("cross_layer_physical_shape") is None:
        with pytest.raises(LayoutError, match=r"no padded form|unknown layout"):
            any_layout(name, spec, num_layers=3, **size)
        return
    layout = any_layout(name, spec, num_layers=case["cross_layer_num_layers"], **size)
    itemsize = ITEM_BYTES[case["view_dtype"]]
    order = tuple(
        a.name for a in pieces_of(layout)[0][1].axes if not (isinstance(layout, PartedLayout) and a.name == "kv")
    )
    shape, _ = as_tensor(layout, (*order[:-1], "content"), itemsize)
    assert shape == case["cross_layer_physical_shape"], case["case_id"]
    shape, strides = as_tensor(layout, axes, itemsize)
    assert shape == case["cross_layer_layer1_view_shape"], case["case_id"]
    assert strides == [step * itemsize for step in case["cross_layer_layer1_view_stride_elements"]], case["case_id"]
    offset = case["cross_layer_layer1_storage_offset_elements"] * itemsize
    assert pieces_of(layout)[0][1].stride("layer") == offset, case["case_id"]
    runs = (
        case["cross_layer_one_block_all_layers_contiguous_runs"],
        case["cross_layer_one_block_all_layers_bytes_per_run"],
    )
    assert contiguous_runs(layout, "block") == runs, case["case_id"]


# --- vLLM 0.32 ----------------------------------------------------------------------------------------------------


def spec_032(case: Case) -> kvspec.AttentionSpec:
    """The same cache as one of our specs, whose fields are 0.22's."""
    name, given = case["spec"]["spec_class"], dict(case["spec"]["fields"])
    given["compress_ratio"] = given["tokens_per_state"]
    if given["kv_quant_mode"].startswith("TURBOQUANT"):
        name, given["kv_quant_mode"] = "TQFullAttentionSpec", "NONE"
        given["tq_slot_size"] = given["state_content_bytes"]
    ours = {field.name for field in fields(getattr(kvspec, name))}
    return as_attention(make_spec(name, {key: value for key, value in given.items() if key in ours}))


def preset_032(case: Case, spec: kvspec.AttentionSpec) -> str:
    order, mode = case["layout"].lower(), spec.kv_quant_mode
    if isinstance(spec, kvspec.HiddenStateCacheSpec):
        return f"hidden_states_{order}"
    if isinstance(spec, kvspec.MLAAttentionSpec):
        return f"{'deepseek_v4' if spec.model_version == 'deepseek_v4' else 'mla'}_{order}"
    if isinstance(spec, kvspec.TQFullAttentionSpec):
        return f"turboquant_{order}"
    if mode.is_per_token_head:
        return f"per_token_head_{order}"
    if mode is kvspec.KVQuantMode.NVFP4:
        return f"nvfp4_{order}"
    assert isinstance(spec, kvspec.FullAttentionSpec)
    return f"{'vllm' if spec.head_size == spec.head_size_v else 'diffkv'}_{order}"


def check_032(case: Case) -> None:
    spec = spec_032(case)
    kernel, num_layers = case["kernel_block_size"], case["num_layers"]
    name = preset_032(case, spec)

    def build() -> AnyLayout:
        blocks = case["num_blocks"]
        return any_layout(name, spec, num_layers=num_layers, num_blocks=blocks, kernel_block_size=kernel)

    if "error" in case:
        with pytest.raises(LayoutError, match=r"cannot be split into|has no padded form"):
            build()
        return
    layout = build()
    if kernel is None:
        shape, strides = as_lbhnc(layout, 1)
        assert shape == case["logical_shape_bytes_LBHNC"], case["case_id"]
        assert strides == case["strides_bytes_LBHNC"], case["case_id"]
    itemsize = ITEM_BYTES[case["view_dtype"]]
    shape, strides = as_lbhnc(layout, itemsize)
    for layer, view in enumerate(case["views"]):
        assert shape[1:] == view["shape_BHNC"], case["case_id"]
        assert strides[1:] == [step * itemsize for step in view["stride_elements"]], case["case_id"]
        assert layer * strides[0] == view["storage_offset_bytes"], case["case_id"]
    assert len(case["views"]) == shape[0] == num_layers
    runs = case["one_kernel_block_one_layer_contiguous_runs"], case["one_kernel_block_one_layer_bytes_per_run"]
    assert contiguous_runs(layout, "layer", "block") == runs, case["case_id"]


def as_lbhnc(layout: AnyLayout, itemsize: int) -> tuple[list[int], list[int]]:
    """0.32's logical tensor [L, B, H, N, C]. In NVFP4 its heads are all K heads, then all V heads."""
    axes = ("layer", "block", "head", "token", "content")
    if not layout.name.startswith("nvfp4"):
        return as_tensor(layout, axes, itemsize)
    shape, strides = as_tensor(layout, axes, itemsize, separate=("kv",))
    kv, head = (pieces_of(layout)[0][1].by_name[axis] for axis in ("kv", "head"))
    assert kv.stride == head.extent * head.stride, "V heads must follow K heads"
    shape[2] *= kv.extent
    return shape, strides


# --- the tests ----------------------------------------------------------------------------------------------------


def compare(cases: list[Case], check: Callable[[Case], None], not_covered: Callable[[Case], str | None]) -> int:
    """Check every case that is covered and return how many, after printing why the others are not."""
    reasons = dict[str, int]()
    for case in cases:
        if reason := not_covered(case):
            reasons[reason] = reasons.get(reason, 0) + 1
        else:
            check(case)
    print(f"{len(cases) - sum(reasons.values())} of {len(cases)} cases agree; not covered: {reasons}")  # noqa: T201
    return len(cases) - sum(reasons.values())


def test_vector_layouts_022(record_property: Any) -> None:  # noqa: ANN401 - pytest's own
    cases = load_cases("layouts_0.22.json")
    assert {case["backend"] for case in cases} == {*BACKENDS, *HYBRIDS, "MAMBA only"}
    refused = [case for case in cases if "error" in case]
    assert sum(case["backend"] == "MAMBA only" for case in cases)
    agreed = compare(cases, check_022, not_covered_022)
    assert agreed == len(cases) - len(refused), "all that vLLM lays out"
    record_property("vector_cases", agreed)


def test_vector_states_tell_sd_from_ds() -> None:
    """vLLM's tensors of convolutions are SD by default: read as DS they must be noticed."""
    for case in load_essential("layouts_0.22.json"):
        if "state_tensors" in case:
            check_states(case)
            with pytest.raises(AssertionError, match=case["case_id"]):
                check_states(case, "mamba_ds")


def test_vector_layouts_032(record_property: Any) -> None:  # noqa: ANN401 - pytest's own
    """All of them: where 0.32 refuses a split or a padding, so do we."""
    cases = load_cases("layouts_0.32.json")
    record_property("vector_cases", compare(cases, check_032, lambda _: None))


@pytest.mark.parametrize("version", ["0.22", "0.32"])
def test_essential_vector_layouts_of_every_kind(version: str) -> None:
    """A case of each backend, order, and kind of page, kept in the repository."""
    cases = load_essential(f"layouts_{version}.json")
    check = check_022 if version == "0.22" else check_032
    assert compare(cases, check, not_covered_022 if version == "0.22" else lambda _: None) == len(cases)
