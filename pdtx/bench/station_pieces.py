"""What a link moves: pieces of requests, each one transfer, and how each side plans it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from pdtx.bench.station_caches import CaseShape
from pdtx.bench.work import LinkWork
from pdtx.engine.matching import BufferMatch
from pdtx.engine.picking import ModePicker, Picks
from pdtx.errors import InputError
from pdtx.kvspec import AttentionSpec
from pdtx.parallel import RankTransfer, heads_of_rank
from pdtx.parallel.ranks import replicated
from pdtx.plan import Endpoint, PlanCache, TransferPlan
from pdtx.transports import TransferKey
from pdtx.units import ceil_div

PieceName = tuple[int, int, int, int, int, int]
"""Request, buffer, first layer and the one after the last, source and destination rank."""


@dataclass(frozen=True)
class Piece:
    """One transfer. layers: the consumer's; step: the last layer of the model that must be computed before it."""

    request: int
    match: BufferMatch
    move: RankTransfer
    layers: range
    positions: range
    step: int

    @property
    def name(self) -> PieceName:
        """What tells it from the others of its link."""
        layers, move = self.layers, self.move
        return self.request, self.match.index, layers.start, layers.stop, move.src_rank, move.dst_rank

    def key(self, iteration: int) -> TransferKey:
        """Return the key under which it moves in an iteration; one of another iteration is another key."""
        return self.match.key(f"i{iteration}.r{self.request}", self.move, self.layers, self.positions)


class Planner:
    """Plans pieces of a case, as an engine does: shapes that were seen before are known. Safe to use from threads."""

    def __init__(self, shape: CaseShape) -> None:
        self._shape, self._plans = shape, PlanCache()

    def pushed(self, piece: Piece) -> TransferPlan:
        """Return the plan of the source that puts, who knows both block tables."""
        match = piece.match
        here = match.source(self._shape.prefill.tables[match.producer_group][piece.request])
        there = match.destination(self._shape.decode.tables[match.group][piece.request])
        return self._plan(piece, here, there)

    def arriving(self, piece: Piece) -> TransferPlan:
        """Return the destination's own plan, put or get: it takes nobody's word for the source's blocks."""
        match = piece.match
        there = match.destination(self._shape.decode.tables[match.group][piece.request])
        return self._plan(piece, match.source_stand_in(piece.positions.stop), there)

    def offered(self, piece: Piece) -> TransferPlan:
        """Return the plan of the source that a destination gets from."""
        match = piece.match
        here = match.source(self._shape.prefill.tables[match.producer_group][piece.request])
        return self._plan(piece, here, match.destination_stand_in(piece.positions.stop))

    def _plan(self, piece: Piece, src: Endpoint, dst: Endpoint) -> TransferPlan:
        merge, plans = self._shape.case.merge, self._plans
        return piece.match.plan(piece.move, src, dst, piece.layers, piece.positions, merge=merge, plans=plans)


def pieces_of(shape: CaseShape, link: LinkWork) -> tuple[Piece, ...]:
    """Return what a link moves in one iteration, in the order in which a prefill computes it."""
    return tuple(sorted(_pieces(shape, link), key=lambda piece: piece.step))


def num_pieces(shape: CaseShape, link: LinkWork) -> int:
    """Return the number of pieces that pieces_of() would make. Raises InputError for layers_per_transfer below 0."""
    of_request = sum(
        len(_moves(match, link)) * len(_slices(len(match.layers), shape.case.layers_per_transfer))
        for match in shape.match.buffers
    )
    return len(link.requests) * of_request


def _pieces(shape: CaseShape, link: LinkWork) -> Iterator[Piece]:
    for request in link.requests:
        for match in shape.match.buffers:
            positions = shape.positions[match.group]
            moves = _moves(match, link)
            if not positions:
                continue
            for layers in _slices(len(match.layers), shape.case.layers_per_transfer):
                step = max(shape.model.steps[match.consumer.layer_names[layer]] for layer in layers)
                for move in moves:
                    yield Piece(request, match, move, layers, positions, step)


def _moves(match: BufferMatch, link: LinkWork) -> list[RankTransfer]:
    return [m for m in match.moves if m.src_rank in link.prefill_ranks and m.dst_rank in link.decode_ranks]


def _slices(num_layers: int, at_once: int) -> list[range]:
    if at_once < 0:
        raise InputError(f"layers_per_transfer is {at_once}; needs 1 or more, or 0 for all")
    step = at_once or num_layers
    return [range(first, min(first + step, num_layers)) for first in range(0, num_layers, step)]


# -- what it comes to --------------------------------------------------------------------------------------------------


def link_facts(shape: CaseShape, pieces: tuple[Piece, ...], planner: Planner, picker: ModePicker) -> dict[str, object]:
    """Return what a link moves in one iteration, as pdtx.results.model.Link has it.

    Pieces that differ in layers alone come to the same: one of them is planned for all. Raises PlanError.
    """
    alike = dict[tuple[int, int, int, int, int], list[Piece]]()
    for piece in pieces:
        move = piece.move
        key = piece.request, piece.match.index, len(piece.layers), move.src_rank, move.dst_rank
        alike.setdefault(key, []).append(piece)
    wire = unique = runs = 0
    sizes, picks = Counter[int](), Picks()
    for same in alike.values():
        plan, times = planner.pushed(same[0]), len(same)
        choice = picker.pick(plan)
        wire += plan.nbytes * times
        unique += _unique_bytes(shape, same[0], plan.nbytes) * times
        runs += plan.num_runs * times
        for size, count in plan.sizes.items():
            sizes[size] += count * times
        for _ in same:
            picks.add(choice)
    return {
        "wire_bytes": wire,
        "unique_bytes": unique,
        "runs": runs,
        "run_sizes": {str(size): count for size, count in sorted(sizes.items(), reverse=True)},
        "num_transfers": len(pieces),
        "modes": {str(mode): count for mode, count in picks.counts.items()},
        "mode_reason": picks.reason,
    }


def _unique_bytes(shape: CaseShape, piece: Piece, nbytes: int) -> int:
    """Return the bytes of a piece without heads that an earlier destination rank is sent as well."""
    rank, tp_size, spec = piece.move.dst_rank, shape.case.tp[1], piece.match.consumer.spec
    if tp_size == 1:
        return nbytes
    if replicated(spec):
        return nbytes if rank == 0 else 0
    if not isinstance(spec, AttentionSpec):
        return nbytes
    readers = ceil_div(tp_size, spec.num_kv_heads)
    return nbytes if rank % readers == 0 else 0


def first_head(shape: CaseShape, match: BufferMatch, role: str, rank: int) -> tuple[int, int]:
    """Return the first of the model's heads that a rank holds of a buffer, and how many heads the model has."""
    spec, tp_size = match.consumer.spec, shape.case.tp[0 if role == "prefill" else 1]
    layout = match.consumer.layout.parts[0].layout
    if replicated(spec) or not isinstance(spec, AttentionSpec) or "head" not in layout.by_name:
        return 0, layout.extent("head") if "head" in layout.by_name else 1
    return heads_of_rank(rank, tp_size, spec.num_kv_heads).start, spec.num_kv_heads


def written_heads(piece: Piece, held: int) -> list[range]:
    """Return the heads, as its destination rank counts them, that a piece writes. held: heads of that rank."""
    cuts = [[cut for cut in box.cuts if cut.axis == "head"] for box in piece.move.boxes]
    return [range(found[0].dst, found[0].dst + found[0].count) if found else range(held) for found in cuts]
