"""Blocks that a request got from this node's tiers, verified with the content hashes that were stored with them.

What a prefill node computes anew may differ from it in last bits, for they depend on how many tokens are computed at
once. So what was loaded is compared with what was stored, which had been verified with its own source by then.
"""

from dataclasses import dataclass
from math import prod

import numpy as np

from pdtx.cache import KVCaches, PagedBuffer
from pdtx.cache.verify import Naming
from pdtx.engine.inbound import InboundRequest
from pdtx.plan.runs import Int64s
from pdtx.tiers import HASH_BYTES, Side, hash_contents


@dataclass(frozen=True)
class LoadedBlocks:
    """What a comparison showed. compared: elements of the request. wrong: elements, all those of a buffer's bad block.

    bad, checked: blocks. first: which block is wrong, and what it holds; None if all are right.
    """

    compared: int = 0
    wrong: int = 0
    bad: int = 0
    checked: int = 0
    first: str | None = None


def checked_places(request: InboundRequest, group: int) -> Int64s:
    """Return the tier blocks of a group that are verified with content hashes; int64, ascending."""
    fetched = request.fetched
    if not fetched.num_tokens or not fetched.contents:
        return np.zeros(0, np.int64)
    known = np.array([bool(content) for content in fetched.contents[group]], bool)
    places: Int64s = fetched.places[group][known]
    return places


def unchecked_positions(request: InboundRequest, group: int, positions: range) -> list[range]:
    """Return those of positions that no content hash covers, in runs: they must be compared with the producer's."""
    places = checked_places(request, group)
    if not len(places) or not positions:
        return [positions] if positions else []
    at = np.arange(positions.start, positions.stop)
    left = at[~np.isin(at // request.fetched.block_tokens, places)]
    if not len(left):
        return []
    runs = np.split(left, np.flatnonzero(np.diff(left) != 1) + 1)
    return [range(int(run[0]), int(run[-1]) + 1) for run in runs]


def compare_loaded(cache: KVCaches, request: InboundRequest) -> LoadedBlocks:
    """Compare the blocks that came from tiers with their content hashes: one pass over them, on the caller's thread."""
    found = LoadedBlocks()
    for group in range(len(cache.groups)):
        places = checked_places(request, group)
        if len(places):
            found = _plus(found, _compare_group(cache, request, group, places))
    return found


def _plus(one: LoadedBlocks, other: LoadedBlocks) -> LoadedBlocks:
    return LoadedBlocks(
        one.compared + other.compared,
        one.wrong + other.wrong,
        one.bad + other.bad,
        one.checked + other.checked,
        one.first or other.first,
    )


def _compare_group(cache: KVCaches, request: InboundRequest, group: int, places: Int64s) -> LoadedBlocks:
    fetched, buffers = request.fetched, cache.buffers_of(group)
    meant = [content for content in fetched.contents[group] if content]
    here = hash_contents(Side(cache, request.tables), fetched.block_tokens, group, places)
    elements = [_elements(buffer, fetched.block_tokens) for buffer in buffers]
    positions = request.needs[group].positions
    others = unchecked_positions(request, group, positions)
    covered = len(positions) - sum(map(len, others))
    compared = sum(_elements(buffer, covered) for buffer in buffers)
    wrong, first = 0, None
    bad = np.zeros(len(places), bool)
    for at, (right, content) in enumerate(zip(meant, here, strict=True)):
        if content == right:
            continue
        bad[at] = True
        for index, (buffer, size) in enumerate(zip(buffers, elements, strict=True)):
            part = slice(index * HASH_BYTES, (index + 1) * HASH_BYTES)
            if content[part] != right[part]:
                wrong += size
                where = Naming(buffer.name, cache.groups[group].name).where
                holds = _describe(content[part], [each[part] for each in meant], places, fetched.block_tokens)
                first = first or f"{where} {_name(int(places[at]), fetched.block_tokens)} {holds}"
    return LoadedBlocks(compared, wrong, int(bad.sum()), len(places), first)


def _elements(buffer: PagedBuffer, positions: int) -> int:
    return prod(buffer.rows_shape(positions)) // buffer.itemsize * buffer.num_layers


def _name(place: int, block_tokens: int) -> str:
    return f"block {place} (tokens {place * block_tokens}..{(place + 1) * block_tokens})"


def _describe(content: bytes, others: list[bytes], places: Int64s, block_tokens: int) -> str:
    """Say whose content a wrong block holds, as far as that is one of the request's."""
    if content in others:
        return f"holds the content of {_name(int(places[others.index(content)]), block_tokens)}"
    return "does not hold what was stored, nor any other block of this request"
