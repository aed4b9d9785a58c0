"""Layouts: where each element of a KV cache lies in memory, as named axes with byte strides.

A layout is named, never guessed from a shape: FlashAttention's (2, num_blocks, ...) and FlashInfer's
(num_blocks, 2, ...) have the same number of bytes, and at num_blocks = 2 the same shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from pdtx.errors import LayoutError
from pdtx.kvspec import FullAttentionSpec, KVQuantMode, dtype_size

AXIS_NAMES = ("layer", "block", "kv", "head", "token", "channel")
"""layer of the model | block of the pool | 0 = K, 1 = V | KV head | token in its block | channel in its head."""

LAYOUT_ORDERS = MappingProxyType({
    # vLLM 0.22, one tensor a layer: FlashAttention (2, nb, ...), FlashInfer (nb, 2, ...).
    "flash_attn_nhd": ("layer", "kv", "block", "token", "head", "channel"),
    "flash_attn_hnd": ("layer", "kv", "block", "head", "token", "channel"),
    "flashinfer_nhd": ("layer", "block", "kv", "token", "head", "channel"),
    "flashinfer_hnd": ("layer", "block", "kv", "head", "token", "channel"),
})  # fmt: skip
"""Preset layouts: their axes, outermost first."""


_WITHOUT_SCALES = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)


@dataclass(frozen=True)
class Axis:
    """One axis: its name, its extent in steps, and the bytes between two neighbouring steps."""

    name: str
    extent: int
    stride: int


@dataclass(frozen=True)
class KVCacheLayout:
    """Where each element of a cache lies inside one region of size_bytes.

    axes: outermost (largest stride) first. The element at coordinates x lies at sum(x[a] * stride[a]).
    Raises LayoutError if axes are unknown, missing or doubled, if two elements would share a byte, or if
    the last element lies outside the region.
    """

    name: str
    axes: tuple[Axis, ...]
    itemsize: int
    size_bytes: int

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if sorted(names) != sorted(AXIS_NAMES):
            raise LayoutError(
                f"layout {self.name!r} has the axes {', '.join(names)}; needs each of {', '.join(AXIS_NAMES)}"
            )
        if any(axis.extent < 1 or axis.stride < 1 for axis in self.axes):
            raise LayoutError(f"layout {self.name!r}: extents and strides must be 1 or more, not {self.axes}")
        # Extent 1 puts nothing beside itself, so its stride cannot overlap anything.
        stepped = [axis for axis in self.axes if axis.extent > 1]
        inner = [*stepped[1:], Axis("element", 1, self.itemsize)]
        for outer, next_inner in zip(stepped, inner, strict=True):
            if outer.stride < next_inner.stride * next_inner.extent:
                raise LayoutError(
                    f"layout {self.name!r}: axis {outer.name} steps {outer.stride} bytes, less than the "
                    f"{next_inner.stride * next_inner.extent} bytes of axis {next_inner.name} inside it"
                )
        end = sum((axis.extent - 1) * axis.stride for axis in self.axes) + self.itemsize
        if end > self.size_bytes:
            raise LayoutError(f"layout {self.name!r} ends at byte {end}, beyond its region of {self.size_bytes}")

    @cached_property
    def by_name(self) -> MappingProxyType[str, Axis]:
        """The axes by their names."""
        return MappingProxyType({axis.name: axis for axis in self.axes})

    def stride(self, name: str) -> int:
        """Bytes between two neighbours on an axis."""
        return self.by_name[name].stride

    def extent(self, name: str) -> int:
        """Number of steps of an axis."""
        return self.by_name[name].extent

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.extent("token")

    @property
    def bytes_per_token(self) -> int:
        """Payload bytes of one token in one layer, K and V together."""
        return self.extent("kv") * self.extent("head") * self.extent("channel") * self.itemsize

    def with_swapped(self, first: str, second: str) -> "KVCacheLayout":
        """Return a copy in which two axes trade places in memory: the classic wrong reading, for fault injection."""
        order = [{first: second, second: first}.get(axis.name, axis.name) for axis in self.axes]
        extents = {axis.name: axis.extent for axis in self.axes}
        return _packed(f"{self.name}[{first}<->{second}]", order, extents, self.itemsize)


def _packed(name: str, order: Sequence[str], extents: dict[str, int], itemsize: int) -> KVCacheLayout:
    """Lay the axes out without gaps, the last of order innermost."""
    stride, axes = itemsize, list[Axis]()
    for axis in reversed(order):
        axes.append(Axis(axis, extents[axis], stride))
        stride *= extents[axis]
    return KVCacheLayout(name, tuple(reversed(axes)), itemsize, stride)


def layout_name(text: str) -> str:
    """Return the preset that a user's spelling means ('FlashInfer-HND', 'FLASH_ATTN:NHD', ...).

    Raises LayoutError, listing the presets.
    """
    name = text.strip().lower().replace("-", "_").replace(":", "_").replace("flashattention", "flash_attn")
    name = name.replace("flashattn", "flash_attn").replace("flash_infer", "flashinfer")
    if name not in LAYOUT_ORDERS:
        raise LayoutError(f"unknown layout {text!r}; one of {', '.join(LAYOUT_ORDERS)}")
    return name


def make_layout(name: str, spec: FullAttentionSpec, *, num_layers: int, num_blocks: int) -> KVCacheLayout:
    """Return a preset's layout for num_layers equal layers of num_blocks blocks in one region.

    Raises LayoutError for an unknown name, or for a spec that the preset cannot hold.
    """
    name = layout_name(name)
    if num_layers < 1 or num_blocks < 1:
        raise LayoutError(f"a cache needs 1 or more layers and blocks, not {num_layers} and {num_blocks}")
    if type(spec) is not FullAttentionSpec or spec.kv_quant_mode not in _WITHOUT_SCALES:
        raise LayoutError(
            f"{name} holds plain full attention, not {type(spec).__name__} with {spec.kv_quant_mode.value}"
        )
    if spec.head_size_v != spec.head_size:
        raise LayoutError(
            f"{name} keeps K and V alike; head_size {spec.head_size} and head_size_v {spec.head_size_v} differ"
        )
    if spec.page_size_padded is not None:
        raise LayoutError(f"{name} has no padded form; page_size_padded is {spec.page_size_padded}")
    extents = {
        "layer": num_layers,
        "block": num_blocks,
        "kv": 2,
        "head": spec.num_kv_heads,
        "token": spec.block_size,
        "channel": spec.head_size,
    }
    return _packed(name, LAYOUT_ORDERS[name], extents, dtype_size(spec.dtype))
