"""Sizes of tiers as text: '1,4,16,64 GiB', '512MiB,2GiB', '100,1000 blocks'."""

import re
from dataclasses import dataclass

from pdtx.errors import InputError
from pdtx.units import format_bytes, parse_bytes

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)")
_BLOCKS = ("blocks", "block")


@dataclass(frozen=True)
class TierSize:
    """What a tier is to have. blocks: whole ones that fit; None for a tier without end."""

    blocks: int | None
    nbytes: int | None

    def __str__(self) -> str:
        return "unbounded" if self.nbytes is None else format_bytes(self.nbytes)


UNBOUNDED = TierSize(None, None)


def parse_sizes(text: str, block_bytes: int) -> list[TierSize]:
    """Return sizes, smallest first, each once. A number without a unit has that of the last one.

    Raises InputError for a text that is no such list, and for a size that does not hold one block.
    """
    found = [_SIZE.fullmatch(part.strip()) for part in text.split(",")]
    pairs = [(match[1], match[2]) for match in found if match]
    if len(pairs) != len(found) or not pairs[-1][1]:
        raise InputError(f"no sizes of tiers: {text!r}; write for example '1,4,16 GiB' or '100,1000 blocks'")
    sizes = {_size(number, unit or pairs[-1][1], block_bytes) for number, unit in pairs}
    return sorted(sizes, key=lambda size: size.nbytes or 0)


def _size(number: str, unit: str, block_bytes: int) -> TierSize:
    nbytes = int(float(number) * block_bytes) if unit in _BLOCKS else parse_bytes(number + unit)
    blocks = nbytes // block_bytes
    if blocks < 1:
        raise InputError(f"a tier of {number} {unit} does not hold one block of {format_bytes(block_bytes)}")
    return TierSize(blocks, nbytes)
