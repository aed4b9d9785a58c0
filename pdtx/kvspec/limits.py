"""What a server promises its requests: the settings on which a layer's greatest need depends."""

from dataclasses import dataclass
from enum import StrEnum

from pdtx.kvspec.checks import require_one_of, require_positive
from pdtx.units import ceil_div


class Growth(StrEnum):
    """What makes one request occupy more pages of a layer."""

    TOKENS = "tokens"
    """Every block_size tokens of the request, up to max_model_len."""
    WINDOW = "window"
    """Tokens, until a window (or chunk) and one batch are held; then no more."""
    STATES = "states"
    """Nothing: a fixed number of states from the first token on."""
    ENCODER = "encoder"
    """The encoder's input, once."""
    NOTHING = "nothing"
    """Nothing: the layer keeps no cache."""


MAMBA_CACHE_MODES = ("none", "align", "all")
"""Which states of a Mamba layer are kept: the running one | one more at a block boundary | one for every block."""


@dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """The greatest request and batch that the caches must hold; names are those of vLLM's configuration.

    max_model_len: tokens of one request, prompt and output.
    max_num_batched_tokens: tokens computed in one step.
    max_num_encoder_input_tokens: tokens of an encoder's input; max_num_batched_tokens where None, as in vLLM.
    decode_context_parallel_size, prefill_context_parallel_size: ranks over which one request's tokens are spread.
    mamba_cache_mode: one of MAMBA_CACHE_MODES.

    Raises SpecError for a number below 1 (below 0 for the encoder's tokens) or an unknown mode.
    """

    max_model_len: int
    max_num_batched_tokens: int = 2048
    max_num_encoder_input_tokens: int | None = None
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    mamba_cache_mode: str = "none"

    def __post_init__(self) -> None:
        require_positive(
            self,
            "max_model_len",
            "max_num_batched_tokens",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        )
        if self.max_num_encoder_input_tokens is not None:
            require_positive(self, "max_num_encoder_input_tokens", least=0)
        require_one_of(self, "mamba_cache_mode", MAMBA_CACHE_MODES)

    @property
    def encoder_tokens(self) -> int:
        """Tokens of an encoder's input, the default applied."""
        given = self.max_num_encoder_input_tokens
        return self.max_num_batched_tokens if given is None else given

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of the longest request that one context-parallel rank keeps: ceil(max_model_len / (dcp * pcp))."""
        return ceil_div(self.max_model_len, self.decode_context_parallel_size * self.prefill_context_parallel_size)
