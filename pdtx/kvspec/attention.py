"""Specs of layers that keep a key and a value for every token."""

from dataclasses import dataclass

from pdtx.errors import SpecError
from pdtx.kvspec.base import KVCacheSpec, require_positive
from pdtx.kvspec.dtypes import dtype_size


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """A layer with num_kv_heads heads of head_size channels.

    dtype: name of the element type, see pdtx.kvspec.DTYPE_SIZES.
    page_size_padded: bytes that a page is padded to, if it is.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "num_kv_heads", "head_size")
        dtype_size(self.dtype)
        if self.page_size_padded is not None and self.page_size_padded < self.real_page_size_bytes:
            raise SpecError(
                f"page_size_padded {self.page_size_padded} is smaller than the page, {self.real_page_size_bytes} bytes"
            )

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one page without padding: 2 * block_size * num_kv_heads * head_size * element."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * dtype_size(self.dtype)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page, padding included."""
        return self.real_page_size_bytes if self.page_size_padded is None else self.page_size_padded

    def max_memory_usage_bytes(self, max_model_len: int) -> int:
        """Bytes of all pages of max_model_len tokens: ceil(max_model_len / block_size) pages."""
        return -(-max_model_len // self.block_size) * self.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """A layer that keeps every token.

    head_size_v: channels of a value head; head_size where not given.
    """

    head_size_v: int = 0

    def __post_init__(self) -> None:
        if not self.head_size_v:
            object.__setattr__(self, "head_size_v", self.head_size)
        super().__post_init__()
        require_positive(self, "head_size_v")

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one page: block_size * num_kv_heads * (head_size + head_size_v) * element."""
        return self.block_size * self.num_kv_heads * (self.head_size + self.head_size_v) * dtype_size(self.dtype)
