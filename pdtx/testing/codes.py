"""Fill paged caches with coordinate codes, and check that they are there."""

import numpy as np
import torch

from pdtx.cache import CoordinateCodes, PagedKVCache
from pdtx.cache.verify import NOTHING_COMPARED, Rows, Verification, compare
from pdtx.plan.runs import Int64s


def code_rows(codes: CoordinateCodes, layer: int, tokens: range) -> Rows:
    """Return the canonical bytes of tokens of one layer; uint8, shape (2, tokens, heads, channels * itemsize)."""
    words = np.ascontiguousarray(codes.of(range(layer, layer + 1), tokens)[0])
    return torch.from_numpy(words.view(np.uint8).reshape(*words.shape[:3], -1))


def codes_for(cache: PagedKVCache, tokens: int) -> CoordinateCodes:
    """Return the codes of a request of so many tokens in a cache."""
    spec = cache.spec
    return CoordinateCodes(cache.num_layers, tokens, spec.num_kv_heads, spec.head_size, cache.layout.itemsize)


def fill_codes(
    cache: PagedKVCache,
    block_ids: Int64s,
    codes: CoordinateCodes,
    *,
    layers: range | None = None,
    tokens: range | None = None,
) -> None:
    """Write the codes of layers x tokens (default: all) into a request's blocks, given in token order."""
    layers = range(codes.layers) if layers is None else layers
    tokens = range(codes.tokens) if tokens is None else tokens
    blocks = torch.from_numpy(block_ids).to(cache.device)
    for layer in layers:
        rows = code_rows(codes, layer, tokens).to(cache.device).view(cache.dtype)
        cache.write(layer, blocks, tokens.start, rows[0], rows[1])


def check_codes(
    cache: PagedKVCache,
    block_ids: Int64s,
    codes: CoordinateCodes,
    *,
    layers: range | None = None,
    tokens: range | None = None,
) -> Verification:
    """Compare every element of layers x tokens (default: all) with its code."""
    layers = range(codes.layers) if layers is None else layers
    tokens = range(codes.tokens) if tokens is None else tokens
    blocks = torch.from_numpy(block_ids).to(cache.device)
    result = NOTHING_COMPARED
    for layer in layers:
        found = cache.canonical(layer, blocks, tokens.start, tokens.stop)
        expected = code_rows(codes, layer, tokens)
        result += compare(found, expected, layer=layer, start=tokens.start, itemsize=codes.itemsize)
    return result
