"""The control plane: ZeroMQ channels that carry pdtx.protocol messages, with keys off loopback."""

from pdtx.sidechannel.address import is_loopback, join_address, parse_address
from pdtx.sidechannel.dialer import Dialer
from pdtx.sidechannel.keys import KeyPair, Security, generate_keys, load_public, load_secret
from pdtx.sidechannel.listener import Listener

__all__ = [
    "Dialer",
    "KeyPair",
    "Listener",
    "Security",
    "generate_keys",
    "is_loopback",
    "join_address",
    "load_public",
    "load_secret",
    "parse_address",
]
