"""How producer and consumer find out whether they can work together, and what a stranger gets."""

import contextlib
import dataclasses
import socket
import threading
import time
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtx import __version__
from pdtx.engine import (
    check_compatible,
    facts_of,
)
from pdtx.engine.specs import SPEC_CLASSES, spec_fields, spec_of
from pdtx.errors import (
    AddressInUse,
    DeadlineExceeded,
    IncompatiblePeer,
    InputError,
    PdtxError,
    PeerUnreachable,
    ProtocolError,
)
from pdtx.kvspec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from pdtx.layout import ELEMENT_ORDERS, PARTED_ORDERS, RECORD_ORDERS, STATE_ORDERS, any_layout
from pdtx.parallel import rank_spec
from pdtx.protocol import (
    PROTOCOL_VERSION,
    BufferDescription,
    CacheDescription,
    Complete,
    Failure,
    Grant,
    GroupDescription,
    Hello,
    LayerDone,
    Message,
    Reference,
    Refuse,
    Reject,
    SpecField,
    TransferRequest,
    Welcome,
    decode,
    encode,
)
from pdtx.sidechannel import Dialer, Listener, Security
from pdtx.testing.pair import Leaks
from tests.engine_pair import (
    CHANNELS,
    HEADS,
    LAYERS,
    OPEN,
    PATIENCE_S,
    Pair,
    begin,
    describe,
    make_cache,
    make_consumer,
    make_producer,
    ship,
    wait_until,
)
from tests.ports import free_port

M = TypeVar("M")

INCOMPATIBLE = {
    "dtype of buffer full": (make_cache(dtype="float16"), "float16", "bfloat16"),
    "num_kv_heads of buffer full": (make_cache(heads=1), "1", "2"),
    "head_size of buffer full": (make_cache(channels=16), "16", "8"),
    "layers of buffer full": (make_cache(num_layers=2), "2", "3"),
    "block_size of group full": (make_cache(block_size=24), "24", "32"),
    "fingerprint": (make_cache(), "other", "same"),
}


@pytest.mark.parametrize("field", INCOMPATIBLE)
def test_incompatible_peers_are_told_the_field_and_both_values(field: str) -> None:
    cache, ours, theirs = INCOMPATIBLE[field]
    fingerprint = "other" if field == "fingerprint" else "same"
    with Pair() as pair:
        producer = make_producer(cache, fingerprint=fingerprint)
        with pytest.raises(IncompatiblePeer) as caught:
            producer.connect(pair.address, security=OPEN)
        assert (caught.value.field, caught.value.producer, caught.value.consumer) == (field, ours, theirs)
        producer.close()
        producer.mover.close()
        with pytest.raises(IncompatiblePeer):
            check_compatible(describe(cache, fingerprint), describe(pair.destination))
        ship(pair.producer, begin(pair.producer, 20))
        pair.finish(pair.next_ready())


def test_a_peers_name_of_its_model_is_printed_as_one_short_line() -> None:
    words = msgspec.structs.replace(describe(make_cache()), model="\x1b[2J\n" + "x" * 100_000, fingerprint="other")
    with pytest.raises(IncompatiblePeer, match=r"the models are .*x and a model") as caught:
        check_compatible(words, describe(make_cache()))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_movers_must_agree() -> None:
    with Pair() as pair:
        producer = make_producer(pair.source, "tcp")
        with pytest.raises(IncompatiblePeer, match="mover is tcp on the prefill side and inproc on the decode side"):
            producer.connect(pair.address, security=OPEN)
        producer.close()
        producer.mover.close()


def test_layout_pool_and_block_size_may_differ() -> None:
    check_compatible(describe(make_cache()), describe(make_cache("flashinfer_hnd", 48, num_blocks=2)))


@pytest.mark.parametrize("layout", [*ELEMENT_ORDERS, *PARTED_ORDERS])
def test_a_layout_survives_its_description(layout: str) -> None:
    cache = make_cache(layout)
    (buffer,) = facts_of(describe(cache)).buffers
    assert (buffer.layout, buffer.spec, buffer.layer_names) == (cache.layout, cache.spec, list(cache.layer_names))


