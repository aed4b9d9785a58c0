"""The messages of the control plane: typed, versioned, bounded in size; msgpack on the wire.

P is the producer (prefill node), D the consumer (decode node). Only what both sides must agree on travels:
block ids and the names of layouts, never addresses or strides. Where a message counts buffers, layers or groups it
means those of D's description; positions are what the block table of a group counts.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgpack
import msgspec
from msgspec import Meta

from pdtx.arguments import MAX_SECONDS, shown
from pdtx.errors import IncompatiblePeer, InputError, ProtocolError

PROTOCOL_VERSION = 6
MAX_MESSAGE_BYTES = 64 << 20
MAX_RANKS = 1024
MAX_PROCESSES = 4096
"""Of one engine."""
_MAX_ITEMS = 1 << 22
MAX_TOKENS = 1 << 21
MAX_COUNT = 1 << 62
_MAX_TEXT = 1 << 20
MAX_BODY_BYTES = MAX_MESSAGE_BYTES - 4096
_MAX_ERROR = 300
_MAX_GROUPS = 64
_MAX_LAYERS = 4096
MAX_RENEWALS = 1 << 15
MAX_PARTS = 1 << 18
"""Parts that a request which goes on in another session may be in."""
_MAX_STATES = 16
MAX_TIER_BLOCKS = 1 << 18
MAX_TIER_HASHES = 32 << 20
"""Bytes of all content hashes in one answer."""


Id = Annotated[str, Meta(max_length=128, pattern=r"^[A-Za-z0-9._:+-]+\Z")]
Word = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=_MAX_TEXT)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]
Counts = Annotated[list[Count], Meta(max_length=_MAX_ITEMS)]
Layer = Annotated[str, Meta(max_length=256, pattern=r"^[A-Za-z0-9._:/+-]+\Z")]
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Process = Annotated[int, Meta(ge=0, lt=MAX_PROCESSES)]
Processes = Annotated[int, Meta(ge=1, le=MAX_PROCESSES)]
Attempt = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""Counts the times that P has asked for grants; answers repeat it, so that a late one is not taken for another's."""
NumBlocks = Annotated[int, Meta(ge=1, le=2**31)]
BlockIds = Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(max_length=_MAX_ITEMS)]
Extents = Annotated[list[Count], Meta(max_length=16)]
Places = Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_TIER_BLOCKS)]], Meta(max_length=MAX_TIER_BLOCKS)]
ContentHashes = Annotated[list[Annotated[bytes, Meta(max_length=16 * _MAX_GROUPS)]], Meta(max_length=MAX_TIER_BLOCKS)]
SpecField = Count | Word | None | Annotated[list[Word | Extents], Meta(max_length=64)]
"""A field of a spec: a number, a name, or the names or shapes of a layer's states."""


def request_id_of(value: object) -> str:
    """Return a request id that messages can carry. Raises InputError for anything else."""
    try:
        return str(msgspec.convert(value, Id))
    except msgspec.ValidationError:
        raise InputError(f"request id {shown(value)} cannot be sent; give 1 to 128 of A-Z a-z 0-9 . _ : + -") from None


def _require_distinct(what: str, names: Sequence[str]) -> None:
    """Raise ValueError if a name comes twice."""
    seen = set[str]()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} {name} is described twice")
        seen.add(name)


class GroupDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers with one block table. num_blocks: of the pool, the null block 0 included."""

    name: Id
    kind: Literal["full", "window", "chunk", "state", "cross"]
    block_size: Positive
    num_blocks: NumBlocks
    encoder_positions: Count = 0


class SegmentDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Channels of a convolution that ranks share among themselves, see pdtx.kvspec.Segment."""

    name: Id
    channels: Positive
    units: Positive


class ShardingDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How ranks share the states of recurrent layers, see pdtx.kvspec.StateSharding."""

    conv: Annotated[
        list[Annotated[list[SegmentDescription], Meta(min_length=1, max_length=_MAX_STATES)]],
        Meta(max_length=_MAX_STATES),
    ]
    heads: Count


class BufferDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers of one group with one spec, in one region on each rank.

    spec: the class name as `kind`, and the fields, of one layer of the whole model. layout: a preset's name.
    size_bytes: of one rank's region; what spec and layout come to must be the same, which tells two versions apart.
    sharding: of states, of which more than one rank has a share.
    """

    name: Id
    group: Id
    spec: Annotated[dict[Id, SpecField], Meta(max_length=64)]
    layer_names: Annotated[list[Layer], Meta(min_length=1, max_length=_MAX_LAYERS)]
    layout: Id
    size_bytes: Positive
    kernel_block_size: Positive | None = None
    sharding: ShardingDescription | None = None


class CacheDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process's cache: its groups, and their buffers, of the layers that it has.

    tp_size: tensor-parallel ranks of the model, each with its own regions. first_rank, num_ranks: those that this
    process has; 0 is all of them. not_transferred: layers that do not move, a draft model's for example.
    """

    model: Text
    fingerprint: Id
    device: Text
    groups: Annotated[list[GroupDescription], Meta(min_length=1, max_length=_MAX_GROUPS)]
    buffers: Annotated[list[BufferDescription], Meta(min_length=1, max_length=_MAX_GROUPS)]
    tp_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    first_rank: Rank = 0
    num_ranks: Annotated[int, Meta(ge=0, le=MAX_RANKS)] = 0
    not_transferred: Annotated[list[Layer], Meta(max_length=_MAX_LAYERS)] = []  # msgspec copies it

    @property
    def ranks(self) -> range:
        """The ranks that this process has."""
        return range(self.first_rank, self.first_rank + (self.num_ranks or self.tp_size))

    def __post_init__(self) -> None:
        groups = [group.name for group in self.groups]
        _require_distinct("group", groups)
        _require_distinct("buffer", [buffer.name for buffer in self.buffers])
        for buffer in self.buffers:
            _require_distinct(f"buffer {buffer.name}: layer", buffer.layer_names)
        lost = next((buffer for buffer in self.buffers if buffer.group not in groups), None)
        if lost is not None:
            raise ValueError(f"buffer {lost.name} is in group {lost.group}, which is not described")
        if self.ranks.stop > self.tp_size:
            raise ValueError(f"ranks {self.ranks.start}..{self.ranks.stop - 1} of tensor-parallel size {self.tp_size}")


class DataEndpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where payloads are taken, and by which mover."""

    mover: Id
    address: Text


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Root of the messages; `type` is the class name in snake case."""


class Hello(_Message, frozen=True, kw_only=True, tag="hello"):
    """P to D: who I am and what my cache is like.

    engine_id: of the engine, whose processes may be several: this is number process of processes. incarnation: of this
    process; the same one in all of its sessions. number: of this hello of the process, which counts them: one that was
    held up must not take the place of a later session. resumes: whether it goes on with its requests in another session
    when this one is lost.
    """

    protocol: Count
    pdtx_version: Text
    engine_id: Id
    incarnation: Id
    cache: CacheDescription
    movers: Annotated[list[Id], Meta(max_length=32)]
    process: Process = 0
    processes: Processes = 1
    number: Count = 0
    resumes: bool = False


class Welcome(_Message, frozen=True, kw_only=True, tag="welcome"):
    """D to P: the answer to a hello; or what D says first where it has dialled P, whose answer is a hello then.

    token: proves the data connections of this session, 32 bytes. engine_id, process, processes: as in Hello.
    """

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
    process: Process = 0
    processes: Processes = 1

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
    """P to D: grant me blocks for the cache of a prompt of num_tokens; then generate max_tokens, the first of which P
    computes.

    token_ids: of the prompt, for tiers; empty where P does not name them. max_tokens: 0 where D decides by itself.
    Asked again in another session of the same process, the request goes on with what has arrived of it.
    lease_s: how long P holds an offered request without being asked to hold it longer; 0 where it is not offered.
    """

    request_id: Id
    num_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    token_ids: Annotated[list[Count], Meta(max_length=MAX_TOKENS)]
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    deadline_s: Seconds
    ignore_eos: bool = False
    attempt: Attempt = 0
    lease_s: Seconds = 0.0

    def __post_init__(self) -> None:
        if self.token_ids and len(self.token_ids) != self.num_tokens:
            raise ValueError(f"{len(self.token_ids)} token_ids of a prompt of {self.num_tokens} tokens")


class GrantedBlocks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group's block table as far as it is granted. 0, the null block, stands where nothing is to be written."""

    block_ids: BlockIds
    generations: Counts

    def __post_init__(self) -> None:
        if len(self.block_ids) != len(self.generations):
            raise ValueError(f"{len(self.block_ids)} block_ids and {len(self.generations)} generations")


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank sends to another of some layers of a buffer at some positions; both ranges are half-open."""

    buffer: Count
    src_rank: Rank
    dst_rank: Rank
    layer_start: Count
    layer_stop: Count
    token_start: Count
    token_stop: Count


class Grant(_Message, frozen=True, kw_only=True, tag="grant"):
    """D to P: these blocks are yours to write until deadline_s from now; one table for each of D's groups.

    cached_tokens: what D has of the beginning of the prompt, and P does not send. States are sent all the same.
    arrived: what has come from P's process in an earlier session, and been noticed: P does not send it again.
    """

    request_id: Id
    groups: Annotated[list[GrantedBlocks], Meta(min_length=1, max_length=_MAX_GROUPS)]
    deadline_s: Seconds
    cached_tokens: Count = 0
    attempt: Attempt = 0
    arrived: Annotated[list[Part], Meta(max_length=MAX_PARTS)] = []  # msgspec copies it


class Refuse(_Message, frozen=True, kw_only=True, tag="refuse"):
    """D to P: no blocks, ever, for this request."""

    request_id: Id
    reason: Text
    attempt: Attempt = 0


class LayerDone(_Message, frozen=True, kw_only=True, tag="layer_done"):
    """P to D: this part of the request has been delivered."""

    request_id: Id
    buffer: Count
    src_rank: Rank
    dst_rank: Rank
    layer_start: Count
    layer_stop: Count
    token_start: Count
    token_stop: Count
    nbytes: Count


class Complete(_Message, frozen=True, kw_only=True, tag="complete"):
    """P to D: all parts have been delivered; nbytes in all. first_token: the first new token, if P has computed it."""

    request_id: Id
    first_token: Count | None
    num_tokens: Count
    nbytes: Count


class Failure(_Message, frozen=True, kw_only=True, tag="failure"):
    """Either way: the request has failed on my side. wrong: elements that verification found wrong, if it was that."""

    request_id: Id
    phase: Text
    reason: Text
    wrong: Count | None = None
    attempt: Attempt = 0


class ReadReference(_Message, frozen=True, kw_only=True, tag="read_reference"):
    """D to P: show me what src_rank sends to dst_rank of a layer at these positions, to compare mine with."""

    request_id: Id
    buffer: Count
    layer: Count
    token_start: Count
    token_stop: Count
    src_rank: Rank = 0
    dst_rank: Rank = 0
    attempt: Attempt = 0


class Reference(_Message, frozen=True, kw_only=True, tag="reference"):
    """P to D: the answer; data in the order [K/V][position][head][channel], of the heads that src_rank sends."""

    request_id: Id
    buffer: Count
    layer: Count
    token_start: Count
    token_stop: Count
    data: Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)]
    src_rank: Rank = 0
    dst_rank: Rank = 0


class Release(_Message, frozen=True, kw_only=True, tag="release"):
    """D to P: your blocks of this request are not needed any more."""

    request_id: Id
    attempt: Attempt = 0


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
    attempt: Attempt = 0


class Pull(_Message, frozen=True, kw_only=True, tag="pull"):
    """D to P: send me what you have offered. P asks for a grant then, as for any request, or refuses.

    generation: of the offer, as it was named when it was made; None for whichever there is.
    """

    request_id: Id
    generation: Count | None = None


class Renew(_Message, frozen=True, kw_only=True, tag="renew"):
    """D to P: I have pulled these, and still want them: hold each for its lease_s from now."""

    request_ids: Annotated[list[Id], Meta(min_length=1, max_length=MAX_RENEWALS)]


class TierHello(_Message, frozen=True, kw_only=True, tag="tier_hello"):
    """A to S, a node that serves its tier: who I am, and which cache I want blocks of block_tokens tokens for.

    Where the messages below count groups, buffers and layers they mean those of A's description.
    """

    protocol: Count
    pdtx_version: Text
    engine_id: Id
    cache: CacheDescription
    block_tokens: Positive


class TierWelcome(_Message, frozen=True, kw_only=True, tag="tier_welcome"):
    """S to A: the answer. token: as in Welcome. cache: the tier. lease_s: how long what is found stays there."""

    protocol: Count
    pdtx_version: Text
    engine_id: Id
    session_id: Id
    token: Annotated[bytes, Meta(min_length=32, max_length=32)]
    cache: CacheDescription
    data_endpoints: Annotated[list[DataEndpoint], Meta(max_length=32)]
    block_tokens: Positive
    lease_s: Seconds

    def __repr__(self) -> str:
        """Without the token: what is logged can be read by others."""
        return f"TierWelcome(engine_id={self.engine_id!r}, session_id={self.session_id!r})"


class TierLookup(_Message, frozen=True, kw_only=True, tag="tier_lookup"):
    """A to S: which of these blocks do you have? digests, proofs: see PrefixKeys; S compares both with its own.

    places: for each group those asked for, as indices of digests.
    """

    request_id: Id
    digests: Annotated[list[Annotated[bytes, Meta(max_length=64)]], Meta(max_length=MAX_TIER_BLOCKS)]
    proofs: Annotated[list[Annotated[bytes, Meta(max_length=_MAX_TEXT)]], Meta(max_length=MAX_TIER_BLOCKS)]
    places: Annotated[list[Places], Meta(min_length=1, max_length=_MAX_GROUPS)]

    def __post_init__(self) -> None:
        if len(self.digests) != len(self.proofs):
            raise ValueError(f"{len(self.digests)} digests and {len(self.proofs)} proofs")
        beyond = next((place for group in self.places for place in group if place >= len(self.digests)), None)
        if beyond is not None:
            raise ValueError(f"place {beyond} of {len(self.digests)} digests")


class TierFound(_Message, frozen=True, kw_only=True, tag="tier_found"):
    """S to A: these are yours to read until lease_s have passed. places: for each group those of the lookup's.

    contents: for each group, for each of its places, the content hash that was stored with the block: 16 bytes for each
    buffer of the group, in an order that equal digests imply; empty where there is none. Together no more than
    MAX_TIER_HASHES.
    """

    request_id: Id
    places: Annotated[list[Places], Meta(min_length=1, max_length=_MAX_GROUPS)]
    contents: Annotated[list[ContentHashes], Meta(min_length=1, max_length=_MAX_GROUPS)]

    def __post_init__(self) -> None:
        counts = [len(each) for each in self.places], [len(each) for each in self.contents]
        if counts[0] != counts[1]:
            raise ValueError(f"content hashes of {sum(counts[1])} blocks for {sum(counts[0])} that were found")


class TierDone(_Message, frozen=True, kw_only=True, tag="tier_done"):
    """A to S: what was found need not be kept any more."""

    request_id: Id


class Call(_Message, frozen=True, kw_only=True, tag="call"):
    """A driver of measurements to an agent: do this. body: msgpack of what the method takes, see pdtx.bench.calls."""

    call_id: Count
    method: Id
    body: Annotated[bytes, Meta(max_length=MAX_BODY_BYTES)] = b""

    def __repr__(self) -> str:
        """Without the body, which may hold tokens: what is logged can be read by others."""
        return f"Call(call_id={self.call_id}, method={self.method!r}, {len(self.body)} bytes)"


class Answer(_Message, frozen=True, kw_only=True, tag="answer"):
    """An agent to its driver: what came of a call; body as in Call. kind: the class of the error, if there is one."""

    call_id: Count
    body: Annotated[bytes, Meta(max_length=MAX_BODY_BYTES)] = b""
    error: Text = ""
    kind: Word = ""

    def __repr__(self) -> str:
        """Without the body, see Call."""
        return f"Answer(call_id={self.call_id}, error={self.error!r}, {len(self.body)} bytes)"


class Heartbeat(_Message, frozen=True, kw_only=True, tag="heartbeat"):
    """Either way: I am alive."""


class Bye(_Message, frozen=True, kw_only=True, tag="bye"):
    """Either way: I am leaving."""

    reason: Text


Message = (
    Hello | Welcome | Reject | TransferRequest | Grant | Refuse | LayerDone | Complete | Failure
    | ReadReference | Reference | Release | Finished | Pull | Renew
    | TierHello | TierWelcome | TierLookup | TierFound | TierDone | Call | Answer | Heartbeat | Bye
)  # fmt: skip


def encode(message: Message) -> bytes:
    """Return a message's bytes.

    Raises ProtocolError for a message that the peer's decode() would refuse: better where it was made than there.
    """
    try:
        fields = msgspec.to_builtins(message, builtin_types=(bytes,))
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
    fields = unpack_fields(data)
    _check_version(fields)
    return _convert(fields)


def unpack_fields(data: bytes, max_map_len: int = 1024) -> object:
    """Return what is packed in data, of msgpack's plain types alone; no room is made for more than data can hold.

    max_map_len: entries that a map may have. Raises ProtocolError.
    """
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=_MAX_TEXT * 4,
            max_bin_len=len(data),
            # The parser makes room for what a list claims before it looks; none has more items than the message bytes.
            max_array_len=min(_MAX_ITEMS, len(data)),
            max_map_len=max_map_len,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, MemoryError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not msgpack: {brief(error) or type(error).__name__}") from None


def _convert(fields: object) -> Message:
    try:
        message: Message = msgspec.convert(fields, type=Message, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise ProtocolError(f"malformed message: {brief(error)}") from None
    return message


def brief(error: Exception) -> str:
    """One short line, though the error may quote what a peer has sent."""
    text = " ".join(str(error).split())
    return text if len(text) <= _MAX_ERROR else f"{text[: _MAX_ERROR // 2]} ... {text[-_MAX_ERROR // 2 :]}"


def _check_version(fields: object) -> None:
    """Raise IncompatiblePeer for a greeting in another version, whose fields need not be known here."""
    if not isinstance(fields, dict) or fields.get("type") not in ("hello", "welcome", "tier_hello", "tier_welcome"):
        return
    theirs, ours = fields.get("protocol"), PROTOCOL_VERSION
    if isinstance(theirs, int) and theirs != ours:
        # Who serves a tier gives, so the one that welcomes is the producer there.
        producer, consumer = (theirs, ours) if fields["type"] in ("hello", "tier_welcome") else (ours, theirs)
        raise IncompatiblePeer("protocol", str(producer), str(consumer), "run the same pdtx on both sides")
