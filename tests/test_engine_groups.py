"""Requests with several groups and buffers: own block tables, windows, states, latent vectors, draft layers."""

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pdtx.cache import KVCaches, PagedBuffer, PagedLatentCache
from pdtx.engine import InboundRequest, check_compatible
from pdtx.engine.granting import granted_blocks
from pdtx.errors import (
    IncompatiblePeer,
    OutOfBlocks,
    PlanError,
    ProtocolError,
    TransferError,
    TransferRefused,
    VerificationError,
)
from pdtx.kvspec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from pdtx.protocol import GrantedBlocks
from pdtx.testing.codes import check_codes, codes_for, fill_codes
from pdtx.transports import TransferKey
from tests.engine_pair import (
    CHANNELS,
    HEADS,
    OPEN,
    PATIENCE_S,
    Pair,
    attention,
    begin,
    describe,
    finished,
    join,
    latent,
    make_consumer,
    make_producer,
    produce,
    require_contents,
    scramble,
    states,
    wait_until,
)

WINDOW = 24
ENCODER = 21


def gemma(
    layout: str, block_size: int, window_layout: str = "", *, num_blocks: int = 12, window_blocks: int = 9
) -> KVCaches:
    """Full and window layers in turn."""
    full = attention(
        FullAttentionSpec, "full", layout, block_size, layers=("layers.1", "layers.3"), num_blocks=num_blocks
    )
    window = attention(
        SlidingWindowSpec,
        "window",
        window_layout or layout,
        block_size,
        layers=("layers.0", "layers.2", "layers.4"),
        num_blocks=window_blocks,
        sliding_window=WINDOW,
    )
    return join([full], [window])


def llama4(layout: str, block_size: int) -> KVCaches:
    chunk = attention(ChunkedLocalAttentionSpec, "chunk", layout, block_size, num_blocks=9, attention_chunk_size=32)
    return join([attention(FullAttentionSpec, "full", layout, block_size)], [chunk])


def deepseek(block_size: int) -> KVCaches:
    return join([latent("latent", 20, block_size), latent("indexer", 6, block_size)])


def jamba(layout: str, block_size: int, state_layout: str) -> KVCaches:
    return join(
        [attention(FullAttentionSpec, "full", layout, block_size, layers=("layers.0",))], [states(state_layout)]
    )


def whisper(layout: str, block_size: int) -> KVCaches:
    cross = attention(CrossAttentionSpec, "cross", layout, block_size, num_blocks=7)
    return join([attention(FullAttentionSpec, "full", layout, block_size)], [cross], encoder_positions=ENCODER)


FAMILIES: dict[str, tuple[KVCaches, KVCaches]] = {
    "gemma": (gemma("flash_attn_nhd", 16), gemma("flashinfer_hnd", 32, "cpu_attn_lbhnc")),
    "gemma-smaller-blocks": (gemma("flashinfer_hnd", 32), gemma("sglang", 8, num_blocks=30, window_blocks=12)),
    "llama4": (llama4("flash_attn_hnd", 16), llama4("flashinfer_nhd", 32)),
    "deepseek": (deepseek(16), deepseek(64)),
    "jamba": (jamba("flash_attn_nhd", 16, "mamba_sd"), jamba("flashinfer_hnd", 32, "mamba_ds")),
    "whisper": (whisper("flash_attn_nhd", 16), whisper("flashinfer_hnd", 8)),
}


