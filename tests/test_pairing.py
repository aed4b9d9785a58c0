"""Two sides' ranges as runs: against one number for every byte of the stream."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtx.errors import PlanError
from pdtx.plan import Slices
from pdtx.transports.pairing import cut_stream, pair_slices

_lengths = st.lists(st.integers(0, 9), max_size=12)


def _slices(lengths: list[int], seed: int) -> Slices:
    """Ranges of these lengths in random order of a region, apart or touching."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(lengths))
    offsets, at = np.zeros(len(lengths), np.int64), 0
    for place in order:
        at += int(random.integers(0, 3))
        offsets[place] = at
        at += lengths[place]
    return Slices(offsets, np.array(lengths, np.int64))


def _bytes(slices: Slices) -> list[int]:
    pairs = zip(slices.offsets.tolist(), slices.nbytes.tolist(), strict=True)
    return [byte for offset, nbytes in pairs for byte in range(offset, offset + nbytes)]


def _recut(total: int, seed: int) -> list[int]:
    """Another way to cut a stream of total bytes."""
    random = np.random.default_rng(seed)
    cuts = np.sort(random.integers(0, total + 1, int(random.integers(0, 8))))
    return np.diff(np.concatenate(([0], cuts, [total]))).tolist()  # type: ignore[no-any-return]


@given(_lengths, st.integers(0, 1000))
def test_every_byte_goes_where_its_place_in_the_stream_says(lengths: list[int], seed: int) -> None:
    src, dst = _slices(lengths, seed), _slices(_recut(sum(lengths), seed), seed + 1)
    runs = pair_slices(src, dst)
    assert _bytes(Slices(runs.src, runs.nbytes)) == _bytes(src)
    assert _bytes(Slices(runs.dst, runs.nbytes)) == _bytes(dst)
    assert len(runs) <= len(src) + len(dst)


@given(_lengths, st.integers(0, 1000), st.integers(0, 108), st.integers(0, 108))
def test_a_cut_is_that_part_of_the_stream(lengths: list[int], seed: int, one: int, other: int) -> None:
    slices = _slices(lengths, seed)
    start, stop = sorted((min(one, slices.total), min(other, slices.total)))
    assert _bytes(cut_stream(slices, start, stop)) == _bytes(slices)[start:stop]


def test_streams_of_different_length_are_refused() -> None:
    with pytest.raises(PlanError, match="7 bytes cannot be moved to 8"):
        pair_slices(_slices([7], 0), _slices([4, 4], 0))
