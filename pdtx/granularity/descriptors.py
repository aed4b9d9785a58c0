"""What NIXL's descriptors are, by the layout of the cache (the seed's table 5.1)."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdtx.errors import LayoutError
from pdtx.granularity.connectors import ATTENTION, LATENT, STATE
from pdtx.granularity.pieces import HeadSplit, Pieces, layout_pieces, state_pieces
from pdtx.granularity.request import RequestKind
from pdtx.granularity.transfer import family, one_group


@dataclass(frozen=True, kw_only=True)
class _Form:
    """A layout as NIXL registers it; one_group: where all layers lie in one group only."""

    version: str
    label: str
    backend: str = ""
    cut: tuple[str, ...] = ()
    one_group: bool = False


_KV = ("kv",)
_PACKED = tuple(
    _Form(version="0.32", label=backend.upper(), backend=backend, cut=cut)
    for backend, cut in (
        ("lbhnc", ()),
        ("lbnhc", ()),
        ("lhbnc", ()),
        ("blhnc", ("layer",)),
        ("blnhc", ()),
        ("bhlnc", ()),
    )
)
_FORMS = {
    ATTENTION: (
        _Form(version="0.22", label="FlashAttention NHD", backend="flash_attn_nhd", cut=_KV),
        _Form(version="0.22", label="FlashAttention HND", backend="flash_attn_hnd", cut=_KV),
        _Form(version="0.22", label="FlashInfer NHD", backend="flashinfer_nhd", cut=_KV),
        _Form(version="0.22", label="FlashInfer HND", backend="flashinfer_hnd", cut=_KV),
        _Form(version="0.22", label="FA cross-layer HND", backend="flash_attn_hnd_cross_layer", one_group=True),
        _Form(
            version="0.22", label="FI cross-layer HND", backend="flashinfer_hnd_cross_layer", cut=_KV, one_group=True
        ),
        *_PACKED,
    ),
    LATENT: (_Form(version="0.22", label="MLA", backend="flashinfer_hnd"), *_PACKED),
    STATE: tuple(_Form(version=version, label="states") for version in ("0.22", "0.32")),
}


@dataclass(frozen=True, kw_only=True)
class DescriptorRow:
    """NIXL's descriptors for one kind of layers in one layout.

    kind: index into the kinds given. regions: that are registered. stride: bytes from a block's descriptor to the next
    block's. per_block: descriptors of a block. count: of the request. All None where the layout cannot be, and note
    says why.
    """

    version: str
    layout: str
    kind: int
    unit: str = ""
    formula: str = ""
    regions: int | None = None
    nbytes: int | None = None
    stride: int | None = None
    per_block: int | None = None
    count: int | None = None
    note: str = ""


def descriptor_rows(
    kinds: Sequence[RequestKind], *, versions: Sequence[str], splits: Sequence[HeadSplit | None] = ()
) -> list[DescriptorRow]:
    """Return the rows of every layout of those versions, kind by kind.

    splits: as in transfer_rows; the descriptors are then those that one rank of the other side reads or writes.
    """
    rows = list[DescriptorRow]()
    for index, kind in enumerate(kinds):
        for form in _FORMS[family(kind)]:
            if form.version in versions:
                rows += _rows(form, kinds, index, splits[index] if splits else None)
    return rows


def _rows(form: _Form, kinds: Sequence[RequestKind], index: int, split: HeadSplit | None) -> list[DescriptorRow]:
    if form.one_group and not one_group(kinds):
        return [_refused(form, index, "needs a model whose layers are all alike, in one group")]
    try:
        pieces = _pieces(form, kinds, index, split)
    except LayoutError as error:
        return [_refused(form, index, str(error))]
    return [
        DescriptorRow(
            version=form.version,
            layout=form.label,
            kind=index,
            unit=piece.unit,
            formula=piece.formula,
            regions=piece.regions,
            nbytes=piece.nbytes,
            stride=piece.stride,
            per_block=piece.per_block,
            count=piece.count,
        )
        for piece in pieces
    ]


def _refused(form: _Form, index: int, why: str) -> DescriptorRow:
    return DescriptorRow(version=form.version, layout=form.label, kind=index, note=why)


def _pieces(form: _Form, kinds: Sequence[RequestKind], index: int, split: HeadSplit | None) -> list[Pieces]:
    kind = kinds[index]
    if kind.is_state:
        return state_pieces(kind, parts=True)
    beside_states = any(other.is_state for other in kinds)
    return layout_pieces(kind, form.backend, cut=form.cut, split=split, beside_states=beside_states)
