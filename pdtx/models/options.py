"""How the cache is to be kept, beside what the model is: block size, kv_cache_dtype, ranks."""

from collections.abc import Collection
from dataclasses import dataclass, field

from pdtx.errors import ModelError
from pdtx.kvspec import TURBOQUANT_PRESETS, KVQuantMode, get_kv_quant_mode, kv_cache_dtype_to_dtype
from pdtx.models.fields import Fields

PLAIN_DTYPES = ("auto", "bfloat16", "float16", "float32")
FP8_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")
SCALED_DTYPES = ("int8_per_token_head", "fp8_per_token_head", "nvfp4")
KV_CACHE_DTYPES = (*PLAIN_DTYPES, *FP8_DTYPES, "fp8_ds_mla", *SCALED_DTYPES, *TURBOQUANT_PRESETS)
"""Every kv_cache_dtype that layer_specs knows; which of them a model can have, its family says."""


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """What layer_specs was asked for.

    root: the whole config; model_dtype and quantization_config are read from it where they are needed.
    text: the part that describes the language model; root itself unless it is nested.
    state_block_size: tokens in one block of a state, which is the longest request (vLLM's mamba_block_size).
    """

    root: Fields = field(repr=False)
    text: Fields = field(repr=False)
    block_size: int
    kv_cache_dtype: str
    tensor_parallel_size: int
    max_model_len: int | None

    def __post_init__(self) -> None:
        for name in ("block_size", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be 1 or more, not {getattr(self, name)}")
        self.require_dtype("pdtx", KV_CACHE_DTYPES)

    @property
    def state_block_size(self) -> int:
        """Tokens in one block of a state: max_model_len, or else the model's own greatest length."""
        if self.max_model_len is not None:
            return self.max_model_len
        return self.text.integer("max_position_embeddings", "model_max_length")

    @property
    def model_dtype(self) -> str:
        """The element type of the model. Raises ModelError where the config does not say."""
        for fields in (self.root, self.text):
            for name in ("dtype", "torch_dtype"):
                if fields.has(name):
                    return fields.dtype(name)
        raise ModelError('the config has no torch_dtype or dtype; add it, for example "torch_dtype": "bfloat16"')

    @property
    def cache_dtype(self) -> str:
        """The element type of keys and values. Raises ModelError for "auto" where the checkpoint says another thing."""
        if self.kv_cache_dtype != "auto":
            return kv_cache_dtype_to_dtype(self.kv_cache_dtype, "uint8")
        if self.root.has("quantization_config"):
            quantization = self.root.section("quantization_config")
            for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
                if quantization.has(name):
                    raise ModelError(f"{quantization.path}{name} sets how K/V is kept; give kv_cache_dtype, not auto")
        return self.model_dtype

    @property
    def quant_mode(self) -> KVQuantMode:
        """How elements of keys and values are quantized."""
        return get_kv_quant_mode(self.kv_cache_dtype)

    def require_dtype(self, whose: str, known: Collection[str]) -> None:
        """Raise ModelError unless kv_cache_dtype is one of the known."""
        if self.kv_cache_dtype not in known:
            raise ModelError(f"{whose} has no kv_cache_dtype {self.kv_cache_dtype!r}; one of {', '.join(known)}")

    def share(self, name: str, value: int) -> int:
        """Return one rank's part of value. Raises ModelError if ranks cannot have equal ones."""
        if value % self.tensor_parallel_size:
            raise ModelError(f"{name} {value} cannot be divided over tensor_parallel_size {self.tensor_parallel_size}")
        return value // self.tensor_parallel_size

    def kv_heads(self, total: int, name: str = "num_key_value_heads") -> int:
        """Return one rank's KV heads, max(1, total / ranks): with more ranks than heads, heads are copied.

        Raises ModelError if neither number is a multiple of the other.
        """
        ranks = self.tensor_parallel_size
        if total % ranks and ranks % total:
            raise ModelError(f"{name} {total} cannot be divided over tensor_parallel_size {ranks}, nor copied evenly")
        return max(1, total // ranks)
