"""CUDA memory between processes, with a stand-in for CUDA: what torch hands out crosses unchanged."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from pdtx.errors import TransferError
from pdtx.transports.base import Region
from pdtx.transports.shm.cuda import open_cuda, share_cuda
from pdtx.transports.shm.keys import OnDevice, pack, unpack_key

HANDED_OUT = (1, b"handle", 8192, 512, b"counter", 3, b"event", True)
UUIDS = ["GPU-a", "GPU-b", "GPU-c"]


def stand_in(handed_out: tuple[object, ...] | Exception) -> Region:
    """A region from byte 100 of a storage on CUDA device 1."""

    def share() -> tuple[object, ...]:
        if isinstance(handed_out, Exception):
            raise handed_out
        return handed_out

    storage = SimpleNamespace(_share_cuda_=share)
    memory = SimpleNamespace(device=torch.device("cuda:1"), untyped_storage=lambda: storage, storage_offset=lambda: 100)
    return Region(cast("torch.Tensor", memory))


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """UUIDs of the CUDA devices that this process sees, in their order; change them at will."""
    seen = list(UUIDS)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=seen[device]))
    return seen


def test_region_crosses_unchanged(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    key = share_cuda(stand_in(HANDED_OUT))
    assert key == OnDevice("GPU-b", 100, b"handle", 8192, 512, b"counter", 3, b"event", True)
    crossed = unpack_key(pack(key))
    assert crossed == key
    assert isinstance(crossed, OnDevice)
    opened = list[tuple[object, ...]]()
    memory = (torch.arange(8192) % 251).to(torch.uint8)

    def new_shared(*arguments: object) -> torch.UntypedStorage:
        opened.append(arguments)
        return memory.untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", new_shared)
    devices.reverse()
    devices.append("GPU-d")
    devices.pop(0)  # the peer's device 1 is number 0 here
    assert torch.equal(open_cuda(crossed, 200), memory[100:300])
    assert opened == [(0, *HANDED_OUT[1:])]


@pytest.mark.parametrize("text", ["CUDA error: invalid argument\nmore of it", ""])
def test_what_torch_refuses_is_one_line(devices: list[str], text: str) -> None:
    with pytest.raises(
        TransferError, match=r"memory of cuda:1 cannot be shared: (CUDA error: invalid argument|Runtime)"
    ):
        share_cuda(stand_in(RuntimeError(text)))


def test_device_without_cuda_is_one_line(monkeypatch: pytest.MonkeyPatch, devices: list[str]) -> None:
    def fail(*arguments: object) -> torch.UntypedStorage:
        raise RuntimeError("CUDA is not available")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", fail)
    with pytest.raises(TransferError, match="device 0 cannot be opened: CUDA is not available"):
        open_cuda(OnDevice("GPU-a", 0, b"", 8192, 0, b"", 0, b"", False), 8192)
