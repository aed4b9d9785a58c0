"""Block tables as fragmented as asked for: how ids of blocks lie in a pool that has been used for a while."""

from collections.abc import Sequence

import numpy as np

from pdtx.errors import InputError
from pdtx.plan.runs import Int64s

RANDOM_ORDER = 1.0
ONE_PIECE = 0.0

_MOST_BLOCKS = 1 << 31
_MOST_MENDS = 64


def block_ids(num_blocks_pool: int, counts: Sequence[int], mean_run: float, seed: int) -> list[Int64s]:
    """Return a block table for each request, with counts[i] ids of a pool; no id twice, and never the null block 0.

    mean_run: mean length of pieces with consecutive ids, as near as whole pieces come to it; lengths are distributed
    geometrically. 1 for a random order, 0 for each table in one piece. Pieces that follow each other in a table never
    touch in the pool by accident. The same seed gives the same tables.

    Raises InputError for a pool that is too small, negative counts, and a mean run that is neither 0 nor 1 or more.
    """
    total = _checked_total(num_blocks_pool, counts, mean_run)
    if not total:
        return [np.zeros(0, dtype=np.int64) for _ in counts]
    random = np.random.default_rng(seed)
    lengths = np.concatenate([_pieces(count, mean_run, random) for count in counts])
    starts = _places(lengths, num_blocks_pool - 1 - total, random)
    firsts = np.cumsum(lengths) - lengths
    ids = np.repeat(starts - firsts, lengths) + np.arange(total, dtype=np.int64)
    return list(np.split(ids, np.cumsum(counts)[:-1]))


def check_mean_run(mean_run: float) -> None:
    """Raise InputError for a mean run that no tables can have."""
    if not (mean_run == ONE_PIECE or 1 <= mean_run < _MOST_BLOCKS):
        raise InputError(f"a mean run of block ids is 0 (all in one piece) or 1 and more, not {mean_run:g}")


def _checked_total(num_blocks_pool: int, counts: Sequence[int], mean_run: float) -> int:
    if any(count < 0 for count in counts):
        raise InputError(f"a table has no fewer than 0 blocks, not {min(counts)}")
    check_mean_run(mean_run)
    total = sum(counts)
    if not total < num_blocks_pool <= _MOST_BLOCKS:
        raise InputError(
            f"{total:,} blocks and the null block do not fit into a pool of {num_blocks_pool:,} (of {_MOST_BLOCKS:,} "
            "at most)"
        )
    return total


def _pieces(count: int, mean_run: float, random: np.random.Generator) -> Int64s:
    """Return lengths of pieces that sum up to count.

    As many pieces as give the mean, cut at places by chance: that is what geometric lengths are, given their number and
    sum. Drawing length after length would leave a short rest, and a mean below what was asked for in short tables.
    """
    if not count:
        return np.zeros(0, dtype=np.int64)
    number = 1 if mean_run == ONE_PIECE else min(count, max(1, round(count / mean_run)))
    cuts = np.sort(random.choice(count - 1, number - 1, replace=False)) + 1 if number > 1 else np.zeros(0, np.int64)
    return np.diff(cuts, prepend=0, append=count).astype(np.int64)


def _places(lengths: Int64s, free: int, random: np.random.Generator) -> Int64s:
    """Return the first id of each piece: pieces in an order by chance, free blocks between them by chance."""
    number = len(lengths)
    order = _order(number, random)
    slots = np.sort(random.choice(number + free, number, replace=False))
    placed = lengths[order]
    starts = np.empty(number, dtype=np.int64)
    starts[order] = 1 + np.cumsum(placed) - placed + slots - np.arange(number)
    return starts


def _order(number: int, random: np.random.Generator) -> Int64s:
    """Return an order in which no piece comes right after the one before it, which would make one piece of two.

    By chance one such pair is in a whole permutation, so a few swaps mend it; few pieces may need the other way.
    """
    order = random.permutation(number).astype(np.int64)
    for _ in range(_MOST_MENDS):
        touching = np.flatnonzero(np.diff(order) == 1)
        if not len(touching):
            return order
        here, there = int(touching[0]), int(random.integers(number))
        order[[here, there]] = order[[there, here]]
    return np.arange(number, dtype=np.int64)[::-1].copy()
