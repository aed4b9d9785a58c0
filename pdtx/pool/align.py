"""One page size for attention and states (vLLM 0.22, platforms/interface.py, _align_hybrid_block_size)."""

import math
from dataclasses import replace
from typing import TypeVar

from pdtx.errors import SpecError
from pdtx.kvspec import AttentionSpec, MambaSpec
from pdtx.units import ceil_div

A = TypeVar("A", bound=AttentionSpec)


def align_hybrid_block_size(
    attention: A, state: MambaSpec, *, kernel_block_size: int = 16, chunk_size: int = 256
) -> tuple[A, MambaSpec]:
    """Return both specs with pages of one size: attention gets more tokens, then the state's page is padded.

    attention: with its configured block_size, which is kept if it is large enough already.
    kernel_block_size: tokens to a multiple of which the attention kernel can be raised.
    chunk_size: tokens to a multiple of which states are kept in mamba_cache_mode "all".

    In modes "align" and "all" a state's block gets as many tokens as attention's. Raises SpecError for a size below 1.
    """
    if kernel_block_size < 1 or chunk_size < 1:
        raise SpecError(f"kernel_block_size and chunk_size must be 1 or more, not {kernel_block_size} and {chunk_size}")
    step = max(kernel_block_size, attention.block_size)
    if state.mamba_cache_mode == "all":
        step = math.lcm(chunk_size, step)
    token = attention.copy_with_new_block_size(1).page_size_bytes
    block_size = step * ceil_div(state.real_page_size_bytes, step * token)
    aligned = attention.copy_with_new_block_size(block_size)
    padded = None if aligned.page_size_bytes == state.real_page_size_bytes else aligned.page_size_bytes
    own = state.block_size if state.mamba_cache_mode == "none" else block_size
    return aligned, replace(state, block_size=own, page_size_padded=padded)
