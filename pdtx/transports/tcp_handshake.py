"""The start of a TCP connection: both sides prove that they know the session's token, which itself never crosses.

producer: Hello (version, nonce, session id)
consumer: Challenge (status, nonce, HMAC of "consumer" and all of the above)
producer: HMAC of "producer" and all of the above
consumer: one byte, accepted or refused
"""

import hmac
import secrets
import struct
from collections.abc import Callable

from pdtx.errors import AuthenticationFailed, InputError, PeerLost, PeerUnreachable, ProtocolError
from pdtx.transports.tcp_frames import MAX_ID_BYTES, bounded_id
from pdtx.transports.wire import Wire

VERSION = 1

_MAGIC = b"pdtx-tcp"
_NONCE_BYTES = _PROOF_BYTES = 32
_HELLO = struct.Struct(f"!8sH{_NONCE_BYTES}sH{MAX_ID_BYTES}s")
_CHALLENGE = struct.Struct(f"!BH{_NONCE_BYTES}s{_PROOF_BYTES}s")
_GO_ON, _OTHER_VERSION, _ACCEPTED, _REFUSED = 1, 2, 3, 4


def _proof(token: bytes, role: bytes, *transcript: bytes) -> bytes:
    return hmac.digest(token, role + b"\0" + b"".join(transcript), "sha256")


def _check_token(token: bytes) -> None:
    if len(token) < 16:
        raise InputError(f"a session token of {len(token)} bytes; needs 16 or more")


def prove_to_consumer(wire: Wire, session_id: str, token: bytes, deadline: float) -> None:
    """Run the producer's side.

    Raises AuthenticationFailed, PeerUnreachable (the peer hung up), ProtocolError (it is no pdtx, or another version)
    or DeadlineExceeded.
    """
    _check_token(token)
    identity = bounded_id(session_id, "session id")
    hello = _HELLO.pack(_MAGIC, VERSION, secrets.token_bytes(_NONCE_BYTES), len(identity), identity)
    try:
        wire.send(hello, "room to send the greeting", deadline)
        challenge = wire.receive(_CHALLENGE.size, "the answer to the greeting", deadline)
        _check_challenge(challenge, hello, wire.peer, session_id, token)
        wire.send(_proof(token, b"producer", hello, challenge), "room to send the proof", deadline)
        (verdict,) = wire.receive(1, "the verdict on the session's proof", deadline)
    except PeerLost as error:
        raise PeerUnreachable(f"{error} during the handshake") from None
    if verdict != _ACCEPTED:
        raise AuthenticationFailed(f"{wire.peer} refused the proof for session {session_id}")


def _check_challenge(challenge: bytes, hello: bytes, peer: str, session_id: str, token: bytes) -> None:
    status, version, nonce, proof = _CHALLENGE.unpack(challenge)
    if status == _OTHER_VERSION:
        raise ProtocolError(f"{peer} speaks version {version} of the TCP mover's protocol, this side {VERSION}")
    if status != _GO_ON:
        raise ProtocolError(f"{peer} is no pdtx TCP mover")
    if not hmac.compare_digest(proof, _proof(token, b"consumer", hello, nonce)):
        raise AuthenticationFailed(f"{peer} does not know the token of session {session_id}")


def admit_producer(wire: Wire, admit: Callable[[str], bytes], deadline: float) -> str:
    """Run the consumer's side; admit gives the token of a session. Return the session's id.

    Raises AuthenticationFailed, ProtocolError, PeerLost or DeadlineExceeded.
    """
    hello = wire.receive(_HELLO.size, "a producer's greeting", deadline)
    session_id = _read_hello(wire, hello, deadline)
    refusal: AuthenticationFailed | None = None
    try:
        token = admit(session_id)
        _check_token(token)
    except AuthenticationFailed as error:
        # An unknown session must look like a wrong token: who asks learns nothing about the sessions there are.
        refusal, token = error, secrets.token_bytes(_PROOF_BYTES)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    challenge = _CHALLENGE.pack(_GO_ON, VERSION, nonce, _proof(token, b"consumer", hello, nonce))
    wire.send(challenge, "room to send the challenge", deadline)
    proof = wire.receive(_PROOF_BYTES, "a producer's proof", deadline)
    if refusal is None and hmac.compare_digest(proof, _proof(token, b"producer", hello, challenge)):
        wire.send(bytes([_ACCEPTED]), "room to send the verdict", deadline)
        return session_id
    wire.send(bytes([_REFUSED]), "room to send the verdict", deadline)
    raise refusal or AuthenticationFailed(f"{wire.peer} does not know the token of session {session_id!r}")


def _read_hello(wire: Wire, hello: bytes, deadline: float) -> str:
    magic, version, _, length, raw = _HELLO.unpack(hello)
    if magic != _MAGIC or length > MAX_ID_BYTES:
        raise ProtocolError(f"{wire.peer} is no pdtx TCP mover")
    if version != VERSION:
        wire.send(_CHALLENGE.pack(_OTHER_VERSION, VERSION, b"", b""), "room to send the version", deadline)
        raise ProtocolError(f"{wire.peer} speaks version {version} of the TCP mover's protocol, this side {VERSION}")
    try:
        session_id: str = raw[:length].decode()
    except UnicodeDecodeError:
        raise ProtocolError(f"{wire.peer} sent a session id that is not UTF-8") from None
    return session_id
