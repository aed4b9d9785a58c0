"""Specs of multi-head latent attention: one vector a token, shared by K and V, perhaps compressed over tokens."""

from dataclasses import dataclass, replace
from typing import Self

from pdtx.errors import SpecError
from pdtx.kvspec.attention import FullAttentionSpec
from pdtx.kvspec.checks import require_positive, require_positive_or_none
from pdtx.kvspec.dtypes import dtype_size
from pdtx.kvspec.window import SlidingWindowSpec
from pdtx.units import round_up

V32_TOKEN_BYTES = 656
"""DeepSeek V3.2, fp8_ds_mla: 512 FP8 elements without position, 4 float32 scales, 64 bfloat16 with position."""
V4_TOKEN_BYTES = 584
"""DeepSeek V4, fp8_ds_mla: 448 + 128 + 8 bytes a token on average; a token's bytes do not lie together."""
V4_ALIGNMENT = 576
"""Bytes to a multiple of which DeepSeek V4 pads its pages."""


def _check_mla_fields(spec: "MLAAttentionSpec | SlidingWindowMLASpec") -> None:
    require_positive(spec, "compress_ratio")
    require_positive_or_none(spec, "alignment")
    if spec.block_size % spec.compress_ratio:
        raise SpecError(
            f"block_size {spec.block_size} is not a multiple of compress_ratio {spec.compress_ratio}; "
            f"the last tokens of a block would have no place"
        )


def _align_page(spec: "MLAAttentionSpec | SlidingWindowMLASpec") -> None:
    """Pad the page to a multiple of alignment, unless it is padded to more already. Raises SpecError if to less."""
    if spec.alignment is None:
        return
    aligned = round_up(spec.real_page_size_bytes, spec.alignment)
    if spec.page_size_padded is None and aligned != spec.real_page_size_bytes:
        object.__setattr__(spec, "page_size_padded", aligned)
    elif spec.page_size_padded is not None and spec.page_size_padded < aligned:
        raise SpecError(f"page_size_padded {spec.page_size_padded} is smaller than the aligned page, {aligned} bytes")


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """A layer that keeps one latent vector of head_size elements for compress_ratio tokens (and so no values).

    cache_dtype_str: the kv_cache_dtype; "fp8_ds_mla" has DeepSeek's own records.
    alignment: bytes to a multiple of which a page is padded; sets page_size_padded where that is not given. A
    page_size_padded that is given stays (dataclasses.replace gives the old one; copy_with_new_block_size does not).
    compress_ratio: tokens in one stored vector; block_size must be a multiple of it.
    model_version: "deepseek_v4" for its records; anything else changes nothing.
    """

    cache_dtype_str: str | None = None
    alignment: int | None = None
    compress_ratio: int = 1
    model_version: str | None = None

    def _check_fields(self) -> None:
        super()._check_fields()
        _check_mla_fields(self)
        _align_page(self)

    @property
    def storage_block_size(self) -> int:
        """Vectors stored in one block: block_size / compress_ratio."""
        return self.block_size // self.compress_ratio

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one page's vectors.

        fp8_ds_mla: 584 for each stored vector of DeepSeek V4, 656 for each token of V3.2.
        Else storage_block_size * num_kv_heads * head_size * element.
        """
        if self.cache_dtype_str == "fp8_ds_mla":
            if self.model_version == "deepseek_v4":
                return self.storage_block_size * V4_TOKEN_BYTES
            return self.block_size * V32_TOKEN_BYTES
        return self.storage_block_size * self.num_kv_heads * self.head_size * dtype_size(self.dtype)

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """Return the same spec with another block size, aligned anew. Raises SpecError if it is impossible."""
        padded = None if self.alignment else self.page_size_padded
        return replace(self, block_size=block_size, page_size_padded=padded)


@dataclass(frozen=True, kw_only=True)
class HiddenStateCacheSpec(MLAAttentionSpec):
    """Hidden states of captured layers, kept like latent vectors: num_kv_heads captured layers of head_size."""


@dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """Latent vectors within a sliding window: DeepSeek V4's window cache and its compressors' states.

    Fields as in MLAAttentionSpec, but model_version must be None or "deepseek_v4".
    """

    cache_dtype_str: str | None = None
    alignment: int | None = None
    compress_ratio: int = 1
    model_version: str | None = None

    def _check_fields(self) -> None:
        super()._check_fields()
        if self.model_version not in (None, "deepseek_v4"):
            raise SpecError(f"SlidingWindowMLASpec.model_version must be None or deepseek_v4, not {self.model_version}")
        _check_mla_fields(self)
        _align_page(self)

    @property
    def storage_block_size(self) -> int:
        """Vectors stored in one block: block_size / compress_ratio."""
        return self.block_size // self.compress_ratio

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one page's vectors: 584 each in DeepSeek V4, else num_kv_heads * head_size * element."""
        if self.model_version == "deepseek_v4":
            return self.storage_block_size * V4_TOKEN_BYTES
        return self.storage_block_size * self.num_kv_heads * self.head_size * dtype_size(self.dtype)

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """Return the same spec with another block size, aligned anew. Raises SpecError if it is impossible."""
        padded = None if self.alignment else self.page_size_padded
        return replace(self, block_size=block_size, page_size_padded=padded)
