"""From a preset's name and a spec to a layout."""

from pdtx.kvspec import KVCacheSpec, dtype_size
from pdtx.layout.elements import KVCacheLayout, packed
from pdtx.layout.packing import Frame, check_split
from pdtx.layout.parted import PartedLayout, make_parted_layout
from pdtx.layout.plain import check_alike, check_plain
from pdtx.layout.presets import (
    ELEMENT_ORDERS,
    PARTED_ORDERS,
    RECORD_ORDERS,
    STATE_ORDERS,
    layout_name,
    preset_name,
)
from pdtx.layout.quantized import QuantizedLayout, split_scales
from pdtx.layout.records import RecordLayout, make_record_layout
from pdtx.layout.states import StateLayout, make_state_layout

AnyLayout = KVCacheLayout | PartedLayout | RecordLayout | QuantizedLayout | StateLayout
"""Every kind there is; all are Layouts."""


def make_layout(
    name: str, spec: KVCacheSpec, *, num_layers: int, num_blocks: int, kernel_block_size: int | None = None
) -> KVCacheLayout:
    """Return a preset's layout for num_layers equal layers of num_blocks blocks in one region.

    name: one of ELEMENT_ORDERS.
    spec: of any class that keeps a key and a value for every token, in elements of its dtype.
    kernel_block_size: tokens in a step of the block axis, where that is less than block_size; the layout then has
    num_blocks * block_size / kernel_block_size of them, see StridedLayout.block_steps.
    A spec with page_size_padded gives pages that far apart, where a page of the preset lies in one piece.

    Raises LayoutError for an unknown name, or for a spec that the preset cannot hold.
    """
    name = layout_name(name)
    plain = check_plain(name, spec)
    check_alike(name, plain)
    frame = Frame.of(name, plain, num_layers=num_layers, num_blocks=num_blocks, kernel_block_size=kernel_block_size)
    layout = packed(
        name,
        ELEMENT_ORDERS[name],
        {**frame.extents(), "kv": 2, "head": plain.num_kv_heads, "channel": plain.head_size},
        dtype_size(plain.dtype),
        kernel_blocks=frame.kernel_blocks,
        page_size_padded=plain.page_size_padded,
    )
    check_split(layout)
    return layout


def any_layout(
    name: str, spec: KVCacheSpec, *, num_layers: int, num_blocks: int, kernel_block_size: int | None = None
) -> AnyLayout:
    """Return the layout of a preset of any kind for a spec of any class; arguments as in make_layout.

    Raises LayoutError for an unknown name, or for a spec that the preset cannot hold.
    """
    name = preset_name(name)
    size = {"num_layers": num_layers, "num_blocks": num_blocks}
    if name in STATE_ORDERS:
        return make_state_layout(name, spec, **size, kernel_block_size=kernel_block_size)
    if name in RECORD_ORDERS:
        return split_scales(make_record_layout(name, spec, **size, kernel_block_size=kernel_block_size), spec)
    if name in PARTED_ORDERS:
        return make_parted_layout(name, spec, **size, kernel_block_size=kernel_block_size)
    return make_layout(name, spec, **size, kernel_block_size=kernel_block_size)
