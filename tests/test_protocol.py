import contextlib
import math
import time
import tracemalloc
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtx.errors import IncompatiblePeer, ProtocolError
from pdtx.protocol import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Answer,
    BufferDescription,
    Bye,
    CacheDescription,
    Call,
    Complete,
    DataEndpoint,
    Failure,
    Finished,
    Grant,
    GrantedBlocks,
    GroupDescription,
    Heartbeat,
    Hello,
    LayerDone,
    Message,
    Pull,
    ReadReference,
    Reference,
    Refuse,
    Reject,
    Release,
    Renew,
    SegmentDescription,
    ShardingDescription,
    TierDone,
    TierFound,
    TierHello,
    TierLookup,
    TierWelcome,
    TransferRequest,
    Welcome,
    decode,
    encode,
)

CACHE = CacheDescription(
    model="a/model",
    fingerprint="abc123",
    device="cpu",
    groups=[
        GroupDescription(name="full", kind="full", block_size=16, num_blocks=8),
        GroupDescription(name="state", kind="state", block_size=1, num_blocks=8),
    ],
    buffers=[
        BufferDescription(
            name="full",
            group="full",
            spec={"kind": "FullAttentionSpec", "block_size": 16, "sliding_window": None},
            layer_names=["layers.0", "model.layers.2/attn"],
            layout="flash_attn_nhd",
            size_bytes=512,
            kernel_block_size=8,
        ),
        BufferDescription(
            name="state",
            group="state",
            spec={"kind": "MambaSpec", "shapes": [[3, 8], [4, 2, 2]], "dtypes": ["float16", "float32"]},
            layer_names=["layers.1"],
            layout="mamba_sd",
            size_bytes=512,
            sharding=ShardingDescription(conv=[[SegmentDescription(name="x", channels=8, units=4)]], heads=4),
        ),
    ],
    tp_size=2,
)
MESSAGES: list[Message] = [
    Hello(protocol=PROTOCOL_VERSION, pdtx_version="0.1", engine_id="p", incarnation="i", cache=CACHE, movers=["tcp"]),
    Welcome(
        protocol=PROTOCOL_VERSION,
        pdtx_version="0.1",
        engine_id="d",
        incarnation="i",
        session_id="s",
        token=bytes(range(32)),
        cache=CACHE,
        data_endpoints=[DataEndpoint(mover="tcp", address="[::1]:5600")],
        lease_s=30.0,
        verify="reference",
    ),
    Reject(field="dtype", producer="bfloat16", consumer="float16", advice="use one"),
    TransferRequest(request_id="r-1", num_tokens=3, token_ids=[1, 2, 3], max_tokens=4, deadline_s=5.0, ignore_eos=True),
    Grant(
        request_id="r-1",
        groups=[GrantedBlocks(block_ids=[4, 0], generations=[1, 2]), GrantedBlocks(block_ids=[], generations=[])],
        deadline_s=5.0,
        cached_tokens=16,
    ),
    Refuse(request_id="r-1", reason="no room, ever"),
    LayerDone(
        request_id="r-1",
        buffer=1,
        src_rank=0,
        dst_rank=3,
        layer_start=0,
        layer_stop=1,
        token_start=0,
        token_stop=3,
        nbytes=96,
    ),
    Complete(request_id="r-1", first_token=9, num_tokens=3, nbytes=192),
    Failure(request_id="r-1", phase="prefill", reason="out of memory"),
    ReadReference(request_id="r-1", buffer=1, layer=1, token_start=0, token_stop=3),
    Reference(request_id="r-1", buffer=1, layer=1, token_start=0, token_stop=3, data=b"\x00\xff" * 8),
    Release(request_id="r-1"),
    Finished(
        request_id="r-1",
        token_ids=[9, 8],
        text="né",
        verified=True,
        wrong=0,
        received_bytes=192,
        received_runs=2,
        times={"move": 0.5},
    ),
    Pull(request_id="r", generation=7),
    Renew(request_ids=["r", "s"]),
    TierHello(protocol=PROTOCOL_VERSION, pdtx_version="0.1", engine_id="a", cache=CACHE, block_tokens=32),
    TierWelcome(
        protocol=PROTOCOL_VERSION,
        pdtx_version="0.1",
        engine_id="s",
        session_id="i",
        token=b"t" * 32,
        cache=CACHE,
        data_endpoints=[DataEndpoint(mover="tcp", address="[::1]:5600")],
        block_tokens=32,
        lease_s=30.0,
    ),
    TierLookup(request_id="l", digests=[b"d" * 32, b"e" * 32], proofs=[b"p", b"q"], places=[[0, 1], []]),
    TierFound(request_id="l", places=[[1], []], contents=[[b"h" * 16], []]),
    TierDone(request_id="l"),
    Call(call_id=1, method="prepare", body=b"\x80"),
    Answer(call_id=1, body=b"\x80", error="no room", kind="InputError"),
    Heartbeat(),
    Bye(reason="done"),
]
HELLO, WELCOME = MESSAGES[:2]

SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


def fields_of(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return fields


def refused(fields: object) -> str:
    """What decode() says to fields that are no message."""
    with pytest.raises(ProtocolError) as caught:
        decode(msgpack.packb(fields))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_message_has_an_example() -> None:
    assert [type(message) for message in MESSAGES] == list(get_args(Message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_unknown_and_missing_fields_are_refused_by_name(message: Message) -> None:
    fields = fields_of(message)
    assert "surprise" in refused(fields | {"surprise": 1})
    for info in msgspec.structs.fields(message):
        if info.required and info.name != "protocol":
            assert info.name in refused({name: value for name, value in fields.items() if name != info.name})


@given(st.binary(max_size=200))
def test_random_bytes_raise_protocol_error_only(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@given(TREES)
def test_random_msgpack_raises_protocol_error_only(tree: object) -> None:
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(tree))


@given(st.sampled_from(MESSAGES), st.data())
def test_messages_with_one_wrong_field_or_byte_raise_protocol_error_only(message: Message, data: st.DataObject) -> None:
    fields = fields_of(message)
    name = data.draw(st.sampled_from(sorted(fields)))
    packed = bytearray(msgpack.packb(fields | {name: data.draw(TREES)}))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        decode(bytes(packed))


def test_truncated_and_repeated_messages_are_refused() -> None:
    data = encode(HELLO)
    for broken in (data[:-1], data + data, data + b"\xc0", b""):
        with pytest.raises(ProtocolError, match="not msgpack"):
            decode(broken)


def test_size_is_checked_before_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(msgpack, "unpackb", never)
    with pytest.raises(ProtocolError, match="101 bytes exceeds the limit of 100"):
        decode(b"\x00" * 101, limit=100)
    with pytest.raises(ProtocolError, match=str(MAX_MESSAGE_BYTES)):
        decode(bytes(MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize("bomb", [b"\x91", b"\x81\xa1a", b"\xdd\x00\x3f\xff\xff", b"\xdd\x00\x00\x10\x00"], ids=repr)
@pytest.mark.parametrize("levels", [500, 1000, 200_000])
def test_deep_nesting_is_refused_in_little_time_and_memory(bomb: bytes, levels: int) -> None:
    tracemalloc.start()
    try:
        begun = time.monotonic()
        with pytest.raises(ProtocolError):
            decode(bomb * levels)
        assert time.monotonic() - begun < 1.0
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("claim", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_claimed_lengths_are_not_believed(claim: bytes) -> None:
    with pytest.raises(ProtocolError, match="not msgpack"):
        decode(claim)


@pytest.mark.parametrize("data", [b"\xc7\x00\x05", b"\xd4\x05\x00", b"\xd6\xff\x00\x00\x00\x00"], ids=repr)
def test_extension_types_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e10])
def test_deadlines_are_finite(seconds: float) -> None:
    assert "deadline_s" in refused(fields_of(MESSAGES[4]) | {"deadline_s": seconds})


def test_errors_stay_short_lines_whatever_they_quote() -> None:
    for fields in ({"type": "a\nb" * 100_000}, {"type": "reject", "a\nb" * 1000: 1}, {"a\nb" * 1000: 1}):
        assert len(refused(fields)) < 400


def hello_with(**changes: object) -> dict[str, Any]:
    """A hello whose first buffer is changed."""
    cache = fields_of(HELLO)["cache"]
    first, *rest = cache["buffers"]
    return fields_of(HELLO) | {"cache": cache | {"buffers": [first | changes, *rest]}}


SPEC = CACHE.buffers[0].spec


@pytest.mark.parametrize(
    "value", ["x" * 257, 2**63, True, 1.5, b"x", {}, [["a"]], [[[1]]], [[1] * 17], ["x"] * 65, [None], [-1]], ids=repr
)
def test_fields_of_a_spec_are_bounded(value: object) -> None:
    assert "spec" in refused(hello_with(spec={**SPEC, "dtype": value}))


@pytest.mark.parametrize(
    "names", [[], ["x"] * 2, ["a b"], ["a\nb"], ["x" * 257], ["a"] * 4097, [7]], ids=lambda x: str(x)[:20]
)
def test_layer_names_are_bounded(names: object) -> None:
    refused(hello_with(layer_names=names))


def test_names_are_distinct_and_groups_are_known() -> None:
    cache = fields_of(HELLO)["cache"]
    assert "buffer full is in group lost, which is not described" in refused(hello_with(group="lost"))
    assert "buffer full: layer a is described twice" in refused(hello_with(layer_names=["a", "b", "a"]))
    for what in ("groups", "buffers"):
        twice = {**cache, what: cache[what] + cache[what][:1]}
        assert f"{what[:-1]} full is described twice" in refused(fields_of(HELLO) | {"cache": twice})


def test_many_layers_are_looked_through_at_once() -> None:
    """A description of the greatest size costs no more than its bytes, whatever its names."""
    names = [f"layers.{i}" for i in range(4095)]
    one = fields_of(HELLO)["cache"]["buffers"][0]
    buffers = [{**one, "name": f"b{i}", "layer_names": [*names, names[-1]]} for i in range(64)]
    cache = {**fields_of(HELLO)["cache"], "buffers": buffers}
    begun = time.monotonic()
    assert "layers.4094 is described twice" in refused(fields_of(HELLO) | {"cache": cache})
    assert time.monotonic() - begun < 2.0


@pytest.mark.parametrize("tp_size", [0, -1, 1025, "2", None])
def test_ranks_are_bounded(tp_size: object) -> None:
    assert "tp_size" in refused(fields_of(HELLO) | {"cache": fields_of(HELLO)["cache"] | {"tp_size": tp_size}})
    assert "src_rank" in refused(fields_of(MESSAGES[6]) | {"src_rank": tp_size or -1})


@pytest.mark.parametrize(("message", "sides"), [(HELLO, ("9", "6")), (WELCOME, ("6", "9"))])
def test_another_version_is_refused_by_field_even_with_unknown_fields(message: Message, sides: tuple[str, str]) -> None:
    future = {"type": fields_of(message)["type"], "protocol": 9, "of_the_future": True}
    with pytest.raises(IncompatiblePeer) as caught:
        decode(msgpack.packb(future))
    assert (caught.value.field, caught.value.producer, caught.value.consumer) == ("protocol", *sides)


@pytest.mark.parametrize("request_id", ["", "a b", "a/b", "a\n", "é", "x" * 129, 7, None])
def test_ids_are_bounded(request_id: object) -> None:
    assert "request_id" in refused({"type": "release", "request_id": request_id})


@pytest.mark.parametrize("nbytes", [-1, 2**63, 1.5, "1", None])
def test_counts_are_bounded(nbytes: object) -> None:
    assert "nbytes" in refused(fields_of(MESSAGES[7]) | {"nbytes": nbytes})


def test_lists_are_bounded() -> None:
    long = fields_of(MESSAGES[3]) | {"token_ids": [0] * ((1 << 21) + 1)}
    assert "token_ids" in refused(long)


def test_block_ids_and_generations_must_match() -> None:
    groups = [{"block_ids": [4, 0], "generations": [1]}]
    assert "2 block_ids and 1 generations" in refused(fields_of(MESSAGES[4]) | {"groups": groups})


@pytest.mark.parametrize(
    "groups", [[], [{"block_ids": [], "generations": []}] * 65, [[]], None], ids=lambda x: str(x)[:9]
)
def test_a_grant_has_a_bounded_number_of_groups(groups: object) -> None:
    assert "groups" in refused(fields_of(MESSAGES[4]) | {"groups": groups})


@pytest.mark.parametrize(
    "message",
    [
        Complete(request_id="r", first_token=0, num_tokens=1, nbytes=2**64),
        Release(request_id="not an id"),
        Failure(request_id="r", phase="x", reason="y" * ((1 << 20) + 1)),
        Reference(request_id="r", buffer=0, layer=0, token_start=0, token_stop=1, data=bytes(MAX_MESSAGE_BYTES)),
    ],
    ids=["overflow", "bad id", "long text", "too large"],
)
def test_what_the_peer_would_refuse_is_not_encoded(message: Message) -> None:
    with pytest.raises(ProtocolError, match=type(message).__name__):
        encode(message)


def test_the_token_does_not_show() -> None:
    assert "token" not in repr(WELCOME)
    assert repr(bytes(range(32))) not in repr(WELCOME)
