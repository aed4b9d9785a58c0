"""Fill paged buffers of any kind with coordinate codes, and check that they are there."""

import torch

from pdtx.cache import CoordinateCodes, PagedBuffer
from pdtx.cache.contents import KEYS_AND_VALUES, code_rows, codes_for
from pdtx.cache.verify import NOTHING_COMPARED, Naming, Verification, compare
from pdtx.plan.runs import Int64s

__all__ = ["check_codes", "code_rows", "codes_for", "fill_codes"]


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
    naming = Naming(kind="kv" if parts == KEYS_AND_VALUES else "record", heads=codes.heads)
    result = NOTHING_COMPARED
    for layer in layers:
        found = buffer.canonical(layer, blocks, tokens.start, tokens.stop)
        expected = code_rows(codes, layer, tokens, parts)
        result += compare(found, expected, layer=layer, start=tokens.start, itemsize=codes.itemsize, naming=naming)
    return result
