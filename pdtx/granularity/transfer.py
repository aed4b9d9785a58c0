"""The granularity of every connector for one model and one request (the seed's table 5.3)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdtx.errors import LayoutError
from pdtx.granularity.connectors import ATTENTION, BACKEND, CONNECTORS, LATENT, STATE, Connector, Gather, Nothing, Runs
from pdtx.granularity.pieces import HeadSplit, Pieces, gathered_pieces, layout_pieces, state_pieces
from pdtx.granularity.request import RequestKind

_INFERRED_PAGE = "not read in its source: counted as one page of states a layer"
_INFERRED_PARTS = "not read in its source: parts as in 0.22"


@dataclass(frozen=True, kw_only=True)
class TransferRow:
    """What one connector makes of one kind of layers.

    kind: index into the kinds given. unit_bytes, units: None where there is no answer, and note says why.
    total_bytes: of the request in this kind. objects: stored objects that the units are segments of.
    coalesces: "no", "runs" of adjacent blocks, or by "gather"ing; "" where nothing is moved.
    """

    connector: str
    variant: str
    version: str
    mover: str
    kind: int
    unit: str = ""
    formula: str = ""
    unit_bytes: int | None = None
    units: int | None = None
    total_bytes: int | None = None
    objects: int | None = None
    coalesces: str = ""
    note: str = ""


def transfer_rows(
    kinds: Sequence[RequestKind],
    *,
    versions: Sequence[str],
    run_length: int = 1,
    splits: Sequence[HeadSplit | None] = (),
) -> list[TransferRow]:
    """Return the rows of every connector of those versions, kind by kind.

    run_length: blocks that lie side by side on both sides, for connectors that join them.
    splits: for each kind how heads divide between ranks here and there; empty where both have as many ranks.
    """
    rows = list[TransferRow]()
    for index, kind in enumerate(kinds):
        split = splits[index] if splits else None
        for connector in CONNECTORS:
            if connector.version in versions and family(kind) in connector.holds:
                rows += _rows(connector, kinds, index, run_length, split)
    return rows


def family(kind: RequestKind) -> str:
    """Which kind of content the layers hold, as connectors know it: ATTENTION, LATENT or STATE."""
    if kind.is_state:
        return STATE
    return LATENT if kind.is_latent else ATTENTION


def one_group(kinds: Sequence[RequestKind]) -> bool:
    """Whether all layers are alike and lie in one group."""
    return len(kinds) == 1 and len(kinds[0].groups) == 1 and kinds[0].groups[0][1] == 1


def _rows(
    connector: Connector, kinds: Sequence[RequestKind], index: int, run_length: int, split: HeadSplit | None
) -> list[TransferRow]:
    rule, kind = connector.rule, kinds[index]
    if isinstance(rule, Nothing):
        return [_row(connector, index, kind, note=rule.why, units=rule.units)]
    if isinstance(rule, Runs) and rule.one_group and not one_group(kinds):
        return [_row(connector, index, kind, note="needs a model whose layers are all alike, in one group")]
    if isinstance(rule, Runs) and rule.splits_heads and split is None:
        return [_row(connector, index, kind, note="give --peer-tp, the ranks of the other side")]
    try:
        pieces = _pieces(rule, kinds, kind, run_length, split)
    except LayoutError as error:
        return [_row(connector, index, kind, note=str(error))]
    return [_with_pieces(connector, rule, index, kind, piece) for piece in pieces]


def _pieces(
    rule: Runs | Gather, kinds: Sequence[RequestKind], kind: RequestKind, run_length: int, split: HeadSplit | None
) -> list[Pieces]:
    if isinstance(rule, Gather):
        return gathered_pieces(kind, per=rule.per, chunk=rule.chunk, all_layers=rule.all_layers, by_token=rule.by_token)
    if kind.is_state:
        return state_pieces(kind, parts=rule.state_parts)
    return layout_pieces(
        kind,
        rule.backend,
        cut=rule.cut,
        run_length=run_length if rule.joins else None,
        split=split if rule.splits_heads else None,
        beside_states=any(other.is_state for other in kinds),
    )


def _row(
    connector: Connector, index: int, kind: RequestKind, *, note: str = "", units: int | None = None
) -> TransferRow:
    return TransferRow(
        connector=connector.name,
        variant="" if connector.variant == BACKEND and family(kind) != ATTENTION else connector.variant,
        version=connector.version,
        mover=connector.mover,
        kind=index,
        units=units,
        note=note or connector.note,
    )


def _with_pieces(
    connector: Connector, rule: Runs | Gather, index: int, kind: RequestKind, pieces: Pieces
) -> TransferRow:
    row = _row(connector, index, kind, note=_state_note(connector, rule) if kind.is_state else "")
    row = replace(row, unit=pieces.unit, formula=pieces.formula, unit_bytes=pieces.nbytes)
    if isinstance(rule, Gather):
        if not rule.counted:
            return row
        return replace(row, units=pieces.count, total_bytes=pieces.total, coalesces="gather")
    return replace(
        row,
        units=pieces.count,
        total_bytes=pieces.total,
        objects=pieces.blocks if rule.objects else None,
        coalesces="runs" if pieces.joins else "no",
    )


def _state_note(connector: Connector, rule: Runs | Gather) -> str:
    if isinstance(rule, Runs) and rule.state_parts:
        return "" if connector.version == "0.22" else _INFERRED_PARTS
    return _INFERRED_PAGE
