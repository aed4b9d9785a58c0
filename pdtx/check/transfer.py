"""check_transfer: fill the source by coordinate, poison the destination, let others' code move, and compare."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from pdtx.cache import KVCaches
from pdtx.cache.codes import Words
from pdtx.cache.contents import WordsOf, word_rows
from pdtx.cache.verify import NOTHING_COMPARED, Verification, compare
from pdtx.check.layer import Key, RankLayer
from pdtx.check.pairs import BufferPair, Tables, coordinate_of, on_device, pair_caches
from pdtx.check.report import TransferReport, WrongRun
from pdtx.check.rows import RowIndex
from pdtx.check.runs import AMBIGUOUS, NEVER_WRITTEN, UNKNOWN, RowRuns, row_runs
from pdtx.check.strays import MemoryWatch
from pdtx.plan.runs import Int64s

Bools = npt.NDArray[np.bool_]
SourceTables = TypeVar("SourceTables", bound=Tables)
DestinationTables = TypeVar("DestinationTables", bound=Tables)

_NOBODY = 0x51
"""What an owned source holds outside of the blocks named: no byte of poison."""


def check_transfer(
    source: KVCaches,
    destination: KVCaches,
    move: Callable[[SourceTables, DestinationTables], object],
    *,
    source_blocks: SourceTables,
    destination_blocks: DestinationTables,
    tokens: int | range,
    exact: bool = False,
    once: bool = False,
    max_runs: int = 1000,
) -> TransferReport:
    """Check somebody's own code that moves blocks from one cache to another.

    Blocks of the source are filled with values that say where they belong, the destination is poisoned, move(
    source_blocks, destination_blocks) is called, and every element is compared. move returns when the bytes have
    arrived. It must copy bits: the values are any bits of the dtype, NaN among them.

    source, destination: of the same layers, in any layouts, block sizes and tensor-parallel sizes. *_blocks: the
    request's block table, or one for each group by its name. tokens: how many the request has, of which each group
    needs what a decoder would read; or the range of positions itself.
    exact: what is written in the blocks named but beside these positions is wrong as well.
    once: move cannot be repeated. Otherwise, if anything is wrong, it is called again with other values, once or a few
    times, until each wrong element's true source is known; else whole rows are looked for, and single elements are not.
    max_runs: wrong runs, and strays, to name.

    Nothing but the blocks named is written in memory that others own; the destination's other memory is compared with
    what it was. Caches that were allocated here are overwritten as a whole.
    Raises InputError where the two caches cannot be compared or blocks do not fit, and what move raises.
    """
    pairs = pair_caches(source, destination, source_blocks, destination_blocks, tokens)
    check = _Check(destination, pairs, lambda: move(source_blocks, destination_blocks))
    seen = check.compare()
    watch_total, watch_count, strays = check.watch.strays(max_runs)
    wrong = _Wrong(pairs, max_runs)
    if seen.wrong:
        if not once:
            check.name_exactly(wrong)
        if not wrong.elements:
            check.name_rows(wrong)
    return TransferReport(
        compared=seen.compared,
        wrong=wrong.elements,
        wrong_in=wrong.parts,
        never_written=wrong.never_written,
        stray_bytes=watch_total,
        spilled=check.spilled,
        source_changed=check.source_changed,
        runs=tuple(wrong.runs),
        num_runs=wrong.num_runs,
        strays=tuple(strays),
        num_strays=watch_count,
        exact=exact,
        calls=check.calls,
    )


@dataclass
class _Wrong:
    """What is wrong: counted, and named as far as limit goes."""

    pairs: Sequence[BufferPair]
    limit: int
    elements: int = 0
    never_written: int = 0
    num_runs: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    runs: list[WrongRun] = field(default_factory=list)

    def add(self, at: RankLayer, held: Int64s) -> None:
        """Add a layer. held: the index that each element holds, (K and V, positions, heads, channels)."""
        own, channels = at.own, held.shape[-1]
        wrong = held != own
        self.elements += int(wrong.sum())
        for kv in np.flatnonzero(wrong.any((1, 2, 3))):
            name = at.name(int(kv))
            self.parts[name] = self.parts.get(name, 0) + int(wrong[kv].sum())
        self.never_written += int((wrong & (held == NEVER_WRITTEN)).sum())
        found = row_runs(held.reshape(-1, channels), own.reshape(-1, channels), at.pieces)
        self.num_runs += len(found)
        for number in range(min(len(found), self.limit - len(self.runs))):
            self.runs.append(self._run(at, found, number))

    def _run(self, at: RankLayer, found: RowRuns, number: int) -> WrongRun:
        source = int(found.source[number])
        first = at.coordinate(int(found.first_row[number]), int(found.first_channel[number]))
        return WrongRun(
            first,
            at.coordinate(int(found.last_row[number]), int(found.last_channel[number])),
            at.view.rank,
            int(at.pair.there.table[first.token // at.pair.there.group.block_size]),
            int(found.elements[number]),
            coordinate_of(self.pairs, source) if source >= 0 else None,
            poisoned=source == NEVER_WRITTEN and not found.scattered[number],
            scattered=bool(found.scattered[number]),
            ambiguous=source == AMBIGUOUS,
            ranked=at.pair.destination.tp_size > 1,
        )


class _Check:
    """The rounds of one check.

    spilled, source_changed, calls: see TransferReport.
    """

    def __init__(self, destination: KVCaches, pairs: Sequence[BufferPair], move: Callable[[], object]) -> None:
        self._destination, self._pairs, self._move = destination, pairs, move
        self._layers = [RankLayer(pair, view, layer) for pair in pairs for view in pair.views for layer in pair.layers]
        self._before, self._wrong_rows = dict[Key, Words](), dict[Key, torch.Tensor]()
        self.spilled = self.source_changed = self.calls = 0

    def compare(self) -> Verification:
        """Do the first round: one transfer of values that look alike nowhere."""
        self._fill(lambda pair: pair.values)
        self._poison()
        self.watch = MemoryWatch(self._destination, self._pairs)
        self._before = {at.key: at.words() for at in self._layers}
        sources = [(memory, memory.clone(), itemsize) for memory, itemsize in self._sources().values()]
        beside = [(at, positions, at.read(positions)) for at in self._layers for positions in _beside(at.pair)]
        self._call()
        seen = NOTHING_COMPARED
        for at in self._layers:
            found = at.read()
            here = compare(found, at.expected(), layer=at.layer, start=0, itemsize=at.pair.codes.itemsize)
            if here.wrong:
                self._wrong_rows[at.key] = found
            seen += here
        self.spilled = sum(_differing(at.read(positions), before, at.pair) for at, positions, before in beside)
        self.source_changed = sum(_changed(*source) for source in sources)
        return seen

    def name_exactly(self, wrong: _Wrong) -> None:
        """Repeat the transfer with the digits of indices for values, and read the indices that arrived.

        The last round has the first one's values inverted: what is the same in both came from nowhere in the source.
        """
        rounds = max(pair.rounds for pair in self._pairs)
        held, touched = dict[Key, Int64s](), dict[Key, Bools]()
        for place in range(rounds):
            for at, words, written in self._round(partial(_digits, place=place)):
                shift = 8 * at.pair.codes.itemsize * place
                if at.key not in held:
                    held[at.key], touched[at.key] = np.zeros(words.shape, np.int64), np.zeros(words.shape, bool)
                if place < at.pair.rounds:
                    held[at.key] |= words.astype(np.int64) << shift
                    touched[at.key] |= written
        for at, words, written in self._round(_inverted):
            touched[at.key] |= written
            follows = ~words == held[at.key].astype(words.dtype)
            index = np.where(follows & self._known(held[at.key]), held[at.key], UNKNOWN)
            wrong.add(at, np.where(touched[at.key], index, NEVER_WRITTEN))

    def _round(self, words: Callable[[BufferPair], WordsOf]) -> list[tuple[RankLayer, Words, Bools]]:
        """Transfer values; return what each layer holds then, and where that is not what it held before."""
        self._fill(words)
        self._poison()
        before = [at.words() for at in self._layers]
        self._call()
        found = [at.words() for at in self._layers]
        return [(at, here, here != there) for at, here, there in zip(self._layers, found, before, strict=True)]

    def _known(self, held: Int64s) -> Bools:
        """Whether there is an element of an index."""
        known = np.zeros(held.shape, bool)
        for pair in self._pairs:
            known |= (held >= pair.codes.first) & (held < pair.codes.stop)
        return known

    def name_rows(self, wrong: _Wrong) -> None:
        """Look for the rows that the first round found to be wrong."""
        index = RowIndex(self._pairs)
        for at in self._layers:
            rows = self._wrong_rows.get(at.key)
            if rows is None:
                continue
            own, itemsize = at.own, at.pair.codes.itemsize
            raw = rows.numpy().reshape(-1, rows.shape[-1])
            first = np.repeat(index.find(raw)[:, None], own.shape[-1], 1)
            held = np.where(first >= 0, first + np.arange(own.shape[-1]), first).reshape(own.shape)
            same = (rows == at.expected()).view(*own.shape, itemsize).all(-1).numpy()
            words = np.ascontiguousarray(raw).view(self._before[at.key].dtype).reshape(own.shape)
            held = np.where(words == self._before[at.key], NEVER_WRITTEN, held)
            wrong.add(at, np.where(same, own, held))

    # -- a round ------------------------------------------------------------------------------------------------------

    def _fill(self, words: Callable[[BufferPair], WordsOf]) -> None:
        for pair in self._pairs:
            if pair.source.owned:
                # Other bytes than the destination has, so that a copy of what belongs to no request shows.
                for rank in pair.source.ranks:
                    rank.memory.fill_(_NOBODY)
            blocks, whole = on_device(pair.here.table, pair.source), pair.here.whole
            for layer in range(pair.source.num_layers):
                rows = word_rows(words(pair), layer, whole, pair.parts)
                pair.source.write_canonical(layer, blocks, whole.start, rows)

    def _poison(self) -> None:
        if self._destination.owned:
            for buffer in self._destination.buffers:
                buffer.poison()
            return
        for number, named in {pair.destination.group: pair.there.named for pair in self._pairs}.items():
            self._destination.poison(number, named)

    def _call(self) -> None:
        self.calls += 1
        self._move()
        if self._destination.device.type == "cuda":
            torch.cuda.synchronize(self._destination.device)  # others may copy in streams of their own

    def _sources(self) -> dict[tuple[int, int], tuple[torch.Tensor, int]]:
        """Return each memory of the source once, by address and size, with the bytes of its elements."""
        ranks = ((rank.memory, pair.codes.itemsize) for pair in self._pairs for rank in pair.source.ranks)
        return {(memory.data_ptr(), memory.numel()): (memory, itemsize) for memory, itemsize in ranks}


def _changed(memory: torch.Tensor, before: torch.Tensor, itemsize: int) -> int:
    """Count elements of a memory, in whatever block, that are not what they were."""
    differing = (memory != before).nonzero()[:, 0]
    return len(torch.unique(differing // itemsize))


def _beside(pair: BufferPair) -> Iterator[range]:
    """Yield the positions of the destination's blocks that are not asked for."""
    whole, asked = pair.there.whole, pair.there.positions
    yield from (one for one in (range(whole.start, asked.start), range(asked.stop, whole.stop)) if one)


def _digits(pair: BufferPair, place: int) -> WordsOf:
    return lambda layers, tokens: pair.codes.digits(layers, tokens, min(place, pair.rounds - 1))


def _inverted(pair: BufferPair) -> WordsOf:
    return lambda layers, tokens: ~pair.codes.digits(layers, tokens, 0)


def _differing(found: torch.Tensor, meant: torch.Tensor, pair: BufferPair) -> int:
    """Count elements that differ."""
    return compare(found, meant, layer=0, start=0, itemsize=pair.codes.itemsize).wrong
