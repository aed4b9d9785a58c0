"""The root of the family: one layer's cache, cut into pages of block_size tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

from pdtx.errors import SpecError
from pdtx.kvspec.checks import require_positive
from pdtx.kvspec.limits import Growth, ServingLimits


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
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one page without padding: all that a transfer of it moves."""
        return self.page_size_bytes

    @property
    def storage_block_size(self) -> int:
        """Tokens stored in one block; differs from block_size only where tokens are compressed."""
        return self.block_size

    @abstractmethod
    def max_memory_usage_bytes(self, limits: ServingLimits) -> int:
        """Bytes that the greatest request within limits can come to occupy in this layer."""

    @abstractmethod
    def growth(self, limits: ServingLimits) -> Growth:
        """What makes a request occupy more pages of this layer."""

    def max_admission_blocks_per_request(self, limits: ServingLimits) -> int | None:
        """Blocks above which a request never grows in this layer, or None where only max_model_len ends it.

        As in vLLM 0.22, where only windows and chunks have such a bound (its callers ask whether the method exists).
        """
        return None

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """Return the same spec with another block size. Raises SpecError if it is impossible."""
        return replace(self, block_size=block_size)

    @classmethod
    def merge(cls, specs: "Sequence[KVCacheSpec]") -> Self:
        """Return the one spec that stands for all of specs in a group; call it on the class of the first.

        Raises SpecError if they differ, naming the first field that does.
        """
        return cls._alike(specs)[0]

    @classmethod
    def _alike(cls, specs: "Sequence[KVCacheSpec]", *, ignoring: Sequence[str] = ()) -> list[Self]:
        """Return specs as what they are: of exactly this class, equal in all fields but the ignored ones."""
        own = [spec for spec in specs if isinstance(spec, cls) and type(spec) is cls]
        if not specs:
            raise SpecError(f"{cls.__name__}.merge needs a layer at least")
        if len(own) < len(specs):
            kinds = ", ".join(dict.fromkeys(type(spec).__name__ for spec in specs))
            raise SpecError(f"{cls.__name__}.merge merges layers of its own class only, not {kinds}; group them apart")
        for name in (field.name for field in fields(cls) if field.name not in ignoring):
            values = list(dict.fromkeys(getattr(spec, name) for spec in own))
            if len(values) > 1:
                raise SpecError(
                    f"cannot merge {cls.__name__} layers: {name} is {values[0]} in one and {values[1]} in another"
                )
        return own
