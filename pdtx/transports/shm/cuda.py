"""CUDA memory between processes of one host, by the driver's handles and torch's storage sharing.

Torch counts in a small file who still uses a storage, and keeps the memory until nobody does. What torch hands out for
a storage is sent field by field and never pickled.
"""

import torch

from pdtx.errors import ProtocolError, TransferError
from pdtx.transports.base import Region
from pdtx.transports.shm.keys import OnDevice


def share_cuda(region: Region) -> OnDevice:
    """Return what another process opens a region of a CUDA device with. Raises TransferError."""
    memory = region.memory
    try:
        # (device, handle, size, offset, counter's file, its offset, event's handle, whether to wait for the event)
        fields = memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        device, handle, nbytes, offset, counter, counter_offset, event, event_needed = fields
    except (RuntimeError, ValueError) as error:
        raise TransferError(f"memory of {memory.device} cannot be shared: {_first_line(error)}") from None
    return OnDevice(
        device=_uuid(device),
        offset=int(memory.storage_offset()),
        handle=bytes(handle),
        storage_bytes=nbytes,
        storage_offset=offset,
        counter=bytes(counter),
        counter_offset=counter_offset,
        event=bytes(event),
        event_needed=bool(event_needed),
    )


def open_cuda(key: OnDevice, nbytes: int) -> torch.Tensor:
    """Return a peer's region, uint8, shape (nbytes,). Raises ProtocolError or TransferError."""
    if key.offset > key.storage_bytes or nbytes > key.storage_bytes - key.offset:
        raise ProtocolError(
            f"the peer shared bytes {key.offset} to {key.offset + nbytes} of {key.storage_bytes} on a device"
        )
    device = _device_of(key.device)
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        storage = torch.UntypedStorage._new_shared_cuda(
            device,
            key.handle,
            key.storage_bytes,
            key.storage_offset,
            key.counter,
            key.counter_offset,
            key.event,
            key.event_needed,
        )
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return empty.set_(storage, key.offset, (nbytes,), (1,))
    except RuntimeError as error:
        raise TransferError(
            f"the peer's memory on CUDA device {device} cannot be opened: {_first_line(error)}"
        ) from None


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _device_of(uuid: str) -> int:
    """Return the number that a device has here: the peer may see others, in another order."""
    for device in range(torch.cuda.device_count()):
        if _uuid(device) == uuid:
            return device
    raise TransferError(f"the peer's memory is on CUDA device {uuid}, which this process does not see")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
