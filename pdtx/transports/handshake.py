"""The start of a connection: both sides prove that they know the session's token, which itself never crosses.

producer: Hello (version, nonce, session id)
consumer: Challenge (status, nonce, HMAC of "consumer" and all of the above)
producer: HMAC of "producer" and all of the above
consumer: one byte, accepted or refused
"""

import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass

from pdtx.errors import AuthenticationFailed, InputError, PeerLost, PeerUnreachable, ProtocolError
from pdtx.transports.wire import Wire

MAX_ID_BYTES = 128

_NONCE_BYTES = _PROOF_BYTES = 32
_HELLO = struct.Struct(f"!8sH{_NONCE_BYTES}sH{MAX_ID_BYTES}s")
_CHALLENGE = struct.Struct(f"!BH{_NONCE_BYTES}s{_PROOF_BYTES}s")
_GO_ON, _OTHER_VERSION, _ACCEPTED, _REFUSED = 1, 2, 3, 4


@dataclass(frozen=True)
class Dialect:
    """What is spoken after the handshake, so that movers of different kinds or versions do not take each other's bytes.

    mover: the name for messages. magic: 8 bytes.
    """

    mover: str
    magic: bytes
    version: int

    def __str__(self) -> str:
        return f"the {self.mover} mover's protocol"


def bounded_id(text: str, what: str) -> bytes:
    """Return an id as bytes. Raises InputError if it is longer than MAX_ID_BYTES."""
    data = text.encode()
    if len(data) > MAX_ID_BYTES:
        raise InputError(f"{what} of {len(data)} bytes; at most {MAX_ID_BYTES} fit")
    return data


def _proof(token: bytes, role: bytes, *transcript: bytes) -> bytes:
    return hmac.digest(token, role + b"\0" + b"".join(transcript), "sha256")


def _check_token(token: bytes) -> None:
    if len(token) < 16:
        raise InputError(f"a session token of {len(token)} bytes; needs 16 or more")


def prove_to_consumer(wire: Wire, dialect: Dialect, session_id: str, token: bytes, deadline: float) -> None:
    """Run the producer's side.

    Raises AuthenticationFailed, PeerUnreachable (the peer hung up), ProtocolError (it is no pdtx, or another version)
    or DeadlineExceeded.
    """
    _check_token(token)
    identity = bounded_id(session_id, "session id")
    hello = _HELLO.pack(dialect.magic, dialect.version, secrets.token_bytes(_NONCE_BYTES), len(identity), identity)
    try:
        wire.send(hello, "room to send the greeting", deadline)
        challenge = wire.receive(_CHALLENGE.size, "the answer to the greeting", deadline)
        _check_challenge(challenge, hello, dialect, wire.peer, session_id, token)
        wire.send(_proof(token, b"producer", hello, challenge), "room to send the proof", deadline)
        (verdict,) = wire.receive(1, "the verdict on the session's proof", deadline)
    except PeerLost as error:
        raise PeerUnreachable(f"{error} during the handshake") from None
    if verdict != _ACCEPTED:
        raise AuthenticationFailed(f"{wire.peer} refused the proof for session {session_id}")


def _check_challenge(
    challenge: bytes, hello: bytes, dialect: Dialect, peer: str, session_id: str, token: bytes
) -> None:
    status, version, nonce, proof = _CHALLENGE.unpack(challenge)
    if status == _OTHER_VERSION:
        raise ProtocolError(f"{peer} speaks version {version} of {dialect}, this side {dialect.version}")
    if status != _GO_ON:
        raise ProtocolError(f"{peer} is no pdtx {dialect.mover} mover")
    if not hmac.compare_digest(proof, _proof(token, b"consumer", hello, nonce)):
        raise AuthenticationFailed(f"{peer} does not know the token of session {session_id}")


def admit_producer(wire: Wire, dialect: Dialect, admit: Callable[[str], bytes], deadline: float) -> str:
    """Run the consumer's side; admit gives the token of a session. Return the session's id.

    Raises AuthenticationFailed, ProtocolError, PeerLost or DeadlineExceeded.
    """
    hello = wire.receive(_HELLO.size, "a producer's greeting", deadline)
    session_id = _read_hello(wire, dialect, hello, deadline)
    refusal: AuthenticationFailed | None = None
    try:
        token = admit(session_id)
        _check_token(token)
    except AuthenticationFailed as error:
        # An unknown session must look like a wrong token: who asks learns nothing about the sessions there are.
        refusal, token = error, secrets.token_bytes(_PROOF_BYTES)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    challenge = _CHALLENGE.pack(_GO_ON, dialect.version, nonce, _proof(token, b"consumer", hello, nonce))
    wire.send(challenge, "room to send the challenge", deadline)
    proof = wire.receive(_PROOF_BYTES, "a producer's proof", deadline)
    if refusal is None and hmac.compare_digest(proof, _proof(token, b"producer", hello, challenge)):
        wire.send(bytes([_ACCEPTED]), "room to send the verdict", deadline)
        return session_id
    wire.send(bytes([_REFUSED]), "room to send the verdict", deadline)
    raise refusal or AuthenticationFailed(f"{wire.peer} does not know the token of session {session_id!r}")


def _read_hello(wire: Wire, dialect: Dialect, hello: bytes, deadline: float) -> str:
    magic, version, _, length, raw = _HELLO.unpack(hello)
    if magic != dialect.magic or length > MAX_ID_BYTES:
        raise ProtocolError(f"{wire.peer} is no pdtx {dialect.mover} mover")
    if version != dialect.version:
        wire.send(_CHALLENGE.pack(_OTHER_VERSION, dialect.version, b"", b""), "room to send the version", deadline)
        raise ProtocolError(f"{wire.peer} speaks version {version} of {dialect}, this side {dialect.version}")
    try:
        session_id: str = raw[:length].decode()
    except UnicodeDecodeError:
        raise ProtocolError(f"{wire.peer} sent a session id that is not UTF-8") from None
    return session_id
