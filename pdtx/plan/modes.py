"""Direct or staged: runs straight between caches, or packed into large pieces on the way.

A plan is one stream of bytes, in the order of the destination's memory. Direct, a mover takes each run as it is.
Staged, the source packs the stream into a buffer, piece by piece, and the mover moves what lies together at the
destination in one go: there is nothing to unpack.
"""

from dataclasses import dataclass
from enum import StrEnum

from pdtx.errors import PlanError
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
    num_runs: int,
    nbytes: int,
    mode: Mode = Mode.AUTO,
    costs: Costs | None = None,
    *,
    num_ranges: int,
    piece_bytes: int = PIECE_BYTES,
    source: str = "",
) -> Choice:
    """Pick direct or staged for num_runs runs of nbytes in all: what was asked for, or the cheaper one by costs.

    num_ranges: ranges of the destination, joined where they touch there, which are as many as the runs or fewer.
    direct: every run is posted. staged: every run is packed, and only ranges, or pieces of them, are posted; pack and
    move follow one another piece by piece, so that the slower one counts, and one piece of the other.
    source: where the costs come from, for the reason.
    Raises PlanError for numbers that no plan has.
    """
    if num_runs < 0 or nbytes < 0 or piece_bytes < 1 or not 0 <= num_ranges <= num_runs:
        raise PlanError(
            f"{num_runs} runs of {nbytes} bytes to {num_ranges} ranges in pieces of {piece_bytes} cannot be moved"
        )
    costs = costs or Costs()
    pieces = ceil_div(nbytes, piece_bytes)
    wire_s = nbytes / costs.wire_bytes_per_s
    pack_s = num_runs * costs.pack_run_s + nbytes / costs.pack_bytes_per_s
    direct_s = num_runs * costs.run_s + wire_s
    move_s = max(num_ranges, pieces) * costs.run_s + wire_s
    staged_s = max(move_s, pack_s) + min(move_s, pack_s) / max(pieces, 1)
    picked = mode if mode is not Mode.AUTO else Mode.DIRECT if direct_s <= staged_s else Mode.STAGED
    mean = nbytes // num_runs if num_runs else 0
    reason = (
        f"{num_runs:,} runs of {mean:,} B on average to {num_ranges:,} ranges: direct {format_seconds(direct_s)}, "
        f"staged {format_seconds(staged_s)}"
    )
    reason += f" by {source}" if source else ""
    reason += "" if mode is Mode.AUTO else "; as asked for"
    return Choice(picked, direct_s, staged_s, reason)
