"""How a quantized cache is stored, by vLLM's kv_cache_dtype strings."""

from enum import StrEnum

from pdtx.errors import SpecError
from pdtx.kvspec.dtypes import dtype_size


class KVQuantMode(StrEnum):
    """The modes of vLLM 0.22 (vllm/v1/kv_cache_interface.py)."""

    NONE = "NONE"
    """Elements of dtype, nothing beside them. TurboQuant and the DeepSeek layouts are NONE too: their class says it."""
    FP8_PER_TENSOR = "FP8_PER_TENSOR"
    """One byte an element; the one scale is kept outside the cache."""
    INT8_PER_TOKEN_HEAD = "INT8_PER_TOKEN_HEAD"
    """One byte an element and a float32 scale for each token, head, and K or V, in the page."""
    FP8_PER_TOKEN_HEAD = "FP8_PER_TOKEN_HEAD"
    """As INT8_PER_TOKEN_HEAD."""
    NVFP4 = "NVFP4"
    """Half a byte an element and one byte of scale for each 16 channels, in the page."""

    @property
    def is_per_token_head(self) -> bool:
        """Whether a page ends with a float32 scale for each token, head, and K or V."""
        return self in (KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.FP8_PER_TOKEN_HEAD)


SCALE_BYTES = 4
"""Bytes of one per-token-head scale (float32)."""
NVFP4_GROUP = 16
"""Channels that share one NVFP4 scale."""

_MODES = {
    "int8_per_token_head": KVQuantMode.INT8_PER_TOKEN_HEAD,
    "fp8_per_token_head": KVQuantMode.FP8_PER_TOKEN_HEAD,
    "nvfp4": KVQuantMode.NVFP4,
}


def get_kv_quant_mode(kv_cache_dtype: str) -> KVQuantMode:
    """Return the mode of a kv_cache_dtype string: any other "fp8..." is FP8_PER_TENSOR, the rest NONE, as in vLLM."""
    default = KVQuantMode.FP8_PER_TENSOR if kv_cache_dtype.startswith("fp8") else KVQuantMode.NONE
    return _MODES.get(kv_cache_dtype, default)


def kv_cache_dtype_to_dtype(kv_cache_dtype: str, model_dtype: str) -> str:
    """Return the element type in which a kv_cache_dtype is stored; "auto" is the model's own.

    Raises SpecError for an unknown string.
    """
    if kv_cache_dtype == "auto":
        return model_dtype
    if kv_cache_dtype == "int8_per_token_head":
        return "int8"
    if kv_cache_dtype == "nvfp4" or kv_cache_dtype.startswith(("fp8", "turboquant_")):
        return "uint8"
    dtype_size(kv_cache_dtype)
    return kv_cache_dtype


def head_bytes(head_size: int, dtype: str, mode: KVQuantMode) -> int:
    """Return the bytes of one K or V vector of one head, without per-token-head scales.

    NVFP4: head_size / 2 bytes of elements and head_size / 16 of scales, times the bytes of dtype (1 for uint8).
    Raises SpecError if NVFP4 would leave channels without a scale.
    """
    if mode is not KVQuantMode.NVFP4:
        return head_size * dtype_size(dtype)
    if head_size % NVFP4_GROUP:
        raise SpecError(f"NVFP4 needs head sizes that are multiples of {NVFP4_GROUP}, not {head_size}")
    return (head_size // 2 + head_size // NVFP4_GROUP) * dtype_size(dtype)
