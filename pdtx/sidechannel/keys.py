"""CURVE keys: who may talk to whom off loopback."""

import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

from pdtx.errors import InputError


@dataclass(frozen=True)
class KeyPair:
    """A node's own keys, in Z85 text form. The secret never shows in a repr."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Security:
    """How a channel is protected.

    own, peer_public: CURVE is used where own is given; a listener then admits the keys in peer_public only, and a
    dialer expects the first of them. insecure: allow a channel without keys off loopback.
    """

    own: KeyPair | None = None
    peer_public: list[bytes] = field(default_factory=list)
    insecure: bool = False


def generate_keys(directory: Path, name: str, *, force: bool = False) -> tuple[Path, Path]:
    """Write NAME.key and NAME.key_secret (readable by the owner only) and return both paths.

    Raises InputError if they exist (unless force) or cannot be written.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        raise InputError(f"not a name for a key: {name!r}; use letters, digits, '.', '_' and '-'")
    paths = directory / f"{name}.key", directory / f"{name}.key_secret"
    existing = [str(path) for path in paths if path.exists()]
    if existing and not force:
        raise InputError(f"{existing[0]} exists; choose another name, or --force to replace it")
    before = os.umask(0o077)  # the secret must not be readable for a moment either
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.unlink(missing_ok=True)  # a replaced file would keep its old mode
        zmq.auth.create_certificates(directory, name)
        paths[0].chmod(0o644)
    except OSError as error:
        raise InputError(f"cannot write keys to {directory}: {error.strerror}") from None
    finally:
        os.umask(before)
    return paths


def load_secret(path: Path) -> KeyPair:
    """Read NAME.key_secret. Raises InputError if it is not there or holds no secret key."""
    public, secret = _load(path)
    if secret is None:
        raise InputError(f"{path} holds no secret key; give the file that ends in .key_secret")
    return KeyPair(public, secret)


def load_public(path: Path) -> bytes:
    """Read NAME.key. Raises InputError if it is not there or holds no key."""
    return _load(path)[0]


def read_security(key: Path | None, peer_keys: Sequence[Path], *, insecure: bool) -> Security:
    """Read the keys of a channel from their files. Raises InputError for one that cannot be read, and half a pair."""
    if (key is None) != (not peer_keys):
        raise InputError("--key and --peer-key go together; make keys with 'pdtx keygen NAME'")
    own = load_secret(key) if key is not None else None
    return Security(own, [load_public(path) for path in peer_keys], insecure)


def check_key(key: bytes, what: str) -> None:
    """Raise InputError if a key is not 32 bytes in Z85 text form; `what` names it, for its text may be secret."""
    try:
        sound = len(key) == 40 and len(z85.decode(key)) == 32
    except (KeyError, ValueError, struct.error):
        sound = False
    if not sound:
        raise InputError(f"{what} is no CURVE key of 40 characters; make one with 'pdtx keygen'")


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read a key from {path}: {error}") from None
    for key, name in ((public, "public"), (secret, "secret")):
        if key is not None:
            check_key(key, f"the {name} key in {path}")
    return public, secret