def payload(caches: KVCaches, tokens: int) -> int:
    """Bytes that must move, counted without the engine."""
    kept = {
        "full": tokens,
        "window": min(tokens, WINDOW - 1),
        "chunk": tokens % 32,
        "cross": ENCODER,
        "state": 1,
    }
    sizes = {
        "latent": 40,
        "indexer": 12,
        "state": 3 * 6 * 2 + 2 * 4 * 5 * 4,
    }
    return sum(
        b.num_layers * kept[caches.groups[b.group].kind] * sizes.get(b.name, 2 * HEADS * CHANNELS * 2)
        for b in caches.buffers
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_caches_arrive_through_tcp(family: str) -> None:
    source, destination = FAMILIES[family]
    with Pair(source, destination, mover="tcp") as pair:
        scramble(pair.producer.allocator, 1)
        scramble(pair.consumer.allocator, 2)
        for tokens in (1, 7, 16, 31, 32, 33, 64, 77):
            request = begin(pair.producer, tokens, f"r{tokens}")
            contents = produce(pair.producer, request, [tokens // 3, tokens // 3] if tokens > 2 else [])
            ready = pair.next_ready()
            require_contents(pair, ready, contents)
            assert request.nbytes == ready.received_bytes == payload(destination, tokens)
            pair.finish(ready)
            assert pair.producer.wait(request).text == "done"


def test_several_requests_of_several_groups_do_not_mix() -> None:
    source, destination = FAMILIES["gemma-smaller-blocks"]
    with Pair(source, destination, mover="tcp") as pair:
        scramble(pair.consumer.allocator, 3)
        sent = {}
        for tokens in (40, 5, 33):
            request = begin(pair.producer, tokens, f"r{tokens}")
            sent[request.request_id] = produce(pair.producer, request, [tokens // 2])
        ready = [pair.next_ready() for _ in sent]
        for request_ in ready:
            require_contents(pair, request_, sent[request_.request_id])
        for request_ in ready:
            pair.finish(request_)


def test_groups_have_tables_of_their_own_and_nothing_is_granted_before_the_window() -> None:
    with Pair(*FAMILIES["gemma"]) as pair:
        scramble(pair.consumer.allocator, 4)
        request = begin(pair.producer, 77)
        wait_until(lambda: request.grant is not None, "a grant")
        assert request.grant is not None
        full, window = (group.block_ids for group in request.grant.groups)
        # Positions 54..77 are needed, in blocks of 32 tokens: those of the second block and the third.
        assert len(full) == len(window) == 3
        assert (window[0], request.grant.groups[1].generations[0]) == (0, 0)
        assert 0 not in (*full, *window[1:])
        assert set(full) != set(window), "scrambled pools give different blocks"
        table = pair.received("r").tables[1]
        assert table.dtype == np.int64
        assert table.tolist() == [*window, *table[3:].tolist()]
        assert len(table) == 3, "77 + 2 tokens fit into three blocks"
        pair.producer.fail(request, TransferError("enough"))


def test_a_table_is_long_enough_for_the_answer() -> None:
    with Pair(*FAMILIES["gemma"]) as pair:
        request = pair.producer.begin("r", list(range(64)), max_tokens=33, timeout_s=30.0)
        produce(pair.producer, request)
        ready = pair.next_ready()
        assert [len(table) for table in ready.tables] == [4, 4]  # 97 tokens in blocks of 32
        assert [(table == 0).tolist() for table in ready.tables] == [[False] * 4, [True, False, False, False]]
        pair.finish(ready)


def scaled(block_size: int) -> KVCaches:
    """Latent vectors, and indexer keys of which a block keeps all values before all scales: it only moves whole."""
    spec = MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=132, dtype="uint8")
    indexer = PagedLatentCache(spec, layout="deepseek_indexer", num_layers=2, num_blocks=12, name="indexer")
    return join([latent("latent", 20, block_size), indexer])


@pytest.mark.parametrize("chunks", [[], [16], [10, 7]], ids=str)
def test_blocks_that_stay_together_move_whole_however_the_prompt_is_cut(chunks: list[int]) -> None:
    with Pair(scaled(16), scaled(16), mover="tcp") as pair:
        scramble(pair.consumer.allocator, 6)
        request = begin(pair.producer, 40)
        contents = produce(pair.producer, request, chunks)
        ready = pair.next_ready()
        require_contents(pair, ready, contents)
        pair.finish(ready)


@pytest.mark.parametrize("ranks", [(1, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("chunks", [[], [10, 7]], ids=str)
def test_vectors_for_several_tokens_move_once_they_are_whole(chunks: list[int], ranks: tuple[int, int]) -> None:
    """Of 42 tokens the last two have no vector yet."""

    def caches(block_size: int, tp_size: int) -> KVCaches:
        return join([latent("compressed", 8, block_size, ratio=4, tp_size=tp_size)])

    with Pair(caches(16, ranks[0]), caches(32, ranks[1]), mover="tcp") as pair:
        request = begin(pair.producer, 42)
        contents = produce(pair.producer, request, chunks)
        ready = pair.next_ready()
        require_contents(pair, ready, contents)
        assert ready.received_bytes == ranks[1] * 2 * 10 * 8 * 2
        pair.finish(ready)


def test_blocks_that_stay_together_must_be_of_one_size() -> None:
    with pytest.raises(IncompatiblePeer, match=r"layout of buffer indexer is deepseek_indexer .* block size"):
        check_compatible(describe(scaled(16)), describe(scaled(32)))


# -- teeth -------------------------------------------------------------------------------------------------------------


def test_a_group_of_which_no_byte_was_sent_fails_by_name() -> None:
    """The complete() of a model whose window layers nobody ships: claims add up, and still a group is missing."""
    with Pair(*FAMILIES["gemma"], mover="tcp") as pair:
        request = begin(pair.producer, 40)
        produce(pair.producer, request, without=("window",))
        missing = 3 * 23 * 2 * HEADS * CHANNELS * 2
        with pytest.raises(TransferError, match=f"group window, buffer window: 0 of {missing} bytes arrived"):
            pair.producer.wait(request)
        assert pair.consumer.next_ready(0.1) is None
        request = begin(pair.producer, 40, "next")
        produce(pair.producer, request)
        pair.finish(pair.next_ready())


@pytest.mark.parametrize(
    ("family", "left_out", "named"),
    [
        ("deepseek", "indexer", "group full, buffer indexer: 0 of"),
        ("jamba", "state", "group state, buffer state: 0 of 196 bytes arrived"),
        ("whisper", "cross", "group cross, buffer cross: 0 of"),
        ("gemma", "full", "group full, buffer full: 0 of"),
    ],
)
def test_any_buffer_left_out_fails_by_name(family: str, left_out: str, named: str) -> None:
    with Pair(*FAMILIES[family]) as pair:
        request = begin(pair.producer, 40)
        produce(pair.producer, request, without=(left_out,))
        with pytest.raises(TransferError, match=named):
            pair.producer.wait(request)
        assert pair.consumer.next_ready(0.1) is None


def test_a_window_that_lacks_its_last_position_fails_by_name() -> None:
    with Pair(*FAMILIES["gemma"]) as pair:
        request = begin(pair.producer, 40)
        contents = produce(pair.producer, request, without=("window",), complete=False)
        assert contents
        for layer in range(3):
            pair.producer.layer_ready(request, 1, layer, 0, 39 if layer == 1 else 40)
        pair.producer.computed(request, 7)
        with pytest.raises(
            TransferError,
            match=r"group window, buffer window: 1 of 69 layer x position slices have not arrived, "
            r"first layer 1 \(layers.2\) position 39",
        ):
            pair.producer.wait(request)


def test_positions_before_the_window_are_refused() -> None:
    with Pair(*FAMILIES["gemma"]) as pair:
        request = begin(pair.producer, 40)
        session_id = pair.received("r").session.session_id
        wait_until(lambda: request.grant is not None, "a grant")
        place = pair.consumer.receiver.place
        with pytest.raises(TransferRefused, match=r"is not a part of 3 layers x positions 17..40 of buffer window"):
            place(session_id, TransferKey("r", 0, 1, 16, 40, 1))
        for key in (TransferKey("r", 0, 1, 0, 40, 2), TransferKey("r", 0, 1, 0, 40, -1)):
            with pytest.raises(TransferRefused, match=r"is for buffer .*, of which nothing comes from there"):
                place(session_id, key)
        with pytest.raises(TransferRefused, match="rank 1 takes nothing of buffer full from there"):
            place(session_id, TransferKey("r", 0, 1, 0, 40, 0, 0, 1))
        pair.producer.fail(request, TransferError("enough"))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda groups: groups[:1], r"^decode-.* granted blocks of 1 groups and has 2$"),
        (lambda groups: groups[::-1], "destination has the null block where tokens 0..32 should be"),
        (
            lambda groups: [GrantedBlocks(block_ids=[1, 900], generations=[0, 0]), groups[1]],
            "destination block id 900 is outside its pool of 12 blocks",
        ),
        (
            lambda groups: [groups[0], GrantedBlocks(block_ids=[1], generations=[0])],
            "destination has 1 blocks of 32 tokens, too few for tokens 41..64",
        ),
    ],
    ids=["a group less", "another group's", "beyond the pool", "too few"],
)
def test_a_grant_that_cannot_be_fails_the_request_and_no_other(
    change: Callable[[list[GrantedBlocks]], list[GrantedBlocks]], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Pair(*FAMILIES["gemma"]) as pair:
        with monkeypatch.context() as patch:
            patch.setattr("pdtx.engine.inbound_control.granted_blocks", lambda request: change(granted_blocks(request)))
            request = begin(pair.producer, 64)
            produce(pair.producer, request)
            with pytest.raises((ProtocolError, PlanError), match=error):
                pair.producer.wait(request)
        produce(pair.producer, begin(pair.producer, 64, "next"))
        pair.finish(pair.next_ready())


def test_a_group_without_blocks_leaves_the_others_theirs() -> None:
    with Pair(*FAMILIES["jamba"]) as pair:
        taken = [begin(pair.producer, 1, f"r{i}") for i in range(4)]
        free = pair.producer.allocator.num_free
        assert free == (7, 0)
        with pytest.raises(OutOfBlocks, match="group state: 1 blocks asked for, 0 of 4 are free"):
            begin(pair.producer, 1, "one-too-many")
        assert pair.producer.allocator.num_free == free
        assert not pair.producer.wait_for_blocks(pair.producer.blocks_needed(1), 0.05)
        for request in taken:
            pair.producer.fail(request, TransferError("enough"))
        assert pair.producer.wait_for_blocks(pair.producer.blocks_needed(1), 5.0)


def test_a_request_that_never_fits_is_refused_by_group() -> None:
    source = gemma("flash_attn_nhd", 16, num_blocks=40, window_blocks=40)
    with Pair(source, FAMILIES["gemma"][1]) as pair:
        request = begin(pair.producer, 351)
        with pytest.raises(TransferError, match="it needs 12 blocks and the pool of group full has 11"):
            pair.producer.wait(request)


# -- verification ------------------------------------------------------------------------------------------------------


def at(buffer: PagedBuffer, request: InboundRequest, position: int) -> int:
    return int(request.tables[buffer.group][position // buffer.block_size])


def spoil(buffer: PagedBuffer, request: InboundRequest, layer: int, position: int, byte: int) -> None:
    """Flip one bit of a position's canonical bytes."""
    table = torch.as_tensor(request.tables[buffer.group])
    rows = buffer.canonical(layer, table, position, position + 1)
    rows.view(-1)[byte] ^= 4
    buffer.write_canonical(layer, table, position, rows)


@pytest.mark.parametrize(
    ("family", "buffer", "layer", "position", "byte", "named"),
    [
        ("gemma", "full", 1, 3, 9, r"buffer full layer 1 \(layers.3\) K token 3 head 0 channel 4 "),
        ("gemma", "window", 2, 39, 63, r"buffer window layer 2 \(layers.4\) V token 39 head 1 channel 7 "),
        ("deepseek", "latent", 1, 5, 38, "group full buffer latent layer 1 token 5 channel 19 "),
        ("deepseek", "indexer", 0, 39, 2, "group full buffer indexer layer 0 token 39 channel 1 "),
        ("jamba", "state", 0, 0, 17, r"buffer state layer 0 \(layers.1\) state conv step 1 channel 2 byte 17 "),
        ("whisper", "cross", 1, 20, 0, "buffer cross layer 1 K token 20 head 0 channel 0 "),
    ],
)
def test_one_wrong_bit_anywhere_is_named(
    family: str, buffer: str, layer: int, position: int, byte: int, named: str
) -> None:
    with Pair(*FAMILIES[family]) as pair:
        produce(pair.producer, begin(pair.producer, 40), [13])
        ready = pair.next_ready()
        pair.consumer.verify(ready)
        wrong = pair.destinations.buffer(buffer)
        spoil(wrong, ready, layer, position, byte)
        with pytest.raises(VerificationError, match=rf"^1 of \d+ .* first: {named}\(block (\d+)\) is 0x") as caught:
            pair.consumer.verify(ready)
        assert caught.value.wrong == 1
        assert f"(block {at(wrong, ready, position)})" in str(caught.value)
        pair.finish(ready, verify=False)


def free_block(buffer: PagedBuffer, pair: Pair, request: InboundRequest) -> int:
    return int(pair.consumer.allocator.free_blocks().groups[buffer.group].ids[0])


def null_block(buffer: PagedBuffer, pair: Pair, request: InboundRequest) -> int:
    return 0


@pytest.mark.parametrize("place", [free_block, null_block])
@pytest.mark.parametrize(
    ("family", "name"), [("gemma", "full"), ("gemma", "window"), ("deepseek", "indexer"), ("jamba", "state")]
)
def test_a_stray_write_into_any_buffer_is_caught(
    family: str, name: str, place: Callable[[PagedBuffer, Pair, InboundRequest], int]
) -> None:
    with Pair(*FAMILIES[family]) as pair:
        produce(pair.producer, begin(pair.producer, 40))
        ready = pair.next_ready()
        buffer = pair.destinations.buffer(name)
        table = torch.tensor([place(buffer, pair, ready)])
        rows = buffer.canonical(0, table, 0, 1)
        rows.view(-1)[0] ^= 1
        buffer.write_canonical(0, table, 0, rows)
        with pytest.raises(VerificationError, match=rf"1 2-byte words outside .*: 1 in .*buffer {name}$"):
            pair.consumer.verify(ready)
        buffer.poison(table)
        pair.finish(ready)


@pytest.mark.parametrize("position", [16, 0, 40, 63])
def test_a_write_beside_the_window_in_its_own_blocks_is_caught(position: int) -> None:
    """Positions 17..40 of a window in blocks of 32: the first block is not used from its start on."""
    with Pair(*FAMILIES["gemma"]) as pair:
        produce(pair.producer, begin(pair.producer, 40))
        ready = pair.next_ready()
        buffer = pair.destinations.buffer("window")
        spoil(buffer, ready, 0, position, 5)
        with pytest.raises(VerificationError, match=r"1 2-byte words outside .*: 1 in buffer window$"):
            pair.consumer.verify(ready)
        spoil(buffer, ready, 0, position, 5)
        pair.finish(ready)


def test_a_value_of_another_buffer_is_named_as_the_source() -> None:
    """Two buffers of one shape: the plan of one wrote what belongs to the other."""
    with Pair(*FAMILIES["gemma"]) as pair:
        produce(pair.producer, begin(pair.producer, 40))
        ready = pair.next_ready()
        full, window = pair.destinations.buffers
        tables = [torch.as_tensor(table) for table in ready.tables]
        full.write_canonical(0, tables[0], 30, window.canonical(1, tables[1], 35, 36))
        with pytest.raises(VerificationError) as caught:
            pair.consumer.verify(ready)
        assert "first: buffer full layer 0 (layers.1) K token 30 head 0 channel" in str(caught.value)
        assert str(caught.value).endswith("holds the value of buffer window layer 1 (layers.2) K token 35 head 0")
        pair.finish(ready, verify=False)


# -- layers that only one side has -------------------------------------------------------------------------------------


def with_draft(layout: str, *, in_between: bool = True) -> KVCaches:
    """A producer's cache with draft layers: one among those of the model, and a buffer that nobody else has."""
    names = ("layers.0", "draft.0", "layers.1") if in_between else ("layers.0", "layers.1", "draft.0")
    full = attention(FullAttentionSpec, "full", layout, layers=names)
    return join([full, attention(FullAttentionSpec, "eagle", layout, layers=("draft.1",))])


@pytest.mark.parametrize("in_between", [True, False])
def test_draft_layers_stay_where_they_are_and_are_named_once(
    in_between: bool, caplog: pytest.LogCaptureFixture
) -> None:
    source = with_draft("flash_attn_nhd", in_between=in_between)
    destination = join([attention(FullAttentionSpec, "full", "flashinfer_hnd", 32)])
    not_sent = ("buffer full layer draft.0", "buffer eagle layer draft.1")
    drafts = ["draft.0", "draft.1"]
    with caplog.at_level(logging.INFO), Pair(source, destination, mover="tcp", not_transferred=drafts) as pair:
        assert pair.producer.not_sent == not_sent
        for number in range(2):
            request = begin(pair.producer, 40, f"r{number}")
            contents = produce(pair.producer, request, [11])
            ready = pair.next_ready()
            assert ready.session.match.not_sent == not_sent
            require_contents(pair, ready, contents)
            assert ready.received_bytes == 2 * 40 * 2 * HEADS * CHANNELS * 2
            pair.finish(ready)
    said = [record.getMessage() for record in caplog.records if "draft.0" in record.getMessage()]
    assert len([text for text in said if "decode-" in text]) == 1
    assert len([text for text in said if "prefill-" in text]) == 1
    assert all(name in text for name in not_sent for text in said)


def model_of(*names: str) -> KVCaches:
    """A cache of layers of one buffer, and of another one where a name says so."""
    own = tuple(name for name in names if not name.startswith("eagle"))
    buffers = [attention(FullAttentionSpec, "full", layers=own)]
    if len(own) < len(names):
        buffers.append(attention(FullAttentionSpec, "eagle", layers=names[len(own) :]))
    return join(buffers)


@pytest.mark.parametrize(
    ("extra", "field", "has", "needs"),
    [("draft.0", "layers of buffer full", "2", "3"), ("eagle.0", "layers of buffer eagle", "0", "1")],
    ids=["layer", "buffer"],
)
@pytest.mark.parametrize("with_it", ["producer", "consumer"])
@pytest.mark.parametrize("declared_by", ["nobody", "producer", "consumer"])
def test_layers_that_one_side_lacks_are_refused_with_both_counts_unless_declared(
    extra: str, field: str, has: str, needs: str, with_it: str, declared_by: str
) -> None:
    sides = {"producer": model_of("layers.0", "layers.1"), "consumer": model_of("layers.0", "layers.1")}
    sides[with_it] = model_of("layers.0", "layers.1", extra)
    declared = {declared_by: [extra]}
    producer = make_producer(sides["producer"], not_transferred=declared.get("producer", ()))
    consumer = make_consumer(sides["consumer"], verify=True, not_transferred=declared.get("consumer", ()))
    address = consumer.listen("127.0.0.1:0", security=OPEN)
    try:
        if declared_by == "nobody":
            with pytest.raises(IncompatiblePeer, match=f"{extra}: run the same model") as caught:
                producer.connect(address, security=OPEN)
            both = (needs, has) if with_it == "producer" else (has, needs)
            assert (caught.value.field, caught.value.producer, caught.value.consumer) == (field, *both)
            return
        producer.connect(address, security=OPEN)
        request = begin(producer, 40)
        contents = produce(producer, request, [11])
        ready = consumer.next_ready(PATIENCE_S)
        assert ready is not None
        found = consumer.verify(ready)
        assert found.compared == 2 * 2 * 40 * HEADS * CHANNELS
        assert extra in str(producer.not_sent) or with_it == "consumer"
        assert ("full", "layers.1") in contents
        consumer.finish(ready, finished(ready))
        consumer.let_go(ready)
        assert producer.wait(request).text == "done"
    finally:
        for engine in (producer, consumer):
            engine.close()
            engine.mover.close()


@pytest.mark.parametrize("in_between", [True, False])
def test_layers_go_together_only_where_the_producer_has_them_together(in_between: bool) -> None:
    destination = join([attention(FullAttentionSpec, "full", "flashinfer_hnd", 32)])
    source = with_draft("flash_attn_nhd", in_between=in_between)
    with Pair(source, destination, not_transferred=["draft.0", "draft.1"]) as pair:
        request = begin(pair.producer, 40)
        session_id = pair.received("r").session.session_id
        wait_until(lambda: request.grant is not None, "a grant")
        receiver, key = pair.consumer.receiver, TransferKey("r", 0, 2, 0, 40)
        if in_between:
            with pytest.raises(TransferRefused, match="these layers do not lie one after another at the producer"):
                receiver.place(session_id, key)
        else:
            placement = receiver.place(session_id, key)
            assert placement.slices.total == 2 * 40 * 2 * HEADS * CHANNELS * 2
            receiver.placed(session_id, key, 0, TransferError("enough"))
        pair.producer.fail(request, TransferError("enough"))


# -- codes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_codes_fill_every_kind_of_buffer(family: str) -> None:
    for buffer in FAMILIES[family][0].buffers:
        positions = min(40, buffer.block_size * (buffer.num_blocks - 1)) if buffer.name != "state" else 1
        codes = codes_for(buffer, positions)
        blocks = np.array([4, 2, 3, 1], np.int64)[: -(-positions // buffer.block_size)]
        fill_codes(buffer, blocks, codes)
        found = check_codes(buffer, blocks, codes)
        assert found.compared == codes.layers * buffer.bytes_per_position * positions // codes.itemsize
        assert found.wrong == 0
        buffer.poison()
        assert check_codes(buffer, blocks, codes).wrong > found.compared // 2
