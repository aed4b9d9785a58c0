"""What a driver asks of an agent: the methods by name, what each takes and gives, and how both travel.

Bodies are msgpack of the types below, checked field by field when they come; nothing else is ever made of them.
"""

from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgpack
import msgspec

import pdtx.errors
from pdtx.bench.work import LinkChecked, LinkMoved, Prepared, Role, StationWork
from pdtx.errors import InputError, PdtxError, PeerError, ProtocolError
from pdtx.protocol import MAX_BODY_BYTES, PROTOCOL_VERSION, Answer, Id, brief, unpack_fields
from pdtx.text import printable
from pdtx.transports.base import Path

Body = TypeVar("Body")

_MAX_MAP = 1 << 16
"""Entries of a map in a body: a case in random order can have runs of many sizes."""

_MAX_ERROR = 4000

SILENCE_S = 20.0
"""Longest that a driver and an agent hear nothing of each other: less would end runs on hosts that are overloaded.

One that is killed is noticed at once, for its connection ends.
"""


@dataclass(frozen=True)
class Nothing:
    """What is taken or given where there is nothing to say."""


@dataclass(frozen=True)
class HelloCall:
    """Who the driver is, for the message that a second one gets."""

    protocol: int
    pdtx_version: str
    driver: str


@dataclass(frozen=True)
class AgentFacts:
    """Who the agent is.

    boot_id, host: of its machine, which tell whether clocks are one. facts: what machine_facts() says there.
    max_bytes: that a case's caches may take there.
    """

    role: Role
    host: str
    boot_id: str
    facts: dict[str, Any]
    max_bytes: int


@dataclass(frozen=True)
class ClockRead:
    """The agent's time.monotonic()."""

    at: float


@dataclass(frozen=True)
class Load:
    """The agent's host's load average of the last minute."""

    average: float


@dataclass(frozen=True)
class ConnectCall:
    """Open a link's connection to the station that listens at address. token: proves it."""

    link: int
    address: str
    token: bytes = field(repr=False)
    timeout_s: float


@dataclass(frozen=True)
class LinkCall:
    """Tell what is known of a link, see Prepared.links."""

    link: int


@dataclass(frozen=True)
class ReadyCall:
    """Make an iteration's contents."""

    iteration: int


@dataclass(frozen=True)
class MoveCall:
    """Move links at once, from start_at on the agent's clock on, within timeout_s of it."""

    links: tuple[int, ...]
    start_at: float
    timeout_s: float


@dataclass(frozen=True)
class CheckCall:
    """Count what has arrived by links, and with full look at every element."""

    links: tuple[int, ...]
    full: bool


@dataclass(frozen=True)
class OpenReference:
    """Make the side of a reference that listens."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class ReferenceOpened:
    """Where the other side connects, and by what it proves itself."""

    address: str
    token: bytes = field(repr=False)
    detail: str


@dataclass(frozen=True)
class ConnectReference:
    """Make the side of a reference that measures. run_sizes: as Link has them, for what copies runs."""

    name: str
    address: str
    token: bytes = field(repr=False)
    nbytes: int
    timeout_s: float
    run_sizes: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ReferenceCall:
    """Measure a round of a reference."""

    name: str


@dataclass(frozen=True)
class ReferenceRound:
    """The seconds of a round, and what the reference is in its own words."""

    seconds: float
    detail: str


Moved = tuple[LinkMoved, ...]
Checked = tuple[LinkChecked, ...]


@dataclass(frozen=True)
class Method:
    """A call by its name: what it takes and what it gives."""

    name: Id
    takes: Any
    gives: Any


HELLO = Method("hello", HelloCall, AgentFacts)
PING = Method("ping", Nothing, ClockRead)
LOAD = Method("load", Nothing, Load)
PREPARE = Method("prepare", StationWork, Prepared)
CONNECT = Method("connect", ConnectCall, Path)
FACTS = Method("facts", LinkCall, dict[str, Any])
READY = Method("ready", ReadyCall, Nothing)
MOVE = Method("move", MoveCall, Moved)
CHECK = Method("check", CheckCall, Checked)
OPEN_REFERENCE = Method("open-reference", OpenReference, ReferenceOpened)
CONNECT_REFERENCE = Method("connect-reference", ConnectReference, Nothing)
REFERENCE_ROUND = Method("reference-round", ReferenceCall, ReferenceRound)
RELEASE = Method("release", Nothing, Nothing)


def pack(body: object) -> bytes:
    """Return a body's bytes. Raises ProtocolError for one that is too large."""
    fields = msgspec.to_builtins(body, builtin_types=(bytes,), str_keys=True, enc_hook=_to_plain)
    data: bytes = msgpack.packb(fields, use_bin_type=True)
    if len(data) > MAX_BODY_BYTES:
        raise ProtocolError(f"{len(data)} bytes of a {type(body).__name__} exceed the limit of {MAX_BODY_BYTES}")
    return data


def unpack(data: bytes, kind: type[Body]) -> Body:
    """Return the body in data, checked field by field. Raises ProtocolError."""
    fields = unpack_fields(data, _MAX_MAP)
    try:
        return msgspec.convert(fields, kind, builtin_types=(bytes,), str_keys=True, dec_hook=_from_plain)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"malformed body: {brief(error)}") from None


def _to_plain(value: object) -> object:
    if isinstance(value, range) and value.step == 1:
        return [value.start, value.stop]
    raise NotImplementedError(f"a {type(value).__name__} cannot travel")


def _from_plain(kind: type[Any], value: Any) -> object:  # noqa: ANN401 - whatever a peer has sent
    if kind is object:
        return value
    if kind is not range:
        raise NotImplementedError(f"a {kind.__name__} cannot travel")
    if not isinstance(value, list) or len(value) != 2 or not all(type(end) is int for end in value):
        raise ValueError("a range is [first, end]")
    first, end = value
    if not 0 <= first <= end < 2**31:
        raise ValueError(f"no range of ours: {first} to {end}")
    return range(first, end)


def failed(call_id: int, error: PdtxError) -> Answer:
    """Return the answer to a call that has failed."""
    return Answer(call_id=call_id, error=str(error)[:_MAX_ERROR] or type(error).__name__, kind=type(error).__name__)


def error_of(answer: Answer, agent: str) -> PdtxError:
    """Return an answer's error as the class it had at the agent, so that its exit code is the same; its text is kept.

    An error of a peer is one between agents and not of the driver with this agent.
    """
    text = f"{agent}: {printable(answer.error, ' ')}"
    cls = getattr(pdtx.errors, answer.kind, PdtxError)
    known = isinstance(cls, type) and issubclass(cls, PdtxError)
    # Made without its own __init__, which may want more than a text.
    error = cls.__new__(cls, text) if known and not issubclass(cls, PeerError) else PdtxError(text)
    Exception.__init__(error, text)
    return error


def cause_of(reason: str) -> str:
    """Return why the other side counts as lost, with what may be behind it where it was merely silent."""
    text = printable(reason, " ")
    return f"{text}; it was stopped, or a host is overloaded" if "nothing heard" in text else text


def check_hello(hello: HelloCall, version: str) -> None:
    """Raise InputError for a driver of another version than the agent's."""
    if (hello.protocol, hello.pdtx_version) != (PROTOCOL_VERSION, version):
        raise InputError(
            f"the driver runs pdtx {hello.pdtx_version} (protocol {hello.protocol}) and this agent pdtx {version} "
            f"(protocol {PROTOCOL_VERSION}); run the same pdtx on all hosts"
        )
