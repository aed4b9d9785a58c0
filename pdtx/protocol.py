"""The messages of the control plane: typed, versioned, bounded in size; msgpack on the wire.

P is the producer (prefill node), D the consumer (decode node). Only what both sides must agree on travels:
block ids and layouts, never addresses.
"""

from typing import Annotated, Literal

import msgpack
import msgspec
from msgspec import Meta

from pdtx.errors import IncompatiblePeer, ProtocolError

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 64 << 20
_MAX_ITEMS = 1 << 22
_MAX_TEXT = 1 << 20
_MAX_ERROR = 300

Id = Annotated[str, Meta(max_length=128, pattern=r"^[A-Za-z0-9._:+-]+\Z")]
Word = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=_MAX_TEXT)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Positive = Annotated[int, Meta(ge=1, le=2**62)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Counts = Annotated[list[Count], Meta(max_length=_MAX_ITEMS)]


class AxisDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One axis of a layout; stride in bytes."""

    name: Id
    extent: Positive
    stride: Positive


class LayoutDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a peer's elements lie inside its region."""

    name: Text
    axes: Annotated[list[AxisDescription], Meta(max_length=16)]
    itemsize: Positive
    size_bytes: Positive


class CacheDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node's cache. spec: the class name as `kind`, and the spec's fields."""

    spec: Annotated[dict[Id, int | Word | None], Meta(max_length=64)]
    model: Text
    fingerprint: Id
    num_layers: Positive
    num_blocks: Positive
    layout: LayoutDescription
    device: Text
    tp_size: Positive = 1
    tp_rank: Count = 0


class DataEndpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where payloads are taken, and by which mover."""

    mover: Id
    address: Text


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Root of the messages; `type` is the class name in snake case."""


class Hello(_Message, frozen=True, kw_only=True, tag="hello"):
    """P to D: who I am and what my cache is like."""

    protocol: Count
    pdtx_version: Text
    engine_id: Id
    incarnation: Id
    cache: CacheDescription
    movers: Annotated[list[Id], Meta(max_length=32)]


class Welcome(_Message, frozen=True, kw_only=True, tag="welcome"):
    """D to P: the answer to a hello. token: proves the data connections of this session, 32 bytes."""

    protocol: Count
    pdtx_version: Text
    engine_id: Id
    incarnation: Id
    session_id: Id
    token: Annotated[bytes, Meta(min_length=32, max_length=32)]
    cache: CacheDescription
    data_endpoints: Annotated[list[DataEndpoint], Meta(max_length=32)]
    lease_s: Seconds
    verify: Literal["off", "reference"]

    def __repr__(self) -> str:
        """Without the token: what is logged can be read by others."""
        return f"Welcome(engine_id={self.engine_id!r}, session_id={self.session_id!r})"


class Reject(_Message, frozen=True, kw_only=True, tag="reject"):
    """D to P: we cannot work together, because of this field."""

    field: Text
    producer: Text
    consumer: Text
    advice: Text = ""


class TransferRequest(_Message, frozen=True, kw_only=True, tag="transfer_request"):
    """P to D: grant me blocks for this prompt's K/V; then generate max_tokens, the first of which P computes."""

    request_id: Id
    token_ids: Annotated[list[Count], Meta(max_length=1 << 21)]
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 21)]
    deadline_s: Seconds
    ignore_eos: bool = False


class Grant(_Message, frozen=True, kw_only=True, tag="grant"):
    """D to P: these blocks, in token order, are yours to write until deadline_s from now."""

    request_id: Id
    block_ids: Counts
    generations: Counts
    deadline_s: Seconds

    def __post_init__(self) -> None:
        if len(self.block_ids) != len(self.generations):
            raise ValueError(f"{len(self.block_ids)} block_ids and {len(self.generations)} generations")


class Refuse(_Message, frozen=True, kw_only=True, tag="refuse"):
    """D to P: no blocks, ever, for this request."""

    request_id: Id
    reason: Text


class LayerDone(_Message, frozen=True, kw_only=True, tag="layer_done"):
    """P to D: this part of the request has been delivered."""

    request_id: Id
    layer_start: Count
    layer_stop: Count
    token_start: Count
    token_stop: Count
    nbytes: Count


