"""States of recurrent layers in small, and by hand which elements of them each tensor-parallel rank has."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdtx.cache import PagedBuffer, PagedStateCache
from pdtx.kvspec import MambaSpec, Segment, StateSharding

INPUTS = 3
"""Tokens that the convolutions look back on."""


@dataclass(frozen=True)
class Family:
    """One kind of recurrent layer.

    channels: for each number of ranks, convolution and rank the model's channels on that rank, in their order there.
    heads: for each number of ranks and rank those of the recurrent state. copied: channels that more than one of four
    ranks has, counted once for each rank beyond the first.
    """

    spec: MambaSpec
    sharding: StateSharding
    channels: Mapping[int, tuple[tuple[list[int], ...], ...]]
    heads: Mapping[int, tuple[list[int], ...]]
    copied: int = 0


def _spec(convs: tuple[int, ...], state: tuple[int, ...]) -> MambaSpec:
    shapes = (*((INPUTS, channels) for channels in convs), state)
    return MambaSpec(block_size=64, shapes=shapes, dtypes=(*("bfloat16" for _ in convs), "float32"))


def _sharding(heads: int, *convs: tuple[tuple[str, int, int], ...]) -> StateSharding:
    """How ranks share states. convs: of each convolution name, units and width of its segments."""
    return StateSharding(
        conv=tuple(
            tuple(Segment(name=name, channels=units * width, units=units) for name, units, width in segments)
            for segments in convs
        ),
        heads=heads,
    )


_FOURTHS = {1: ([0, 1, 2, 3],), 2: ([0, 1], [2, 3]), 4: ([0], [1], [2], [3])}
_EIGHTHS = {
    1: ([0, 1, 2, 3, 4, 5, 6, 7],),
    2: ([0, 1, 2, 3], [4, 5, 6, 7]),
    4: ([0, 1], [2, 3], [4, 5], [6, 7]),
}

FAMILIES = {
    # Jamba: channels alone.
    "mamba1": Family(
        _spec((8,), (8, 5)), _sharding(8, (("x", 8, 1),)), {tp: (ranks,) for tp, ranks in _EIGHTHS.items()}, _EIGHTHS
    ),
    # Bamba and Falcon-H1: [x 8 | B 3 | C 3]; the one group's B and C are on all ranks.
    "mamba2 of 1 group": Family(
        _spec((14,), (4, 2, 3)),
        _sharding(4, (("x", 4, 2), ("B", 1, 3), ("C", 1, 3))),
        {
            1: (([*range(14)],),),
            2: (([0, 1, 2, 3, 8, 9, 10, 11, 12, 13], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]),),
            4: (
                (
                    [0, 1, 8, 9, 10, 11, 12, 13],
                    [2, 3, 8, 9, 10, 11, 12, 13],
                    [4, 5, 8, 9, 10, 11, 12, 13],
                    [6, 7, 8, 9, 10, 11, 12, 13],
                ),
            ),
        },
        _FOURTHS,
        copied=3 * 6,
    ),
    # [x 8 | B 6 | C 6]: two groups, each on two of four ranks.
    "mamba2 of 2 groups": Family(
        _spec((20,), (4, 2, 3)),
        _sharding(4, (("x", 4, 2), ("B", 2, 3), ("C", 2, 3))),
        {
            1: (([*range(20)],),),
            2: (([0, 1, 2, 3, 8, 9, 10, 14, 15, 16], [4, 5, 6, 7, 11, 12, 13, 17, 18, 19]),),
            4: (
                (
                    [0, 1, 8, 9, 10, 14, 15, 16],
                    [2, 3, 8, 9, 10, 14, 15, 16],
                    [4, 5, 11, 12, 13, 17, 18, 19],
                    [6, 7, 11, 12, 13, 17, 18, 19],
                ),
            ),
        },
        _FOURTHS,
        copied=2 * 6,
    ),
    # Qwen3-Next: [q 8 | k 8 | v 16], twice as many heads of values.
    "gated delta net": Family(
        _spec((32,), (8, 2, 2)),
        _sharding(8, (("q", 4, 2), ("k", 4, 2), ("v", 8, 2))),
        {
            1: (([*range(32)],),),
            2: (([*range(4), *range(8, 12), *range(16, 24)], [*range(4, 8), *range(12, 16), *range(24, 32)]),),
            4: (
                (
                    [0, 1, 8, 9, 16, 17, 18, 19],
                    [2, 3, 10, 11, 20, 21, 22, 23],
                    [4, 5, 12, 13, 24, 25, 26, 27],
                    [6, 7, 14, 15, 28, 29, 30, 31],
                ),
            ),
        },
        _EIGHTHS,
    ),
    # Kimi-Linear as vLLM keeps it: three convolutions.
    "kimi delta": Family(
        _spec((8, 8, 8), (4, 2, 2)),
        _sharding(4, *(((name, 4, 2),) for name in ("q", "k", "v"))),
        {tp: (ranks, ranks, ranks) for tp, ranks in _EIGHTHS.items()},
        _FOURTHS,
    ),
    # LFM2: a convolution and no recurrence.
    "short convolution": Family(
        MambaSpec(block_size=64, shapes=((INPUTS, 8),), dtypes=("bfloat16",)),
        _sharding(0, (("x", 8, 1),)),
        {tp: (ranks,) for tp, ranks in _EIGHTHS.items()},
        dict.fromkeys((1, 2, 4), ()),
    ),
}


def state_cache(
    family: str, tp_size: int, layout: str = "mamba_sd", *, num_blocks: int = 5, num_layers: int = 2
) -> PagedStateCache:
    """A buffer of a family's states over so many ranks."""
    one = FAMILIES[family]
    return PagedStateCache(
        one.spec, layout=layout, num_layers=num_layers, num_blocks=num_blocks, tp_size=tp_size, sharding=one.sharding
    )


Words = npt.NDArray[np.uint8] | npt.NDArray[np.int64]


def elements_of(family: str, row: Words) -> list[Words]:
    """The states in a canonical row, or in the numbers of its bytes; each (first dimension, the rest, itemsize)."""
    found, spec, at = list[Words](), FAMILIES[family].spec, 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        size = {"bfloat16": 2, "float32": 4}[dtype]
        count = int(np.prod(shape)) * size
        found.append(row[at : at + count].reshape(shape[0], -1, size))
        at += count
    return found


def share_of(family: str, tp_size: int, rank: int, states: list[Words]) -> list[Words]:
    """What a rank has of the states, by the tables above."""
    one = FAMILIES[family]
    convs = one.channels[tp_size]
    found = [state[:, ranks[rank]] for state, ranks in zip(states, convs, strict=False)]
    return [*found, *(state[one.heads[tp_size][rank]] for state in states[len(convs) :])]


def on_rank(buffer: PagedBuffer, rank: int, layer: int, block: int) -> list[Words]:
    """What lies in a block on one rank, byte by byte by the layout's strides alone; as elements_of returns it."""
    memory, found = buffer.ranks[rank].memory.cpu().numpy(), list[Words]()
    for part in buffer.layout.parts:
        axes = part.layout.by_name
        first = part.offset + layer * axes["layer"].stride + block * axes["block"].stride
        inner = [np.arange(axes[name].extent) * axes[name].stride for name in part.layout.names[2:]]
        offsets = first + inner[0][:, None, None] + inner[1][:, None] + np.arange(part.layout.itemsize)
        found.append(memory[offsets])
    return found
