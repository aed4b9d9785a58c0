"""Layouts of recurrent layers' states: strides by hand, single bytes through vLLM's own views, and what is refused."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from pdtx.errors import LayoutError
from pdtx.kvspec import FullAttentionSpec, KVCacheSpec, MambaSpec
from pdtx.layout import (
    STATE_ORDERS,
    ConvStateLayout,
    HeadStateLayout,
    Part,
    StateLayout,
    any_layout,
    layout_name,
    make_state_layout,
    preset_name,
)

# 3 inputs of 4 channels in bfloat16 (24 bytes), 2 heads of (2, 3) in float32 (48 bytes), 8 bytes of padding.
MAMBA2 = MambaSpec(
    block_size=512, shapes=((3, 4), (2, 2, 3)), dtypes=("bfloat16", "float32"), page_size_padded=80
)  # fmt: skip
KDA = MambaSpec(
    block_size=512, shapes=((3, 4), (3, 4), (3, 4), (2, 4, 4)), dtypes=("bfloat16", "bfloat16", "bfloat16", "float32")
)
LAYERS, BLOCKS = 2, 3
TORCH = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def layout_of(name: str, spec: KVCacheSpec = MAMBA2) -> StateLayout:
    return make_state_layout(name, spec, num_layers=LAYERS, num_blocks=BLOCKS)


def strides_of(part: Part) -> dict[str, tuple[int, int]]:
    return {axis.name: (axis.extent, axis.stride) for axis in part.layout.axes}


class TestStrides:
    def test_sd(self) -> None:
        """One channel beside the other: the default."""
        conv, ssm = layout_of("mamba_sd").parts
        assert (conv.name, conv.offset, conv.layout.itemsize) == ("conv", 0, 2)
        assert strides_of(conv) == {"layer": (2, 240), "block": (3, 80), "step": (3, 8), "channel": (4, 2)}
        assert (ssm.name, ssm.offset, ssm.layout.itemsize) == ("ssm", 24, 4)
        assert strides_of(ssm) == {"layer": (2, 240), "block": (3, 80), "head": (2, 24), "element": (6, 4)}

    def test_ds(self) -> None:
        """The last inputs of a channel side by side; the recurrence's state does not change."""
        conv, ssm = layout_of("mamba_ds").parts
        assert strides_of(conv) == {"layer": (2, 240), "block": (3, 80), "channel": (4, 6), "step": (3, 2)}
        assert [axis.name for axis in conv.layout.axes] == ["layer", "block", "channel", "step"]
        assert strides_of(ssm) == strides_of(layout_of("mamba_sd").parts[1])

    @pytest.mark.parametrize("name", STATE_ORDERS)
    def test_the_whole(self, name: str) -> None:
        layout = layout_of(name)
        assert any_layout(name, MAMBA2, num_layers=LAYERS, num_blocks=BLOCKS) == layout
        assert (layout.name, layout.size_bytes) == (name, 2 * 3 * 80)
        assert (layout.block_size, layout.blocks_per_manager_block, layout.bytes_per_block) == (1, 1, 72)
        assert layout.sliceable == {"layer", "block"}
        assert [part.layout.sliceable for part in layout.parts] == [
            frozenset(part.layout.names) for part in layout.parts
        ]
        assert layout.block_steps([2, 1]).tolist() == [2, 1]
        assert layout.movable

    @pytest.mark.parametrize(
        ("shapes", "names"),
        [
            (((3, 8192), (8192, 16)), ["conv", "ssm"]),  # Jamba: the state of Mamba 1 has two dimensions as well
            (((3, 8448), (128, 64, 128)), ["conv", "ssm"]),  # Bamba
            (((3, 4096), (3, 4096), (3, 4096), (32, 128, 128)), ["conv0", "conv1", "conv2", "ssm"]),  # Kimi, vLLM 0.22
            (((3, 12288), (32, 128, 128)), ["conv", "ssm"]),  # Kimi, vLLM 0.32
            (((64, 128, 128),), ["ssm"]),  # MiniMax
            (((2, 2048),), ["conv"]),  # LFM2
        ],
    )
    def test_which_states_are_convolutions(self, shapes: tuple[tuple[int, ...], ...], names: list[str]) -> None:
        layout = layout_of("mamba_ds", MambaSpec(block_size=512, shapes=shapes, dtypes=("bfloat16",) * len(shapes)))
        assert [part.name for part in layout.parts] == names
        kinds = [HeadStateLayout if name == "ssm" else ConvStateLayout for name in names]
        assert [type(part.layout) for part in layout.parts] == kinds
        assert layout.parts[-1].layout.extent("head" if names[-1] == "ssm" else "step") == shapes[-1][0]

    def test_jambas_state_begins_at_byte_49152(self) -> None:
        spec = MambaSpec(
            block_size=512, shapes=((3, 8192), (8192, 16)), dtypes=("bfloat16",) * 2, page_size_padded=327_680
        )
        conv, ssm = layout_of("mamba_sd", spec).parts
        assert (conv.offset, ssm.offset) == (0, 49_152)
        assert conv.layout.stride("block") == ssm.layout.stride("block") == 327_680


