"""Carrying a request out between engines of several processes, in pieces, with sessions that are lost on the way.

Matching, pieces, what has arrived and what is asked for again are the engine's; memory is simulated, see
tests.plan_oracle. What was said to have arrived is counted byte by byte.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from pdtx.cache import CacheGroup
from pdtx.engine.arrivals import Arrivals, Notice, expected_buffers
from pdtx.engine.holding_back import HoldingBack
from pdtx.engine.matching import BufferMatch, Match
from pdtx.engine.outbound_leg import ArrivedParts
from pdtx.parallel import RankTransfer
from pdtx.plan import Endpoint, PlanCache, Runs, Slices, TransferPlan
from pdtx.transports import TransferKey
from tests.plan_oracle import POISON, Cells, byte_indices, copy, copy_runs
from tests.split_oracle import Process, SplitScene


@dataclass(frozen=True, eq=False)
class Piece:
    """What one process sends at once. sender: its number."""

    sender: int
    match: BufferMatch
    move: RankTransfer
    layers: range
    positions: range

    @property
    def key(self) -> TransferKey:
        return self.match.key("r", self.move, self.layers, self.positions)


@dataclass(eq=False)
class Delivery:
    """One destination process and all source processes: delivers all pieces in any order.

    matches: with each source process. plans: as the engine has them, for all of its requests.
    begun: pieces on their way, and the bytes of those that have arrived without a notice. noticed: those that both
    sides know of.
    times: how often these have written each byte of each buffer and rank.
    """

    scene: SplitScene
    process: Process
    matches: Sequence[Match]
    random: np.random.Generator
    plans: PlanCache
    arrivals: Arrivals = field(init=False)
    memory: dict[tuple[int, int], Cells] = field(init=False)
    times: dict[tuple[int, int], Cells] = field(init=False)
    noticed: dict[TransferKey, int] = field(default_factory=dict)
    begun: dict[Piece, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        scene, process = self.scene, self.process
        kept = frozenset(scene.sources[0].description.not_transferred)
        expected = expected_buffers(process.facts, scene.sources[0].description.tp_size, kept)
        self.arrivals = Arrivals(expected, [self._positions(index) for index in range(len(process.held))])
        self.memory, self.times = process.memory(POISON), process.memory(np.int32(0))

    # -- what moves, as the engine sees it ----------------------------------------------------------------------------

    def _group(self, index: int) -> CacheGroup:
        group = self.process.facts.groups[self.process.facts.buffers[index].group]
        spec = self.process.facts.buffers[index].spec
        return CacheGroup(
            group.name, group.kind, group.block_size, group.num_blocks, spec, group.encoder_positions
        )  # fmt: skip

    def _request(self, index: int) -> range:
        """The positions of the whole request."""
        return self._group(index).positions(self.scene.buffers[self.process.held[index].number].num_tokens)

    def _positions(self, index: int) -> range:
        buffer = self.scene.buffers[self.process.held[index].number]
        found = self._group(index).uncached(self._request(index), buffer.cached_tokens)
        # Where whole pages move, any position of a page stands for all of it.
        unit = self.process.held[index].node.steps_per_page * buffer.tokens_per_step if buffer.together else 1
        sent, needed = ({position // unit for position in some} for some in (found, buffer.positions))
        assert sent == needed, "positions that a decoder needs and lacks"
        return found

    def _chunks(self, match: BufferMatch) -> list[range]:
        """Cut the prompt anywhere, and return what is shipped after each chunk of it."""
        group = self._group(match.index)
        buffer = self.scene.buffers[self.process.held[match.index].number]
        cuts = [0, *(cut for cut in range(1, buffer.num_tokens) if self.random.random() < 0.15), buffer.num_tokens]
        parts = [group.ready(buffer.num_tokens, *cut) for cut in pairwise(cuts)]
        if match.together == 1 or not group.counts_tokens:
            return [found for part in parts if (found := group.uncached(part, buffer.cached_tokens))]
        held = HoldingBack(match.together, self._positions(match.index))
        slices = [list(pairwise(cuts))[at] for at in self.random.permutation(len(cuts) - 1)]
        return [found for cut in slices if (found := held.add(cut[0], cut[1], lambda: None)[0])]

    def pieces(self) -> list[Piece]:
        """Return the pieces of all processes: of one layer each, or of several that lie one after another."""
        return [
            Piece(sender, one, move, layers, positions)
            for sender, match in enumerate(self.matches)
            for one in match.buffers
            for positions in self._chunks(one)
            for layers in self._layers(one)
            for move in one.moves
        ]

    def _layers(self, match: BufferMatch) -> list[range]:
        together = bool(self.random.random() < 0.5)
        found = list[range]()
        for layer in sorted(match.layer_index.values()):
            if together and found and found[-1].stop == layer and match.consecutive(range(found[-1].start, layer + 1)):
                found[-1] = range(found[-1].start, layer + 1)
            else:
                found.append(range(layer, layer + 1))
        return found

    # -- sessions -----------------------------------------------------------------------------------------------------

    def deliver(self, sources: Sequence[Mapping[tuple[int, int], Cells]], losses: int) -> None:
        """Deliver everything, though sessions are lost so many times. sources: the memories of all processes."""
        pieces = self.pieces()
        waiting = self._shuffled(pieces)
        for _ in range(losses):
            self._begin(waiting[: int(self.random.integers(0, len(waiting) + 1))], sources)
            waiting = self._shuffled(self._resume(pieces, sources))
        assert not waiting or self.arrivals.missing() is not None
        for piece in waiting:
            self._deliver(piece, sources)
        assert self.arrivals.missing() is None
        assert self.arrivals.unnoticed() is None
        self._require_counted(0)

    def _shuffled(self, pieces: Sequence[Piece]) -> list[Piece]:
        return [pieces[at] for at in self.random.permutation(len(pieces))]

    def _begin(self, pieces: Sequence[Piece], sources: Sequence[Mapping[tuple[int, int], Cells]]) -> None:
        """Deliver pieces, of which some are in the middle, or without their notice, when sessions are lost."""
        for piece in pieces:
            fate = self.random.random()
            if fate < 0.6:
                self._deliver(piece, sources)
                continue
            self.arrivals.expect(piece.key, piece.match)
            nbytes, _ = self.send(piece, sources[piece.sender], cut=fate > 0.8)
            if fate <= 0.8:
                self.arrivals.arrive(piece.key, nbytes)
            self.begun[piece] = nbytes if fate <= 0.8 else None

    def _deliver(self, piece: Piece, sources: Sequence[Mapping[tuple[int, int], Cells]]) -> None:
        move = self.arrivals.expect(piece.key, piece.match)
        assert piece.match.moves[move] is piece.move
        self._finish(piece, sources, arrived=False)

    def _finish(
        self, piece: Piece, sources: Sequence[Mapping[tuple[int, int], Cells]], *, arrived: bool
    ) -> None:  # fmt: skip
        """Let a piece that was expected arrive, unless it has, and take the notice of it."""
        key = piece.key
        nbytes, written = self.send(piece, sources[piece.sender])
        if not arrived:
            self.arrivals.arrive(key, nbytes)
        assert self.arrivals.notice(key, nbytes) is Notice.NEW
        assert key not in self.noticed, "what was known to be there was sent again"
        self.noticed[key] = nbytes
        np.add.at(self.times[piece.match.index, piece.move.dst_rank], byte_indices(written), 1)

    def _resume(
        self, pieces: Sequence[Piece], sources: Sequence[Mapping[tuple[int, int], Cells]]
    ) -> list[Piece]:  # fmt: skip
        """Lose the sessions with some processes, and return what they and the others still have to send."""
        lost = {sender for sender in range(len(self.matches)) if self.random.random() < 0.6}
        for sender in lost:
            self._ask_again(sender, [piece for piece in pieces if piece.sender == sender])
        self._require_counted(sum(nbytes or 0 for piece, nbytes in self.begun.items() if piece.sender not in lost))
        # The others know nothing of it: what they had begun goes on.
        for piece, nbytes in self.begun.items():
            if piece.sender not in lost:
                self._finish(piece, sources, arrived=nbytes is not None)
        self.begun.clear()
        return [piece for piece in pieces if piece.key not in self.noticed]

    def _require_counted(self, unnoticed: int) -> None:
        """Check what is said of bytes; unnoticed: of pieces that have arrived and of which there was no notice yet."""
        noticed = sum(self.noticed.values())
        assert (self.arrivals.received_bytes, self.arrivals.noticed_bytes) == (noticed + unnoticed, noticed)

    def _ask_again(self, sender: int, pieces: Sequence[Piece]) -> None:
        """Check what the next session with a process is told to have arrived, and what that makes it send."""
        match = self.matches[sender]
        parts = self.arrivals.keep_noticed(match.of_consumer)
        for part in parts:
            layers = range(part.layer_start, part.layer_stop)
            assert set(layers) <= set(match.of_consumer[part.buffer].layer_index.values()), (
                "layers that another process sends"
            )
        arrived = ArrivedParts(parts, match, self._stops(match))
        again = [piece for piece in pieces if not arrived.covers(piece.key)]
        missing = [piece for piece in pieces if piece.key not in self.noticed]
        assert again == missing, "exactly what nobody knows to be there is sent again"

    def _stops(self, match: Match) -> list[int]:
        return [self._request(one.index).stop for one in match.buffers]

    # -- bytes --------------------------------------------------------------------------------------------------------

    def send(self, piece: Piece, source: Mapping[tuple[int, int], Cells], *, cut: bool = False) -> tuple[int, Slices]:
        """Copy a piece by one of the ways in which movers do; cut: only some runs of it. Return its bytes and where."""
        match, target = piece.match, self.memory[piece.match.index, piece.move.dst_rank]
        cells = source[match.producer_index, piece.move.src_rank]
        here = match.source(self.scene.sources[piece.sender].held[match.producer_index].node.table)
        there = match.destination(self.process.held[match.index].node.table)
        stop = piece.positions.stop
        # A put of which both tables are known; a stream that each side plans with a stand-in for the other's table.
        plan = self._plan(piece, here, there)
        if cut:
            runs, some = plan.flat, int(self.random.integers(0, plan.num_runs + 1))
            copy_runs(cells, target, Runs(runs.src[:some], runs.dst[:some], runs.nbytes[:some]))
        elif self.random.random() < 0.5:
            copy_runs(cells, target, plan.flat)
        else:
            ours = self._plan(piece, here, match.destination_stand_in(stop))
            theirs = self._plan(piece, match.source_stand_in(stop), there)
            copy(cells, ours.flat.source(), target, theirs.flat.destination())
        return plan.nbytes, plan.flat.destination()

    def _plan(self, piece: Piece, here: Endpoint, there: Endpoint) -> TransferPlan:
        return piece.match.plan(piece.move, here, there, piece.layers, piece.positions, plans=self.plans)
