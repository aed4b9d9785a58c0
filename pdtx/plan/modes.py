"""Direct or staged: runs straight between caches, or packed into large pieces on the way.

A plan is one stream of bytes. Direct, a mover takes each run as it is. Staged, the source packs the stream into a
buffer, the mover moves large pieces of it, and the destination unpacks them to where they belong.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pdtx.errors import PlanError
from pdtx.plan.runs import Int64s, Runs, Slices
from pdtx.units import ceil_div, format_seconds

PIECE_BYTES = 4 << 20
"""Bytes of a staged piece."""


class Mode(StrEnum):
    """How a plan is moved."""

    DIRECT = "direct"
    STAGED = "staged"
    AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a mover and a copy cost: seconds a run, and bytes a second. Measure them; the defaults are only a start.

    The defaults are those of one CPU core: one-sided puts posted one by one, and a copy by index at memory speed.
    """

    run_s: float = 1.0e-6
    wire_bytes_per_s: float = 3.0e9
    pack_run_s: float = 3.0e-8
    pack_bytes_per_s: float = 9.0e9


@dataclass(frozen=True)
class Choice:
    """What was picked and why: the estimated seconds of both ways."""

    mode: Mode
    direct_s: float
    staged_s: float
    reason: str


def choose_mode(
    num_runs: int, nbytes: int, mode: Mode = Mode.AUTO, costs: Costs | None = None, piece_bytes: int = PIECE_BYTES
) -> Choice:
    """Pick direct or staged for num_runs runs of nbytes in all: what was asked for, or the cheaper one by costs.

    direct: every run is posted. staged: every run is copied on either side, and only pieces are posted; pack, move
    and unpack follow one another piece by piece, so that the slowest of them counts, and one piece of the others.
    Raises PlanError for negative numbers, or pieces of less than a byte.
    """
    if num_runs < 0 or nbytes < 0 or piece_bytes < 1:
        raise PlanError(f"{num_runs} runs of {nbytes} bytes in pieces of {piece_bytes} cannot be moved")
    costs = costs or Costs()
    pieces = ceil_div(nbytes, piece_bytes)
    wire_s = nbytes / costs.wire_bytes_per_s
    copy_s = num_runs * costs.pack_run_s + nbytes / costs.pack_bytes_per_s
    direct_s = num_runs * costs.run_s + wire_s
    move_s = pieces * costs.run_s + wire_s
    staged_s = max(move_s, copy_s) + (2 * copy_s + move_s - max(move_s, copy_s)) / max(pieces, 1)
    picked = mode if mode is not Mode.AUTO else Mode.DIRECT if direct_s <= staged_s else Mode.STAGED
    mean = nbytes // num_runs if num_runs else 0
    reason = (
        f"{num_runs:,} runs of {mean:,} B on average: direct {format_seconds(direct_s)}, "
        f"staged {format_seconds(staged_s)}" + ("" if mode is Mode.AUTO else "; as asked for")
    )
    return Choice(picked, direct_s, staged_s, reason)


@dataclass(frozen=True)
class StagedPlan:
    """A plan in three steps, each a set of runs: pack (source to buffer), move (buffer to buffer), unpack.

    The buffers hold nbytes; move's runs are at most piece_bytes long and lie at the same place on both sides.
    """

    pack: Runs
    move: Runs
    unpack: Runs

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer on either side."""
        return self.move.total


def stage(flat: Runs, piece_bytes: int = PIECE_BYTES) -> StagedPlan:
    """Return the staged form of a plan's runs. Raises PlanError for pieces of less than a byte."""
    if piece_bytes < 1:
        raise PlanError(f"staged pieces must have 1 byte or more, not {piece_bytes}")
    source, destination = flat.source(), flat.destination()
    starts = np.arange(0, flat.total, piece_bytes, dtype=np.int64)
    move = Runs(starts, starts, np.diff(starts, append=flat.total))
    packed, unpacked = _stream(source), _stream(destination)
    return StagedPlan(
        Runs(source.offsets, packed, source.nbytes), move, Runs(unpacked, destination.offsets, destination.nbytes)
    )


def _stream(slices: Slices) -> Int64s:
    """Where each range begins in the stream."""
    ends = np.cumsum(slices.nbytes)
    return ends - slices.nbytes
