"""One spec for layers of one family whose pages differ in size but fill at the same pace."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from pdtx.errors import SpecError
from pdtx.kvspec.attention import CrossAttentionSpec, FullAttentionSpec
from pdtx.kvspec.base import KVCacheSpec
from pdtx.kvspec.limits import Growth, ServingLimits
from pdtx.kvspec.mamba import MambaSpec
from pdtx.kvspec.mla import SlidingWindowMLASpec
from pdtx.kvspec.window import ChunkedLocalAttentionSpec, SlidingWindowSpec
from pdtx.units import ceil_div

_FAMILIES: tuple[tuple[type[KVCacheSpec], str | None], ...] = (
    (FullAttentionSpec, None),  # and all its descendants: MLA, hidden states, sinks, TurboQuant
    (CrossAttentionSpec, None),
    (SlidingWindowMLASpec, "sliding_window"),
    (SlidingWindowSpec, "sliding_window"),
    (ChunkedLocalAttentionSpec, "attention_chunk_size"),
    (MambaSpec, "num_speculative_blocks"),
)  # what a family has in common beside block_size, descendants before their ancestors


def _family(spec: KVCacheSpec) -> tuple[type[KVCacheSpec], object] | None:
    for cls, common in _FAMILIES:
        if isinstance(spec, cls):
            return cls, getattr(spec, common) if common else None
    return None


@dataclass(frozen=True, kw_only=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers of one family with one block size, whose requests need equally many blocks in each of them.

    kv_cache_specs: spec of each layer, by name. A block has one page of every layer.
    Raises SpecError if there is no layer, or is_uniform_type says no.
    """

    kv_cache_specs: Mapping[str, KVCacheSpec]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "kv_cache_specs", dict(self.kv_cache_specs))
        if not self.is_uniform_type(self.kv_cache_specs):
            raise SpecError("UniformTypeKVCacheSpecs needs layers of one family (full attention, or one window size)")
        sizes = {spec.block_size for spec in self.kv_cache_specs.values()}
        if sizes != {self.block_size}:
            raise SpecError(f"block_size {self.block_size} is not the layers', {sizes.pop()}")

    @classmethod
    def is_uniform_type(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        """Return whether layers have one block size and one family.

        Families: full attention with all its descendants; sliding windows, latent sliding windows and chunks of one
        size each; cross attention; states with one num_speculative_blocks. Raises SpecError if the first is of none.
        """
        specs = list(kv_cache_specs.values())
        if len({spec.block_size for spec in specs}) != 1:
            return False
        family = _family(specs[0])
        if family is None:
            raise SpecError(f"{type(specs[0]).__name__} cannot share a group with layers of other sizes; leave it out")
        return all(_family(spec) == family for spec in specs)

    @classmethod
    def from_specs(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> Self | None:
        """Return one spec for the layers, or None if they are not of one type."""
        if not cls.is_uniform_type(kv_cache_specs):
            return None
        return cls(block_size=next(iter(kv_cache_specs.values())).block_size, kv_cache_specs=kv_cache_specs)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block: the sum of the layers' pages."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def max_memory_usage_pages(self, limits: ServingLimits) -> int:
        """Blocks that the greatest request needs: the most pages of any layer."""
        layers = self.kv_cache_specs.values()
        return max(ceil_div(spec.max_memory_usage_bytes(limits), spec.page_size_bytes) for spec in layers)

    def max_memory_usage_bytes(self, limits: ServingLimits) -> int:
        """Bytes of max_memory_usage_pages blocks."""
        return self.max_memory_usage_pages(limits) * self.page_size_bytes

    def growth(self, limits: ServingLimits) -> Growth:
        """Return the growth of its layers, which is one."""
        return next(iter(self.kv_cache_specs.values())).growth(limits)

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """Return the same layers with another block size. Raises SpecError if it is impossible for one."""
        layers = {name: spec.copy_with_new_block_size(block_size) for name, spec in self.kv_cache_specs.items()}
        return type(self)(block_size=block_size, kv_cache_specs=layers)
