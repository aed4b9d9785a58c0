"""The handshake of both sides: what each says, and what it makes of the other's description."""

import secrets
import uuid
from dataclasses import dataclass, field

from pdtx import __version__
from pdtx.arguments import integer
from pdtx.engine.describe import CacheFacts, facts_of
from pdtx.engine.inbound import Session
from pdtx.engine.matching import Match, match_caches
from pdtx.errors import IncompatiblePeer, InputError, PdtxError, ProtocolError
from pdtx.protocol import (
    MAX_PROCESSES,
    PROTOCOL_VERSION,
    CacheDescription,
    DataEndpoint,
    Hello,
    Reject,
    TierHello,
    Welcome,
)
from pdtx.text import reason_of


@dataclass(frozen=True)
class ProcessIdentity:
    """Which process of which engine this is: number process of processes. Raises InputError for what cannot be.

    incarnation: of this process, another one each time that it is started.
    """

    engine_id: str
    process: int = 0
    processes: int = 1
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        integer("processes", self.processes, 1, MAX_PROCESSES)
        integer(f"process, of {self.processes},", self.process, 0, self.processes - 1)

    @classmethod
    def of(cls, role: str, engine_id: str | None, process: int, processes: int) -> "ProcessIdentity":
        """Return an identity, with a name made up where there is none, which several processes cannot do."""
        if engine_id is None and processes != 1:
            raise InputError(f"an engine of {processes} processes needs a name that they share; give engine_id")
        return cls(engine_id or f"{role}-{uuid.uuid4().hex[:8]}", process, processes)

    def __str__(self) -> str:
        which = f" process {self.process} of {self.processes}" if self.processes > 1 else ""
        return f"{self.engine_id}{which}"


# -- the producer ------------------------------------------------------------------------------------------------------


def make_hello(
    identity: ProcessIdentity, cache: CacheDescription, mover: str, *, number: int = 0, resumes: bool = False
) -> Hello:
    """Return what a producer says of itself. number: see Hello."""
    return Hello(
        protocol=PROTOCOL_VERSION,
        pdtx_version=__version__,
        engine_id=identity.engine_id,
        process=identity.process,
        processes=identity.processes,
        incarnation=identity.incarnation,
        cache=cache,
        movers=[mover],
        number=number,
        resumes=resumes,
    )


def match_welcome(welcome: Welcome, producer: CacheFacts) -> Match:
    """Return how a consumer's cache matches this one. Raises IncompatiblePeer or ProtocolError."""
    _require_version(PROTOCOL_VERSION, welcome.protocol)
    return match_caches(producer, facts_of(welcome.cache))


def choose_endpoint(welcome: Welcome, mover: str) -> DataEndpoint:
    """Return where the consumer takes payloads of a mover. Raises IncompatiblePeer if it has none."""
    endpoint = next((each for each in welcome.data_endpoints if each.mover == mover), None)
    if endpoint is None:
        offered = ", ".join(each.mover for each in welcome.data_endpoints)
        raise IncompatiblePeer("mover", mover, offered, "choose one that both sides have")
    return endpoint


# -- the consumer ------------------------------------------------------------------------------------------------------


def check_hello(hello: Hello) -> None:
    """Raise IncompatiblePeer for a producer of another version, or ProtocolError for an impossible process."""
    _require_version(hello.protocol, PROTOCOL_VERSION)
    if hello.process >= hello.processes:
        raise ProtocolError(f"{hello.engine_id} says that it is process {hello.process} of {hello.processes}")


def new_session(peer: bytes, hello: Hello | TierHello, match: Match, names: tuple[str, bytes] | None = None) -> Session:
    """Return a new session for a peer. match: of both caches, see match_caches and facts_of.

    names: its id and token, where the peer knows them already.
    """
    session_id, token = names or (uuid.uuid4().hex, new_token())
    if isinstance(hello, TierHello):
        return Session(session_id, peer, hello.engine_id, token, match)
    return Session(
        session_id,
        peer,
        hello.engine_id,
        token,
        match,
        process=hello.process,
        processes=hello.processes,
        incarnation=hello.incarnation,
        number=hello.number,
        resumes=hello.resumes,
    )


def new_token() -> bytes:
    """Return what proves the data connections of a session."""
    return secrets.token_bytes(32)


def make_welcome(
    identity: ProcessIdentity,
    cache: CacheDescription,
    session_id: str,
    token: bytes,
    endpoints: list[DataEndpoint],
    *,
    lease_s: float,
    verifies: bool,
) -> Welcome:
    """Return what a consumer says to a producer that has a session now, or that it has dialled."""
    return Welcome(
        protocol=PROTOCOL_VERSION,
        pdtx_version=__version__,
        engine_id=identity.engine_id,
        process=identity.process,
        processes=identity.processes,
        incarnation=identity.incarnation,
        session_id=session_id,
        token=token,
        cache=cache,
        data_endpoints=endpoints,
        lease_s=lease_s,
        verify="reference" if verifies else "off",
    )


def make_reject(error: PdtxError) -> Reject:
    """Return the answer to a producer that gets no session."""
    if isinstance(error, IncompatiblePeer):
        return Reject(field=error.field, producer=error.producer, consumer=error.consumer, advice=error.advice)
    return Reject(field="cache", producer=reason_of(error), consumer="a possible cache")


def _require_version(producer: int, consumer: int) -> None:
    if producer != consumer:
        raise IncompatiblePeer("protocol", str(producer), str(consumer), "run the same pdtx on both sides")
