"""How much of a device is left for the pool (vLLM 0.22, v1/worker/gpu_worker.py)."""

import math
from dataclasses import dataclass

from pdtx.errors import InputError
from pdtx.kvspec.checks import require_positive, require_positive_or_none
from pdtx.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """A device's memory at start-up and what else needs it; all in bytes.

    gpu_memory_utilization: part of total_memory that this server may use, above 0 and at most 1.
    weights, peak_activation, non_torch: measured while the model runs its greatest batch.
    cuda_graphs: estimate for captured graphs; 0 where vLLM is not told to estimate it.
    kv_cache_memory_bytes: the answer itself, where the user knows better.

    Raises SpecError for a size below 0, InputError for an impossible gpu_memory_utilization.
    """

    total_memory: int
    free_memory: int
    gpu_memory_utilization: float = 0.9
    weights: int = 0
    peak_activation: int = 0
    non_torch: int = 0
    cuda_graphs: int = 0
    kv_cache_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        require_positive(self, "total_memory")
        require_positive(self, "free_memory", "weights", "peak_activation", "non_torch", "cuda_graphs", least=0)
        require_positive_or_none(self, "kv_cache_memory_bytes")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InputError(f"gpu_memory_utilization must be above 0 and at most 1, not {self.gpu_memory_utilization}")

    @property
    def requested_memory(self) -> int:
        """Bytes that this server may use: ceil(total_memory * gpu_memory_utilization)."""
        return math.ceil(self.total_memory * self.gpu_memory_utilization)


def available_kv_cache_memory(device: DeviceMemory) -> int:
    """Return the bytes left for the pool; 0 or less where the rest needs everything.

    requested_memory - weights - peak_activation - non_torch - cuda_graphs, or kv_cache_memory_bytes where given.
    Raises InputError if less than requested_memory was free at start-up.
    """
    if device.free_memory < device.requested_memory:
        raise InputError(
            f"{format_bytes(device.free_memory)} of {format_bytes(device.total_memory)} are free, less than "
            f"gpu_memory_utilization {device.gpu_memory_utilization} asks for "
            f"({format_bytes(device.requested_memory)}); lower it or free memory"
        )
    if device.kv_cache_memory_bytes is not None:
        return device.kv_cache_memory_bytes
    others = device.weights + device.peak_activation + device.non_torch + device.cuda_graphs
    return device.requested_memory - others
