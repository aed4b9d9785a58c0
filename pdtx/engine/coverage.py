"""Whether the processes of an engine together have what the other side's process needs: each layer and rank once."""

from collections.abc import Sequence

import numpy as np

from pdtx.engine.describe import BufferFacts, CacheFacts, facts_of
from pdtx.engine.matching import ABSENT, Match, all_moves, match_caches, some_of
from pdtx.errors import IncompatiblePeer
from pdtx.protocol import CacheDescription

_ADVICE = (
    "run the same model on both sides, all of its stages and ranks, or declare as not transferred what one side keeps "
    "for itself"
)


def check_compatible(producer: CacheDescription, consumer: CacheDescription) -> None:
    """Raise IncompatiblePeer or ProtocolError unless two caches can exchange all that they hold, see match_caches."""
    match = match_caches(facts_of(producer), facts_of(consumer))
    require_all_received([match])
    require_all_sent([match])


def require_all_received(matches: Sequence[Match]) -> None:
    """Check that a consumer's process gets all of its layers, each from one rank of one process of the producer's.

    matches: with all processes of one producer. Layers that either side declares as not transferred are left out.
    Raises IncompatiblePeer with both counts.
    """
    consumer = matches[0].consumer
    kept = _not_transferred(matches)
    for index, buffer in enumerate(consumer.buffers):
        moves = all_moves(buffer, _tp_size([match.producer for match in matches]), consumer.tp_size)
        pairs = [(move.src_rank, move.dst_rank) for move in moves if move.dst_rank in consumer.ranks]
        times = np.zeros((buffer.num_layers, len(pairs)), np.int64)
        for match in matches:
            found = match.of_consumer.get(index)
            if found is not None:
                held = np.array(found.layers) != ABSENT
                times += np.outer(held, np.array([pair in found.move_index for pair in pairs], bool))
        _check(buffer, kept, times, [pair[0] for pair in pairs], "producer", [match.producer for match in matches])


def require_all_sent(matches: Sequence[Match]) -> None:
    """Check that all layers of a producer's process go somewhere, each to one process of the consumer's for each rank.

    matches: with all processes of one consumer. Raises as require_all_received().
    """
    producer = matches[0].producer
    kept = _not_transferred(matches)
    for index, buffer in enumerate(producer.buffers):
        moves = all_moves(buffer, producer.tp_size, _tp_size([match.consumer for match in matches]))
        pairs = [(move.src_rank, move.dst_rank) for move in moves if move.src_rank in producer.ranks]
        times = np.zeros((buffer.num_layers, len(pairs)), np.int64)
        for match in matches:
            found = match.of_producer.get(index)
            if found is not None:
                held = np.array([layer in found.layer_index for layer in range(buffer.num_layers)])
                times += np.outer(held, np.array([pair in found.move_index for pair in pairs], bool))
        _check(buffer, kept, times, [pair[1] for pair in pairs], "consumer", [match.consumer for match in matches])


def _not_transferred(matches: Sequence[Match]) -> set[str]:
    sides = [side for match in matches for side in (match.producer, match.consumer)]
    return {name for side in sides for name in side.description.not_transferred}


def _tp_size(sides: Sequence[CacheFacts]) -> int:
    """Return the tensor-parallel size that all processes of an engine agree on. Raises IncompatiblePeer."""
    sizes = sorted({side.tp_size for side in sides})
    if len(sizes) > 1:
        raise IncompatiblePeer("tp_size of one engine's processes", str(sizes[0]), str(sizes[-1]))
    return sizes[0]


def _advice(absent: Sequence[str], buffer: BufferFacts, other: str, processes: Sequence[CacheFacts]) -> str:
    """Say what to do where the other side lacks layers of a buffer: it may only call the buffer otherwise."""
    for theirs in (theirs for process in processes for theirs in process.buffers):
        if theirs.name != buffer.name and not set(absent).isdisjoint(theirs.layer_names):
            return f"the {other} has them in buffer {theirs.name}; give the buffers one name on both sides"
    return _ADVICE


def _check(
    buffer: BufferFacts,
    kept: set[str],
    times: np.ndarray,
    ranks: Sequence[int],
    other: str,
    processes: Sequence[CacheFacts],
) -> None:
    """Check how many times each layer (rows) of a buffer moves for each pair of ranks (columns).

    ranks: of the other side, for each column. other: which side that is. processes: its.
    """
    moved = np.array([name not in kept for name in buffer.layer_names])
    absent = [name for name, row in zip(buffer.layer_names, times, strict=True) if name not in kept and not row.any()]
    if absent and times.shape[1]:
        has, needs = str(int(moved.sum()) - len(absent)), str(int(moved.sum()))
        sides = (has, needs) if other == "producer" else (needs, has)
        raise IncompatiblePeer(
            f"layers of buffer {buffer.name}", *sides, f"{some_of(absent)}: {_advice(absent, buffer, other, processes)}"
        )
    for wrong, what in ((times < 1, "none"), (times > 1, "two")):
        at = np.argwhere(wrong & moved[:, None])
        if len(at):
            layer, rank = buffer.layer_names[at[0][0]], ranks[at[0][1]]
            field = f"processes with rank {rank} of layer {layer} of buffer {buffer.name}"
            raise IncompatiblePeer(field, *((what, "one") if other == "producer" else ("one", what)), _ADVICE)