HEAD: Any = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": "float16"}
SPECS: list[tuple[KVCacheSpec, str]] = [
    (SlidingWindowSpec(**HEAD, sliding_window=24), "sglang"),
    (ChunkedLocalAttentionSpec(**HEAD, attention_chunk_size=32), "sglang"),
    (SinkFullAttentionSpec(**HEAD, sink_len=16), "sglang"),
    (CrossAttentionSpec(**HEAD), "sglang"),
    (MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=24, dtype="float16", alignment=512), "mla"),
    (
        FullAttentionSpec(**{**HEAD, "dtype": "int8"}, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD),
        "triton_per_token_head_nhd",
    ),
    (
        MambaSpec(block_size=512, shapes=((3, 8), (2, 4, 4)), dtypes=("float16", "float32"), page_size_padded=256),
        "mamba_ds",
    ),
]


@pytest.mark.parametrize(("spec", "layout"), SPECS, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_every_kind_of_spec_survives_its_description(spec: KVCacheSpec, layout: str) -> None:
    """Over the wire and back: shapes and modes are words and lists there."""
    whole = any_layout(layout, spec, num_layers=2, num_blocks=4)
    state = isinstance(spec, MambaSpec)
    group = GroupDescription(name="g", kind="state" if state else "full", block_size=1 if state else 16, num_blocks=4)
    buffer = BufferDescription(
        name="b", group="g", spec=spec_fields(spec), layer_names=["a", "b"], layout=layout, size_bytes=whole.size_bytes
    )
    cache = CacheDescription(model="m", fingerprint="f", device="cpu", groups=[group], buffers=[buffer])
    hello = Hello(protocol=PROTOCOL_VERSION, pdtx_version="1", engine_id="e", incarnation="i", cache=cache, movers=[])
    arrived = decode(encode(hello))
    assert isinstance(arrived, Hello)
    (facts,) = facts_of(arrived.cache).buffers
    assert (facts.spec, facts.layout) == (spec, whole)
    assert type(facts.spec) is type(spec)


def broken(**changes: object) -> CacheDescription:
    """A description whose only buffer is changed."""
    whole = describe(make_cache())
    return msgspec.structs.replace(whole, buffers=[msgspec.structs.replace(whole.buffers[0], **changes)])


def spec(**changes: SpecField) -> CacheDescription:
    """A description whose spec is changed; None takes a field out."""
    fields = {**describe(make_cache()).buffers[0].spec, **changes}
    return broken(spec={name: value for name, value in fields.items() if value is not None or name not in changes})


def group(**changes: object) -> CacheDescription:
    whole = describe(make_cache())
    return msgspec.structs.replace(whole, groups=[msgspec.structs.replace(whole.groups[0], **changes)])


IMPOSSIBLE = {
    "an unknown layout": broken(layout="spiral"),
    "a layout of another kind": broken(layout="mamba_sd"),
    "another size than its layout": broken(size_bytes=64),
    "kernel blocks that do not divide": broken(kernel_block_size=5),
    "more blocks than it says": group(num_blocks=10),
    "more tokens in a block than its group": spec(block_size=32),
    "another element size than its dtype": spec(dtype="float32"),
    "an unknown dtype": spec(dtype="bfloat17"),
    "no block size": spec(block_size=None),
    "a block size in words": spec(block_size="sixteen"),
    "block size 0": spec(block_size=0),
    "heads that are a list": spec(num_kv_heads=["2"]),
    "a dtype that is a list": spec(dtype=["bfloat16"]),
    "a field too many": spec(colour="red"),
    "no class": spec(kind=None),
    "a class that is none": spec(kind="object"),
    "a class that keeps nothing": spec(kind="EncoderOnlyAttentionSpec"),
    "a quantisation that is none": spec(kv_quant_mode="LOUD"),
    "a padding that is too small": spec(page_size_padded=8),
    "ranks that cannot share its heads": msgspec.structs.replace(describe(make_cache()), tp_size=3),
}


NUMBERS = st.sampled_from([0, 1, 2, 3, 8, 16, 512, 2**31, 2**62]) | st.integers(0, 2**62)
KNOWN = ["float16", "bfloat16", "uint8", "NONE", "NVFP4", "fp8_ds_mla", "deepseek_v4", "all"]
WORDS = st.sampled_from(KNOWN) | st.text(max_size=9)
VALUES = st.none() | NUMBERS | WORDS | st.lists(WORDS | st.lists(NUMBERS, max_size=4), max_size=4)
PRESETS = [*ELEMENT_ORDERS, *PARTED_ORDERS, *RECORD_ORDERS, *STATE_ORDERS]


@given(st.data())
def test_whatever_a_peer_describes_is_taken_or_refused_at_once(data: st.DataObject) -> None:
    cls = data.draw(st.sampled_from(list(SPEC_CLASSES.values())))
    fields: dict[str, Any] = {field.name: data.draw(VALUES) for field in dataclasses.fields(cls)}
    # Often enough a cache that could be.
    possible = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": "float16", "kv_quant_mode": "NONE"}
    fields |= {name: value for name, value in possible.items() if name in fields and data.draw(st.integers(0, 9))}
    layout, num_blocks, tp_size = (
        data.draw(st.sampled_from(PRESETS)),
        data.draw(NUMBERS),
        data.draw(st.integers(1, 1024)),
    )
    wire = {"kind": cls.__name__, **fields}
    try:
        size = any_layout(layout, rank_spec(spec_of(wire), tp_size), num_layers=2, num_blocks=num_blocks).size_bytes
    except PdtxError:
        size = data.draw(NUMBERS)
    buffer = {
        "name": "b",
        "group": "g",
        "spec": wire,
        "layer_names": ["x", "y"],
        "layout": layout,
        "size_bytes": size,
        "kernel_block_size": data.draw(st.none() | NUMBERS),
    }
    kind = data.draw(st.sampled_from(["full", "window", "chunk", "state", "cross"]))
    group = {"name": "g", "kind": kind, "block_size": 16, "num_blocks": num_blocks, "encoder_positions": 0}
    raw = {"model": "m", "fingerprint": "f", "device": "d", "groups": [group], "buffers": [buffer], "tp_size": tp_size}
    try:
        description = msgspec.convert(raw, CacheDescription)
    except msgspec.ValidationError:
        return
    begun = time.thread_time()  # the work alone: others may have the processor meanwhile
    with contextlib.suppress(ProtocolError):
        check_compatible(description, describe(make_cache()))
    assert time.thread_time() - begun < 1.0


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_an_impossible_cache_is_rejected_and_the_consumer_serves_on(what: str) -> None:
    with Pair() as pair:
        with Rogue(pair.address, IMPOSSIBLE[what]) as rogue:
            assert isinstance(rogue.answer, Reject), rogue.answer
        ship(pair.producer, begin(pair.producer, 20))
        pair.finish(pair.next_ready())


def test_the_words_of_who_is_refused_are_logged_as_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    words = msgspec.structs.replace(describe(make_cache()), model="\x1b[2J\n" + "x" * 100_000, fingerprint="other")
    with Pair() as pair, Rogue(pair.address, words) as rogue:
        assert isinstance(rogue.answer, Reject), rogue.answer
    (text,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("refused rogue")]
    assert text.isprintable()
    assert len(text) < 2000


class Rogue:
    """A producer that says what it wants to say."""

    def __init__(self, address: str, description: CacheDescription | None = None) -> None:
        self.heard, self.lost = list[Message](), list[str]()
        self.dialer = Dialer(address, self.heard.append, self.lost.append, security=OPEN)
        self.dialer.connect(PATIENCE_S)
        self.hello(description or describe(make_cache()))
        wait_until(lambda: bool(self.heard), "an answer to hello", 3.0)
        self.answer = self.heard[0]

    def hello(self, description: CacheDescription) -> None:
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            pdtx_version=__version__,
            engine_id="rogue",
            incarnation="1",
            cache=description,
            movers=["inproc"],
        )
        self.dialer.send(hello)

    def ask(self, request_id: str = "r", tokens: int = 20) -> None:
        self.dialer.send(
            TransferRequest(
                request_id=request_id, num_tokens=tokens, token_ids=list(range(tokens)), max_tokens=2, deadline_s=30.0
            )
        )

    def hear(self, kind: type[M]) -> M:
        """The first message of a kind, once it is there."""

        def found() -> list[M]:
            return [message for message in self.heard if isinstance(message, kind)]

        wait_until(lambda: bool(found()), f"a {kind.__name__}", 3.0)
        return found()[0]

    def __enter__(self) -> "Rogue":
        return self

    def __exit__(self, *_: object) -> None:
        self.dialer.close()


