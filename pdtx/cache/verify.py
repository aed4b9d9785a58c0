"""Verification: compare what arrived with what was meant, by coordinates, and find where wrong values come from."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from pdtx.cache.codes import POISON

Rows = torch.Tensor
"""Canonical bytes of some tokens of one layer: uint8, shape (2, tokens, heads, bytes of a head)."""


@dataclass(frozen=True, order=True)
class Coordinate:
    """Where an element belongs. kv: 0 is K, 1 is V; token: position in the request."""

    layer: int
    kv: int
    token: int
    head: int
    channel: int = 0

    def __str__(self) -> str:
        return f"layer {self.layer} {'KV'[self.kv]} token {self.token} head {self.head} channel {self.channel}"

    @property
    def row(self) -> str:
        """The coordinate without its channel."""
        return f"layer {self.layer} {'KV'[self.kv]} token {self.token} head {self.head}"


@dataclass(frozen=True)
class Mismatch:
    """The first wrong element of a comparison, with its row (one head of one token) as found and as meant."""

    coordinate: Coordinate
    found: torch.Tensor
    expected: torch.Tensor


@dataclass(frozen=True)
class Verification:
    """What a comparison found. wrong: elements that differ; compared: elements looked at."""

    compared: int
    wrong: int
    first: Mismatch | None

    def __add__(self, other: "Verification") -> "Verification":
        return Verification(self.compared + other.compared, self.wrong + other.wrong, self.first or other.first)


NOTHING_COMPARED = Verification(0, 0, None)


def compare(found: Rows, expected: Rows, *, layer: int, start: int, itemsize: int) -> Verification:
    """Compare the canonical bytes of tokens start.. of one layer, every element."""
    elements = found.numel() // itemsize
    if torch.equal(found, expected):
        return Verification(elements, 0, None)
    parts, tokens, heads, nbytes = found.shape
    differs = (found != expected).view(parts, tokens, heads, nbytes // itemsize, itemsize).any(-1)
    kv, token, head, channel = (int(x) for x in differs.nonzero()[0])
    coordinate = Coordinate(layer, kv, start + token, head, channel)
    first = Mismatch(coordinate, found[kv, token, head].clone(), expected[kv, token, head].clone())
    return Verification(elements, int(differs.sum()), first)


def find_row(row: torch.Tensor, rows: Rows, *, layer: int, start: int) -> Coordinate | None:
    """Return the first coordinate of rows whose bytes are those of row, shape (bytes of a head,)."""
    hits = (rows == row).all(-1).nonzero()
    if not len(hits):
        return None
    kv, token, head = (int(x) for x in hits[0])
    return Coordinate(layer, kv, start + token, head)


def describe_mismatch(
    mismatch: Mismatch,
    reference: Iterable[tuple[int, int, Rows]],
    block_of: Callable[[int], int],
    itemsize: int,
) -> str:
    """Say in one line which coordinate is wrong and where its value comes from.

    reference: (layer, first token, rows) of what was meant, to search; read only as far as needed.
    block_of: from a token position to the id of the block that holds it.
    """
    at = mismatch.coordinate
    where = f"{at} (block {block_of(at.token)})"
    words = mismatch.found.numpy().view(np.int16)
    if (words == POISON).all():
        return f"{where} was never written: it holds poison"
    for layer, start, rows in reference:
        source = find_row(mismatch.found, rows, layer=layer, start=start)
        if source is not None:
            return f"{where} holds the value of {source.row}"
    place = slice(at.channel * itemsize, (at.channel + 1) * itemsize)
    found, expected = (bytes(row[place].numpy()[::-1]).hex() for row in (mismatch.found, mismatch.expected))
    return f"{where} is 0x{found}, should be 0x{expected}; no row of the source holds this value"
