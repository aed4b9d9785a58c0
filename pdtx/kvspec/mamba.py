"""Specs of layers whose cache is a state, not tokens: Mamba, linear attention, short convolutions."""

from dataclasses import dataclass
from math import prod

from pdtx.errors import SpecError
from pdtx.kvspec.base import KVCacheSpec
from pdtx.kvspec.checks import require_one_of, require_page, require_positive
from pdtx.kvspec.dtypes import dtype_size
from pdtx.kvspec.limits import MAMBA_CACHE_MODES, Growth, ServingLimits
from pdtx.units import ceil_div


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """A layer that keeps states of fixed shapes; one page holds one of each, one after another.

    shapes, dtypes: one shape and one element type for each state, e.g. (3, 8192) of the convolution.
    page_size_padded: bytes that a page is padded to, if it is.
    mamba_cache_mode: kept as a record; memory follows ServingLimits.mamba_cache_mode, as in vLLM.
    num_speculative_blocks: states kept for speculative tokens.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    page_size_padded: int | None = None
    mamba_type: str = "MAMBA2"
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.shapes) != len(self.dtypes):
            raise SpecError(f"MambaSpec has {len(self.shapes)} shapes and {len(self.dtypes)} dtypes; give one for each")
        if any(not isinstance(extent, int) or extent < 1 for shape in self.shapes for extent in shape):
            raise SpecError(f"MambaSpec.shapes must hold ints of 1 or more, not {self.shapes}")
        require_positive(self, "num_speculative_blocks", least=0)
        require_one_of(self, "mamba_cache_mode", MAMBA_CACHE_MODES)
        require_page(self, self.real_page_size_bytes, self.page_size_padded)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one of each state: the sum of product of shape * element."""
        return sum(prod(shape) * dtype_size(dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    @property
    def unpadded_page_size_bytes(self) -> int:
        """The same: states have no scales."""
        return self.real_page_size_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page, padding included."""
        return self.real_page_size_bytes if self.page_size_padded is None else self.page_size_padded

    def max_memory_usage_bytes(self, limits: ServingLimits) -> int:
        """Bytes of the states kept, by limits.mamba_cache_mode, and of num_speculative_blocks more.

        all: ceil(max_model_len / block_size); align: 2; none: 1.
        """
        kept = {"all": ceil_div(limits.max_model_len, self.block_size), "align": 2, "none": 1}
        return (kept[limits.mamba_cache_mode] + self.num_speculative_blocks) * self.page_size_bytes

    def growth(self, limits: ServingLimits) -> Growth:
        """TOKENS in mode all, else STATES."""
        return Growth.TOKENS if limits.mamba_cache_mode == "all" else Growth.STATES
