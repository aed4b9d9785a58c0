"""How many tokens found blocks are good for, against an oracle that looks at every position."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtx.cache import CacheGroup, group_kind
from pdtx.kvspec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from pdtx.tiers.hits import held_places, held_tokens, resume_places, usable_tokens

WINDOW, CHUNK, BLOCK = 10, 24, 8
_HEADS: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16"}


def group(spec: KVCacheSpec) -> CacheGroup:
    kind = group_kind(spec)
    return CacheGroup(kind, kind, spec.block_size, 9, spec, 5 if kind == "cross" else 0)


FULL = group(FullAttentionSpec(**_HEADS))
SLIDING = group(SlidingWindowSpec(**_HEADS, sliding_window=WINDOW))
CHUNKED = group(ChunkedLocalAttentionSpec(**_HEADS, attention_chunk_size=CHUNK))
STATES = group(MambaSpec(block_size=512, shapes=((3, 6),), dtypes=("bfloat16",)))
CROSS = group(CrossAttentionSpec(**_HEADS))
SETS = [(FULL,), (SLIDING,), (FULL, SLIDING), (FULL, CHUNKED), (FULL, STATES), (SLIDING, STATES, CHUNKED), (STATES,)]


def looked_at(kind: str, tokens: int) -> list[int]:
    """Positions that the token after so many looks at, by the rules of attention and nothing else."""
    new = tokens
    match kind:
        case "full":
            return list(range(new))
        case "window":
            return [at for at in range(new) if new - at < WINDOW]
        case "chunk":
            return [at for at in range(new) if at // CHUNK == new // CHUNK]
        case _:
            return []


def usable(groups: Sequence[CacheGroup], found: Sequence[Sequence[bool]], tokens: int) -> int:
    def enough(length: int) -> bool:
        for group, mask in zip(groups, found, strict=True):
            if group.kind == "state" and not mask[length // BLOCK - 1]:
                return False
            if not all(mask[at // BLOCK] for at in looked_at(group.kind, length)):
                return False
        return True

    lengths = range(BLOCK, min(tokens - 1, len(found[0]) * BLOCK) + 1, BLOCK)
    return max((length for length in lengths if enough(length)), default=0)


def held(groups: Sequence[CacheGroup], found: Sequence[Sequence[bool]], tokens: int) -> int:
    def enough(length: int) -> bool:
        return all(
            mask[at // BLOCK]
            for group, mask in zip(groups, found, strict=True)
            for at in looked_at(group.kind, tokens)
            if at < length
        )

    lengths = range(BLOCK, min(tokens, len(found[0]) * BLOCK) + 1, BLOCK)
    return max((length for length in lengths if enough(length)), default=0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[CacheGroup, ...], list[list[bool]], int]:
    groups = draw(st.sampled_from(SETS))
    tokens = draw(st.integers(0, 15 * BLOCK))
    count = tokens // BLOCK
    likely = st.sampled_from([True, True, True, False])
    return groups, [draw(st.lists(likely, min_size=count, max_size=count)) for _ in groups], tokens


@given(cases())
def test_hits_are_what_looking_at_every_position_finds(
    case: tuple[tuple[CacheGroup, ...], list[list[bool]], int],
) -> None:
    groups, found, tokens = case
    masks = [np.array(mask, bool) for mask in found]
    reached = usable_tokens(groups, BLOCK, masks, tokens)
    assert reached == usable(groups, found, tokens)
    assert held_tokens(groups, BLOCK, masks, tokens) == held(groups, found, tokens)
    for one, mask, places in zip(groups, masks, resume_places(groups, BLOCK, reached), strict=True):
        assert mask[places].all()
        assert set(places.tolist()) >= {at // BLOCK for at in looked_at(one.kind, reached)}
        if one.kind == "state":
            assert places.tolist() == ([reached // BLOCK - 1] if reached else [])


def test_one_token_is_left_to_compute_and_a_decoder_needs_none() -> None:
    everything = [np.ones(4, bool)]
    assert usable_tokens([FULL], BLOCK, everything, 4 * BLOCK) == 3 * BLOCK
    assert usable_tokens([FULL], BLOCK, everything, 4 * BLOCK + 1) == 4 * BLOCK
    assert held_tokens([FULL], BLOCK, everything, 4 * BLOCK) == 4 * BLOCK


def test_of_a_window_only_what_is_within_reach_counts() -> None:
    found = [np.array([False, False, True, True])]
    assert usable_tokens([SLIDING], BLOCK, found, 4 * BLOCK + 1) == 4 * BLOCK
    assert usable_tokens([FULL], BLOCK, found, 4 * BLOCK + 1) == 0
    (places,) = held_places([SLIDING], BLOCK, 4 * BLOCK, 4 * BLOCK)
    assert places.tolist() == [2, 3]


def test_a_state_is_good_for_its_own_length_only() -> None:
    found = [np.ones(4, bool), np.array([False, True, False, False])]
    assert usable_tokens([FULL, STATES], BLOCK, found, 4 * BLOCK + 1) == 2 * BLOCK
    assert held_tokens([FULL, STATES], BLOCK, found, 4 * BLOCK + 1) == 4 * BLOCK


def test_cross_attention_is_not_determined_by_tokens() -> None:
    found = [np.ones(4, bool), np.ones(4, bool)]
    assert usable_tokens([FULL, CROSS], BLOCK, found, 4 * BLOCK + 1) == 0
    assert held_tokens([FULL, CROSS], BLOCK, found, 4 * BLOCK + 1) == 0


@pytest.mark.parametrize("groups", SETS)
def test_nothing_found_is_no_token(groups: tuple[CacheGroup, ...]) -> None:
    assert usable_tokens(groups, BLOCK, [np.zeros(5, bool) for _ in groups], 5 * BLOCK) == 0
