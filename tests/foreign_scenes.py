"""Memory that is not pdtx's, for tests: a hybrid model's three groups in one memory, as vLLM keeps them."""

import ctypes
from collections.abc import Sequence

import torch

from pdtx.cache import CacheGroup, ForeignBuffer, KVCaches, Memory, group_kind
from pdtx.kvspec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from pdtx.transports import Region, Registration, make_mover
from tests.engine_pair import WrappedMover

GUARD = 64
"""Bytes before and behind a cache that nothing may touch."""


class Pages:
    """Bytes of a C library's allocation, filled with a pattern, with a guard at both ends."""

    def __init__(self, nbytes: int, seed: int = 0) -> None:
        self._raw = ctypes.create_string_buffer(nbytes + 2 * GUARD + 64)
        base = ctypes.addressof(self._raw)
        self.address = base + -base % 64 + GUARD
        self.nbytes = nbytes
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randint(256, (len(self._raw),), dtype=torch.uint8, generator=generator)
        ctypes.memmove(base, noise.data_ptr(), len(noise))
        self.before = self.snapshot()

    @property
    def memory(self) -> Memory:
        """All but the guards."""
        return Memory.at(self.address, self.nbytes, keep=self)

    def snapshot(self) -> bytes:
        """All bytes, guards included."""
        return bytes(self._raw)

    def changed(self) -> set[int]:
        """Offsets in the memory of the bytes that are not what they were; negative ones lie in the guard."""
        first = self.address - ctypes.addressof(self._raw)
        pairs = enumerate(zip(self.snapshot(), self.before, strict=True))
        return {at - first for at, (now, then) in pairs if now != then}


def hybrid_specs(block_size: int = 4, heads: int = 2, channels: int = 8) -> list[KVCacheSpec]:
    """Full attention, and two windows."""
    full = FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=channels, dtype="bfloat16")
    windows = [
        SlidingWindowSpec(
            block_size=block_size, num_kv_heads=heads, head_size=channels, dtype="bfloat16", sliding_window=width
        )
        for width in (6, 9)
    ]
    return [full, *windows]


NAMES = ("full", "window.0", "window.1")


def hybrid_groups(specs: Sequence[KVCacheSpec], num_blocks: int, pool: str = "one") -> list[CacheGroup]:
    """Groups of one pool."""
    return [
        CacheGroup(name, group_kind(spec), spec.block_size, num_blocks, spec, pool=pool)
        for name, spec in zip(NAMES, specs, strict=True)
    ]


def hybrid_over(
    memory: Memory,
    *,
    num_blocks: int,
    layers: Sequence[int] = (3, 3, 2),
    layout: str = "vllm_lbhnc",
    block_size: int = 4,
) -> KVCaches:
    """Three groups, of 3, 3 and 2 layers, each from the first byte of one memory on."""
    specs = hybrid_specs(block_size)
    page = 2 * 2 * 8 * 2 * block_size
    buffers = [
        ForeignBuffer(
            name,
            name,
            spec,
            layout,
            [f"{name}.layers.{layer}" for layer in range(count)],
            num_blocks,
            memory,
            layer_stride=page * num_blocks,
            block_stride=page,
        )
        for name, spec, count in zip(NAMES, specs, layers, strict=True)
    ]
    return KVCaches.over(hybrid_groups(specs, num_blocks), buffers)


def hybrid_bytes(num_blocks: int, layers: int = 3, block_size: int = 4) -> int:
    """Bytes of the memory of hybrid_over."""
    return layers * num_blocks * 2 * 2 * 8 * 2 * block_size


def group_of(spec: KVCacheSpec, num_blocks: int = 6, name: str = "g") -> CacheGroup:
    """A group with a pool of its own for layers of a spec."""
    kind = group_kind(spec)
    return CacheGroup(name, kind, 1 if kind == "state" else spec.block_size, num_blocks, spec)


def ids(*block_ids: int) -> torch.Tensor:
    """Block ids as buffers take them."""
    return torch.tensor(block_ids, dtype=torch.int64)


class Registering(WrappedMover):
    """A mover that registers memory, and says so."""

    def __init__(self) -> None:
        super().__init__(make_mover("inproc"), lambda connection: connection)
        self.regions = list[Region]()

    def register(self, region: Region) -> Registration | None:
        self.regions.append(region)
        return Registration(region.nbytes, 0.0)
