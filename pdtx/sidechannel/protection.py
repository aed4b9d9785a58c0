"""Which addresses a channel may use with the keys it has."""

import logging

from pdtx.address import is_loopback
from pdtx.arguments import shown
from pdtx.errors import InputError
from pdtx.sidechannel.keys import Security, check_key

logger = logging.getLogger(__name__)


def require_protection(host: str, security: object) -> None:
    """Raise InputError for keys half given or malformed, or an address off loopback with neither keys nor waiver."""
    if not isinstance(security, Security):
        raise InputError(f"security is {shown(security)}; give Security(...), without keys on loopback only")
    own = security.own
    if own is not None and not security.peer_public:
        raise InputError("a secret key needs the peers' public keys beside it: give --peer-key")
    if own is None and security.peer_public:
        raise InputError("peers' public keys need a secret key of our own beside them: give --key")
    if own is not None:
        check_key(own.public, "our public key")
        check_key(own.secret, "our secret key")
        for key in security.peer_public:
            check_key(key, "a peer's public key")
        return
    if is_loopback(host):
        return
    if not security.insecure:
        raise InputError(
            f"{host} is not a loopback address: run 'pdtx keygen' and give --key and --peer-key, or --insecure"
        )
    logger.warning("no keys: everyone who reaches %s can read and write this session", host)
