"""What one request becomes when it is cut into pieces: by a layout's runs, by gathering, or by states."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod

from pdtx.errors import InputError, LayoutError
from pdtx.granularity.backends import backend_layout
from pdtx.granularity.formulas import gathered_formula, layers_text, run_formula, unit_text
from pdtx.granularity.request import RequestKind
from pdtx.granularity.runs import block_runs
from pdtx.kvspec import MambaSpec
from pdtx.layout import StridedLayout, any_layout
from pdtx.units import ceil_div


@dataclass(frozen=True, kw_only=True)
class HeadSplit:
    """Ranks of another tensor-parallel size on the other side.

    heads: that one piece holds. times: as many pieces as of a whole page, so that a rank there gets all its heads.
    """

    heads: int
    times: int

    @classmethod
    def of(cls, own_heads: int, peer_heads: int) -> "HeadSplit":
        """Return the split between ranks that keep so many heads here and there.

        Raises InputError unless one number is a multiple of the other.
        """
        few, many = sorted((own_heads, peer_heads))
        if few < 1 or many % few:
            raise InputError(f"ranks of {own_heads} heads here and {peer_heads} there do not share heads evenly")
        return cls(heads=few, times=peer_heads // few)


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Equal pieces of a request in layers of one kind.

    unit: what a piece is. formula: of its bytes. nbytes: of one; the last one of a row of blocks or tokens may be
    shorter. count: for the request. total: bytes of all. blocks: of the request that they are pieces of.
    per_block, regions, stride: see BlockRuns; None where no layout decides.
    joins: whether pieces of adjacent blocks lie end to end, so that r of them make one run.
    """

    unit: str
    formula: str
    nbytes: int
    count: int
    total: int
    blocks: int
    per_block: int | None = None
    regions: int | None = None
    stride: int | None = None
    joins: bool = False


def layout_pieces(
    kind: RequestKind,
    backend: str,
    *,
    cut: Collection[str] = (),
    run_length: int | None = None,
    split: HeadSplit | None = None,
    beside_states: bool = False,
) -> list[Pieces]:
    """Return the pieces that a layout gives, those of different sizes apart (a block of all layers of unequal groups).

    run_length: blocks that lie side by side on both sides; None for a mover that never joins them.
    Raises LayoutError where the backend cannot hold the layers, or heads cannot be split.
    """
    pieces: dict[int, Pieces] = {}
    for layers, groups in kind.groups:
        layout = backend_layout(backend, kind.spec, layers, beside_states=beside_states)
        more = _of_group(kind, layout, cut, run_length, split)
        more = replace(more, **{name: getattr(more, name) * groups for name in _SUMS})
        pieces[more.nbytes] = _added(pieces[more.nbytes], more) if more.nbytes in pieces else more
    return list(pieces.values())


_SUMS = ("count", "total", "blocks")


def _added(first: Pieces, second: Pieces) -> Pieces:
    """The pieces of two sizes of groups; regions and the pieces of a block are those of the larger, which is first."""
    return replace(first, **{name: getattr(first, name) + getattr(second, name) for name in _SUMS})


def _of_group(
    kind: RequestKind,
    layout: StridedLayout,
    cut: Collection[str],
    run_length: int | None,
    split: HeadSplit | None,
) -> Pieces:
    runs = block_runs(layout, cut=cut, heads=None if split is None else split.heads)
    divided = split is not None and split.heads < layout.extent("head")
    if divided and ("token" not in runs.spans or "head" not in layout.sliceable):
        raise LayoutError(f"{layout.name} does not keep the bytes of a head together, and is not split between ranks")
    joins = run_length is not None and runs.adjacent_blocks_join
    join = max(1, min(run_length or 1, kind.blocks)) if joins else 1
    per_block = runs.count * (split.times if split else 1)
    return Pieces(
        unit=unit_text(kind, layout, runs, joins=joins),
        formula=run_formula(kind, layout, runs, joins=joins, split=divided),
        nbytes=runs.nbytes * join,
        count=ceil_div(kind.blocks, join) * per_block,
        total=kind.blocks * per_block * runs.nbytes,
        blocks=kind.blocks,
        per_block=per_block,
        regions=runs.regions,
        stride=runs.stride,
        joins=joins,
    )


