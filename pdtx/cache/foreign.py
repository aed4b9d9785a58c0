"""Memory that others have allocated, as bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pdtx.errors import LayoutError

_MAX_ADDRESS = 1 << 63


class _At:
    """What numpy makes an array over; keeps the memory's owner alive as long as any view of it."""

    def __init__(self, address: int, nbytes: int, keep: Any) -> None:  # noqa: ANN401  # anything that owns memory
        self.keep = keep
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


@dataclass(frozen=True)
class Memory:
    """Memory that somebody else has allocated. bytes: all of it, uint8, shape (nbytes,), contiguous."""

    bytes: torch.Tensor = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.bytes.numel()

    @classmethod
    def at(cls, address: int, nbytes: int, keep: object = None) -> "Memory":
        """Return writable memory of this process, on the CPU, by its address.

        keep: what owns the memory; it is kept alive as long as the memory is used here. Without it the caller has to
        see to that. Raises LayoutError for what is no address or no size.
        """
        if address <= 0 or nbytes <= 0 or address + nbytes > _MAX_ADDRESS:
            raise LayoutError(f"{nbytes} bytes at address {address:#x} are no memory")
        return cls(torch.from_numpy(np.asarray(_At(address, nbytes, keep))))

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Memory":
        """Return a tensor's memory. Raises LayoutError for one that is not contiguous: storage_of() takes those."""
        _check_memory(tensor)
        if not tensor.is_contiguous():
            raise LayoutError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous; give "
                "Memory.storage_of(tensor), and the offset in it"
            )
        return cls(tensor.detach().reshape(-1).view(torch.uint8))

    @classmethod
    def storage_of(cls, tensor: torch.Tensor) -> "Memory":
        """Return all of the storage that a tensor of any shape and strides is a view of."""
        _check_memory(tensor)
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return cls(whole.set_(storage))

    def part(self, offset: int, nbytes: int, padding: int, itemsize: int, what: str) -> torch.Tensor:
        """Return nbytes from offset on, uint8. itemsize: of the elements there. what: for messages.

        padding: so many bytes at the end hold no element, and are left out where the memory ends before them.

        Raises LayoutError if they lie outside, or elements would not lie at multiples of their size.
        """
        if offset < 0 or offset + nbytes - padding > self.nbytes:
            needed = nbytes - padding
            raise LayoutError(f"{what} takes {needed} bytes from byte {offset} on; its memory has {self.nbytes}")
        found = self.bytes[offset : offset + nbytes]
        if found.data_ptr() % itemsize or found.storage_offset() % itemsize:
            raise LayoutError(
                f"{what} begins at address {found.data_ptr():#x}, byte {offset} of its memory: not at a multiple of "
                f"its elements' {itemsize} bytes"
            )
        return found


def _check_memory(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise LayoutError(f"a {tensor.layout} tensor on {tensor.device} has no memory that a cache can lie in")


AnyMemory = torch.Tensor | Memory
"""What memory can be given as: a contiguous tensor of any dtype and device, or a Memory."""


def memories(given: AnyMemory | Sequence[AnyMemory]) -> tuple[Memory, ...]:
    """Return memory given for one rank or for several. Raises LayoutError as Memory.of does."""
    each = [given] if isinstance(given, torch.Tensor | Memory) else given
    return tuple(memory if isinstance(memory, Memory) else Memory.of(memory) for memory in each)