def layers_done(rogue: Rogue, request_id: str = "r", tokens: int = 20) -> int:
    """Claim all layers; return the bytes claimed."""
    nbytes = tokens * 2 * HEADS * CHANNELS * 2
    for layer in range(LAYERS):
        rogue.dialer.send(
            LayerDone(
                request_id=request_id,
                buffer=0,
                src_rank=0,
                dst_rank=0,
                layer_start=layer,
                layer_stop=layer + 1,
                token_start=0,
                token_stop=tokens,
                nbytes=nbytes,
            )
        )
    return LAYERS * nbytes


def test_a_claim_without_payload_is_refused() -> None:
    with Pair() as pair, Rogue(pair.address) as rogue:
        rogue.ask()
        total = layers_done(rogue)
        rogue.dialer.send(Complete(request_id="r", first_token=1, num_tokens=20, nbytes=total))
        reason = rogue.hear(Failure).reason
        claims = f"claims 20 tokens and {total} bytes, noticed 0"
        assert f"group full, buffer full: 0 of {total} bytes arrived ({claims}" in reason
        assert pair.consumer.next_ready(0.05) is None


def test_reference_data_that_nobody_asked_for_is_not_heaped_up() -> None:
    with Pair() as pair, Rogue(pair.address) as rogue:
        rogue.ask()
        for _ in range(50):
            rogue.dialer.send(Reference(request_id="r", buffer=0, layer=0, token_start=0, token_stop=1, data=b"x"))
        layers_done(rogue)
        wait_until(lambda: bool(pair.consumer.core.requests), "the request")
        (request,) = pair.consumer.core.requests.values()
        wait_until(lambda: pair.consumer.unknown_notices == LAYERS, "all that was sent before")
        assert request.references.empty(), "nothing is kept before all has arrived"


