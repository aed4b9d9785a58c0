"""Specs of layers that forget: sliding windows and chunks."""

from dataclasses import dataclass

from pdtx.errors import SpecError
from pdtx.kvspec.attention import AttentionSpec
from pdtx.kvspec.checks import require_positive
from pdtx.kvspec.limits import Growth, ServingLimits
from pdtx.kvspec.quant import head_bytes
from pdtx.units import ceil_div


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A layer that attends to the last sliding_window tokens and frees the blocks before them.

    head_size_v: channels of a value head; head_size where not given (0).
    """

    sliding_window: int
    head_size_v: int = 0

    def __post_init__(self) -> None:
        if not self.head_size_v:
            object.__setattr__(self, "head_size_v", self.head_size)
        super().__post_init__()

    def _check_fields(self) -> None:
        super()._check_fields()
        require_positive(self, "sliding_window", "head_size_v")

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one page's elements: block_size * num_kv_heads * (bytes of a key + bytes of a value)."""
        mode = self.kv_quant_mode
        key, value = head_bytes(self.head_size, self.dtype, mode), head_bytes(self.head_size_v, self.dtype, mode)
        return self.block_size * self.num_kv_heads * (key + value)

    def max_admission_blocks_per_request(self, limits: ServingLimits) -> int:
        """Blocks of the window before the newest token and one batch, and one: a window seldom starts with a block.

        ceil(min(sliding_window - 1 + max_num_batched_tokens, max_model_len) / block_size) + 1
        """
        tokens = min(self.sliding_window - 1 + limits.max_num_batched_tokens, limits.max_model_len)
        return ceil_div(tokens, self.block_size) + 1

    def max_memory_usage_bytes(self, limits: ServingLimits) -> int:
        """Bytes of max_admission_blocks_per_request pages.

        Raises SpecError under decode context parallelism, which vLLM does not have for windows.
        """
        if limits.decode_context_parallel_size > 1:
            raise SpecError(
                f"sliding windows cannot be spread over decode_context_parallel_size "
                f"{limits.decode_context_parallel_size}; set it to 1"
            )
        return self.max_admission_blocks_per_request(limits) * self.page_size_bytes

    def growth(self, limits: ServingLimits) -> Growth:
        """WINDOW."""
        return Growth.WINDOW


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A layer that attends within chunks of attention_chunk_size tokens and frees the chunks before."""

    attention_chunk_size: int

    def _check_fields(self) -> None:
        super()._check_fields()
        require_positive(self, "attention_chunk_size")

    def max_admission_blocks_per_request(self, limits: ServingLimits) -> int:
        """Blocks of one chunk and one batch.

        ceil(min(attention_chunk_size + max_num_batched_tokens, max_model_len) / block_size)
        """
        tokens = min(self.attention_chunk_size + limits.max_num_batched_tokens, limits.max_model_len)
        return ceil_div(tokens, self.block_size)

    def max_memory_usage_bytes(self, limits: ServingLimits) -> int:
        """Bytes of max_admission_blocks_per_request pages; context parallelism changes nothing."""
        return self.max_admission_blocks_per_request(limits) * self.page_size_bytes

    def growth(self, limits: ServingLimits) -> Growth:
        """WINDOW."""
        return Growth.WINDOW
