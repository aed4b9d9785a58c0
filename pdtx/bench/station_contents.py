"""The caches of a station: memory of the ranks that it keeps, filled, poisoned and compared for all its links."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from pdtx.bench.contents import BufferContents, Found, Place, Written
from pdtx.bench.station_caches import CaseShape
from pdtx.bench.station_memory import StationMemory
from pdtx.bench.station_pieces import Piece, first_head, written_heads
from pdtx.bench.work import StationWork
from pdtx.cache.buffer import RankMemory
from pdtx.cache.device import record_fence
from pdtx.engine.describe import BufferFacts
from pdtx.engine.matching import BufferMatch
from pdtx.plan.match import match_parts, whole_blocks
from pdtx.transports import Region

_SHARED = "shm"
"""The mover whose caches lie in memory that peers can map."""

_At = tuple[int, int]
"""The number of a match, and a rank."""


class CaseCaches:
    """One side's buffers. regions: of each match and rank, as movers take them."""

    def __init__(
        self,
        work: StationWork,
        shape: CaseShape,
        pieces: Mapping[int, Sequence[Piece]],
        memory: StationMemory,
    ) -> None:
        """Raises InputError where the caches would need more than the memory may hold."""
        self._work, self._shape = work, shape
        self._writes = work.role == "prefill"
        self.device: torch.device = memory.device
        self.regions, self._contents = dict[_At, Region](), dict[_At, BufferContents]()
        self._open(memory)
        self._requests = sorted({piece.request for found in pieces.values() for piece in found})
        self._written = {link: self._places_of(found) for link, found in pieces.items()}
        self._touched = False

    def _open(self, memory: StationMemory) -> None:
        at = [(match, rank) for match in self._shape.match.buffers for rank in self._work.ranks]
        layouts = [self._facts(match).layout for match, _ in at]
        regions = memory.cut(region_sizes(self._work, self._shape), shared=self._work.case.mover == _SHARED)
        for (match, rank), layout, region in zip(at, layouts, regions, strict=True):
            first, heads = first_head(self._shape, match, self._work.role, rank)
            layers = range(len(match.consumer.layer_names))
            self.regions[match.index, rank] = Region(region)
            self._contents[match.index, rank] = BufferContents(
                RankMemory(layout, region),
                match.naming,
                buffer=match.index,
                # Codes count layers as the consumer does.
                layers=[match.layer_index[layer] for layer in layers] if self._writes else layers,
                first_head=first,
                num_heads=heads,
                whole=_moves_whole(match),
            )

    def _facts(self, match: BufferMatch) -> BufferFacts:
        return _facts(match, self._work)

    # -- where things are ----------------------------------------------------------------------------------------------

    def _place(self, match: BufferMatch, request: int, heads: range) -> Place:
        side, group = self._shape.side(self._work.role), self._facts(match).group
        return Place(side.tables[group][request], self._shape.positions[match.group], heads)

    def _whole_places(self) -> Iterator[tuple[_At, int, Place]]:
        """Yield all that the links' requests have here, each once: which buffer, which request, where."""
        for match in self._shape.match.buffers:
            for rank in self._work.ranks:
                heads = range(self._contents[match.index, rank].num_heads_here)
                for request in self._requests:
                    yield (match.index, rank), request, self._place(match, request, heads)

    def _places_of(self, pieces: Sequence[Piece]) -> dict[tuple[_At, int, range], Place]:
        """Return what a link writes here, each once, whatever the number of its transfers."""
        found = dict[tuple[_At, int, range], Place]()
        if self._writes:
            return found
        for piece in pieces:
            at = piece.match.index, piece.move.dst_rank
            for heads in written_heads(piece, self._contents[at].num_heads_here):
                name = at, piece.request, heads
                if name not in found:
                    found[name] = self._place(piece.match, piece.request, heads)
        return found

    # -- an iteration --------------------------------------------------------------------------------------------------

    def ready(self, iteration: int) -> None:
        """Write the source's values, or make the destination what it was before anything was written."""
        if not self._work.verify and self._touched:
            return
        with _one_thread():
            self._write(iteration)
        record_fence(self.device)()
        self._touched = True

    def _write(self, iteration: int) -> None:
        if not self._writes and not self._touched:
            self._poison_all()
        else:
            for at, request, place in self._whole_places():
                contents = self._contents[at]
                if self._writes:
                    contents.fill(place, self._by(iteration, request))
                else:
                    contents.poison(place)

    def compare(self, link: int, iteration: int) -> Found:
        """Compare all that a link has written here with what its iteration has at the source."""
        found = Found()
        for (at, request, _), place in self._written[link].items():
            with _one_thread():
                here = self._contents[at].compare(place, self._by(iteration, request))
            found += Found(here.wrong, f"request r{request} {here.first}" if here.first else "")
        return found

    def strays(self) -> Found:
        """Look for what was written where no link of the case writes. What is found is told once."""
        found = Found()
        for at, contents in self._contents.items():
            places = {name: place for link in self._written.values() for name, place in link.items() if name[0] == at}
            with _one_thread():
                here = contents.strays(list(places.values()))
            if here.wrong:
                rank = f"rank {at[1]} " if len(self._work.ranks) > 1 else ""
                found += Found(here.wrong, f"{rank}{here.first}")
                self._touched = False  # so that ready() poisons everything again
        return found

    def _poison_all(self) -> None:
        for contents in self._contents.values():
            contents.poison_all()

    def _by(self, iteration: int, request: int) -> Written:
        # Without verification all iterations move the same.
        return Written(self._work.case.seed, iteration if self._work.verify else 0, request)


def region_sizes(work: StationWork, shape: CaseShape) -> list[int]:
    """Return the bytes of each region that a station keeps: of every buffer, of every rank."""
    return [_facts(match, work).layout.size_bytes for match in shape.match.buffers for _ in work.ranks]


def _facts(match: BufferMatch, work: StationWork) -> BufferFacts:
    return match.producer if work.role == "prefill" else match.consumer


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let this thread's tensors be worked on by it alone: what is done here is short, and others need the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _moves_whole(match: BufferMatch) -> bool:
    """Whether blocks of a buffer move as a whole, whatever of them a request has."""
    pairs = match_parts(match.producer.layout, match.consumer.layout)
    return any(whole_blocks(ours.layout, theirs.layout) for ours, theirs in pairs)
