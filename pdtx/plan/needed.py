"""Which positions of a request a decoder still needs once some of its tokens are computed."""

from pdtx.errors import PlanError
from pdtx.kvspec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

STATE = range(1)
"""A state is position 0 of a table of one block: the one that holds it."""


def needed_positions(spec: KVCacheSpec, num_tokens: int, encoder_positions: int | None = None) -> range:
    """Return the positions of a layer that the token after num_tokens computed ones will look at.

    Full attention and all its kin: all. A window of w: the last w - 1, for the new token is the w-th.
    Chunks of c: those of the chunk that the new token is in; none if it begins one. States: STATE, the running one.
    Cross attention: encoder_positions, whatever num_tokens. Where several tokens make one vector, only whole vectors:
    there is no other yet.
    (vLLM 0.22: get_num_skipped_tokens in v1/core/single_type_kv_cache_manager.py.)

    Raises PlanError for a spec without a rule, or cross attention without encoder_positions.
    """
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return needed_positions(next(iter(spec.kv_cache_specs.values())), num_tokens, encoder_positions)
    if num_tokens < 1 or isinstance(spec, EncoderOnlyAttentionSpec):
        return range(0)
    needed, ratio = _needed(spec, num_tokens, encoder_positions), tokens_per_vector(spec)
    start, stop = needed.start // ratio * ratio, needed.stop // ratio * ratio
    return range(min(start, stop), stop)


def tokens_per_vector(spec: KVCacheSpec) -> int:
    """Tokens that one stored vector stands for: compress_ratio, where a spec has one."""
    return int(getattr(spec, "compress_ratio", 1))


def _needed(spec: KVCacheSpec, num_tokens: int, encoder_positions: int | None) -> range:
    if isinstance(spec, SlidingWindowSpec):
        return range(max(0, num_tokens - spec.sliding_window + 1), num_tokens)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return range(num_tokens // spec.attention_chunk_size * spec.attention_chunk_size, num_tokens)
    if isinstance(spec, MambaSpec):
        return STATE
    if isinstance(spec, CrossAttentionSpec):
        if encoder_positions is None or encoder_positions < 0:
            raise PlanError(f"cross attention keeps the encoder's positions; say how many, not {encoder_positions}")
        return range(encoder_positions)
    if not isinstance(spec, AttentionSpec):
        raise PlanError(f"{type(spec).__name__} has no rule for which positions are needed")
    return range(num_tokens)


def state_block(block_ids: list[int], num_tokens: int, block_size: int) -> int:
    """Return the block that holds the running state after num_tokens, out of a layer's whole table.

    A table of one block (mamba_cache_mode none) is that block; otherwise one state was kept every block_size tokens and
    the running one is in the block of the last token. Raises PlanError if the table is too short.
    """
    if num_tokens < 1 or block_size < 1:
        raise PlanError(f"blocks of {block_size} tokens hold no state of {num_tokens} tokens; both must be 1 or more")
    at = 0 if len(block_ids) == 1 else (num_tokens - 1) // block_size
    if at >= len(block_ids):
        raise PlanError(f"{len(block_ids)} blocks of {block_size} tokens hold no state of {num_tokens} tokens")
    return block_ids[at]
