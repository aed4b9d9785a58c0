"""Layouts: where each element of a KV cache lies in memory, as named axes with byte strides.

A layout is named, never guessed from a shape: FlashAttention's (2, num_blocks, ...) and FlashInfer's
(num_blocks, 2, ...) have the same number of bytes, and at num_blocks = 2 the same shape.

Five kinds: KVCacheLayout (one stride an axis, every axis may be cut), PartedLayout (keys and values laid out
differently: two KVCacheLayouts in one region), RecordLayout (bytes whose inside is not known, cut only where
sliceable says so), QuantizedLayout (elements, then their scales, in each K and V of a page), StateLayout (the states of
recurrent layers, one after another in each page). All are Layouts: what a plan needs of each are its parts, which are
StridedLayouts.
"""

from pdtx.callable_package import make_callable
from pdtx.layout.base import Int64s, Layout, Part
from pdtx.layout.choose import cache_kind, layout_for, parse_layouts, require_held
from pdtx.layout.elements import AXIS_NAMES, KVCacheLayout
from pdtx.layout.make import AnyLayout, any_layout, make_layout
from pdtx.layout.parted import PartedLayout, make_parted_layout
from pdtx.layout.presets import (
    ELEMENT_ORDERS,
    LAYOUT_ORDERS,
    PARTED_ORDERS,
    RECORD_ORDERS,
    STATE_ORDERS,
    layout_name,
    preset_name,
)
from pdtx.layout.quantized import VALUE_SCALE_GROUP, QuantizedLayout
from pdtx.layout.records import RecordLayout, make_record_layout
from pdtx.layout.states import ConvStateLayout, HeadStateLayout, StateLayout, make_state_layout
from pdtx.layout.strided import Axis, StridedLayout

__all__ = [
    "AXIS_NAMES",
    "ELEMENT_ORDERS",
    "LAYOUT_ORDERS",
    "PARTED_ORDERS",
    "RECORD_ORDERS",
    "STATE_ORDERS",
    "VALUE_SCALE_GROUP",
    "AnyLayout",
    "Axis",
    "ConvStateLayout",
    "HeadStateLayout",
    "Int64s",
    "KVCacheLayout",
    "Layout",
    "Part",
    "PartedLayout",
    "QuantizedLayout",
    "RecordLayout",
    "StateLayout",
    "StridedLayout",
    "any_layout",
    "cache_kind",
    "layout_for",
    "layout_name",
    "make_layout",
    "make_parted_layout",
    "make_record_layout",
    "make_state_layout",
    "parse_layouts",
    "preset_name",
    "require_held",
]

make_callable(__name__, "pdtx.api.caches:layout")  # pdtx.layout(...), see docs/python.md