def test_one_producer_has_so_many_requests_under_way_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdtx.engine.inbound_control.MAX_REQUESTS", 3)
    with Pair() as pair, Rogue(pair.address) as rogue:
        for number in range(4):
            rogue.ask(f"r{number}", tokens=100)
        refused = rogue.hear(Refuse)
        assert (refused.request_id, refused.reason.split(";")[0]) == ("r3", "3 requests of rogue are under way")
        for number in range(3):
            rogue.dialer.send(Failure(request_id=f"r{number}", phase="prefill", reason="enough"))
        rogue.ask("again", tokens=20)
        assert pair.received("again").num_tokens == 20
        rogue.dialer.send(Failure(request_id="again", phase="prefill", reason="enough"))


def test_messages_about_nothing_are_ignored() -> None:
    with Pair() as pair, Rogue(pair.address) as rogue:
        layers_done(rogue, "nothing")
        rogue.dialer.send(Complete(request_id="nothing", first_token=1, num_tokens=20, nbytes=1))
        rogue.dialer.send(Refuse(request_id="nothing", reason="the wrong way round"))
        rogue.ask()
        assert rogue.hear(Grant).request_id == "r"
        rogue.dialer.send(Failure(request_id="r", phase="prefill", reason="enough"))


def test_a_second_completion_is_ignored() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        ship(pair.producer, request)
        ready = pair.next_ready()
        for token, nbytes in ((1, 5), (7, request.nbytes)):
            again = Complete(request_id="r", first_token=token, num_tokens=20, nbytes=nbytes)
            pair.producer.core.effects.send(pair.producer.core.session, again)
        assert pair.consumer.next_ready(0.2) is None
        pair.finish(ready)
        assert pair.producer.wait(request).text == "done"


