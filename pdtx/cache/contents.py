"""What caches are filled with to be checked: the codes of coordinates, as a buffer's canonical bytes."""

from collections.abc import Callable

import numpy as np
import torch

from pdtx.cache.buffer import PagedBuffer
from pdtx.cache.codes import CoordinateCodes, Words
from pdtx.cache.verify import Rows
from pdtx.layout import Layout

KEYS_AND_VALUES = 2

WordsOf = Callable[[range, range], Words]
"""CoordinateCodes.of, or what has its shape."""


def code_rows(codes: CoordinateCodes, layer: int, positions: range, parts: int = KEYS_AND_VALUES) -> Rows:
    """Return the canonical bytes of positions of one layer; uint8, shape (parts, positions, heads, bytes of a head).

    parts: 2 for keys and values, 1 for records and states, whose codes are those that keys would have.
    """
    return word_rows(codes.of, layer, positions, parts)


def word_rows(of: WordsOf, layer: int, positions: range, parts: int) -> Rows:
    """Return what code_rows() returns, of any words."""
    words = np.ascontiguousarray(of(range(layer, layer + 1), positions)[0][:parts])
    return torch.from_numpy(words.view(np.uint8).reshape(*words.shape[:3], -1))


def codes_for(buffer: PagedBuffer, positions: int, first: int = 0) -> CoordinateCodes:
    """Return the codes of a request of so many positions in a buffer. first: see CoordinateCodes."""
    _, _, heads, nbytes = buffer.rows_shape(1)
    return CoordinateCodes(buffer.num_layers, positions, heads, nbytes // buffer.itemsize, buffer.itemsize, first)


def locate_byte(layout: Layout, offset: int) -> dict[str, int]:
    """Return the step of each axis in which a byte of a layout's region lies; of padding, the last before it."""
    parts = layout.parts
    part = next((part for part in reversed(parts) if part.offset <= offset), parts[0])
    rest, at = offset - part.offset, dict[str, int]()
    for axis in sorted(part.layout.axes, key=lambda axis: -axis.stride):
        at[axis.name] = min(rest // axis.stride, axis.extent - 1)
        rest -= at[axis.name] * axis.stride
    return at
