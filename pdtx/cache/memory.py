"""Where a cache's bytes come from."""

import torch

from pdtx.cache.shared import HUGE_PAGE_BYTES, MADV_HUGEPAGE, allocate_shared, libc
from pdtx.errors import InputError

_ALIGNMENT = HUGE_PAGE_BYTES
"""Bytes: more than O_DIRECT asks for, too."""


def allocate(nbytes: int, device: torch.device, *, shared: bool = False) -> torch.Tensor:
    """Return nbytes of uint8 memory, shape (nbytes,), aligned to 2 MiB; on the CPU in huge pages where there are any.

    shared: on the CPU, so that other processes of this host can be let map it, see pdtx.cache.shared; memory of other
    devices can be shared as it is. Raises InputError if the memory cannot be had.
    """
    if shared and device.type == "cpu":
        return allocate_shared(nbytes)
    try:
        raw = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise InputError(f"no memory for a cache of {nbytes} bytes on {device}: {str(error).splitlines()[0]}") from None
    skip = -raw.data_ptr() % _ALIGNMENT
    memory = raw[skip : skip + nbytes]
    if device.type == "cpu" and nbytes >= _ALIGNMENT:
        # Scattered blocks are spread over many pages; with small ones the processor looks up more than it copies.
        # Advice only: a kernel without huge pages declines, and nothing but the speed changes.
        libc.madvise(memory.data_ptr(), nbytes // _ALIGNMENT * _ALIGNMENT, MADV_HUGEPAGE)
    return memory
