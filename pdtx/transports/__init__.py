"""Movers: how bytes get from one node's cache into another's."""

from pdtx.transports.base import (
    Connection,
    Mover,
    Path,
    Placement,
    Receiver,
    Region,
    Registration,
    TransferHandle,
    TransferKey,
    TransferState,
)
from pdtx.transports.registry import make_mover, mover_names

__all__ = [
    "Connection",
    "Mover",
    "Path",
    "Placement",
    "Receiver",
    "Region",
    "Registration",
    "TransferHandle",
    "TransferKey",
    "TransferState",
    "make_mover",
    "mover_names",
]
