"""How much of a prompt blocks that were found are good for: hits are counted in tokens, whatever the groups keep."""

from collections.abc import Sequence

import numpy as np

from pdtx.cache import CacheGroup
from pdtx.plan.runs import Int64s
from pdtx.tiers.base import Bools

_NONE: Int64s = np.zeros(0, np.int64)


def usable_tokens(groups: Sequence[CacheGroup], block_tokens: int, found: Sequence[Bools], num_tokens: int) -> int:
    """Return after how many tokens of a prompt computing can go on, if the found blocks are loaded.

    found: for each group, for each whole block of the prompt, whether it is there. Of full attention all blocks are
    needed, of windows and chunks those that the next token looks at, of states the one after just so many tokens. One
    token at least is left to be computed. 0 for models with cross attention, which tokens alone do not determine.
    """
    if any(group.kind == "cross" for group in groups):
        return 0
    blocks = min([max(0, num_tokens - 1) // block_tokens, *(len(each) for each in found)])
    while blocks:
        # A shorter prefix looks at earlier blocks too, so a block that is missing is missing for all down to it.
        shorter = min(
            _whole(group, block_tokens, each, blocks) for group, each in zip(groups, found, strict=True)
        )  # fmt: skip
        if shorter == blocks:
            break
        blocks = shorter
    return blocks * block_tokens


def _whole(group: CacheGroup, block_tokens: int, found: Bools, blocks: int) -> int:
    """Return blocks if a group has all that is needed after them, else fewer that may do."""
    if group.kind == "state":
        stored = np.flatnonzero(found[:blocks])
        return int(stored[-1]) + 1 if len(stored) else 0
    first = group.first_read(blocks * block_tokens) // block_tokens
    missing = np.flatnonzero(~found[first:blocks])
    return first + int(missing[0]) if len(missing) else blocks


def resume_places(groups: Sequence[CacheGroup], block_tokens: int, num_tokens: int) -> tuple[Int64s, ...]:
    """Return for each group the blocks to load so that computing can go on after num_tokens, see usable_tokens()."""
    blocks = num_tokens // block_tokens
    return tuple(
        _range(blocks - 1 if group.kind == "state" else group.first_read(num_tokens) // block_tokens, blocks)
        for group in groups
    )


def held_tokens(groups: Sequence[CacheGroup], block_tokens: int, found: Sequence[Bools], num_tokens: int) -> int:
    """Return how many tokens of a prompt nobody need send to a decoder that loads the found blocks.

    Other than for usable_tokens() states do not count, for they are sent whole, and the whole prompt may be held.
    """
    if any(group.kind == "cross" for group in groups):
        return 0
    blocks = min([num_tokens // block_tokens, *(len(each) for each in found)])
    for places, each in zip(held_places(groups, block_tokens, blocks * block_tokens, num_tokens), found, strict=True):
        missing = places[~each[places]]
        if len(missing):
            blocks = min(blocks, int(missing[0]))
    return blocks * block_tokens


def held_places(
    groups: Sequence[CacheGroup], block_tokens: int, num_tokens: int, prompt_tokens: int
) -> tuple[Int64s, ...]:
    """Return for each group the blocks among the first num_tokens of a prompt that a decoder looks at."""
    blocks = num_tokens // block_tokens
    return tuple(
        _range(group.positions(prompt_tokens).start // block_tokens, blocks) if group.counts_tokens else _NONE
        for group in groups
    )


def _range(start: int, stop: int) -> Int64s:
    return np.arange(max(0, start), max(0, stop), dtype=np.int64)
