"""Movers made of engines with one-sided operations: what UCX, NIXL and shared memory have in common."""

from pdtx.transports.onesided.fabric import Fabric, Link, Progress, Shared
from pdtx.transports.onesided.mover import OneSidedMover

__all__ = ["Fabric", "Link", "OneSidedMover", "Progress", "Shared"]
