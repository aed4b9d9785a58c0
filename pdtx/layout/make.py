"""From a preset's name and a spec to a layout."""

from pdtx.errors import LayoutError
from pdtx.kvspec import AttentionSpec, FullAttentionSpec, dtype_size
from pdtx.layout.elements import KVCacheLayout, packed
from pdtx.layout.packing import Frame, check_split
from pdtx.layout.parted import PartedLayout, make_parted_layout
from pdtx.layout.plain import check_plain
from pdtx.layout.presets import (
    ELEMENT_ORDERS,
    PARTED_ORDERS,
    RECORD_ORDERS,
    layout_name,
    preset_name,
)
from pdtx.layout.records import RecordLayout, make_record_layout


def make_layout(
    name: str, spec: FullAttentionSpec, *, num_layers: int, num_blocks: int, kernel_block_size: int | None = None
) -> KVCacheLayout:
    """Return a preset's layout for num_layers equal layers of num_blocks blocks in one region.

    name: one of ELEMENT_ORDERS.
    kernel_block_size: tokens in a step of the block axis, where that is less than block_size; the layout then has
    num_blocks * block_size / kernel_block_size of them, see StridedLayout.block_steps.
    A spec with page_size_padded gives pages that far apart, where a page of the preset lies in one piece.

    Raises LayoutError for an unknown name, or for a spec that the preset cannot hold.
    """
    name = layout_name(name)
    check_plain(name, spec)
    if spec.head_size_v != spec.head_size:
        raise LayoutError(
            f"{name} keeps K and V alike; head_size {spec.head_size} and head_size_v {spec.head_size_v} differ"
        )
    frame = Frame.of(name, spec, num_layers=num_layers, num_blocks=num_blocks, kernel_block_size=kernel_block_size)
    layout = packed(
        name,
        ELEMENT_ORDERS[name],
        {**frame.extents(), "kv": 2, "head": spec.num_kv_heads, "channel": spec.head_size},
        dtype_size(spec.dtype),
        kernel_blocks=frame.kernel_blocks,
        page_size_padded=spec.page_size_padded,
    )
    check_split(layout)
    return layout


def any_layout(
    name: str, spec: AttentionSpec, *, num_layers: int, num_blocks: int, kernel_block_size: int | None = None
) -> KVCacheLayout | PartedLayout | RecordLayout:
    """Return the layout of a preset of any kind; arguments as in make_layout. Raises LayoutError."""
    name = preset_name(name)
    if name in RECORD_ORDERS:
        return make_record_layout(
            name, spec, num_layers=num_layers, num_blocks=num_blocks, kernel_block_size=kernel_block_size
        )
    if not isinstance(spec, FullAttentionSpec):
        raise LayoutError(f"{name} holds plain full attention, not {type(spec).__name__}")
    make = make_parted_layout if name in PARTED_ORDERS else make_layout
    return make(name, spec, num_layers=num_layers, num_blocks=num_blocks, kernel_block_size=kernel_block_size)
