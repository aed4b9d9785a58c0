"""Layouts whose keys and values do not share their strides: DiffKV, and vLLM 0.32 on CPUs."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdtx.errors import LayoutError
from pdtx.kvspec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec, dtype_size
from pdtx.layout.base import Layout, Part
from pdtx.layout.elements import KVCacheLayout
from pdtx.layout.packing import Frame, check_split, pack
from pdtx.layout.plain import KeyValueSpec, check_alike, check_plain, head_size_v
from pdtx.layout.presets import PARTED_ORDERS, preset_name
from pdtx.layout.strided import Axis


@dataclass(frozen=True)
class PartedLayout(Layout):
    """A region of size_bytes in which keys and values are laid out each by themselves, perhaps interleaved.

    The kv axis of each part has one step.
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
    def bytes_per_token(self) -> int:
        """Payload bytes of one token in one layer, K and V together."""
        return self.bytes_per_block // self.block_size

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
    name: str, spec: KVCacheSpec, *, num_layers: int, num_blocks: int, kernel_block_size: int | None = None
) -> PartedLayout:
    """Return the layout of one of PARTED_ORDERS; arguments as in make_layout.

    Raises LayoutError for an unknown name, or for a spec that the preset cannot hold.
    """
    name = preset_name(name)
    if name not in PARTED_ORDERS:
        raise LayoutError(f"{name} does not part keys and values; one of {', '.join(PARTED_ORDERS)} does")
    plain = check_plain(name, spec)
    _check_heads(name, plain)
    frame = Frame.of(name, plain, num_layers=num_layers, num_blocks=num_blocks, kernel_block_size=kernel_block_size)
    order, widths, item = PARTED_ORDERS[name], (plain.head_size, head_size_v(plain)), dtype_size(plain.dtype)
    extents = {**frame.extents(), "kv": 1, "head": plain.num_kv_heads, "channel": sum(widths)}
    axes, size = pack(name, ("kv", *order), extents, item, plain.page_size_padded)
    whole = KVCacheLayout(name, axes, item, size, frame.kernel_blocks)
    check_split(whole)
    if name == "cpu_attn_lbhnc":
        return _transposed_keys(whole)
    key, value = (_narrowed(whole, channels) for channels in widths)
    return _parted(name, key, value, plain.head_size * item, whole)


def _check_heads(name: str, spec: KeyValueSpec) -> None:
    """Raise LayoutError where a spec's heads do not fit: alike on CPUs, else each with a size of its own."""
    if name == "cpu_attn_lbhnc":
        check_alike(name, spec)
    elif not isinstance(spec, FullAttentionSpec | SlidingWindowSpec):
        raise LayoutError(f"{name} needs a spec with head_size_v, which {type(spec).__name__} does not have")


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
