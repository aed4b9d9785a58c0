"""Block tables as fragmented as asked for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtx.bench.fragment import block_ids
from pdtx.errors import InputError
from pdtx.plan.runs import Int64s

counts = st.lists(st.integers(0, 60), min_size=1, max_size=6)
runs = st.one_of(st.just(0.0), st.just(1.0), st.floats(1.0, 70.0))


def pieces(table: Int64s) -> int:
    """How many pieces of consecutive ids a table has; counted one by one, unlike it was made."""
    ids = table.tolist()
    return sum(1 for at, block in enumerate(ids) if at == 0 or block != ids[at - 1] + 1)


@given(counts, runs, st.integers(0, 200), st.integers(0, 2**32))
def test_every_table_has_blocks_of_its_own_in_pieces_of_the_mean(
    counts: list[int], mean_run: float, free: int, seed: int
) -> None:
    pool = sum(counts) + 1 + free
    tables = block_ids(pool, counts, mean_run, seed)
    ids = [block for table in tables for block in table.tolist()]
    assert [len(table) for table in tables] == counts
    assert len(set(ids)) == len(ids)
    assert all(1 <= block < pool for block in ids)
    assert all(table.dtype == np.int64 for table in tables)
    for table, count in zip(tables, counts, strict=True):
        meant = 1 if mean_run == 0 else min(count, max(1, round(count / mean_run)))
        assert pieces(table) == min(meant, count)


@given(counts, runs, st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_tables(counts: list[int], mean_run: float, seed: int) -> None:
    first, second = (block_ids(sum(counts) + 9, counts, mean_run, seed) for _ in range(2))
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_another_seed_gives_other_tables() -> None:
    assert not np.array_equal(block_ids(1000, [500], 4, 1)[0], block_ids(1000, [500], 4, 2)[0])


def test_a_whole_pool_can_be_taken() -> None:
    assert sorted(block_ids(101, [60, 40], 1, 0)[0].tolist() + block_ids(101, [60, 40], 1, 0)[1].tolist()) == list(
        range(1, 101)
    )


def test_lengths_of_pieces_are_geometric() -> None:
    """Of a geometric length of mean 8, a share of 1/8 is 1 long and (7/8)^16 longer than 16."""
    (table,) = block_ids(300_001, [200_000], 8, 3)
    lengths = np.diff(np.flatnonzero(np.diff(table, prepend=-9, append=-9) != 1))
    assert abs(lengths.mean() - 8) < 0.01
    assert abs((lengths == 1).mean() - 1 / 8) < 0.01
    assert abs((lengths > 16).mean() - (7 / 8) ** 16) < 0.01


def test_tables_are_spread_over_the_pool() -> None:
    """Free blocks lie between the pieces, not behind them, and pieces are in no order."""
    (table,) = block_ids(10_001, [5000], 10, 5)
    assert table.max() > 9000
    assert table.min() < 1000
    starts = table[np.flatnonzero(np.diff(table, prepend=-9) != 1)]
    assert 0.4 < (np.diff(starts) > 0).mean() < 0.6


def test_a_million_blocks() -> None:
    tables = block_ids(1_500_000, [1000] * 1000, 3, 7)
    ids = np.concatenate(tables)
    assert len(np.unique(ids)) == 1_000_000


@pytest.mark.parametrize(
    ("pool", "counts", "mean_run", "said"),
    [
        (10, [10], 1, "10 blocks and the null block do not fit into a pool of 10"),
        (10, [3, -1], 1, "not -1"),
        (10, [3], 0.5, "0 (all in one piece) or 1 and more, not 0.5"),
        (10, [3], float("nan"), "not nan"),
        (1 << 40, [3], 1, "at most"),
    ],
)
def test_what_cannot_be_is_refused(pool: int, counts: list[int], mean_run: float, said: str) -> None:
    with pytest.raises(InputError) as refused:
        block_ids(pool, counts, mean_run, 0)
    assert said in str(refused.value)
