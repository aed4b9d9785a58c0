"""Layouts of quantized heads whose scales lie behind all elements of a page's K or V: two regular parts."""

from dataclasses import dataclass, replace

from pdtx.errors import LayoutError
from pdtx.kvspec import AttentionSpec, KVCacheSpec, KVQuantMode, dtype_size
from pdtx.layout.base import Layout, Part
from pdtx.layout.records import RecordLayout
from pdtx.layout.strided import Axis

VALUE_SCALE_GROUP = 4
"""Tokens whose value scales of a head lie interleaved (vLLM's swizzle_scale_offset, as TRT-LLM's kernels read them)."""

_ELEMENTS_OF_A_SCALE = 16


@dataclass(frozen=True)
class QuantizedLayout(Layout):
    """A region of pages in whose K and V parts all elements come first, then all scales, both in one order.

    elements, scales: RecordLayouts of one page; a token of a head has a record in each. So heads and tokens can be told
    apart by strides, which one record for both could not. whole: the same pages as records whose inside is not known.
    Raises LayoutError if a part lies outside the region.
    """

    name: str
    elements: Part
    scales: Part
    size_bytes: int
    whole: RecordLayout

    def __post_init__(self) -> None:
        for part in self.parts:
            if part.offset < 0 or part.offset + part.layout.size_bytes > self.size_bytes:
                raise LayoutError(f"layout {self.name!r}: {part.name} lies outside the region of {self.size_bytes}")

    @property
    def parts(self) -> tuple[Part, Part]:
        """Elements, then scales."""
        return self.elements, self.scales


def split_scales(whole: RecordLayout, spec: KVCacheSpec) -> RecordLayout | QuantizedLayout:
    """Return an NVFP4 layout as its elements and its scales, where K and V of a page each lie in one piece.

    Other layouts are returned as they are; of NVFP4 in another order only whole parts of pages can be moved. Source of
    what lies where: vLLM's _nvfp4_split_data_scale, which has the elements of all tokens and heads of K or V first, and
    its swizzle_scale_offset, which needs whole groups of VALUE_SCALE_GROUP tokens and scales of a head.
    """
    inner = [axis.name for axis in whole.axes[-4:]]
    in_one_piece = inner[0] == "kv" and set(inner[1:3]) == {"token", "head"}
    if not isinstance(spec, AttentionSpec) or spec.kv_quant_mode is not KVQuantMode.NVFP4 or not in_one_piece:
        return whole
    if whole.block_size % VALUE_SCALE_GROUP or spec.head_size % (VALUE_SCALE_GROUP * _ELEMENTS_OF_A_SCALE):
        return whole
    records = whole.extent("token") * whole.extent("head")
    elements = spec.head_size // 2 * dtype_size(spec.dtype)
    scales = whole.extent("byte") - elements
    first = _narrowed(whole, "elements", elements, 0)
    second = _narrowed(whole, "scales", scales, records * elements, VALUE_SCALE_GROUP)
    return QuantizedLayout(whole.name, first, second, whole.size_bytes, whole)


def _narrowed(whole: RecordLayout, name: str, nbytes: int, offset: int, together: int = 1) -> Part:
    """Return the part of all records' elements or scales: as if nothing else lay in a page's K and V."""
    record = whole.extent("byte")
    axes = tuple(
        replace(axis, stride=axis.stride // record * nbytes) if axis.name in ("token", "head") else axis
        for axis in whole.axes[:-1]
    )
    layout = RecordLayout(
        f"{whole.name}.{name}",
        (*axes, Axis("byte", nbytes, 1)),
        1,
        whole.size_bytes - offset,
        whole.blocks_per_manager_block,
        tokens_together=together,
    )
    return Part(name, offset, layout)
