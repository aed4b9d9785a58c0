"""Probe: what a cache's owner writes into a spare block, held against where the named layout says that it lies.

Every element is given a number of its own, written in digits: one digit a round, as a small value that the buffer's
dtype holds exactly. What is found at a coordinate after all rounds is the number of the element that really lies there,
so that a wrong layout is found out whatever it does, and named.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from pdtx.cache.buffer import PagedBuffer
from pdtx.cache.verify import Coordinate, Naming
from pdtx.errors import LayoutError

WriteBlock = Callable[..., None]
"""write(layer_name, block_id, *tensors), see KVCaches.probe."""

_DIGITS = {
    torch.float64: 1 << 24,
    torch.float32: 1 << 24,
    torch.float16: 1 << 11,
    torch.bfloat16: 1 << 8,
    torch.float8_e4m3fn: 1 << 4,
    torch.float8_e5m2: 1 << 3,
    torch.uint8: 1 << 7,
    torch.int8: 1 << 6,
}
"""Values 1, 2, ... up to this are exact in a dtype, and none of them is made of POISON's bytes."""

_NOTHING = -1  # what is found is none of the values that were written
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Numbering:
    """The numbers of all elements of one buffer's spare block.

    An element's number counts through layers, then tensors, then each tensor's axes. shapes: of a layer's tensors.
    """

    buffer: PagedBuffer
    naming: Naming
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def per_layer(self) -> int:
        """Elements of a layer."""
        return sum(map(prod, self.shapes))

    @property
    def total(self) -> int:
        """Elements of all layers."""
        return self.per_layer * self.buffer.num_layers

    @property
    def base(self) -> int:
        """Digits of the number system: what the narrowest dtype can tell apart."""
        return min(_DIGITS[dtype] for dtype in self.dtypes)

    @property
    def rounds(self) -> int:
        """Digits of the largest number."""
        rounds, reach = 1, self.base
        while reach < self.total:
            rounds, reach = rounds + 1, reach * self.base
        return rounds

    def numbers(self, layer: int) -> list[Numbers]:
        """Return the numbers of a layer's tensors, each in its shape."""
        first, found = layer * self.per_layer, list[Numbers]()
        for shape in self.shapes:
            found.append(np.arange(first, first + prod(shape), dtype=np.int64).reshape(shape))
            first += prod(shape)
        return found

    def values(self, layer: int, place: int) -> list[torch.Tensor]:
        """Return what to write into a layer in a round: digit number place of each element's number, plus 1."""
        digits = (numbers // self.base**place % self.base + 1 for numbers in self.numbers(layer))
        pairs = zip(digits, self.dtypes, strict=True)
        return [torch.from_numpy(own).to(torch.float32).to(self.buffer.device, dtype) for own, dtype in pairs]

    def digits(self, tensor: torch.Tensor) -> Numbers:
        """Return the digits that tensor holds; _NOTHING where it holds anything else."""
        values = tensor.cpu().to(torch.float64).numpy()
        good = (values >= 1) & (values <= self.base) & (values == np.floor(values))
        return np.where(good, values - 1, _NOTHING).astype(np.int64)

    def where(self, number: int) -> str:
        """Name an element in words."""
        layer, rest = divmod(number, self.per_layer)
        tensor = 0
        while rest >= prod(self.shapes[tensor]):
            rest -= prod(self.shapes[tensor])
            tensor += 1
        at = [int(x) for x in np.unravel_index(rest, self.shapes[tensor])]
        if self.naming.kind == "state":
            state = self.buffer.layout.parts[tensor].name
            return f"{self.naming.where} {self.naming.layer(layer)} state {state} element {tuple(at)}"
        if self.naming.kind == "record":
            per_vector = self.buffer.block_size // self.shapes[0][0]
            at = [at[0] * per_vector, 0, at[1]]
        if self.naming.fields:  # (planes, tokens, heads, bytes of a field)
            tensor, token, head, byte = at[0], at[1], at[2], at[3] + sum(shape[-1] for shape in self.shapes[:tensor])
            return str(Coordinate(layer, tensor, token, head, byte, self.naming))
        token, head, channel = at
        return str(Coordinate(layer, tensor, token, head, channel, self.naming))


def probe_buffer(buffer: PagedBuffer, group: str, write: WriteBlock, block: int) -> None:
    """Probe one buffer, see KVCaches.probe. group: the name of its group."""
    tensors = buffer.block_tensors()
    naming = Naming(buffer.name, group, buffer.layer_names, buffer.kind, 1, fields=buffer.row_fields)
    numbering = _Numbering(buffer, naming, tuple(s for s, _ in tensors), tuple(d for _, d in tensors))
    ids = torch.tensor([block], device=buffer.device)
    before = buffer.save_blocks(ids)
    try:
        found = _write_and_read(numbering, write, block, ids)
    finally:
        buffer.restore_blocks(ids, before)
    _require_all(numbering, found, block)


def _write_and_read(numbering: _Numbering, write: WriteBlock, block: int, ids: torch.Tensor) -> Numbers:
    """Let the owner write all rounds; return the number found at each element, shape (elements,)."""
    buffer = numbering.buffer
    found = np.zeros(numbering.total, np.int64)
    nothing = np.zeros(numbering.total, bool)
    for place in range(numbering.rounds):
        buffer.poison(ids)
        for layer, name in enumerate(buffer.layer_names):
            write(name, block, *numbering.values(layer, place))
        if buffer.device.type == "cuda":
            torch.cuda.synchronize(buffer.device)  # the owner may write in a stream of its own
        digits = _read(numbering, block, ids)
        nothing |= digits == _NOTHING
        found += digits * numbering.base**place
    return np.where(nothing | (found >= numbering.total), _NOTHING, found)


def _read(numbering: _Numbering, block: int, ids: torch.Tensor) -> Numbers:
    """Return the digits that lie where the layout has each element, shape (elements,)."""
    buffer, found = numbering.buffer, list[Numbers]()
    for layer in range(buffer.num_layers):
        found += [numbering.digits(tensor).reshape(-1) for tensor in buffer.read_block(layer, block)]
        differing = buffer.replicas_differ(layer, ids, 0, buffer.block_size) if buffer.tp_size > 1 else 0
        if differing:
            where = f"{numbering.naming.where} {numbering.naming.layer(layer)}"
            raise LayoutError(
                f"probe: {where} block {block}: {differing} elements differ between ranks that keep copies"
            )
    return np.concatenate(found)


def _require_all(numbering: _Numbering, found: Numbers, block: int) -> None:
    """Raise LayoutError unless each element was found at its own coordinate."""
    expected = np.arange(numbering.total, dtype=np.int64)
    layout = numbering.buffer.layout
    if "token" in layout.parts[0].layout.by_name and "token" not in layout.sliceable:
        # Where elements lie inside such a block is not known; that all of them lie there is.
        per_layer = found.reshape(numbering.buffer.num_layers, -1)
        found = np.sort(per_layer, axis=1).reshape(-1)
    wrong = np.flatnonzero(found != expected)
    if not len(wrong):
        return
    first = int(wrong[0])
    source = int(found[first])
    holds = (
        "holds nothing that was written"
        if source == _NOTHING
        else f"holds what was written to {numbering.where(source)}"
    )
    raise LayoutError(
        f"probe: {numbering.where(first)} (block {block}) {holds}; {len(wrong)} of {numbering.total} elements do not "
        f"lie where layout {layout.name} has them: name the layout that their owner writes"
    )