def views(memory: torch.Tensor, spec: MambaSpec, layer: int, *, dim_first: bool) -> list[torch.Tensor]:
    """The state tensors as vLLM cuts them out of a layer's memory, in logical order (block, *shape).

    With dim_first its shapes of convolutions are (channels, inputs), and kernels see them transposed.
    """
    page = spec.page_size_bytes
    own = memory[layer * BLOCKS * page : (layer + 1) * BLOCKS * page]
    found, offset = list[torch.Tensor](), 0
    for place, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True)):
        conv = place < len(spec.shapes) - 1
        held = shape[::-1] if conv and dim_first else shape
        elements = own.view(TORCH[dtype])
        size = (BLOCKS, *held)
        inner = torch.empty(held, device="meta").stride()
        view = torch.as_strided(
            elements, size, (page // elements.itemsize, *inner), elements.storage_offset() + offset // elements.itemsize
        )
        found.append(view.transpose(1, 2) if held != shape else view)
        offset += view[0].numel() * view.itemsize
    return found


def value_at(memory: torch.Tensor, part: Part, dtype: str, **at: int) -> float:
    place = part.offset + sum(part.layout.stride(axis) * step for axis, step in at.items())
    return float(memory[place : place + part.layout.itemsize].view(TORCH[dtype])[0])


def mismatches(layout: StateLayout, spec: MambaSpec, *, dim_first: bool) -> int:
    """Fill all states through vLLM's views, each element with its own number, and count those not found."""
    memory = torch.zeros(LAYERS * BLOCKS * spec.page_size_bytes, dtype=torch.uint8)
    wrong = 0
    for layer in range(LAYERS):
        for view in views(memory, spec, layer, dim_first=dim_first):
            numbers = torch.arange(view.numel()).reshape(view.shape) + 100 * layer
            view.copy_(numbers)
            assert torch.equal(view.to(torch.int64), numbers), "bfloat16 must hold the numbers"
    for layer in range(LAYERS):
        for part, view, dtype in zip(
            layout.parts, views(memory, spec, layer, dim_first=dim_first), spec.dtypes, strict=True
        ):
            inner = part.layout.names[2:]
            logical = view.reshape(BLOCKS, *(part.layout.extent(axis) for axis in inner))
            for index in product(*(range(extent) for extent in logical.shape)):
                at = dict(zip(("block", *inner), index, strict=True))
                wrong += value_at(memory, part, dtype, layer=layer, **at) != float(logical[index])
    return wrong


@pytest.mark.parametrize("spec", [MAMBA2, KDA], ids=["mamba2", "kda"])
@pytest.mark.parametrize("name", STATE_ORDERS)
def test_every_element_lies_where_vllm_puts_it(name: str, spec: MambaSpec) -> None:
    dim_first = name == "mamba_ds"
    assert mismatches(layout_of(name, spec), spec, dim_first=dim_first) == 0
    assert mismatches(layout_of(name, spec), spec, dim_first=not dim_first) > 0, "the other order must be noticed"


class TestRefusals:
    def test_names(self) -> None:
        assert preset_name("Mamba-DS") == "mamba_ds"
        with pytest.raises(LayoutError, match="unknown layout"):
            layout_name("mamba_sd")
        with pytest.raises(LayoutError, match="triton_nhd does not hold states; one of mamba_sd, mamba_ds does"):
            layout_of("triton_nhd")

    def test_specs_of_tokens(self) -> None:
        spec = FullAttentionSpec(block_size=4, num_kv_heads=3, head_size=6, dtype="float16")
        with pytest.raises(LayoutError, match="mamba_sd holds the states of recurrent layers, not FullAttentionSpec"):
            layout_of("mamba_sd", spec)

    @pytest.mark.parametrize(
        ("shapes", "text"),
        [
            (
                ((3, 4, 5), (2, 2, 3)),
                r"every state but the last is a convolution's \(inputs, channels\), not \(3, 4, 5\)",
            ),
            (((7,), (2, 2, 3)), r"every state but the last is a convolution's"),
            (((3, 4), ()), "not a single number"),
        ],
    )
    def test_shapes_that_are_no_states(self, shapes: tuple[tuple[int, ...], ...], text: str) -> None:
        with pytest.raises(LayoutError, match=text):
            layout_of("mamba_sd", replace(MAMBA2, shapes=shapes, page_size_padded=None))

    def test_elements_that_are_not_aligned(self) -> None:
        """vLLM's views count in elements; it asserts the same."""
        with pytest.raises(LayoutError, match="ssm begins at byte 18 of pages of 80 bytes, not at whole elements of 4"):
            layout_of("mamba_sd", replace(MAMBA2, shapes=((3, 3), (2, 2, 3))))
        with pytest.raises(LayoutError, match="ssm begins at byte 24 of pages of 82 bytes"):
            layout_of("mamba_sd", replace(MAMBA2, page_size_padded=82))

    def test_kernel_blocks(self) -> None:
        with pytest.raises(LayoutError, match="states are not split into kernel blocks of 16 tokens"):
            make_state_layout("mamba_sd", MAMBA2, num_layers=1, num_blocks=3, kernel_block_size=16)

    def test_sizes(self) -> None:
        with pytest.raises(LayoutError, match="1 or more layers and blocks, not 0 and 3"):
            make_state_layout("mamba_sd", MAMBA2, num_layers=0, num_blocks=3)

    def test_states_that_do_not_belong_together(self) -> None:
        layout = layout_of("mamba_sd")
        conv, ssm = layout.states
        with pytest.raises(LayoutError, match="has no states"):
            replace(layout, states=())
        with pytest.raises(LayoutError, match="ssm lies outside the region of 480"):
            replace(layout, states=(conv, replace(ssm, offset=ssm.offset + 4)))
        other = layout_of("mamba_sd", replace(MAMBA2, page_size_padded=88)).states[1]
        with pytest.raises(LayoutError, match="conv and ssm do not lie in the same pages"):
            replace(layout, states=(conv, other), size_bytes=528)
