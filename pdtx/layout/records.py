"""Layouts of opaque records: bytes that are moved as they are, and cut only where that is known to be right."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from pdtx.errors import LayoutError
from pdtx.kvspec import (
    AttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    TQFullAttentionSpec,
    dtype_size,
)
from pdtx.layout.packing import Frame, check_split, pack
from pdtx.layout.plain import KeyValueSpec, head_size_v, keys_and_values
from pdtx.layout.presets import RECORD_ORDERS, preset_name
from pdtx.layout.strided import StridedLayout

_Latent = MLAAttentionSpec | SlidingWindowMLASpec
_SCALE_BYTES = 4


@dataclass(frozen=True)
class RecordLayout(StridedLayout):
    """A layout that ends in records of bytes whose inside is not known.

    Its axes: layer, block, head, token, byte, and kv where K and V are records of their own. Elements are bytes.
    opaque: axes whose steps do not lie where the strides say; the box that they span is right only as a whole.
    (DeepSeek V4's view has 584 bytes a token, but in memory all data of a block come first, then all scales.)
    tokens_per_step: tokens for which one step of the token axis stands (compress_ratio).
    tokens_together: tokens, counted from the start of a block, that share bytes: they move together, though each has a
    step of its own.
    """

    names: ClassVar[tuple[str, ...]] = ("layer", "block", "head", "token", "byte")

    opaque: tuple[str, ...] = ("byte",)
    tokens_per_step: int = 1
    tokens_together: int = 1

    def _check_names(self) -> None:
        found = {axis.name for axis in self.axes} - {"kv"}
        if found != set(self.names) or len({axis.name for axis in self.axes}) != len(self.axes):
            names = ", ".join(axis.name for axis in self.axes)
            raise LayoutError(f"layout {self.name!r} has the axes {names}; needs {', '.join(self.names)}, perhaps kv")
        if self.itemsize != 1 or self.axes[-1].name != "byte" or "byte" not in self.opaque:
            raise LayoutError(f"layout {self.name!r}: records are bytes, and the innermost axis is byte, opaque")

    @property
    def sliceable(self) -> frozenset[str]:
        """The axes of which a part may be moved without the rest: those around everything opaque.

        To move a box of the other axes, both sides must have it at the same extents and strides.
        """
        hidden = [place for place, axis in enumerate(self.axes) if axis.name in self.opaque and axis.extent > 1]
        around = self.axes[: min(hidden, default=len(self.axes))]
        return frozenset(axis.name for axis in around if axis.name not in self.opaque)


@dataclass(frozen=True, kw_only=True)
class _Content:
    """What the records of a spec are."""

    record_bytes: int
    opaque: tuple[str, ...] = ("byte",)
    tokens_per_step: int = 1


def make_record_layout(
    name: str, spec: KVCacheSpec, *, num_layers: int, num_blocks: int, kernel_block_size: int | None = None
) -> RecordLayout:
    """Return the layout of one of RECORD_ORDERS; arguments as in make_layout.

    Raises LayoutError for an unknown name, or for a spec that the preset cannot hold.
    """
    name = preset_name(name)
    if name not in RECORD_ORDERS:
        raise LayoutError(f"{name} does not hold records; one of {', '.join(RECORD_ORDERS)} does")
    if not isinstance(spec, AttentionSpec):
        raise LayoutError(f"{name} does not hold {type(spec).__name__}")
    content = _CONTENTS[_kind(name)](name, spec)
    frame = Frame.of(name, spec, num_layers=num_layers, num_blocks=num_blocks, kernel_block_size=kernel_block_size)
    extents = frame.extents(content.tokens_per_step)
    extents |= {"kv": 2, "head": spec.num_kv_heads, "byte": content.record_bytes}
    axes, size = pack(name, RECORD_ORDERS[name], extents, 1, spec.page_size_padded)
    layout = RecordLayout(name, axes, 1, size, frame.kernel_blocks, content.opaque, content.tokens_per_step)
    check_split(layout)
    return layout


def _kind(name: str) -> str:
    """The content that a preset's name stands for: the longest that it names."""
    return max((kind for kind in _CONTENTS if kind in name), key=len)


def _refuse(name: str, spec: AttentionSpec) -> LayoutError:
    return LayoutError(f"{name} does not hold {type(spec).__name__} with {spec.kv_quant_mode.value}")


def _latent(name: str, spec: AttentionSpec, *, opaque: tuple[str, ...] = ("byte",), v4: bool = False) -> _Content:
    """One vector a step: contiguous for each token unless the token axis is opaque."""
    if not isinstance(spec, _Latent) or isinstance(spec, HiddenStateCacheSpec) or spec.num_kv_heads != 1:
        raise _refuse(name, spec)
    if (spec.model_version == "deepseek_v4") is not v4:
        raise LayoutError(f"{name} does not hold a cache of model_version {spec.model_version}")
    if not v4 and spec.cache_dtype_str == "fp8_ds_mla" and spec.compress_ratio != 1:
        raise LayoutError(f"{name} keeps a record for every token; compress_ratio is {spec.compress_ratio}")
    steps = spec.storage_block_size
    return _Content(record_bytes=spec.real_page_size_bytes // steps, opaque=opaque, tokens_per_step=spec.compress_ratio)


def _mla(name: str, spec: AttentionSpec) -> _Content:
    if isinstance(spec, SlidingWindowMLASpec):
        raise _refuse(name, spec)
    return _latent(name, spec)


def _deepseek_v4(name: str, spec: AttentionSpec) -> _Content:
    return _latent(name, spec, opaque=("token", "byte"), v4=True)


def _indexer(name: str, spec: AttentionSpec) -> _Content:
    """All values of a block, then all its scales."""
    return _latent(name, spec, opaque=("token", "byte"))


def _compressor(name: str, spec: AttentionSpec) -> _Content:
    if not isinstance(spec, SlidingWindowMLASpec):
        raise _refuse(name, spec)
    return _latent(name, spec)


def _turboquant(name: str, spec: AttentionSpec) -> _Content:
    """Key, value, padding of one token and head."""
    if not isinstance(spec, TQFullAttentionSpec) or not spec.tq_slot_size:
        raise _refuse(name, spec)
    return _Content(record_bytes=spec.tq_slot_size)


def _hidden_states(name: str, spec: AttentionSpec) -> _Content:
    """The head axis counts the captured layers."""
    if not isinstance(spec, HiddenStateCacheSpec) or spec.compress_ratio != 1 or spec.cache_dtype_str == "fp8_ds_mla":
        raise _refuse(name, spec)
    return _Content(record_bytes=spec.head_size * dtype_size(spec.dtype))


def _quantized(name: str, spec: AttentionSpec) -> KeyValueSpec:
    found = keys_and_values(spec)
    if found is None or found.head_size != head_size_v(found):
        raise _refuse(name, spec)
    return found


def _per_token_head(name: str, spec: AttentionSpec) -> _Content:
    """The elements of a head and their float32 scale, K or V of one token."""
    if not _quantized(name, spec).kv_quant_mode.is_per_token_head:
        raise _refuse(name, spec)
    return _Content(record_bytes=spec.head_size * dtype_size(spec.dtype) + _SCALE_BYTES)


def _nvfp4(name: str, spec: AttentionSpec) -> _Content:
    """In each K or V part of a page all data come first, then all scales: only whole parts can be moved."""
    if _quantized(name, spec).kv_quant_mode is not KVQuantMode.NVFP4:
        raise _refuse(name, spec)
    per_part = spec.real_page_size_bytes // (2 * spec.block_size * spec.num_kv_heads)
    return _Content(record_bytes=per_part, opaque=("head", "token", "byte"))


_CONTENTS: Mapping[str, Callable[[str, AttentionSpec], _Content]] = MappingProxyType({
    "mla": _mla,
    "deepseek_v4": _deepseek_v4,
    "deepseek_indexer": _indexer,
    "deepseek_v4_compressor": _compressor,
    "turboquant": _turboquant,
    "hidden_states": _hidden_states,
    "per_token_head": _per_token_head,
    "nvfp4": _nvfp4,
})  # fmt: skip