def test_a_request_id_in_use_in_the_same_session_is_refused_by_the_consumer() -> None:
    with Pair() as pair, Rogue(pair.address) as rogue:
        rogue.ask()
        rogue.ask()
        assert rogue.hear(Refuse).reason == "request id r is in use"
        rogue.dialer.send(Failure(request_id="r", phase="prefill", reason="enough"))


def test_a_second_hello_starts_afresh() -> None:
    """Its requests of before have no producer any more, so they must not keep their blocks."""
    with Pair() as pair, Rogue(pair.address) as rogue:
        rogue.ask()
        rogue.hear(Grant)
        rogue.heard.clear()
        rogue.hello(describe(make_cache()))
        welcome = rogue.hear(Welcome)
        pair.require_all_free()
        rogue.ask("again")
        assert pair.received("again").session.session_id == welcome.session_id
        rogue.dialer.send(Failure(request_id="again", phase="prefill", reason="enough"))


def test_who_has_no_session_is_told() -> None:
    with Pair() as pair, Rogue(pair.address, IMPOSSIBLE["another size than its layout"]) as rogue:
        rogue.ask()
        wait_until(lambda: bool(rogue.lost), "to be told that there is no session", 2.0)
        assert "hello" in rogue.lost[0]


def test_an_echo_is_no_consumer() -> None:
    """It repeats ZeroMQ's own handshake too, so only the answer to hello tells."""

    def echo(server: socket.socket) -> None:
        with contextlib.suppress(OSError), server.accept()[0] as stranger:
            while data := stranger.recv(4096):
                stranger.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=echo, args=(server,))
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        producer = make_producer(make_cache(), "inproc")
        with pytest.raises(DeadlineExceeded, match=f"the handshake's answer from {address}"):
            producer.connect(address, security=OPEN, timeout_s=2.0)
        producer.close()
        producer.mover.close()
        thread.join()


def test_nobody_listening_leaves_nothing_behind() -> None:
    address = f"127.0.0.1:{free_port()}"
    leaks = Leaks()
    producer = make_producer(make_cache(), "inproc")
    with pytest.raises(PeerUnreachable, match=address):
        producer.connect(address, security=OPEN, timeout_s=0.2)
    producer.close()
    producer.mover.close()
    leaks.require_none("a producer that found nobody")


def test_a_hello_that_comes_while_the_consumer_starts_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowListener(Listener):
        def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401
            super().__init__(*args, **options)
            time.sleep(0.3)

    monkeypatch.setattr("pdtx.engine.consumer.Listener", SlowListener)
    address = f"127.0.0.1:{free_port()}"
    cache = make_cache()
    consumer = make_consumer(cache, "inproc")
    producer = make_producer(cache)
    listening = threading.Thread(target=consumer.listen, args=(address,), kwargs={"security": OPEN})
    listening.start()
    try:
        producer.connect(address, security=OPEN, timeout_s=3.0)
    finally:
        listening.join()
        producer.close()
        consumer.close()
        producer.mover.close()


def test_a_wildcard_must_be_advertised() -> None:
    cache = make_cache()
    consumer = make_consumer(cache, "tcp")
    with pytest.raises(InputError, match="give one to advertise"):
        consumer.listen("0.0.0.0:0", security=Security(insecure=True))
    consumer.close()


def test_a_taken_port_leaves_nothing_behind() -> None:
    with Pair(mover="tcp") as pair:
        leaks = Leaks()
        cache = make_cache()
        consumer = make_consumer(cache, "tcp")
        with pytest.raises(AddressInUse):
            consumer.listen(pair.address, security=OPEN)
        consumer.close()
        leaks.require_none("a consumer that could not listen")
