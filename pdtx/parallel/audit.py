"""The audit of what moves between ranks: each unit of a destination comes from a rank that really holds it."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pdtx.errors import PlanError
from pdtx.kvspec import AttentionSpec, KVCacheSpec, MambaSpec, StateSharding
from pdtx.parallel.boxes import Box
from pdtx.parallel.ranks import replicated
from pdtx.parallel.transfers import RankTransfer

Units = npt.NDArray[np.int64]
"""(ranks, units of a rank): the model's number of each unit, in the order in which a rank keeps them."""


def audit_moves(
    spec: KVCacheSpec, moves: Sequence[RankTransfer], src_tp: int, dst_tp: int, sharding: StateSharding | None = None
) -> None:
    """Check moves against what the ranks of both sides hold, which is worked out here anew, from the spec alone.

    An audit of bytes cannot see this: a state whose channels are cut as one flat half, instead of a share of each of
    its segments, has the right sum and writes no byte twice. spec: of the whole model; moves: between all ranks.
    Cost: the units of a layer, once for two sides, whatever the requests.

    Raises PlanError naming the first unit that is not the right one, comes twice, or does not come at all; for ranks
    that there are not, and for boxes that are not cut along the units of one part, which this cannot judge.
    """
    for move in moves:
        if not (0 <= move.src_rank < src_tp and 0 <= move.dst_rank < dst_tp):
            raise PlanError(
                f"audit: nothing moves from rank {move.src_rank} of {src_tp} to rank {move.dst_rank} of {dst_tp}"
            )
    if replicated(spec) or (isinstance(spec, MambaSpec) and src_tp == dst_tp == 1):
        _audit_copies(moves, dst_tp)
        return
    here, there = held_units(spec, src_tp, sharding), held_units(spec, dst_tp, sharding)
    for move in moves:
        for box in move.boxes:
            _check_box(box, there)
    for part, units in there.items():
        for rank in range(dst_tp):
            into = [move for move in moves if move.dst_rank == rank]
            _audit_part(part, here[part], units, rank, into, sharding)


def held_units(spec: KVCacheSpec, tp_size: int, sharding: StateSharding | None) -> Mapping[str, Units]:
    """Return which of the model's units each rank holds, for each part that ranks share: KV heads, channels, heads.

    Equal shares one behind the other; of units that are fewer than ranks each is on several ranks one behind the other.
    """
    if isinstance(spec, AttentionSpec):
        return {"": _shares(np.arange(spec.num_kv_heads)[:, None], tp_size)}
    if not isinstance(spec, MambaSpec) or sharding is None:
        raise PlanError(f"audit: how ranks share a {type(spec).__name__} is not known")
    found = dict[str, Units]()
    for number, segments in enumerate(sharding.conv):
        first, shares = 0, list[Units]()
        for segment in segments:
            channels = np.arange(first, first + segment.channels).reshape(segment.units, -1)
            shares.append(_shares(channels, tp_size))
            first += segment.channels
        found["conv" if len(sharding.conv) == 1 else f"conv{number}"] = np.concatenate(shares, 1)
    if sharding.heads:
        found["ssm"] = _shares(np.arange(sharding.heads)[:, None], tp_size)
    return found


def _shares(units: npt.NDArray[np.int64], tp_size: int) -> Units:
    """Divide units, (number of units, elements of a unit), over ranks."""
    copies = max(1, tp_size // len(units))
    return np.repeat(units, copies, axis=0).reshape(tp_size, -1)


def _audit_copies(moves: Sequence[RankTransfer], dst_tp: int) -> None:
    """Every rank must get one whole copy."""
    for rank in range(dst_tp):
        whole = [move for move in moves if move.dst_rank == rank]
        if len(whole) != 1 or whole[0].boxes != (Box(),):
            raise PlanError(f"audit: rank {rank} gets {len(whole)} copies of what every rank keeps whole")


def _check_box(box: Box, parts: Mapping[str, Units]) -> None:
    """Check that a box is all of a layer, or some units of one of its parts."""
    if not box.part and not box.cuts:
        return
    if box.part not in parts:
        raise PlanError(f"audit: {box} is of no part that ranks share")
    axis = "channel" if box.part.startswith("conv") else "head"
    if any(cut.axis != axis or cut.count < 1 for cut in box.cuts) or len(box.cuts) > 1:
        raise PlanError(f"audit: {box} must be cut once, along {axis}, of which ranks have a share")


def _audit_part(
    part: str, here: Units, there: Units, rank: int, moves: Sequence[RankTransfer], sharding: StateSharding | None
) -> None:
    """Check what one rank gets of a part: each of its units once, and from where it is."""
    times = np.zeros(there.shape[1], np.int64)
    for move in moves:
        for box in move.boxes:
            if box.part not in (part, ""):
                continue
            # What is not cut is all that the source has.
            src, dst, count = _span(box, here.shape[1])
            given, meant = here[move.src_rank][src : src + count], there[rank][dst : dst + count]
            if src < 0 or dst < 0 or len(given) < count or len(meant) < count:
                raise PlanError(f"audit: {_name(part)} {dst}..{dst + count} of rank {rank} lie outside what ranks keep")
            wrong = np.flatnonzero(given != meant)
            if len(wrong):
                at = int(wrong[0])
                raise PlanError(
                    f"audit: rank {rank} would get {_unit(part, given[at], sharding)} from rank {move.src_rank} "
                    f"in the place of {meant[at]}{_segment(part, meant[at], sharding)}"
                )
            times[dst : dst + count] += 1
    bad = np.flatnonzero(times != 1)
    if len(bad):
        unit, count = _unit(part, there[rank][bad[0]], sharding), int(times[bad[0]])
        raise PlanError(f"audit: rank {rank} gets {unit} {count} times")


def _span(box: Box, units: int) -> tuple[int, int, int]:
    """Return where a box begins on the source rank and on the destination rank, and how many units it has."""
    return (box.cuts[0].src, box.cuts[0].dst, box.cuts[0].count) if box.cuts else (0, 0, units)


def _unit(part: str, number: int, sharding: StateSharding | None) -> str:
    return f"{_name(part)} {number} of the model{_segment(part, number, sharding)}"


def _segment(part: str, number: int, sharding: StateSharding | None) -> str:
    """Name the segment that a channel belongs to; nothing for what has none."""
    if sharding is None or not part.startswith("conv"):
        return ""
    segments = sharding.conv[int(part.removeprefix("conv") or 0)]
    ends = np.cumsum([segment.channels for segment in segments])
    return f" (segment {segments[int(np.searchsorted(ends, number, 'right'))].name})"


def _name(part: str) -> str:
    if not part:
        return "KV head"
    return "head of the state" if part == "ssm" else f"channel of {part}"
