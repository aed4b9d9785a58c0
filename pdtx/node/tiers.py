"""A node's tiers: host memory, disk behind it, and another node's."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pdtx.node.config import TierConfig, TransportConfig
from pdtx.node.model import OnNote
from pdtx.node.transport import open_mover
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


class Named(Protocol):
    """A model as tiers know it. fingerprint: of all that its keys and values depend on."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class NodeTiers:
    """What open_tiers() opened. served_at: the address at which other nodes read this one's tier, if they may."""

    prefix: "PrefixCache"
    served_at: str | None = None

    def report(self, on_note: OnNote) -> list[dict[str, Any]]:
        """Report each tier's counters in a line; return them for a result."""
        import msgspec

        usages = self.prefix.usages()
        for usage in usages:
            on_note(_line(usage))
        return [msgspec.to_builtins(usage) for usage in usages]


def open_tiers(
    config: TierConfig,
    cache: "KVCaches",
    runner: Named,
    stack: ExitStack,
    *,
    block_size: int,
    security: "Security",
    transport: TransportConfig,
    costs: "CostTable",
    on_note: OnNote,
) -> NodeTiers | None:
    """Make a node's tiers, closed by stack; None where the config asks for none.

    block_size: of the cache, which the tiers' is by default. Raises InputError or TierError for what cannot be.
    """
    if not config.any:
        return None
    from pdtx.tiers.keys import fingerprint_of
    from pdtx.tiers.prefix import PrefixCache

    tokens = config.kv_offloading_block_size or block_size
    fingerprint = fingerprint_of(cache, model=runner.fingerprint)
    cpu = _cpu_tier(config, cache, tokens) if config.kv_offloading_size else None
    if cpu is not None:
        stack.callback(cpu.close)  # at once: what follows may fail, and closing it twice does no harm
    own = _own_tier(config, cache, tokens, fingerprint, cpu)
    if own is not None:
        stack.callback(own.close)
    served_at = None
    if cpu is not None and config.serve_tier is not None:
        served_at = _serve(config.serve_tier, cpu, runner, stack, security, transport, on_note)
    peer = None
    if config.peer_tier is not None:
        peer = _peer_tier(config.peer_tier, cache, runner, tokens, security, transport, costs)
        stack.callback(peer.close)
    peers = [peer] if peer is not None else []
    # A node that reads this one's tier may want to verify what it gets.
    return NodeTiers(PrefixCache(cache, own, fingerprint, peers=peers, hashed=served_at is not None), served_at)


def _cpu_tier(config: TierConfig, cache: "KVCaches", block_tokens: int) -> "CpuTier":
    from pdtx.tiers.cpu import CpuTier
    from pdtx.tiers.geometry import tier_caches

    memory = tier_caches(
        cache,
        block_tokens=block_tokens,
        nbytes=int(config.kv_offloading_size * _GIB),
        shared=config.serve_tier is not None,
    )
    return CpuTier(memory, like=cache, policy=config.kv_offloading_policy)


def _own_tier(
    config: TierConfig, cache: "KVCaches", block_tokens: int, fingerprint: bytes, cpu: "CpuTier | None"
) -> "Tier | None":
    """Return the tier that a node keeps blocks in: in memory, on disk, or one behind the other."""
    if config.kv_offloading_dir is None:
        return cpu
    from pdtx.tiers.disk import DiskTier
    from pdtx.tiers.stack import TierStack

    disk = DiskTier(
        config.kv_offloading_dir,
        like=cache,
        block_tokens=block_tokens,
        nbytes=int(config.kv_offloading_disk_size * _GIB),
        fingerprint=fingerprint,
        policy=config.kv_offloading_policy,
    )
    return (
        disk
        if cpu is None
        else TierStack([cpu, disk], write="back" if config.kv_offloading_write == "back" else "through")
    )


def _serve(
    address: str,
    tier: "CpuTier",
    runner: Named,
    stack: ExitStack,
    security: "Security",
    transport: TransportConfig,
    on_note: OnNote,
) -> str:
    """Let other nodes read a tier; return the address."""
    from pdtx.engine import TierServer

    moving = open_mover(transport)
    stack.callback(moving.close)
    server = TierServer(tier, _describe(tier.cache, runner), moving)
    stack.callback(server.close)
    bound = server.listen(address, security=security)
    on_note(f"{server.engine_id} serves its tier at {bound}")
    return bound


def _peer_tier(
    address: str,
    cache: "KVCaches",
    runner: Named,
    block_tokens: int,
    security: "Security",
    transport: TransportConfig,
    costs: "CostTable",
) -> "PeerTier":
    from pdtx.engine import PeerTier

    return PeerTier(
        address,
        cache,
        _describe(cache, runner),
        open_mover(transport),
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
