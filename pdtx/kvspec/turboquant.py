"""TurboQuant: key and value of one token and head packed into one slot, by preset name (vLLM 0.22)."""

from dataclasses import dataclass

from pdtx.errors import SpecError
from pdtx.kvspec.checks import require_positive
from pdtx.units import ceil_div, round_up


@dataclass(frozen=True, kw_only=True)
class _Preset:
    key_bits: int  # 8: plain FP8, without a norm beside it
    value_bits: int


_PRESETS = {
    "turboquant_k8v4": _Preset(key_bits=8, value_bits=4),
    "turboquant_4bit_nc": _Preset(key_bits=4, value_bits=4),
    "turboquant_k3v4_nc": _Preset(key_bits=3, value_bits=4),
    "turboquant_3bit_nc": _Preset(key_bits=3, value_bits=3),
}
TURBOQUANT_PRESETS = tuple(_PRESETS)
"""Names of the presets, which are kv_cache_dtype strings too."""

_KEY_NORM_BYTES = 2  # float16
_VALUE_SCALE_BYTES = 4  # float16 scale and zero point


@dataclass(frozen=True, kw_only=True)
class TurboQuantSlot:
    """The bytes of one token and head, in this order: key, value, padding.

    head_size: channels of the key and of the value.
    preset: one of TURBOQUANT_PRESETS. Raises SpecError for another name or an impossible head_size.
    """

    preset: str
    head_size: int

    def __post_init__(self) -> None:
        require_positive(self, "head_size")
        if self.preset not in _PRESETS:
            raise SpecError(f"unknown TurboQuant preset {self.preset!r}; one of {', '.join(_PRESETS)}")

    @property
    def key_packed_bytes(self) -> int:
        """Bytes of the key: head_size in FP8, else ceil(head_size * bits / 8) and a norm of 2."""
        bits = _PRESETS[self.preset].key_bits
        return self.head_size if bits == 8 else ceil_div(self.head_size * bits, 8) + _KEY_NORM_BYTES

    @property
    def value_packed_bytes(self) -> int:
        """Bytes of the value: ceil(head_size * bits / 8), and 4 for scale and zero point."""
        return ceil_div(self.head_size * _PRESETS[self.preset].value_bits, 8) + _VALUE_SCALE_BYTES

    @property
    def slot_bytes(self) -> int:
        """Bytes of key and value."""
        return self.key_packed_bytes + self.value_packed_bytes

    @property
    def slot_bytes_aligned(self) -> int:
        """Bytes of the slot, rounded up to an even number: TQFullAttentionSpec.tq_slot_size."""
        return round_up(self.slot_bytes, 2)
