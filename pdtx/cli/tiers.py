"""A node's tiers from the command line: host memory, disk behind it, and another node's."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pdtx.address import parse_address
from pdtx.cli.common import note
from pdtx.errors import InputError
from pdtx.units import format_bytes

if TYPE_CHECKING:
    from pdtx.cache import KVCaches
    from pdtx.engine import PeerTier
    from pdtx.plan import CostTable
    from pdtx.protocol import CacheDescription
    from pdtx.sidechannel import Security
    from pdtx.tiers import Tier, TierUsage
    from pdtx.tiers.cpu import CpuTier
    from pdtx.tiers.prefix import PrefixCache

_GIB = 1 << 30
_WRITES = ("through", "back")


class Named(Protocol):
    """A model as tiers know it. fingerprint: of all that its keys and values depend on."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class TierOptions:
    """The flags, see pdtx.cli.options; sizes in GiB. Raises InputError for those that do not go together."""

    size: float
    disk_size: float
    directory: Path | None
    block_size: int | None
    policy: str
    write: str
    serve: str | None = None
    peer: str | None = None

    def __post_init__(self) -> None:
        from pdtx.tiers.policies import POLICIES

        if self.policy not in POLICIES:
            raise InputError(f"--kv-offloading-policy takes {', '.join(POLICIES)}, not {self.policy!r}")
        if self.write not in _WRITES:
            raise InputError(f"--kv-offloading-write takes {', '.join(_WRITES)}, not {self.write!r}")
        if (self.disk_size > 0) != (self.directory is not None):
            raise InputError("--kv-offloading-disk-size and --kv-offloading-dir go together")
        if self.serve is not None and not self.size:
            raise InputError("--serve-tier serves the tier in host memory; give --kv-offloading-size too")
        for address in (self.serve, self.peer):
            if address is not None:
                parse_address(address)

    def flags(self, side: str) -> list[str]:
        """Return the flags that give a node the same tiers, with a folder of its own where there is a disk."""
        given: dict[str, object] = {
            "size": self.size,
            "disk-size": self.disk_size,
            "policy": self.policy,
            "write": self.write,
        }
        if self.directory is not None:
            given["dir"] = self.directory / side
        if self.block_size is not None:
            given["block-size"] = self.block_size
        return [part for name, value in given.items() for part in (f"--kv-offloading-{name}", str(value))]

    @property
    def any(self) -> bool:
        """Whether the node has a tier at all."""
        return bool(self.size or self.disk_size or self.peer)


@dataclass(frozen=True)
class NodeTiers:
    """What open_tiers() opened. served_at: where other nodes read this one's, if they may."""

    prefix: "PrefixCache"
    served_at: str | None = None

    def report(self) -> list[dict[str, Any]]:
        """Print each tier's counters on stderr; return them for a result."""
        import msgspec

        usages = self.prefix.usages()
        for usage in usages:
            note(_line(usage))
        return [msgspec.to_builtins(usage) for usage in usages]


def open_tiers(
    options: TierOptions,
    cache: "KVCaches",
    runner: Named,
    stack: ExitStack,
    *,
    block_size: int,
    security: "Security",
    mover: str,
    mover_options: Sequence[str] | None,
    costs: "CostTable",
) -> NodeTiers | None:
    """Make a node's tiers, closed by stack; None where no flag asks for one.

    block_size: of the cache, which the tiers' is by default. Raises InputError or TierError for what cannot be.
    """
    if not options.any:
        return None
    from pdtx.tiers.keys import fingerprint_of
    from pdtx.tiers.prefix import PrefixCache

    tokens = options.block_size or block_size
    fingerprint = fingerprint_of(cache, model=runner.fingerprint)
    cpu = _cpu_tier(options, cache, tokens) if options.size else None
    own = _own_tier(options, cache, tokens, fingerprint, cpu)
    if own is not None:
        stack.callback(own.close)
    served_at = None
    if cpu is not None and options.serve is not None:
        served_at = _serve(options.serve, cpu, runner, stack, security, mover, mover_options)
    peer = None
    if options.peer is not None:
        peer = _peer_tier(options.peer, cache, runner, tokens, security, mover, mover_options, costs)
        stack.callback(peer.close)
    # Nodes that read this tier may want to verify what they load.
    prefix = PrefixCache(
        cache, own, fingerprint, peers=[peer] if peer is not None else [], hashed=served_at is not None
    )
    return NodeTiers(prefix, served_at)


def _cpu_tier(options: TierOptions, cache: "KVCaches", block_tokens: int) -> "CpuTier":
    from pdtx.tiers.cpu import CpuTier
    from pdtx.tiers.geometry import tier_caches

    memory = tier_caches(
        cache, block_tokens=block_tokens, nbytes=int(options.size * _GIB), shared=options.serve is not None
    )
    return CpuTier(memory, like=cache, policy=options.policy)


def _own_tier(
    options: TierOptions, cache: "KVCaches", block_tokens: int, fingerprint: bytes, cpu: "CpuTier | None"
) -> "Tier | None":
    """Return the tier that a node keeps blocks in: in memory, on disk, or one behind the other."""
    if options.directory is None:
        return cpu
    from pdtx.tiers.disk import DiskTier
    from pdtx.tiers.stack import TierStack

    disk = DiskTier(
        options.directory,
        like=cache,
        block_tokens=block_tokens,
        nbytes=int(options.disk_size * _GIB),
        fingerprint=fingerprint,
        policy=options.policy,
    )
    return disk if cpu is None else TierStack([cpu, disk], write="back" if options.write == "back" else "through")


def _serve(
    address: str,
    tier: "CpuTier",
    runner: Named,
    stack: ExitStack,
    security: "Security",
    mover: str,
    mover_options: Sequence[str] | None,
) -> str:
    """Let other nodes read a tier; return the address."""
    from pdtx.cli.movers import open_mover
    from pdtx.engine import TierServer

    moving = open_mover(mover, mover_options)
    stack.callback(moving.close)
    server = TierServer(tier, _describe(tier.cache, runner), moving)
    stack.callback(server.close)
    bound = server.listen(address, security=security)
    note(f"{server.engine_id} serves its tier at {bound}")
    return bound


def _peer_tier(
    address: str,
    cache: "KVCaches",
    runner: Named,
    block_tokens: int,
    security: "Security",
    mover: str,
    mover_options: Sequence[str] | None,
    costs: "CostTable",
) -> "PeerTier":
    from pdtx.cli.movers import open_mover
    from pdtx.engine import PeerTier

    return PeerTier(
        address,
        cache,
        _describe(cache, runner),
        open_mover(mover, mover_options),
        block_tokens=block_tokens,
        security=security,
        costs=costs,
    )


def _describe(cache: "KVCaches", runner: Named) -> "CacheDescription":
    from pdtx.engine import describe_cache

    return describe_cache(cache, model=runner.name, fingerprint=runner.fingerprint)


def _line(usage: "TierUsage") -> str:
    """What a tier holds and has done, on one line."""
    groups = [
        f"{group.name} {group.used.blocks}/{group.capacity.blocks} blocks, {group.stored.blocks} stored, "
        f"{group.loaded.blocks} loaded, {group.evicted.blocks} evicted, {group.missed.blocks} missed"
        for group in usage.groups
    ]
    memory = f"{format_bytes(usage.used)} used of {format_bytes(usage.mapped)}"
    return f"tier {usage.name}: {memory}; {'; '.join(groups)}"