def gathered_pieces(kind: RequestKind, *, per: str, chunk: int, all_layers: bool, by_token: bool) -> list[Pieces]:
    """Return the pieces of a mover that first gathers what it moves.

    per: "request", "block", or "chunk" of so many tokens. all_layers: a piece holds all layers of a group.
    by_token: of the last block only the tokens that there are.
    Raises LayoutError for states, which nothing cut by tokens can hold.
    """
    if kind.is_state and per != "request":
        raise LayoutError(f"cuts by tokens ({per}); a state has none")
    number, one, total = _gathered(kind, per, chunk, by_token=by_token)
    formula = gathered_formula(kind, per, chunk, all_layers=all_layers, by_token=by_token)
    sizes = [(layers, groups, layers) for layers, groups in kind.groups] if all_layers else [(kind.layers, 1, 1)]
    return [
        Pieces(
            unit=f"{per} x {layers_text(kind, layers) if all_layers else 'layer'}",
            formula=formula,
            nbytes=one * together,
            count=number * groups * layers // together,
            total=total * groups * layers,
            blocks=kind.blocks * groups,
        )
        for layers, groups, together in sizes
    ]


def _gathered(kind: RequestKind, per: str, chunk: int, *, by_token: bool) -> tuple[int, int, int]:
    """Pieces of one layer, bytes of one, and of all; pages where not cut by tokens."""
    if per == "chunk":
        first = kind.positions.start // chunk
        number = ceil_div(kind.positions.stop, chunk) - first
        return number, kind.bytes_of(chunk), kind.bytes_of(kind.positions.stop - first * chunk) if number else 0
    if per == "block":
        return kind.blocks, kind.page_bytes, kind.blocks * kind.page_bytes
    nbytes = kind.bytes_of(len(kind.positions)) if by_token and not kind.is_state else kind.blocks * kind.page_bytes
    return min(1, kind.blocks), nbytes, nbytes


def state_pieces(kind: RequestKind, *, parts: bool) -> list[Pieces]:
    """Return the states of all layers: a page each, or each state apart and a convolution's x, B and C too.

    parts: what NIXL 0.22 registers for Mamba 2: four virtual regions a layer. Raises LayoutError for anything else
    than states.
    """
    if not isinstance(kind.spec, MambaSpec):
        raise LayoutError(f"{type(kind.spec).__name__} is not a state")
    if not parts:
        return [_state(kind, "state x layer", "page", kind.page_bytes, 1)]
    layout = any_layout("mamba_ds", kind.spec, num_layers=1, num_blocks=1)
    found: list[Pieces] = []
    for part in layout.parts:
        item, inner = part.layout.itemsize, prod(a.extent for a in part.layout.axes if a.name in ("step", "element"))
        if part.name != "conv" or (own := _mamba2_channels(kind.spec)) is None:
            shape = "*".join(str(axis.extent) for axis in part.layout.axes if axis.name not in ("layer", "block"))
            found.append(
                _state(kind, f"state x layer x {part.name}", f"{shape}*{item}", part.layout.bytes_per_block, 1)
            )
            continue
        x, each = own
        found.append(_state(kind, "state x layer x conv x", f"{inner}*{x}*{item}", inner * x * item, 1))
        found.append(_state(kind, "state x layer x conv B|C", f"{inner}*{each}*{item}", inner * each * item, 2))
    return found


def _state(kind: RequestKind, unit: str, formula: str, nbytes: int, per_layer: int) -> Pieces:
    count, (layers, _) = kind.layers * per_layer, kind.groups[0]
    return Pieces(
        unit=unit,
        formula=formula,
        nbytes=nbytes,
        count=count,
        total=count * nbytes,
        blocks=sum(groups for _, groups in kind.groups),
        per_block=per_layer * layers,
        regions=layers,
    )


def _mamba2_channels(spec: MambaSpec) -> tuple[int, int] | None:
    """Channels of x, and of B and of C each, in a convolution of Mamba 2; None where the shapes are of another kind."""
    if len(spec.shapes) != len(("conv", "ssm")) or len(spec.shapes[1]) != len(("head", "channel", "state")):
        return None
    (_, channels), (heads, width, state) = spec.shapes
    rest = channels - heads * width
    return (heads * width, rest // 2) if rest > 0 and rest % (2 * state) == 0 else None
