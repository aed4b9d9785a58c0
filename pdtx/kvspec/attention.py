"""Specs of layers that keep a key and a value for every token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from pdtx.errors import SpecError
from pdtx.kvspec.base import KVCacheSpec
from pdtx.kvspec.checks import require_one_of, require_page, require_positive, require_positive_or_none
from pdtx.kvspec.dtypes import dtype_size
from pdtx.kvspec.limits import Growth, ServingLimits
from pdtx.kvspec.quant import SCALE_BYTES, KVQuantMode, head_bytes
from pdtx.units import ceil_div


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """A layer with num_kv_heads heads of head_size channels.

    dtype: name of the element type, see pdtx.kvspec.DTYPE_SIZES.
    kv_quant_mode: how elements are quantized, if they are.
    page_size_padded: bytes that a page is padded to, if it is.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_fields()
        require_page(self, self.unpadded_page_size_bytes, self.page_size_padded)

    def _check_fields(self) -> None:
        """Raise SpecError for a field that is impossible by itself; the page is computed afterwards."""
        require_positive(self, "num_kv_heads", "head_size")
        require_one_of(self, "kv_quant_mode", tuple(KVQuantMode))
        object.__setattr__(self, "kv_quant_mode", KVQuantMode(self.kv_quant_mode))
        dtype_size(self.dtype)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of the elements of one page: 2 * block_size * num_kv_heads * bytes of a head."""
        return 2 * self.block_size * self.num_kv_heads * head_bytes(self.head_size, self.dtype, self.kv_quant_mode)

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one page without padding: its elements, and 4 for each per-token-head scale."""
        if not self.kv_quant_mode.is_per_token_head:
            return self.real_page_size_bytes
        return self.real_page_size_bytes + 2 * self.block_size * self.num_kv_heads * SCALE_BYTES

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page, padding included."""
        return self.unpadded_page_size_bytes if self.page_size_padded is None else self.page_size_padded


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """A layer that keeps every token.

    head_size_v: channels of a value head; head_size where not given (0).
    sliding_window, attention_chunk_size: tokens that the layer attends to, where it keeps all of them nevertheless
    because the hybrid manager is off.
    """

    head_size_v: int = 0
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        if not self.head_size_v:
            object.__setattr__(self, "head_size_v", self.head_size)
        super().__post_init__()

    def _check_fields(self) -> None:
        super()._check_fields()
        require_positive(self, "head_size_v")
        require_positive_or_none(self, "sliding_window", "attention_chunk_size")

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one page's elements: block_size * num_kv_heads * (bytes of a key + bytes of a value)."""
        mode = self.kv_quant_mode
        key, value = head_bytes(self.head_size, self.dtype, mode), head_bytes(self.head_size_v, self.dtype, mode)
        return self.block_size * self.num_kv_heads * (key + value)

    def max_memory_usage_bytes(self, limits: ServingLimits) -> int:
        """Bytes of ceil(max_model_len / (dcp * pcp)) tokens in whole pages."""
        return ceil_div(limits.tokens_per_rank, self.block_size) * self.page_size_bytes

    def growth(self, limits: ServingLimits) -> Growth:
        """TOKENS."""
        return Growth.TOKENS

    @classmethod
    def merge(cls, specs: Sequence[KVCacheSpec]) -> Self:
        """Return the one spec for layers that differ at most in having recorded a window or chunk, or none.

        Raises SpecError for any other difference (vLLM 0.22 overlooks head_size_v, sink_len, the class, and in MLA
        most fields, and takes the first layer's), for two windows or chunks, and for a window beside a chunk.
        """
        own = cls._alike(specs, ignoring=("sliding_window", "attention_chunk_size"))
        window = one_recorded("sliding_window", [spec.sliding_window for spec in own])
        chunk = one_recorded("attention_chunk_size", [spec.attention_chunk_size for spec in own])
        if window is not None and chunk is not None:
            raise SpecError(f"cannot merge layers with sliding_window {window} and attention_chunk_size {chunk}")
        return replace(own[0], sliding_window=window, attention_chunk_size=chunk)


def one_recorded(name: str, values: Sequence[int | None]) -> int | None:
    """Return the only value that is not None, or None. Raises SpecError if there are several."""
    recorded = list(dict.fromkeys(value for value in values if value is not None))
    if len(recorded) > 1:
        raise SpecError(f"one group cannot hold layers with {name} {recorded[0]} and {recorded[1]}")
    return recorded[0] if recorded else None


@dataclass(frozen=True, kw_only=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention that also attends to sink_len tokens kept for all requests together.

    The sink's blocks come out of the pool once; neither a page nor a request's memory counts them.
    """

    sink_len: int | None = None

    def _check_fields(self) -> None:
        super()._check_fields()
        require_positive_or_none(self, "sink_len")

    @property
    def num_sink_blocks(self) -> int:
        """Blocks that the sink takes out of the pool for good: sink_len / block_size.

        Raises SpecError unless sink_len is a multiple of block_size, without which vLLM's manager does not start.
        """
        if self.sink_len is None or self.sink_len % self.block_size:
            raise SpecError(f"sink_len must be a multiple of block_size {self.block_size}, not {self.sink_len}")
        return self.sink_len // self.block_size


@dataclass(frozen=True, kw_only=True)
class TQFullAttentionSpec(FullAttentionSpec):
    """Full attention in TurboQuant slots.

    tq_slot_size: bytes of one token and head, key and value together (TurboQuantSlot.slot_bytes_aligned);
    0 for elements of dtype.
    """

    tq_slot_size: int = 0

    def _check_fields(self) -> None:
        super()._check_fields()
        require_positive(self, "tq_slot_size", least=0)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one page: block_size * num_kv_heads * tq_slot_size."""
        if not self.tq_slot_size:
            return super().real_page_size_bytes
        return self.block_size * self.num_kv_heads * self.tq_slot_size


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """A layer of an encoder, which keeps nothing between steps and so belongs into no pool."""

    def max_memory_usage_bytes(self, limits: ServingLimits) -> int:
        """Return 0."""
        return 0

    def growth(self, limits: ServingLimits) -> Growth:
        """NOTHING."""
        return Growth.NOTHING


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """A decoder's layer over the encoder's output."""

    def max_memory_usage_bytes(self, limits: ServingLimits) -> int:
        """Bytes of max_num_encoder_input_tokens tokens in whole pages."""
        return ceil_div(limits.encoder_tokens, self.block_size) * self.page_size_bytes

    def growth(self, limits: ServingLimits) -> Growth:
        """ENCODER."""
        return Growth.ENCODER
