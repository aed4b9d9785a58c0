"""Torch's side of names: element types, devices, and when a device has done its work."""

from collections.abc import Callable

import torch

from pdtx.errors import InputError
from pdtx.kvspec import dtype_size


def torch_dtype(dtype: str) -> torch.dtype:
    """Return torch's type of a spec's dtype name. Raises SpecError for an unknown one."""
    dtype_size(dtype)
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype):
        raise InputError(f"torch has no dtype {dtype!r}")
    return found


def open_device(device: str | torch.device) -> torch.device:
    """Return the torch device. Raises InputError where it does not exist here."""
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"device {str(device)!r} cannot be used: {reason}; use 'cpu' or a CUDA device that is present"
        ) from None
    return found


def record_fence(device: torch.device) -> Callable[[], None]:
    """Return a function that returns once the device has done all that was asked of it so far."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.current_stream(device).record_event()
    return lambda: event.synchronize()
