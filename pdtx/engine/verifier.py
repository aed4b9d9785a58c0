"""Verification of a request: every buffer of the consumer's cache against its source.

What the producer sent is compared with the producer's cache, element by element; what came from this node's tiers with
the content hashes that were stored with it (loaded_blocks).
"""

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from pdtx.cache import CallerBlocks, GroupAllocator, KVCaches, PagedBuffer, Verification, compare, describe_mismatch
from pdtx.cache.verify import NOTHING_COMPARED, Meant, Mismatch, Naming
from pdtx.engine.arrivals import ExpectedBuffer
from pdtx.engine.granting import kept_blocks
from pdtx.engine.inbound import GroupNeed, InboundRequest
from pdtx.engine.loaded_blocks import compare_loaded, unchecked_positions
from pdtx.errors import DeadlineExceeded, PdtxError, PeerLost, ProtocolError, VerificationError
from pdtx.plan import NULL_BLOCK
from pdtx.plan.runs import Int64s
from pdtx.protocol import Message, ReadReference

_REFERENCE_BYTES = 4 << 20
"""Most bytes of source data asked for at once, as far as a position is not more."""


@dataclass(frozen=True)
class _Subject:
    """One buffer of a request: what of it was moved, and where it lies."""

    index: int
    buffer: PagedBuffer
    naming: Naming
    need: GroupNeed
    table: Int64s
    expected: ExpectedBuffer
    src_tp: int

    def shape(self, pair: tuple[int, int], positions: int) -> tuple[int, int, int, int]:
        """Shape of the rows that a rank there and one here have in common; pair: (source rank, rank here)."""
        return self.buffer.common_shape(pair[1], pair[0], self.src_tp, positions)

    @property
    def elements_of_copies(self) -> int:
        """Elements of one position that ranks here hold beside the first one that does."""
        buffer = self.buffer
        held = sum(prod(buffer.common_shape(rank, rank, buffer.tp_size, 1)) for rank in buffer.tp_ranks)
        return sum(self.expected.comes) * max(0, held - buffer.bytes_per_position) // buffer.itemsize

    def naming_of(self, pair: tuple[int, int]) -> Naming:
        """How rows of a pair of ranks are named: which rank is said only where heads do not tell it."""
        units = self.buffer.common_units(pair[1], pair[0], self.src_tp)
        copies = sum(self.buffer.common_units(one[1], one[0], self.src_tp) == units for one in self.expected.pairs)
        rank = pair[1] if copies > 1 else None
        at = self.buffer.common_bytes(pair[1], pair[0], self.src_tp)
        return replace(self.naming, first_head=units.start, rank=rank, bytes_of_row=at)

    def require_all_units(self) -> None:
        """Raise VerificationError unless all that each rank here holds has a source: it would not be looked at."""
        for rank in self.buffer.tp_ranks:
            found = [self._units(rank, pair[0], self.src_tp) for pair in self.expected.pairs if pair[1] == rank]
            own = self._units(rank, rank, self.buffer.tp_size)
            lacking = np.setdiff1d(own, np.concatenate(found) if found else [])
            if len(lacking):
                what = "heads" if self.buffer.kind == "kv" else "bytes"
                named = ", ".join(map(str, lacking[:4].tolist())) + (", ..." if len(lacking) > 4 else "")
                raise VerificationError(
                    f"{self.naming.where} rank {rank}: {what} {named} come from no rank that has them", len(lacking)
                )

    def _units(self, rank: int, other_rank: int, other_tp: int) -> Int64s:
        """The model's numbers of what a rank here and another one both hold."""
        at = self.buffer.common_bytes(rank, other_rank, other_tp)
        return np.array(self.buffer.common_units(rank, other_rank, other_tp), np.int64) if at is None else at

    @property
    def block_ids(self) -> torch.Tensor:
        """The block table on the buffer's device."""
        return torch.as_tensor(self.table, device=self.buffer.device)

    def block_of(self, position: int) -> int:
        """The block that holds a position."""
        return int(self.table[position // self.buffer.block_size])


class Verifier:
    """Compares requests that have arrived in cache with what their producers show. send: sends a producer a message."""

    def __init__(
        self, cache: KVCaches, pool: GroupAllocator | CallerBlocks, send: Callable[[bytes, Message], None]
    ) -> None:
        self._cache, self._pool, self._send = cache, pool, send

    def verify(self, request: InboundRequest) -> Verification:
        """See KVConsumer.verify."""
        subjects = [self._subject(request, index) for index in range(len(self._cache.buffers))]
        loaded = compare_loaded(self._cache, request)
        found, first = Verification(loaded.compared, loaded.wrong, None), None
        for subject in subjects:
            result = self._compare(request, subject)
            found += result
            if first is None and result.first is not None:
                first = subject, result.first
        if loaded.first is not None:
            where = f"{loaded.bad} of {loaded.checked} blocks from tier {', '.join(request.fetched.sources)}"
            raise VerificationError(f"{where} are wrong; first: {loaded.first}", found.wrong)
        if first is not None:
            text = self._describe(request, subjects, *first)
            raise VerificationError(f"{found.wrong} of {found.compared} elements are wrong; first: {text}", found.wrong)
        self._require_no_strays(request, subjects)
        return found

    def _subject(self, request: InboundRequest, index: int) -> _Subject:
        buffer = self._cache.buffers[index]
        group = self._cache.groups[buffer.group]
        heads = buffer.rows_shape(1)[2]
        naming = Naming(
            buffer.name,
            group.name,
            buffer.layer_names,
            buffer.row_kind,
            heads,
            states=buffer.state_names,
            fields=buffer.row_fields,
        )
        return _Subject(
            index,
            buffer,
            naming,
            request.needs[buffer.group],
            request.granted(buffer.group),
            request.engine.expected[index],
            request.engine.tp_size,
        )

    # -- what should be there ------------------------------------------------------------------------------------------

    def _compare(self, request: InboundRequest, subject: _Subject) -> Verification:
        """Compare all of a buffer that came from the producer, and ranks' copies of all that was moved.

        Each rank here is compared with the ranks there that its units came from.
        """
        buffer, found = subject.buffer, NOTHING_COMPARED
        positions = subject.need.positions
        sent = unchecked_positions(request, buffer.group, positions)
        for meant, pair in self._references(request, subject, sent):
            stop = meant.start + meant.rows.shape[1]
            place = meant.layer, subject.block_ids, meant.start, stop
            mine = buffer.common_rows(pair[1], pair[0], subject.src_tp, *place)
            found += compare(
                mine,
                meant.rows,
                layer=meant.layer,
                start=meant.start,
                itemsize=buffer.itemsize,
                naming=meant.naming,
            )
        if found.first is None:
            self._require_equal_copies(subject, positions)
            loaded = len(positions) - sum(map(len, sent))
            found += Verification(loaded * subject.elements_of_copies, 0, None)
        return found

    def _require_equal_copies(self, subject: _Subject, positions: range) -> None:
        """Raise VerificationError if ranks that keep the same elements of a buffer keep different ones."""
        buffer = subject.buffer
        layers = [layer for layer, comes in enumerate(subject.expected.comes) if comes]
        for layer in layers if len(buffer.tp_ranks) > 1 and positions else ():
            differing = buffer.replicas_differ(layer, subject.block_ids, positions.start, positions.stop)
            if differing:
                span = f"positions {positions.start}..{positions.stop}"
                where = f"{subject.naming.where} {subject.naming.layer(layer)} {span}"
                raise VerificationError(
                    f"{where}: {differing} elements differ between ranks that keep copies", differing
                )

    def _references(
        self, request: InboundRequest, subject: _Subject, spans: Sequence[range]
    ) -> Iterator[tuple[Meant, tuple[int, int]]]:
        """Read what the producer has at some positions, a bounded piece at a time, and between which ranks it moved."""
        subject.require_all_units()
        for layer, comes in enumerate(subject.expected.comes):
            for pair in subject.expected.pairs if comes else ():
                step = max(1, _REFERENCE_BYTES // max(1, prod(subject.shape(pair, 1))))
                for span in spans:
                    for start in range(span.start, span.stop, step):
                        piece = range(start, min(start + step, span.stop))
                        yield self._read_reference(request, subject, layer, piece, pair), pair

    def _read_reference(
        self, request: InboundRequest, subject: _Subject, layer: int, positions: range, pair: tuple[int, int]
    ) -> Meant:
        session = request.engine.sender(subject.index, layer, *pair)
        ask = request.ask_of(session) if session is not None else None
        if session is None or ask is None:
            raise PeerLost(f"the process of {request.sender} that has rank {pair[0]} is gone")
        read = ReadReference(
            request_id=request.request_id,
            buffer=subject.index,
            layer=layer,
            token_start=positions.start,
            token_stop=positions.stop,
            src_rank=pair[0],
            dst_rank=pair[1],
            attempt=ask.attempt,
        )
        self._send(session.peer, read)
        left = request.deadline - time.monotonic()
        try:
            answer = request.references.get(max(left, 0.0))
        except queue.Empty:
            waited = round(request.deadline - request.begun, 3)
            raise DeadlineExceeded("reference data to verify with", session.name, waited) from None
        if isinstance(answer, PdtxError):
            raise answer
        shape = subject.shape(pair, len(positions))
        asked = read.buffer, read.layer, read.token_start, read.token_stop, *pair, prod(shape)
        given = answer.buffer, answer.layer, answer.token_start, answer.token_stop, answer.src_rank, answer.dst_rank
        if (*given, len(answer.data)) != asked:
            raise ProtocolError(f"{session.name} answered with other reference data than asked for")
        rows = torch.frombuffer(bytearray(answer.data), dtype=torch.uint8).view(shape)
        return Meant(layer, positions.start, rows, subject.naming_of(pair))

    def _describe(
        self, request: InboundRequest, subjects: list[_Subject], subject: _Subject, mismatch: Mismatch
    ) -> str:
        """Name a wrong element and look for its true source, in its own buffer first."""
        others = [other for other in subjects if other is not subject]
        reference = (
            meant for each in (subject, *others) for meant, _ in self._references(request, each, [each.need.positions])
        )
        return describe_mismatch(mismatch, reference, subject.block_of, subject.buffer.itemsize)

    # -- what should not be there --------------------------------------------------------------------------------------

    def _require_no_strays(self, request: InboundRequest, subjects: list[_Subject]) -> None:
        """Raise VerificationError if anything was written beside a request's positions, in any buffer."""
        strays = {subject.naming.where: self._strays(request, subject) for subject in subjects}
        total = sum(strays.values())
        if total:
            where = ", ".join(f"{count} in {name}" for name, count in strays.items() if count)
            raise VerificationError(f"{total} 2-byte words outside the request's tokens were written: {where}", total)

    def _strays(self, request: InboundRequest, subject: _Subject) -> int:
        """Count written words where no payload may lie: in the request's blocks beside its positions, and in free ones.

        Free blocks of memory or pools that others own are theirs, and may hold anything.
        """
        buffer, group = subject.buffer, subject.buffer.group

        def count(ids: Int64s, from_position: int = 0, to_position: int | None = None) -> int:
            return buffer.unpoisoned(torch.as_tensor(ids, device=buffer.device), from_position, to_position)

        strays = 0
        if isinstance(self._pool, GroupAllocator) and self._cache.owned:
            free = self._pool.free_blocks()
            written = buffer.written_blocks().cpu().numpy()
            # Blocks handed out while we looked may well have been written; all others must not.
            # The null block is nobody's, so it is nobody's to write.
            untouched = np.append(self._pool.untouched(free)[group], NULL_BLOCK)
            strays = count(untouched[written[untouched]])
        # What holds a part of a cached beginning was not filled with poison.
        kept = kept_blocks(self._cache.groups[group], request)
        later = request.tables[group][max(subject.need.granted.stop, kept) :]
        strays += count(later[later != NULL_BLOCK])
        if not subject.need.positions or "token" not in buffer.layout.sliceable:
            # Blocks that only move whole bring their last positions along, whoever needs them.
            return strays
        size = buffer.block_size
        positions = subject.need.positions
        before, after = positions.start % size, positions.stop % size
        # A tier's first block brings the positions before along.
        if before and request.fetched.num_tokens <= positions.start and positions.start // size >= kept:
            first = subject.table[positions.start // size :][:1]
            strays += count(first, 0, before)
        if after and positions.stop // size >= kept:
            strays += count(subject.table[-1:], after)
        return strays
