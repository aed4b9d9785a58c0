"""Verification: compare what arrived with what was meant, by coordinates, and find where wrong values come from."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from pdtx.cache.codes import POISON

Rows = torch.Tensor
"""Canonical bytes of some positions of one layer: uint8, shape (2, positions, heads, bytes of a head) for keys and
values, (1, positions, heads, bytes) for records, (1, 1, 1, bytes) for states."""

Kind = Literal["kv", "record", "state"]
"""What a buffer's rows are: keys and values of heads, one record a position, all states of a layer as bytes."""


@dataclass(frozen=True)
class StateNaming:
    """One of the states that a row holds one after another. axes: names and extents, the outermost first.

    itemsize: bytes of an element.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self.itemsize * prod(extent for _, extent in self.axes)

    def element(self, byte: int) -> str:
        """Return the name of the element that a byte of the state belongs to."""
        steps = np.unravel_index(byte // self.itemsize, [extent for _, extent in self.axes])
        places = (f"{name} {int(step)}" for (name, _), step in zip(self.axes, steps, strict=True))
        return f"state {self.name} {' '.join(places)}"


@dataclass(frozen=True)
class Naming:
    """How the coordinates of a buffer are called in messages.

    buffer: its name; "" leaves it out. group: the group's name where that is another. layers: the layers' names, as
    far as they say more than the layer's index. heads: of a row; one is not worth a word unless there are K and V.
    first_head: the model's number of a row's first head. rank: that has the row, where several could.
    states: of a row of states, in their order. bytes_of_row: which byte of such a row each byte is, of a part of one.
    fields: names and bytes of what a quantized head's row consists of: its elements, and its scales.
    """

    buffer: str = ""
    group: str = ""
    layers: Sequence[str] = ()
    kind: Kind = "kv"
    heads: int = 0
    first_head: int = 0
    rank: int | None = None
    states: Sequence[StateNaming] = ()
    bytes_of_row: npt.NDArray[np.int64] | None = field(default=None, compare=False, repr=False)
    fields: Sequence[tuple[str, int]] = ()

    @property
    def where(self) -> str:
        """The buffer, and its group if that has another name; empty if there is no name."""
        if not self.buffer:
            return ""
        return (
            f"group {self.group} buffer {self.buffer}"
            if self.group not in ("", self.buffer)
            else f"buffer {self.buffer}"
        )

    def channel(self, at: int) -> str:
        """An element of a head: by its number, or of a quantized head the byte of its elements or scales."""
        for name, nbytes in self.fields:
            if at < nbytes:
                return f"{name} byte {at}"
            at -= nbytes
        return f"channel {at}"

    def byte(self, at: int) -> int:
        """The byte of a whole row that a byte of what is named is."""
        return at if self.bytes_of_row is None else int(self.bytes_of_row[at])

    def state(self, byte: int) -> str:
        """The element of a state that a byte of a whole row belongs to; empty where that is not known."""
        for state in self.states:
            if byte < state.nbytes:
                return state.element(byte)
            byte -= state.nbytes
        return ""

    def layer(self, index: int) -> str:
        """A layer's index in its buffer, and its name where that counts differently."""
        name = self.layers[index] if index < len(self.layers) else ""
        told = not name or re.findall(r"\d+", name) == [str(index)]
        return f"layer {index}" if told else f"layer {index} ({name})"


@dataclass(frozen=True, order=True)
class Coordinate:
    """Where an element belongs. kv: 0 is K, 1 is V; token: position in the request; channel: of a state, the byte."""

    layer: int
    kv: int
    token: int
    head: int
    channel: int = 0
    naming: Naming = field(default=Naming(), compare=False)

    def __str__(self) -> str:
        if self.naming.kind != "state":
            return f"{self.row} {self.naming.channel(self.channel)}"
        byte = self.naming.byte(self.channel)
        return " ".join(word for word in (self.row, self.naming.state(byte), f"byte {byte}") if word)

    @property
    def row(self) -> str:
        """The coordinate without its channel."""
        names = self.naming
        words = [names.where, f"rank {names.rank}" if names.rank is not None else "", names.layer(self.layer)]
        if names.kind == "kv":
            words.append("KV"[self.kv])
        if names.kind != "state":
            words.append(f"token {self.token}")
        if names.kind == "kv" or names.heads > 1:
            words.append(f"head {names.first_head + self.head}")
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Mismatch:
    """The first wrong element of a comparison, with its row (one head of one position) as found and as meant."""

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
_PLAIN = Naming()


