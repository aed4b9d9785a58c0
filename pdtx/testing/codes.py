"""Fill paged buffers of any kind with coordinate codes, and check that they are there."""

import numpy as np
import torch

from pdtx.cache import CoordinateCodes, PagedBuffer
from pdtx.cache.verify import NOTHING_COMPARED, Naming, Rows, Verification, compare
from pdtx.plan.runs import Int64s

_KEYS_AND_VALUES = 2


def code_rows(codes: CoordinateCodes, layer: int, positions: range, parts: int = _KEYS_AND_VALUES) -> Rows:
    """Return the canonical bytes of positions of one layer; uint8, shape (parts, positions, heads, bytes of a head).

    parts: 2 for keys and values, 1 for records and states, whose codes are those that keys would have.
    """
    words = np.ascontiguousarray(codes.of(range(layer, layer + 1), positions)[0][:parts])
    return torch.from_numpy(words.view(np.uint8).reshape(*words.shape[:3], -1))


def codes_for(buffer: PagedBuffer, positions: int) -> CoordinateCodes:
    """Return the codes of a request of so many positions in a buffer."""
    _, _, heads, nbytes = buffer.rows_shape(1)
    return CoordinateCodes(buffer.num_layers, positions, heads, nbytes // buffer.itemsize, buffer.itemsize)


def fill_codes(
    buffer: PagedBuffer,
    block_ids: Int64s,
    codes: CoordinateCodes,
    *,
    layers: range | None = None,
    tokens: range | None = None,
) -> None:
    """Write the codes of layers x tokens (positions; default: all) into a request's blocks, given in table order."""
    layers = range(codes.layers) if layers is None else layers
    tokens = range(codes.tokens) if tokens is None else tokens
    blocks, parts = torch.from_numpy(block_ids).to(buffer.device), buffer.rows_shape(1)[0]
    for layer in layers:
        buffer.write_canonical(layer, blocks, tokens.start, code_rows(codes, layer, tokens, parts).to(buffer.device))


def check_codes(
    buffer: PagedBuffer,
    block_ids: Int64s,
    codes: CoordinateCodes,
    *,
    layers: range | None = None,
    tokens: range | None = None,
) -> Verification:
    """Compare every element of layers x tokens (positions; default: all) with its code."""
    layers = range(codes.layers) if layers is None else layers
    tokens = range(codes.tokens) if tokens is None else tokens
    blocks, parts = torch.from_numpy(block_ids).to(buffer.device), buffer.rows_shape(1)[0]
    naming = Naming(kind="kv" if parts == _KEYS_AND_VALUES else "record", heads=codes.heads)
    result = NOTHING_COMPARED
    for layer in layers:
        found = buffer.canonical(layer, blocks, tokens.start, tokens.stop)
        expected = code_rows(codes, layer, tokens, parts)
        result += compare(found, expected, layer=layer, start=tokens.start, itemsize=codes.itemsize, naming=naming)
    return result
