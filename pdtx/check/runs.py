"""From what every element of a layer holds to runs of wrong elements."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdtx.plan.runs import Int64s

NEVER_WRITTEN, UNKNOWN, AMBIGUOUS = -1, -2, -3
"""In place of the index of the coordinate whose value an element holds."""

_FAR = np.int64(1 << 62)
"""More than indices can be apart."""


@dataclass(frozen=True)
class RowRuns:
    """Runs of rows (heads of positions) of one layer at the destination; int64 each, shape (n,).

    first_row, last_row: the rows, counted through (K and V, position, head). first_channel, last_channel: the wrong
    elements of each. source: what the first element holds: an index, or one of the above. elements: in all.
    scattered: whether the elements of a row come from several directions; then a run is one row.
    """

    first_row: Int64s
    last_row: Int64s
    first_channel: Int64s
    last_channel: Int64s
    source: Int64s
    elements: Int64s
    scattered: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.first_row)


def row_runs(held: Int64s, own: Int64s, pieces: Int64s) -> RowRuns:
    """Group the wrong elements of one layer.

    held: the index that each element holds, shape (rows, channels). own: the index that it should hold, likewise.
    pieces: of each row the piece (K or V, and block) that it lies in, shape (rows,); no run goes on into another piece.
    """
    rows = np.flatnonzero((held != own).any(1))
    held, own, pieces = held[rows], own[rows], pieces[rows]
    wrong = held != own
    first = wrong.argmax(1)
    last = wrong.shape[1] - 1 - wrong[:, ::-1].argmax(1)
    count = wrong.sum(1)
    # How far away the value belongs; what is no value at all is farther than any.
    apart = np.where(held < 0, held - _FAR, held - own)
    least = np.where(wrong, apart, _FAR).min(1, initial=_FAR)
    most = np.where(wrong, apart, -_FAR + UNKNOWN * 2).max(1, initial=-_FAR + UNKNOWN * 2)
    scattered = least != most
    goes_on = np.zeros(len(rows), bool)
    goes_on[1:] = ~scattered[1:] & ~scattered[:-1] & (np.diff(rows) == 1)
    for same in (least, first, last, count, pieces):
        goes_on[1:] &= same[1:] == same[:-1]
    starts = np.flatnonzero(~goes_on)
    stops = np.append(starts[1:], len(rows))[: len(starts)] - 1
    return RowRuns(
        rows[starts],
        rows[stops],
        first[starts],
        last[starts],
        held[starts, first[starts]],
        np.add.reduceat(count, starts) if len(starts) else count,
        scattered[starts],
    )
