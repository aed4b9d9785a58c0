"""Layouts whose keys and values do not share their strides: DiffKV, and vLLM 0.32 on CPUs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pdtx.errors import LayoutError
from pdtx.kvspec import FullAttentionSpec, dtype_size
from pdtx.layout.elements import KVCacheLayout
from pdtx.layout.packing import Frame, check_split, pack
from pdtx.layout.plain import check_plain
from pdtx.layout.presets import PARTED_ORDERS, preset_name
from pdtx.layout.strided import Axis


@dataclass(frozen=True)
class Part:
    """The keys or the values: their layout, whose kv axis has one step, beginning offset bytes into the region."""

    name: Literal["key", "value"]
    offset: int
    layout: KVCacheLayout


@dataclass(frozen=True)
class PartedLayout:
    """A region of size_bytes in which keys and values are laid out each by themselves, perhaps interleaved.

    A plan for it is two plans, key to key and value to value, each in its part's own coordinates.
    Raises LayoutError if a part lies outside the region or the parts disagree on what they hold.
    """

    name: str
    key: Part
    value: Part
    size_bytes: int

    def __post_init__(self) -> None:
        for part in self.parts:
            if part.offset < 0 or part.offset + part.layout.size_bytes > self.size_bytes:
                raise LayoutError(f"layout {self.name!r}: {part.name} lies outside the region of {self.size_bytes}")
            if part.layout.extent("kv") != 1:
                raise LayoutError(f"layout {self.name!r}: {part.name} must have one step of kv")
        for axis in ("layer", "block", "head", "token"):
            key, value = (part.layout.extent(axis) for part in self.parts)
            if key != value:
                raise LayoutError(f"layout {self.name!r}: keys have {key} steps of {axis}, values {value}")

    @property
    def parts(self) -> tuple[Part, Part]:
        """Keys, then values."""
        return self.key, self.value

    @property
    def sliceable(self) -> frozenset[str]:
        """The axes of which a part may be moved without the rest: all."""
        return self.key.layout.sliceable

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.key.layout.block_size

    @property
    def bytes_per_token(self) -> int:
        """Payload bytes of one token in one layer, K and V together."""
        return self.key.layout.bytes_per_token + self.value.layout.bytes_per_token

    @classmethod
    def of(cls, layout: KVCacheLayout) -> "PartedLayout":
        """Return a layout of plain elements as its keys and its values, to plan it against one that is parted."""
        if layout.extent("kv") != 2:
            raise LayoutError(f"{layout.name} has {layout.extent('kv')} steps of kv, not keys and values")
        axes = tuple(Axis(axis.name, 1 if axis.name == "kv" else axis.extent, axis.stride) for axis in layout.axes)
        return _parted(layout.name, axes, axes, layout.stride("kv"), layout)


def _parted(
    name: str, key: tuple[Axis, ...], value: tuple[Axis, ...], offset: int, whole: KVCacheLayout
) -> PartedLayout:
    """Put keys at the start and values offset bytes behind, in the region and the blocks of whole."""
    size, item, blocks = whole.size_bytes, whole.itemsize, whole.blocks_per_manager_block
    keys = KVCacheLayout(f"{name}.key", key, item, size, blocks)
    values = KVCacheLayout(f"{name}.value", value, item, size - offset, blocks)
    return PartedLayout(name, Part("key", 0, keys), Part("value", offset, values), size)


def make_parted_layout(
    name: str, spec: FullAttentionSpec, *, num_layers: int, num_blocks: int, kernel_block_size: int | None = None
) -> PartedLayout:
    """Return the layout of one of PARTED_ORDERS; arguments as in make_layout.

    Raises LayoutError for an unknown name, or for a spec that the preset cannot hold.
    """
    name = preset_name(name)
    if name not in PARTED_ORDERS:
        raise LayoutError(f"{name} does not part keys and values; one of {', '.join(PARTED_ORDERS)} does")
    check_plain(name, spec)
    if name == "cpu_attn_lbhnc" and spec.head_size != spec.head_size_v:
        raise LayoutError(f"{name} keeps K and V alike; head_size {spec.head_size}, head_size_v {spec.head_size_v}")
    frame = Frame.of(name, spec, num_layers=num_layers, num_blocks=num_blocks, kernel_block_size=kernel_block_size)
    order, width = PARTED_ORDERS[name], spec.head_size + spec.head_size_v
    extents = {**frame.extents(), "kv": 1, "head": spec.num_kv_heads, "channel": width}
    axes, size = pack(name, ("kv", *order), extents, dtype_size(spec.dtype), spec.page_size_padded)
    whole = KVCacheLayout(name, axes, dtype_size(spec.dtype), size, frame.kernel_blocks)
    check_split(whole)
    if name == "cpu_attn_lbhnc":
        return _transposed_keys(whole)
    key, value = (_narrowed(whole, channels) for channels in (spec.head_size, spec.head_size_v))
    return _parted(name, key, value, spec.head_size * whole.itemsize, whole)


def _narrowed(whole: KVCacheLayout, channels: int) -> tuple[Axis, ...]:
    """The axes of records of K and V that hold only some of the channels."""
    return _changed(whole, {"channel": Axis("channel", channels, whole.itemsize)})


def _transposed_keys(whole: KVCacheLayout) -> PartedLayout:
    """In each block and head: K as (channel, token), then V as (token, channel)."""
    tokens, channels, item = whole.extent("token"), whole.extent("channel") // 2, whole.itemsize
    by_channel = {"token": Axis("channel", channels, tokens * item), "channel": Axis("token", tokens, item)}
    by_token = {"token": Axis("token", tokens, channels * item), "channel": Axis("channel", channels, item)}
    key, value = _changed(whole, by_channel), _changed(whole, by_token)
    return _parted(whole.name, key, value, tokens * channels * item, whole)


def _changed(whole: KVCacheLayout, axes: Mapping[str, Axis]) -> tuple[Axis, ...]:
    return tuple(axes.get(axis.name, axis) for axis in whole.axes)
