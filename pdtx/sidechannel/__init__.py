"""The control plane: ZeroMQ channels that carry pdtx.protocol messages, with keys off loopback."""

from pdtx.sidechannel.channel import END_OF_SESSION
from pdtx.sidechannel.dialer import Dialer
from pdtx.sidechannel.keys import KeyPair, Security, generate_keys, load_public, load_secret, read_security
from pdtx.sidechannel.listener import Listener
from pdtx.sidechannel.protection import require_protection

__all__ = [
    "END_OF_SESSION",
    "Dialer",
    "KeyPair",
    "Listener",
    "Security",
    "generate_keys",
    "load_public",
    "load_secret",
    "read_security",
    "require_protection",
]