class Complete(_Message, frozen=True, kw_only=True, tag="complete"):
    """P to D: all parts have been delivered; nbytes in all. first_token: the first new token."""

    request_id: Id
    first_token: Count
    num_tokens: Count
    nbytes: Count


class Failure(_Message, frozen=True, kw_only=True, tag="failure"):
    """Either way: the request has failed on my side. wrong: elements that verification found wrong, if it was that."""

    request_id: Id
    phase: Text
    reason: Text
    wrong: Count | None = None


class ReadReference(_Message, frozen=True, kw_only=True, tag="read_reference"):
    """D to P: show me your K/V of these tokens of a layer, to compare mine with."""

    request_id: Id
    layer: Count
    token_start: Count
    token_stop: Count


class Reference(_Message, frozen=True, kw_only=True, tag="reference"):
    """P to D: the answer; data in the order [K/V][token][head][channel]."""

    request_id: Id
    layer: Count
    token_start: Count
    token_stop: Count
    data: Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)]


class Release(_Message, frozen=True, kw_only=True, tag="release"):
    """D to P: your blocks of this request are not needed any more."""

    request_id: Id


class Finished(_Message, frozen=True, kw_only=True, tag="finished"):
    """D to P: the request's tokens. wrong: elements found wrong; verified: whether anybody looked. times in seconds."""

    request_id: Id
    token_ids: Counts
    text: Text
    verified: bool
    wrong: Count
    received_bytes: Count
    received_runs: Count
    times: Annotated[dict[Id, float], Meta(max_length=32)]


class Heartbeat(_Message, frozen=True, kw_only=True, tag="heartbeat"):
    """Either way: I am alive."""


class Bye(_Message, frozen=True, kw_only=True, tag="bye"):
    """Either way: I am leaving."""

    reason: Text


Message = (
    Hello | Welcome | Reject | TransferRequest | Grant | Refuse | LayerDone | Complete | Failure
    | ReadReference | Reference | Release | Finished | Heartbeat | Bye
)  # fmt: skip


def encode(message: Message) -> bytes:
    """Return a message's bytes.

    Raises ProtocolError for a message that the peer's decode() would refuse: better where it was made than there.
    """
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    try:
        _convert(fields)
        data: bytes = msgpack.packb(fields, use_bin_type=True)
    except (ProtocolError, ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"a {type(message).__name__} that cannot be sent: {error}") from None
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a {type(message).__name__} of {len(data)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes, limit: int = MAX_MESSAGE_BYTES) -> Message:
    """Return the message in data, checked field by field.

    limit: bytes above which data is refused unread.
    Raises IncompatiblePeer for a greeting in another protocol version, ProtocolError for anything else.
    """
    if len(data) > limit:
        raise ProtocolError(f"a message of {len(data)} bytes exceeds the limit of {limit}")
    try:
        fields = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=_MAX_TEXT * 4,
            max_bin_len=limit,
            # The parser makes room for what a list claims before it looks; none has more items than the message bytes.
            max_array_len=min(_MAX_ITEMS, len(data)),
            max_map_len=1024,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, MemoryError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not msgpack: {_brief(error) or type(error).__name__}") from None
    _check_version(fields)
    return _convert(fields)


def _convert(fields: object) -> Message:
    try:
        message: Message = msgspec.convert(fields, type=Message, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise ProtocolError(f"malformed message: {_brief(error)}") from None
    return message


def _brief(error: Exception) -> str:
    """One short line, though the error may quote what a peer has sent."""
    text = " ".join(str(error).split())
    return text if len(text) <= _MAX_ERROR else f"{text[: _MAX_ERROR // 2]} ... {text[-_MAX_ERROR // 2 :]}"


def _check_version(fields: object) -> None:
    """Raise IncompatiblePeer for a greeting in another version, whose fields need not be known here."""
    if not isinstance(fields, dict) or fields.get("type") not in ("hello", "welcome"):
        return
    theirs, ours = fields.get("protocol"), PROTOCOL_VERSION
    if isinstance(theirs, int) and theirs != ours:
        producer, consumer = (theirs, ours) if fields["type"] == "hello" else (ours, theirs)
        raise IncompatiblePeer("protocol", str(producer), str(consumer), "run the same pdtx on both sides")
