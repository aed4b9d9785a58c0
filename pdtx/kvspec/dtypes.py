"""Element types by name, so that the arithmetic needs no torch."""

from types import MappingProxyType

from pdtx.errors import SpecError

DTYPE_SIZES = MappingProxyType({
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1,
})  # fmt: skip
"""Bytes of one element."""


def dtype_size(dtype: str) -> int:
    """Return the bytes of one element. Raises SpecError for a name that is not in DTYPE_SIZES."""
    try:
        return DTYPE_SIZES[dtype]
    except KeyError:
        raise SpecError(f"unknown dtype {dtype!r}; one of {', '.join(DTYPE_SIZES)}") from None
