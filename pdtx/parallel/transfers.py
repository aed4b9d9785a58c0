"""What moves between the ranks of a source and of a destination with other tensor-parallel sizes."""

from collections import defaultdict
from dataclasses import dataclass

from pdtx.errors import ParallelError
from pdtx.kvspec import AttentionSpec, KVCacheSpec, MambaSpec, StateSharding
from pdtx.parallel.boxes import Box, Cut
from pdtx.parallel.ranks import Source, replicated, require_sharding, sources

_WHOLE = (Box(),)


@dataclass(frozen=True)
class RankTransfer:
    """What one source rank sends to one destination rank: the boxes of each layer, for build_plan."""

    src_rank: int
    dst_rank: int
    boxes: tuple[Box, ...] = _WHOLE


def transfers(
    spec: KVCacheSpec, src_tp: int, dst_tp: int, sharding: StateSharding | None = None
) -> tuple[RankTransfer, ...]:
    """Return all that must move for a layer, by destination rank, then source rank.

    spec: of the whole model. sharding: see rank_spec. Every element of every destination rank comes exactly once;
    where the source has copies, only one of them is read, see unread_ranks.
    Raises ParallelError if ranks cannot have equal shares.
    """
    if src_tp == dst_tp == 1:
        return (RankTransfer(0, 0),)
    if replicated(spec):
        return tuple(RankTransfer(sources(rank, src_tp, dst_tp, 1)[0].src_rank, rank) for rank in range(dst_tp))
    if isinstance(spec, MambaSpec):
        return _of_states(src_tp, dst_tp, require_sharding(spec, sharding))
    if not isinstance(spec, AttentionSpec):
        raise ParallelError(f"{type(spec).__name__} has no rule for how ranks share it")
    found = list[RankTransfer]()
    for rank in range(dst_tp):
        pieces = sources(rank, src_tp, dst_tp, spec.num_kv_heads, "KV heads")
        by_rank = defaultdict[int, list[Box]](list)
        for piece in pieces:
            by_rank[piece.src_rank].append(Box((_cut("head", piece),)))
        found += [RankTransfer(src_rank, rank, tuple(boxes)) for src_rank, boxes in sorted(by_rank.items())]
    return tuple(found)


def unread_ranks(moves: tuple[RankTransfer, ...], src_tp: int) -> list[int]:
    """Return the source ranks that nobody reads: they must be told that the request is over all the same."""
    return sorted(set(range(src_tp)) - {move.src_rank for move in moves})


def _cut(axis: str, piece: Source, *, src_at: int = 0, dst_at: int = 0, width: int = 1) -> Cut:
    return Cut(axis, src_at + piece.src * width, dst_at + piece.dst * width, piece.count * width)


def _of_states(src_tp: int, dst_tp: int, sharding: StateSharding) -> tuple[RankTransfer, ...]:
    found = list[RankTransfer]()
    for rank in range(dst_tp):
        by_rank = defaultdict[int, list[Box]](list)
        for number, segments in enumerate(sharding.conv):
            part = "conv" if len(sharding.conv) == 1 else f"conv{number}"
            src_at = dst_at = 0
            for segment in segments:
                width = segment.channels // segment.units
                for piece in sources(rank, src_tp, dst_tp, segment.units, f"units of {segment.name}"):
                    cut = _cut("channel", piece, src_at=src_at, dst_at=dst_at, width=width)
                    by_rank[piece.src_rank].append(Box((cut,), part))
                src_at += max(1, segment.units // src_tp) * width
                dst_at += max(1, segment.units // dst_tp) * width
        if sharding.heads:
            for piece in sources(rank, src_tp, dst_tp, sharding.heads, "heads of the state"):
                by_rank[piece.src_rank].append(Box((_cut("head", piece),), "ssm"))
        found += [RankTransfer(src_rank, rank, tuple(boxes)) for src_rank, boxes in sorted(by_rank.items())]
    return tuple(found)
