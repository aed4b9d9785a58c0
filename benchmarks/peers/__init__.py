"""Yardsticks: other ways to move the same bytes, each a pair of processes of its own that is driven round by round."""

from benchmarks.peers.base import Peer, Workload
from benchmarks.peers.memcpy import Memcpy
from benchmarks.peers.mooncake_peer import MooncakePeer
from benchmarks.peers.nixl_peer import NixlPeer
from benchmarks.peers.sockets import BulkSocket, SocketPingPong
from benchmarks.peers.ucx_perftest import UcxPerftest

__all__ = [
    "BulkSocket",
    "Memcpy",
    "MooncakePeer",
    "NixlPeer",
    "Peer",
    "SocketPingPong",
    "UcxPerftest",
    "Workload",
]
