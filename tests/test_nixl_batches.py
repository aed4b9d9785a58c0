"""Runs as NIXL takes them: nothing lost or moved on the way to indices, requests and descriptors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtx.transports.nixl.batches import Batch, listed, strided, units_of

RUNS = st.lists(
    st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(1, 1 << 20)), min_size=1, max_size=20
)


def batch_of(runs: list[tuple[int, int, int]]) -> Batch:
    return Batch(*(np.array(column, np.int64) for column in zip(*runs, strict=True)))


def joined(batch: Batch) -> list[tuple[int, int, int]]:
    """The runs with neighbours that touch on both sides put together again."""
    found = list[tuple[int, int, int]]()
    for local, remote, nbytes in zip(*(numbers.tolist() for numbers in batch), strict=True):
        if found and (local, remote) == (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]):
            local, remote, nbytes = found[-1][0], found[-1][1], found.pop()[2] + nbytes
        found.append((local, remote, nbytes))
    return found


@given(RUNS, st.integers(1, 1 << 20))
def test_cut_runs_are_short_and_the_same_together(runs: list[tuple[int, int, int]], most: int) -> None:
    batch = batch_of([(local, remote, min(nbytes, most * 50)) for local, remote, nbytes in runs])
    cut = batch.cut(most)
    assert int(cut.nbytes.max()) <= most
    assert int(cut.nbytes.min()) > 0
    assert joined(cut) == joined(batch)


@given(RUNS, st.integers(1, 1 << 21), st.integers(1, 7))
def test_pieces_are_bounded_and_all_there(runs: list[tuple[int, int, int]], most_bytes: int, most_runs: int) -> None:
    batch = batch_of(runs)
    pieces = list(batch.pieces(most_bytes, most_runs))
    for piece in pieces:
        assert 1 <= len(piece.nbytes) <= most_runs
        assert len(piece.nbytes) == 1 or int(piece.nbytes.sum()) <= most_bytes
    for side in range(3):
        np.testing.assert_array_equal(np.concatenate([piece[side] for piece in pieces]), batch[side])


@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(1, 9)), min_size=1, max_size=20), st.integers(1, 4096))
def test_units_are_those_of_the_ranges(ranges: list[tuple[int, int]], unit: int) -> None:
    offsets, counts = (np.array(column, np.int64) for column in zip(*ranges, strict=True))
    indices = units_of(offsets * unit, counts * unit, unit)
    assert indices.dtype == np.int32
    assert indices.tolist() == [first + step for first, count in ranges for step in range(count)]


def test_no_pieces_of_nothing() -> None:
    nothing = Batch(*(np.zeros(0, np.int64) for _ in range(3)))
    assert list(nothing.cut(10).pieces(10, 10)) == []


@pytest.mark.parametrize(
    ("runs", "region_bytes", "unit"),
    [
        ([(0, 64, 64), (128, 256, 64)], 1 << 20, 64),
        ([(0, 64, 192), (256, 512, 192)], 1 << 20, 64),  # three units a run are few
        ([(0, 1, 4096), (8192, 16384, 4096)], 1 << 20, None),  # single bytes are too many
        ([(0, 2, 2), (8, 16, 2)], 1 << 33, None),  # more units than NIXL has indices
    ],
)
def test_unit_of_a_batch(runs: list[tuple[int, int, int]], region_bytes: int, unit: int | None) -> None:
    assert batch_of(runs).unit(4096, region_bytes) == unit


def test_descriptors() -> None:
    assert strided(1000, 105, 3, 10).tolist() == [[1000, 10, 3, 10, 10]]
    assert listed(1000, np.array([0, 5]), np.array([7, 8]), 3).tolist() == [[1000, 7, 3], [1005, 8, 3]]
    top = (1 << 64) - 4096
    assert listed(top, np.array([1]), np.array([1]), 0)[0, 0] == top + 1
