"""Flags that give a node the same transport and tiers as a command was given."""

from collections.abc import Sequence

from pdtx.node.config import TierConfig


def mover_flags(mover: str, options: Sequence[str] | None) -> list[str]:
    """Return the flags that give a node the same mover."""
    return ["--mover", mover, *(part for option in options or () for part in ("--mover-option", option))]


def tier_flags(tiers: TierConfig, side: str) -> list[str]:
    """Return the flags that give a node the same tiers, with a folder of its own, side, where there is a disk."""
    given: dict[str, object] = {
        "size": tiers.kv_offloading_size,
        "disk-size": tiers.kv_offloading_disk_size,
        "policy": tiers.kv_offloading_policy,
        "write": tiers.kv_offloading_write,
    }
    if tiers.kv_offloading_dir is not None:
        given["dir"] = tiers.kv_offloading_dir / side
    if tiers.kv_offloading_block_size is not None:
        given["block-size"] = tiers.kv_offloading_block_size
    return [part for name, value in given.items() for part in (f"--kv-offloading-{name}", str(value))]
