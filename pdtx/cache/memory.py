"""Where a cache's bytes come from."""

import ctypes

import torch

from pdtx.errors import InputError

_ALIGNMENT = 2 << 20
"""Bytes: the size of a huge page, and more than O_DIRECT asks for."""

_MADV_HUGEPAGE = 14
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return nbytes of uint8 memory, shape (nbytes,), aligned to 2 MiB; on the CPU in huge pages where there are any.

    Raises InputError if the memory cannot be had.
    """
    try:
        raw = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise InputError(f"no memory for a cache of {nbytes} bytes on {device}: {str(error).splitlines()[0]}") from None
    skip = -raw.data_ptr() % _ALIGNMENT
    memory = raw[skip : skip + nbytes]
    if device.type == "cpu" and nbytes >= _ALIGNMENT:
        # Scattered blocks are spread over many pages; with small ones the processor looks up more than it copies.
        # Advice only: a kernel without huge pages declines, and nothing but the speed changes.
        _libc.madvise(memory.data_ptr(), nbytes // _ALIGNMENT * _ALIGNMENT, _MADV_HUGEPAGE)
    return memory
