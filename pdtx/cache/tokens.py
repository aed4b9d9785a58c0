"""Reading and writing one axis of tokens through a block table."""

import torch

from pdtx.units import ceil_div


def put_tokens(view: torch.Tensor, steps: torch.Tensor, start: int, rows: torch.Tensor) -> None:
    """Store rows (T, ...) as tokens start.. in a view (block steps, tokens of a step, ...).

    steps: the steps of the block axis that hold the sequence's tokens, in their order; int64.
    """
    size = view.shape[1]
    positions = torch.arange(start, start + len(rows), device=view.device)
    view[steps[positions // size], positions % size] = rows


def take_tokens(view: torch.Tensor, steps: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return a contiguous copy of tokens start..stop, (T, ...); see put_tokens. No other block is read."""
    # Whole blocks first, then the slice: several times as fast as an index for every token.
    size = view.shape[1]
    first = start // size
    used = steps[first : ceil_div(stop, size)] if stop > start else steps[:0]
    tokens = view.index_select(0, used).reshape(-1, *view.shape[2:])
    return tokens[start - first * size : stop - first * size].contiguous()