def compare(
    found: Rows, expected: Rows, *, layer: int, start: int, itemsize: int, naming: Naming = _PLAIN
) -> Verification:
    """Compare the canonical bytes of positions start.. of one layer, every element of itemsize bytes."""
    elements = found.numel() // itemsize
    if torch.equal(found, expected):
        return Verification(elements, 0, None)
    parts, tokens, heads, nbytes = found.shape
    differs = (found != expected).view(parts, tokens, heads, nbytes // itemsize, itemsize).any(-1)
    kv, token, head, channel = (int(x) for x in differs.nonzero()[0])
    coordinate = Coordinate(layer, kv, start + token, head, channel, naming)
    first = Mismatch(coordinate, found[kv, token, head].clone(), expected[kv, token, head].clone())
    return Verification(elements, int(differs.sum()), first)


@dataclass(frozen=True)
class Meant:
    """A piece of what was meant: the rows of positions start.. of one layer."""

    layer: int
    start: int
    rows: Rows
    naming: Naming = _PLAIN


def find_row(row: torch.Tensor, meant: Meant) -> Coordinate | None:
    """Return the first coordinate of meant whose bytes are those of row, shape (bytes of a head,)."""
    if meant.rows.shape[-1] != len(row):
        return None
    hits = (meant.rows == row).all(-1).nonzero()
    if not len(hits):
        return None
    kv, token, head = (int(x) for x in hits[0])
    return Coordinate(meant.layer, kv, meant.start + token, head, naming=meant.naming)


def _wrong_field(mismatch: Mismatch) -> tuple[str, slice]:
    """Return the field of a row outside of which all is right, and its bytes; "" and the whole row where there is none.

    A scale that is another token's, or was never written, lies beside elements that are right.
    """
    wrong, first = (mismatch.found != mismatch.expected).nonzero().flatten(), 0
    for name, nbytes in mismatch.coordinate.naming.fields:
        if len(wrong) and first <= int(wrong[0]) and int(wrong[-1]) < first + nbytes:
            return name, slice(first, first + nbytes)
        first += nbytes
    return "", slice(None)


def is_poison(row: torch.Tensor) -> bool:
    """Whether bytes, shape (n,), are POISON from end to end, whichever of its two bytes they begin with."""
    word = torch.tensor(np.array([POISON], np.int16).view(np.uint8))
    pattern = word.repeat(len(row) // 2 + 2)
    return any(torch.equal(row, pattern[first : first + len(row)]) for first in (0, 1))


def describe_mismatch(
    mismatch: Mismatch,
    reference: Iterable[Meant],
    block_of: Callable[[int], int],
    itemsize: int,
) -> str:
    """Say in one line which coordinate is wrong and where its value comes from.

    reference: what was meant, to search; read only as far as needed.
    block_of: from a position to the id of the block that holds it.
    """
    at = mismatch.coordinate
    where = f"{at} (block {block_of(at.token)})"
    name, part = _wrong_field(mismatch)
    held = mismatch.found[part]
    if is_poison(held):
        return f"{where} was never written: it holds poison"
    for meant in reference:
        source = find_row(held, replace(meant, rows=meant.rows[..., part]))
        if source is not None:
            return f"{where} holds the {name or 'value'} of {source.row}"
    place = slice(at.channel * itemsize, (at.channel + 1) * itemsize)
    found, expected = (bytes(row[place].numpy()[::-1]).hex() for row in (mismatch.found, mismatch.expected))
    return f"{where} is 0x{found}, should be 0x{expected}; no row of the source holds this value"
