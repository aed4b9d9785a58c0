"""Offloading to host memory: pieces on both sides, the pool there, and what the bus costs (the seed's table 5.2)."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdtx.errors import InputError
from pdtx.granularity.request import RequestKind
from pdtx.granularity.transfer import transfer_rows

OFFLOADING, SIMPLE = "OffloadingConnector", "SimpleCPUOffload"
DEFAULT_MEMORY = 16 * 2**30
SIMPLE_MEMORY = 8 * 2**30
"""What SimpleCPUOffload takes unless told otherwise."""
_TRITON_PAGE = 28 * 2**10
_TRITON_BLOCKS = 16
_TRITON_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """How the host's memory is cut.

    block_size: tokens of a block on the GPU. offload_block_size: tokens of a block on the CPU
    (extra_config's block_size); block_size where None. memory: bytes of the host for all ranks; each connector's own
    default where None. ranks: tensor-parallel ranks that share it. bytes_per_second: of the bus, one direction.

    Raises InputError for sizes below 1, or an offload_block_size that is not a multiple of block_size.
    """

    block_size: int
    offload_block_size: int | None = None
    memory: int | None = None
    ranks: int = 1
    bytes_per_second: float = 25e9

    def __post_init__(self) -> None:
        if self.bytes_per_second <= 0 or (self.memory is not None and self.memory < 1):
            raise InputError("the host's memory and the rate of the bus must be more than 0")
        if self.offload_block_size is not None and (
            self.offload_block_size < 1 or self.offload_block_size % self.block_size
        ):
            raise InputError(
                f"blocks of {self.offload_block_size} tokens on the host are not whole blocks of {self.block_size} "
                f"tokens; give a multiple"
            )

    @property
    def factor(self) -> int:
        """Blocks of the GPU in one of the host: block_size_factor, blocks_per_chunk."""
        return (self.offload_block_size or self.block_size) // self.block_size


@dataclass(frozen=True, kw_only=True)
class OffloadRow:
    """One connector's pieces of one kind of layers.

    kind: index into the kinds given. gpu_bytes: of a piece on the GPU. factor: pieces in one of the host.
    cpu_bytes: of that one. units: pieces of the request on the GPU. store, load: how they are copied to the host and
    back. note: why there is none.
    """

    connector: str
    variant: str
    version: str
    kind: int
    gpu_bytes: int | None
    factor: int
    cpu_bytes: int | None
    units: int | None
    store: str
    load: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class OffloadPool:
    """One connector's pool in the host's memory.

    block_bytes: of one block of the host, all ranks together. blocks: that fit. tokens: that those hold, None where
    groups of layers share them. key, policy: how blocks are found and evicted.
    """

    connector: str
    version: str
    memory: int
    block_bytes: int
    blocks: int
    tokens: int | None
    key: str
    policy: str


def offload_rows(
    kinds: Sequence[RequestKind], settings: OffloadSettings, *, versions: Sequence[str]
) -> list[OffloadRow]:
    """Return the rows of the connectors that offload, kind by kind."""
    found = list[OffloadRow]()
    for row in transfer_rows(kinds, versions=versions):
        if row.connector not in (OFFLOADING, SIMPLE):
            continue
        factor = 1 if row.connector == SIMPLE or kinds[row.kind].is_state else settings.factor
        found.append(
            OffloadRow(
                connector=row.connector,
                variant=row.variant,
                version=row.version,
                kind=row.kind,
                gpu_bytes=row.unit_bytes,
                factor=factor,
                cpu_bytes=None if row.unit_bytes is None else row.unit_bytes * factor,
                units=row.units,
                store=_STORES[row.connector, row.version],
                load=_load(row.connector, row.version, row.unit_bytes, row.units),
                note=row.note,
            )
        )
    return found


_STORES = {
    (OFFLOADING, "0.22"): "cuMemcpyBatchAsync",
    (OFFLOADING, "0.32"): "cuMemcpyBatchAsync",
    (SIMPLE, "0.22"): "low-priority thread",
    (SIMPLE, "0.32"): "low-priority thread",
}


def _load(connector: str, version: str, nbytes: int | None, units: int | None) -> str:
    """vLLM 0.32 loads small pages with a kernel: under 28 KiB, aligned to 8 bytes, 16 of them at least."""
    if nbytes is None or units is None:
        return ""
    if version == "0.22":
        return "cuMemcpyBatchAsync"
    if connector == SIMPLE:
        return "DMA batch"
    small = nbytes < _TRITON_PAGE and nbytes % _TRITON_ALIGNMENT == 0 and units >= _TRITON_BLOCKS
    return "Triton kernel" if small else "DMA batch"


def offload_pools(
    kinds: Sequence[RequestKind],
    settings: OffloadSettings,
    *,
    block_bytes: int,
    groups: int,
    versions: Sequence[str],
) -> list[OffloadPool]:
    """Return the pools of the connectors of those versions.

    block_bytes: of one block of the GPU's pool on one rank, all its tensors (pdtx.pool.bytes_per_block).
    groups: of layers, which share the blocks.
    """
    pools = list[OffloadPool]()
    for connector, version, default, key, policy in _POOLS:
        if version not in versions:
            continue
        factor = 1 if connector == SIMPLE else settings.factor
        once = version == "0.32" and all(kind.is_latent for kind in kinds)
        block = block_bytes * factor * (1 if once else settings.ranks)
        memory = default if settings.memory is None else settings.memory
        pools.append(
            OffloadPool(
                connector=connector,
                version=version,
                memory=memory,
                block_bytes=block,
                blocks=memory // block,
                tokens=memory // block * factor * settings.block_size if groups == 1 else None,
                key=key,
                policy=policy,
            )
        )
    return pools


_POOLS = (
    (OFFLOADING, "0.22", DEFAULT_MEMORY, "hash, group", "LRU, ARC"),
    (SIMPLE, "0.22", SIMPLE_MEMORY, "hash", "LRU"),
    (OFFLOADING, "0.32", DEFAULT_MEMORY, "hash, group; TP-free pages", "LRU, ARC, plug-in"),
    (SIMPLE, "0.32", SIMPLE_MEMORY, "hash", "LRU"),
)
