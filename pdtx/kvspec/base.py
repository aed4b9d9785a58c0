"""The root of the family: one layer's cache, cut into pages of block_size tokens."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

from pdtx.errors import SpecError


def require_positive(spec: object, *fields: str) -> None:
    """Raise SpecError unless every named field of spec is an int of 1 or more."""
    for field in fields:
        value = getattr(spec, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SpecError(f"{type(spec).__name__}.{field} must be an int of 1 or more, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec(ABC):
    """What the KV cache of one layer costs.

    block_size: tokens in one block (page).
    """

    block_size: int

    def __post_init__(self) -> None:
        require_positive(self, "block_size")

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes of one page of this layer, padding included."""

    @property
    def storage_block_size(self) -> int:
        """Tokens stored in one block; differs from block_size only where tokens are compressed."""
        return self.block_size

    @abstractmethod
    def max_memory_usage_bytes(self, max_model_len: int) -> int:
        """Bytes that one request of max_model_len tokens can come to occupy in this layer."""

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """Return the same spec with another block size. Raises SpecError if it is not positive."""
        return replace(self, block_size=block_size)
