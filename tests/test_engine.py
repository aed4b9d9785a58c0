"""KVProducer and KVConsumer against each other: no model, random K/V, real sockets where they matter."""

import multiprocessing
import multiprocessing.synchronize
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import pytest
import torch

from pdtx.cache import PagedKVCache
from pdtx.engine import (
    InboundRequest,
    OutboundRequest,
    TransferTimes,
)
from pdtx.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    InputError,
    OutOfBlocks,
    PdtxError,
    PeerLost,
    PlanError,
    ProtocolError,
    TransferError,
    TransferRefused,
    VerificationError,
)
from pdtx.layout import LAYOUT_ORDERS, KVCacheLayout
from pdtx.plan import Endpoint, Runs, build_plan
from pdtx.protocol import (
    ReadReference,
)
from pdtx.sidechannel import Dialer, Listener
from pdtx.spans import union_seconds
from pdtx.testing.pair import Leaks
from pdtx.testing.wrapped import WrappedConnection
from pdtx.transports import Connection, Region, TransferHandle, TransferKey, make_mover
from tests.engine_pair import (
    CHANNELS,
    HEADS,
    LAYERS,
    OPEN,
    PATIENCE_S,
    Pair,
    Sent,
    WrappedMover,
    all_free,
    arrived,
    begin,
    bits,
    change,
    finished,
    make_cache,
    make_producer,
    ship,
    wait_until,
)

# -- the way it should go ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_sizes", [(16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize("layouts", list(product(LAYOUT_ORDERS, repeat=2)), ids="->".join)
def test_every_pair_of_layouts_and_block_sizes(layouts: tuple[str, str], block_sizes: tuple[int, int]) -> None:
    source, destination = (make_cache(*of) for of in zip(layouts, block_sizes, strict=True))
    lengths = sorted({n for size in block_sizes for n in (1, size - 1, size, size + 1, 2 * size - 1)})
    with Pair(source, destination, mover="tcp") as pair:
        for tokens in lengths:
            request = begin(pair.producer, tokens, f"r{tokens}")
            sent = ship(pair.producer, request, [tokens // 2] if tokens > 1 else [])
            ready = pair.next_ready()
            assert torch.equal(bits(arrived(destination, ready)), bits(sent.data))
            pair.finish(ready)
            got = pair.producer.wait(request)
            assert (got.request_id, got.token_ids) == (request.request_id, [1, 2])
            assert request.nbytes == ready.received_bytes == sent.data.numel() * sent.data.element_size()


@pytest.mark.timeout(30)
def test_a_signal_whose_handler_takes_long_does_not_make_waiting_endless() -> None:
    """It did: a SimpleQueue of CPython 3.11 forgets its timeout when that passes while a handler runs."""
    before = signal.signal(signal.SIGUSR2, lambda *_: time.sleep(0.2))
    try:
        with Pair() as pair:
            timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2))
            timer.start()
            assert pair.consumer.next_ready(0.2) is None
            timer.join()
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_several_requests_at_once() -> None:
    lengths = (5, 40, 16, 33, 17, 1)
    with Pair(make_cache(num_blocks=20), make_cache("flashinfer_hnd", 32, num_blocks=20), mover="tcp") as pair:
        sent = dict[str, Sent]()

        def produce(tokens: int) -> None:
            request = begin(pair.producer, tokens, f"r{tokens}")
            sent[request.request_id] = ship(pair.producer, request, [tokens // 2] if tokens > 1 else [])

        threads = [threading.Thread(target=produce, args=(tokens,)) for tokens in lengths]
        for thread in threads:
            thread.start()
        ready = [pair.next_ready() for _ in lengths]
        for thread in threads:
            thread.join()
        assert {request.request_id for request in ready} == set(sent)
        for request in ready:
            assert torch.equal(bits(arrived(pair.destination, request)), bits(sent[request.request_id].data))
            pair.finish(request)


def test_two_producers_with_equal_request_ids() -> None:
    with Pair(destination=make_cache("flashinfer_hnd", 32, num_blocks=20)) as pair:
        second = pair.connect(make_cache("flash_attn_hnd", 32))
        pairs = {producer.engine_id: (producer, begin(producer, 20, "same")) for producer in (pair.producer, second)}
        sent = {name: ship(producer, request) for name, (producer, request) in pairs.items()}
        for _ in pairs:
            ready = pair.next_ready()
            assert torch.equal(bits(arrived(pair.destination, ready)), bits(sent[ready.session.engine_id].data))
            pair.finish(ready)
        for producer, request in pairs.values():
            assert producer.wait(request).text == "done"


def test_layers_before_their_grant_wait_for_it() -> None:
    with Pair(destination=make_cache("flashinfer_hnd", 32, num_blocks=3)) as pair:
        first, second = begin(pair.producer, 40, "first"), begin(pair.producer, 40, "second")
        ship(pair.producer, first)
        ready = pair.next_ready()
        sent = ship(pair.producer, second, [20])
        assert second.grant is None
        assert len(second.ready) == 2 * LAYERS
        assert not second.unsent
        pair.finish(ready)
        ready = pair.next_ready()
        assert torch.equal(bits(arrived(pair.destination, ready)), bits(sent.data))
        pair.finish(ready)


def test_layers_after_their_grant_go_at_once() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        wait_until(lambda: request.grant is not None, "a grant")
        ship(pair.producer, request, [10], complete=False)
        wait_until(lambda: request.grant is not None and request.unsent == 0, "all layers sent before computed()")
        pair.producer.computed(request, 7)
        pair.finish(pair.next_ready())


def test_first_token_travels() -> None:
    with Pair() as pair:
        ship(pair.producer, begin(pair.producer, 3))
        ready = pair.next_ready()
        assert ready.complete is not None
        assert ready.complete.first_token == 7
        assert ready.ask.token_ids == [0, 1, 2]
        pair.finish(ready)


def test_a_request_id_can_be_used_again_when_its_request_has_ended() -> None:
    with Pair() as pair:
        for _ in range(3):
            request = begin(pair.producer, 20)
            ship(pair.producer, request)
            pair.finish(pair.next_ready())
            pair.producer.wait(request)


def test_release_gives_the_producer_its_blocks_before_the_end() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        ship(pair.producer, request)
        ready = pair.next_ready()
        assert pair.producer.allocator.num_free < (pair.source.num_blocks - 1,)
        pair.consumer.release(ready)
        assert pair.producer.wait_for_blocks([pair.source.num_blocks - 1], PATIENCE_S)
        pair.finish(ready, verify=False)
        assert pair.producer.wait(request).text == "done"


def test_the_decode_loop_keeps_its_blocks_until_it_lets_go() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        ship(pair.producer, request)
        ready = pair.next_ready()
        pair.consumer.fail(ready, TransferError("no more"))
        with pytest.raises(TransferError, match="no more"):
            pair.producer.wait(request)
        time.sleep(0.1)
        assert pair.consumer.allocator.num_free == (pair.destination.num_blocks - 2,)
        pair.consumer.let_go(ready)
        pair.require_all_free()


# -- verification --------------------------------------------------------------------------------------------------

_ROW = r"layer (\d+) ([KV]) token (\d+) head (\d+)"


def row(cache: PagedKVCache, ids: torch.Tensor, coordinate: Sequence[str]) -> torch.Tensor:
    layer, token, head = (int(coordinate[i]) for i in (0, 2, 3))
    return cache.canonical(layer, ids, token, token + 1)["KV".index(coordinate[1]), 0, head]


def test_a_wrong_plan_is_caught_with_the_coordinate_and_its_true_source() -> None:
    destination = make_cache("flashinfer_hnd", 32)
    assert isinstance(destination.layout, KVCacheLayout)
    with Pair(destination=destination, plan_layout=destination.layout.with_swapped("token", "head")) as pair:
        request = begin(pair.producer, 64)
        ship(pair.producer, request)
        ready = pair.next_ready()
        with pytest.raises(VerificationError) as caught:
            pair.consumer.verify(ready)
        text = str(caught.value)
        found = re.search(
            rf"first: buffer full {_ROW} channel \d+ \(block (\d+)\) holds the value of buffer full {_ROW}$", text
        )
        assert found is not None, text
        where, block, origin = found.groups()[:4], int(found[5]), found.groups()[5:]
        here, there = torch.as_tensor(ready.granted(0)), torch.as_tensor(request.tables[0])
        assert block == here[int(where[2]) // 32]
        wrong = row(destination, here, where)
        assert torch.equal(wrong, row(pair.source, there, origin))
        assert not torch.equal(wrong, row(pair.source, there, where))
        assert 0 < caught.value.wrong <= LAYERS * 2 * 64 * HEADS * CHANNELS
        pair.consumer.fail(ready, caught.value)
        pair.consumer.let_go(ready)
        with pytest.raises(VerificationError, match=r"failed in verification: .* elements are wrong") as told:
            pair.producer.wait(request)
        assert told.value.wrong == caught.value.wrong


def free_block(pair: Pair, request: InboundRequest) -> tuple[int, int]:
    return int(pair.consumer.allocator.free_blocks().groups[0].ids[-1]), 0


def tail_of_last_block(pair: Pair, request: InboundRequest) -> tuple[int, int]:
    return int(request.granted(0)[-1]), request.num_tokens % 32


def block_for_new_tokens(pair: Pair, request: InboundRequest) -> tuple[int, int]:
    need = request.needs[0]
    assert need.blocks.stop > need.granted.stop
    return int(request.tables[0][-1]), 0


@pytest.mark.parametrize(
    ("place", "tokens"),
    [(free_block, 20), (tail_of_last_block, 20), (tail_of_last_block, 63), (block_for_new_tokens, 32)],
)
def test_a_stray_write_is_caught(place: Callable[[Pair, InboundRequest], tuple[int, int]], tokens: int) -> None:
    with Pair() as pair:
        ship(pair.producer, begin(pair.producer, tokens))
        ready = pair.next_ready()
        pair.consumer.verify(ready)
        block, token = place(pair, ready)
        pair.destination.view(LAYERS - 1)[1, block, token, HEADS - 1, CHANNELS - 1] = 1.0
        with pytest.raises(
            VerificationError, match=r"^1 2-byte words outside the request's tokens were written: 1 in buffer full$"
        ):
            pair.consumer.verify(ready)
        pair.destination.poison(torch.tensor([block]))
        pair.finish(ready, verify=False)


def test_a_changed_byte_is_caught() -> None:
    with Pair() as pair:
        ship(pair.producer, begin(pair.producer, 40))
        ready = pair.next_ready()
        pair.destination.view(1)[1, int(ready.granted(0)[1]), 3, 1, 5] += 1.0
        with pytest.raises(
            VerificationError, match=r"^1 of \d+ .* buffer full layer 1 V token 35 head 1 channel 5 \(block"
        ) as caught:
            pair.consumer.verify(ready)
        assert caught.value.wrong == 1
        pair.finish(ready, verify=False)


def test_what_was_never_written_is_named_as_poison() -> None:
    with Pair() as pair:
        ship(pair.producer, begin(pair.producer, 40))
        ready = pair.next_ready()
        pair.destination.poison(torch.as_tensor(ready.granted(0)[1:2]))
        with pytest.raises(VerificationError, match=r"token 32 .* was never written: it holds poison"):
            pair.consumer.verify(ready)
        pair.finish(ready, verify=False)


def test_nothing_is_compared_with_blocks_that_the_producer_has_given_back() -> None:
    with Pair() as pair:
        ship(pair.producer, begin(pair.producer, 20))
        ready = pair.next_ready()
        pair.consumer.release(ready)
        assert pair.producer.wait_for_blocks([pair.source.num_blocks - 1], PATIENCE_S)
        with pytest.raises(TransferError, match="failed in verification and decoding: request r is not here any more"):
            pair.consumer.verify(ready)
        pair.consumer.let_go(ready)


# -- failures on either side ---------------------------------------------------------------------------------------


def test_a_producer_that_fails_midway() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        ship(pair.producer, request, [10], complete=False)
        received = pair.received("r")
        wait_until(lambda: request.grant is not None, "a grant")
        pair.producer.fail(request, TransferError("the model broke"))
        with pytest.raises(TransferError, match=r"^the model broke$"):
            pair.producer.wait(request)
        wait_until(lambda: received.error is not None, "the consumer to learn of it")
        assert re.search("prefill-.* failed in prefill: the model broke", str(received.error))
        pair.producer.layer_ready(request, 0, 0, 0, 10)  # what comes too late is dropped
        pair.producer.computed(request, 7)
        pair.require_all_free()
        assert pair.consumer.next_ready(0.1) is None


def test_a_slice_that_cannot_be_sent_fails_the_request_under_its_own_name() -> None:
    """Not as a wrong completion: the last slice to fail must not look like the last to be sent."""
    with Pair(wrap=partial(WrappedMover, wrap=partial(FailingConnection, at=LAYERS))) as pair:
        request = begin(pair.producer, 20)
        received = pair.received("r")
        wait_until(lambda: request.grant is not None, "a grant")
        ship(pair.producer, request)
        with pytest.raises(PlanError, match="cannot be put"):
            pair.producer.wait(request)
        wait_until(lambda: received.error is not None, "the consumer to learn of it")
        assert "cannot be put" in str(received.error)


def test_a_transfer_that_fails_fails_the_request_under_its_own_name() -> None:
    with Pair(wrap=partial(WrappedMover, wrap=partial(FailingConnection, at=LAYERS, late=True))) as pair:
        request = begin(pair.producer, 20)
        received = pair.received("r")
        wait_until(lambda: request.grant is not None, "a grant")
        ship(pair.producer, request)
        with pytest.raises(TransferError, match="cannot be put"):
            pair.producer.wait(request)
        wait_until(lambda: received.error is not None, "the consumer to learn of it")
        assert "cannot be put" in str(received.error)


@pytest.mark.parametrize("ending", [None, TransferError("the connection broke")], ids=["arrives", "stops"])
def test_the_producers_blocks_are_not_used_again_while_a_transfer_reads_them(ending: PdtxError | None) -> None:
    handles = list[TransferHandle]()
    with Pair(wrap=partial(WrappedMover, wrap=partial(HoldingConnection, handles=handles))) as pair:
        request = begin(pair.producer, 20)
        pair.producer.layer_ready(request, 0, 0, 0, 20)
        wait_until(lambda: bool(handles), "a transfer")
        handles[0].post()
        pair.producer.fail(request, TransferError("enough"))
        time.sleep(0.1)
        assert not all_free(pair.producer.allocator)
        handles[0].finish(ending)
        pair.require_all_free()


def test_a_consumer_that_is_done_early_does_not_cost_the_producers_blocks() -> None:
    handles = list[TransferHandle]()
    with Pair(wrap=partial(WrappedMover, wrap=partial(HoldingConnection, handles=handles))) as pair:
        request = begin(pair.producer, 20)
        pair.producer.layer_ready(request, 0, 0, 0, 20)
        wait_until(lambda: bool(handles), "a transfer")
        handles[0].post()
        received = pair.received("r")
        pair.consumer.finish(received, finished(received))
        with pytest.raises(ProtocolError, match="finished request r before all of it was delivered"):
            pair.producer.wait(request)
        assert not all_free(pair.producer.allocator)
        handles[0].finish()
        pair.require_all_free()


def test_a_device_that_fails_fails_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)

        def broken_fence() -> None:
            raise RuntimeError("device-side assert\nwith many lines")

        monkeypatch.setattr("pdtx.engine.producer.record_fence", lambda _: broken_fence)
        pair.producer.layer_ready(request, 0, 0, 0, 20)
        piece = r"request r .*, 2 blocks of rank 0 \(\d+, \d+\) could not be sent"
        reason = "shipping failed: RuntimeError: device-side assert with many lines"
        with pytest.raises(TransferError, match=f"^{piece}: {reason}$"):
            pair.producer.wait(request)
        monkeypatch.undo()
        ship(pair.producer, begin(pair.producer, 20, "next"))
        pair.finish(pair.next_ready())


def test_reference_data_that_no_message_can_carry_fails_the_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        ship(pair.producer, request)
        ready = pair.next_ready()
        monkeypatch.setattr("pdtx.protocol.MAX_MESSAGE_BYTES", 1000)
        with pytest.raises(
            TransferError,
            match=r"failed in verification .*: a Reference of \d+ bytes exceeds the limit",
        ):
            pair.consumer.verify(ready)
        monkeypatch.undo()
        pair.consumer.let_go(ready)
        ship(pair.producer, begin(pair.producer, 20, "next"))
        pair.finish(pair.next_ready())


@pytest.mark.parametrize("part", [(LAYERS, 0, 20), (0, 0, 21), (0, 15, 5)], ids=str)
def test_reference_data_beyond_the_request_is_refused(part: tuple[int, int, int]) -> None:
    with Pair() as pair:
        ship(pair.producer, begin(pair.producer, 20))
        ready = pair.next_ready()
        layer, start, stop = part
        pair.consumer.core.effects.send(
            ready.session.peer, ReadReference(request_id="r", buffer=0, layer=layer, token_start=start, token_stop=stop)
        )
        wait_until(lambda: ready.error is not None, "a refusal")
        assert "failed in verification" in str(ready.error)
        pair.consumer.let_go(ready)


class FailingConnection(WrappedConnection):
    """Its at-th put fails, once computed() has been called: at once, or as a transfer (late)."""

    def __init__(self, inner: Connection, *, at: int, late: bool = False) -> None:
        super().__init__(inner)
        self.at, self.late, self.puts = at, late, 0

    def put(
        self, key: TransferKey, region: Region, runs: Runs, deadline: float, *, staged: bool = False
    ) -> TransferHandle:
        self.puts += 1
        if self.puts < self.at:
            return self.inner.put(key, region, runs, deadline, staged=staged)
        time.sleep(0.2)  # until computed() has been called
        if not self.late:
            raise PlanError("it cannot be put")
        handle = TransferHandle(key, 1, "peer", deadline)
        handle.finish(TransferError("it cannot be put"))
        return handle


class HoldingConnection(WrappedConnection):
    """Its transfers go on until the test ends them."""

    def __init__(self, inner: Connection, handles: list[TransferHandle]) -> None:
        super().__init__(inner)
        self.handles = handles

    def put(
        self, key: TransferKey, region: Region, runs: Runs, deadline: float, *, staged: bool = False
    ) -> TransferHandle:
        self.handles.append(TransferHandle(key, runs.source().total, "peer", deadline))
        return self.handles[-1]


def test_a_consumer_that_fails_while_receiving() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        received = pair.received("r")
        wait_until(lambda: request.grant is not None, "a grant")
        pair.consumer.fail(received, TransferError("out of luck"))
        with pytest.raises(TransferError, match=r"^decode-.* failed in payload: out of luck$"):
            pair.producer.wait(request)
        ship(pair.producer, request)


def test_a_consumer_that_fails_while_decoding() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        ship(pair.producer, request)
        ready = pair.next_ready()
        pair.consumer.release(ready)
        pair.consumer.fail(ready, TransferError("out of luck"))
        pair.consumer.let_go(ready)
        with pytest.raises(TransferError, match=r"^decode-.* failed in the decoder: out of luck$"):
            pair.producer.wait(request)
        pair.consumer.finish(ready, finished(ready))  # too late: ignored


@pytest.mark.parametrize("off_by", [-1, 1])
def test_a_completion_that_claims_another_size_is_refused(off_by: int) -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        ship(pair.producer, request, complete=False)
        wait_until(lambda: request.grant is not None and request.unsent == 0, "all layers sent")
        leg = request.legs[0]
        first = next(iter(leg.delivered))
        change(pair.producer, leg, delivered={**leg.delivered, first: leg.delivered[first] + off_by})
        pair.producer.computed(request, 7)
        with pytest.raises(
            TransferError, match=rf"r wrongly: claims 20 tokens and {request.nbytes + off_by} bytes, noticed"
        ):
            pair.producer.wait(request)
        assert pair.consumer.next_ready(0.1) is None


def test_a_completion_that_claims_other_tokens_is_refused() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        ship(pair.producer, request, complete=False)
        wait_until(lambda: request.grant is not None and request.unsent == 0, "all layers sent")
        change(pair.producer, request, num_tokens=request.num_tokens - 1)
        pair.producer.computed(request, 7)
        with pytest.raises(TransferError, match="completed r wrongly: claims 19 tokens"):
            pair.producer.wait(request)
        assert pair.consumer.next_ready(0.1) is None


def test_a_completion_without_a_layer_is_refused() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        for layer in (0, 2):
            pair.producer.layer_ready(request, 0, layer, 0, 20)
        pair.producer.computed(request, 7)
        with pytest.raises(
            TransferError,
            match="buffer full: 20 of 60 layer x position slices have not arrived, first layer 1 position 0",
        ):
            pair.producer.wait(request)
        assert pair.consumer.next_ready(0.1) is None


def test_a_completion_without_the_last_token_is_refused() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        for layer in range(LAYERS):
            pair.producer.layer_ready(request, 0, layer, 0, 19)
        pair.producer.computed(request, 7)
        with pytest.raises(
            TransferError,
            match="buffer full: 3 of 60 layer x position slices have not arrived, first layer 0 position 19",
        ):
            pair.producer.wait(request)


def test_a_payload_that_comes_twice_is_refused() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        pair.producer.layer_ready(request, 0, 0, 0, 20)
        pair.producer.layer_ready(request, 0, 0, 10, 11)
        with pytest.raises(TransferRefused, match=r"layers 0..1 tokens 10..11 was received before"):
            pair.producer.wait(request)


@pytest.mark.parametrize("part", [(0, 4, 0, 20), (0, 1, 0, 21), (1, 1, 0, 20), (-1, 1, 0, 20), (0, 1, 5, 5)], ids=str)
def test_a_payload_outside_the_request_is_refused(part: tuple[int, int, int, int]) -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        received = pair.received("r")
        wait_until(lambda: request.grant is not None, "a grant")
        with pytest.raises(TransferRefused, match=r"is not a part of 3 layers x positions 0..20 of buffer full"):
            pair.consumer.receiver.place(received.session.session_id, TransferKey("r", *part))
        pair.producer.fail(request, TransferError("enough"))


def test_a_payload_for_a_request_of_another_session_is_refused() -> None:
    with Pair(destination=make_cache("flashinfer_hnd", 32, num_blocks=20), mover="tcp") as pair:
        mine = begin(pair.producer, 20, "mine")
        other = pair.connect()
        wait_until(lambda: mine.grant is not None, "a grant")
        key = TransferKey("mine", 0, 1, 0, 20)
        assert other.core.session.route is not None
        assert mine.grant is not None
        plan = build_plan(
            Endpoint.of(other.cache.buffers[0].layout, [1, 2]),
            Endpoint.of(pair.destination.layout, mine.grant.groups[0].block_ids),
            range(20),
            range(1),
        )
        handle = other.core.session.route.connection.put(
            key, Region(other.cache.buffers[0].ranks[0].memory), plan.flat, time.monotonic() + PATIENCE_S
        )
        with pytest.raises(TransferRefused, match=r"request mine layers 0..1 tokens 0..20 was not granted"):
            handle.wait()
        ship(pair.producer, mine)
        pair.finish(pair.next_ready())


def test_no_payload_before_the_grant_or_after_the_end() -> None:
    with Pair(destination=make_cache("flashinfer_hnd", 32, num_blocks=3)) as pair:
        first, queued = begin(pair.producer, 40, "first"), begin(pair.producer, 40, "queued")
        session_id = pair.received("queued").session.session_id
        key = TransferKey("queued", 0, 1, 0, 40)
        with pytest.raises(TransferRefused, match="was not granted"):
            pair.consumer.receiver.place(session_id, key)
        for request in (queued, first):
            pair.producer.fail(request, TransferError("enough"))
        pair.require_all_free()
        with pytest.raises(TransferRefused, match="was not granted"):
            pair.consumer.receiver.place(session_id, key)


def test_no_data_connection_without_its_session() -> None:
    with Pair(mover="tcp") as pair:
        assert pair.producer.consumer is not None
        welcome = pair.producer.consumer
        mover, deadline = make_mover("tcp"), time.monotonic() + PATIENCE_S
        address = welcome.data_endpoints[0].address
        with pytest.raises(AuthenticationFailed):
            mover.connect(address, "f" * 32, welcome.token, deadline)
        with pytest.raises(AuthenticationFailed):
            mover.connect(address, welcome.session_id, bytes(32), deadline)
        mover.close()


# -- deadlines -----------------------------------------------------------------------------------------------------


def test_the_consumers_deadline_names_phase_peer_and_bytes() -> None:
    with Pair(max_deadline_s=2.0) as pair:
        request = begin(pair.producer, 20)
        received = pair.received("r")
        pair.producer.layer_ready(request, 0, 0, 0, 20)
        with pytest.raises(TransferError) as caught:
            pair.producer.wait(request)
        nbytes = 2 * 20 * HEADS * CHANNELS * 2
        lacking = "group full, buffer full: 40 of 60 layer x position slices have not arrived, first layer 1 position 0"
        assert isinstance(received.error, DeadlineExceeded)
        assert (received.error.phase, received.error.peer) == ("payload", pair.producer.engine_id)
        for text in (str(caught.value), str(received.error)):
            assert f"deadline of 2 s exceeded while waiting for payload from {pair.producer.engine_id}" in text
            assert f"{nbytes} bytes received; {lacking}" in text


def test_the_consumers_deadline_holds_for_the_queue_too() -> None:
    with Pair(destination=make_cache("flashinfer_hnd", 32, num_blocks=3)) as pair:
        first, queued = begin(pair.producer, 40, "first"), begin(pair.producer, 40, "queued", timeout_s=2.0)
        received = pair.received("queued")
        with pytest.raises(
            TransferError, match=r"waiting for (free blocks from prefill-|a grant of blocks from decode-)"
        ):
            pair.producer.wait(queued)
        wait_until(lambda: received.error is not None, "the consumer to give up")
        pair.producer.fail(first, TransferError("enough"))


@pytest.mark.parametrize(
    ("progress", "phase"),
    [("queued", "a grant of blocks"), ("granted", "prefill"), ("computed", "verification and decoding")],
)
def test_the_producers_deadline_names_phase_peer_and_bytes(progress: str, phase: str) -> None:
    with Pair(destination=make_cache("flashinfer_hnd", 32, num_blocks=3)) as pair:
        first = begin(pair.producer, 1, "first") if progress == "queued" else None
        request = begin(pair.producer, 40)
        received = pair.received("r")
        if first is None:
            wait_until(lambda: request.grant is not None, "a grant")
        if progress == "computed":
            ship(pair.producer, request)
            wait_until(lambda: request.legs[0].completed, "a completion")
        change(pair.producer, request, deadline=time.monotonic() + 0.1)
        with pytest.raises(DeadlineExceeded) as caught:
            pair.producer.wait(request)
        peer = "this node" if progress == "granted" else pair.consumer.engine_id
        assert (caught.value.phase, caught.value.peer) == (phase, peer)
        nbytes = LAYERS * 2 * 40 * HEADS * CHANNELS * 2 if progress == "computed" else 0
        assert f"{nbytes} bytes" in str(caught.value)
        wait_until(lambda: received.error is not None, "the consumer to learn of it")
        assert f"failed in {phase}: deadline of" in str(received.error)
        if first is not None:
            pair.producer.fail(first, TransferError("enough"))


def test_a_payload_must_arrive_by_the_requests_deadline() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        received = pair.received("r")
        wait_until(lambda: request.grant is not None, "a grant")
        session_id, key = received.session.session_id, TransferKey("r", 0, 1, 0, 20)
        assert pair.consumer.receiver.place(session_id, key).deadline == received.deadline
        pair.consumer.receiver.placed(session_id, key, 0, TransferError("enough"))


# -- pools that are too small --------------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    with Pair(destination=make_cache("flashinfer_hnd", 32, num_blocks=2)) as pair:
        begun = time.monotonic()
        request = begin(pair.producer, 31)
        with pytest.raises(TransferError, match=r"decode-.* refused r: it needs 2 blocks and the pool has 1"):
            pair.producer.wait(request)
        assert time.monotonic() - begun < 2.0
        ship(pair.producer, begin(pair.producer, 30, "fits"))
        pair.finish(pair.next_ready())


def test_an_empty_prompt_is_refused() -> None:
    with Pair() as pair, pytest.raises(TransferError, match="the prompt has no tokens"):
        pair.producer.wait(begin(pair.producer, 0))


def test_more_requests_than_blocks_wait_and_all_finish() -> None:
    with Pair(make_cache(num_blocks=40), make_cache("flashinfer_hnd", 32, num_blocks=4), mover="tcp") as pair:
        requests = [begin(pair.producer, tokens, f"r{tokens}") for tokens in (40, 33, 20, 62, 1, 30, 50, 32)]
        for request in requests:
            ship(pair.producer, request)
        for _ in requests:
            ready = pair.next_ready()
            assert pair.consumer.allocator.num_free < (3,)
            pair.finish(ready)
        assert [pair.producer.wait(request).text for request in requests] == ["done"] * len(requests)


def test_the_producers_pool_is_not_exceeded() -> None:
    with Pair(make_cache(num_blocks=3)) as pair:
        request = begin(pair.producer, 32)
        with pytest.raises(OutOfBlocks):
            begin(pair.producer, 1, "second")
        assert not pair.producer.wait_for_blocks([1], 0.05)
        pair.producer.fail(request, TransferError("enough"))
        assert pair.producer.wait_for_blocks([2], PATIENCE_S)


def test_the_end_of_a_queued_request_lets_those_behind_it_go() -> None:
    with Pair(make_cache(num_blocks=20), make_cache("flashinfer_hnd", 32, num_blocks=5)) as pair:
        begun = {name: begin(pair.producer, tokens, name) for name, tokens in (("a", 60), ("b", 90), ("c", 20))}
        pair.received("c")
        assert [begun[name].grant is not None for name in "bc"] == [False, False]
        pair.producer.fail(begun["b"], TransferError("enough"))
        wait_until(lambda: begun["c"].grant is not None, "a grant for what fits, while another request goes on", 2.0)
        for name in "ac":
            pair.producer.fail(begun[name], TransferError("enough"))


@pytest.mark.parametrize("ending", [None, TransferError("the connection broke")], ids=["arrives", "stops"])
def test_blocks_are_not_granted_again_while_a_payload_is_being_written(ending: PdtxError | None) -> None:
    with Pair(destination=make_cache("flashinfer_hnd", 32, num_blocks=3)) as pair:
        request = begin(pair.producer, 40, "first")
        received = pair.received("first")
        wait_until(lambda: request.grant is not None, "a grant")
        session_id, key = received.session.session_id, TransferKey("first", 0, 1, 0, 40)
        pair.consumer.receiver.place(session_id, key)
        pair.producer.fail(request, TransferError("enough"))
        wait_until(lambda: received.error is not None, "the consumer to learn of it")
        second = begin(pair.producer, 40, "second")
        pair.received("second")
        time.sleep(0.1)
        assert second.grant is None
        assert pair.consumer.allocator.num_free == (0,)
        pair.consumer.receiver.placed(session_id, key, 5, ending)
        wait_until(lambda: second.grant is not None, "the blocks, now that nothing writes them", 2.0)
        pair.producer.fail(second, TransferError("enough"))


def test_a_request_id_in_use_is_refused() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        with pytest.raises(InputError, match="request id 'r' is in use"):
            begin(pair.producer, 20)
        ship(pair.producer, request)
        pair.finish(pair.next_ready())


def test_a_request_id_that_cannot_be_sent_is_refused_at_once() -> None:
    with Pair() as pair:
        with pytest.raises(InputError, match=r"request id 'no spaces.n' cannot be sent"):
            begin(pair.producer, 20, "no spaces\n")
        assert not pair.producer.core.requests


# -- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mover", ["inproc", "tcp"])
def test_nothing_is_left_of_a_session(mover: str) -> None:
    leaks = Leaks()
    with Pair(mover=mover) as pair:
        ship(pair.producer, begin(pair.producer, 20))
        pair.finish(pair.next_ready())
    pair.close()  # a second time
    leaks.require_none("a session")


def test_a_producer_that_closes_gives_the_consumer_its_blocks_back() -> None:
    with Pair(destination=make_cache("flashinfer_hnd", 32, num_blocks=3)) as pair:
        going, queued = begin(pair.producer, 40, "going"), begin(pair.producer, 40, "queued")
        pair.received("queued")
        ship(pair.producer, going, complete=False)
        pair.producer.close()
        for request in (going, queued):
            with pytest.raises(PeerLost, match="the producer was closed"):
                pair.producer.wait(request)
        with pytest.raises(PeerLost):
            begin(pair.producer, 1, "late")
        pair.require_all_free(2.0)
        ship(pair.connect(), begin(pair.producers[-1], 40, "next"))
        pair.finish(pair.next_ready())


def test_a_request_that_comes_while_the_consumer_closes_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair() as pair:
        close, late = pair.consumer.mover.close, list[OutboundRequest]()
        taken = pair.consumer.allocator.allocate(pair.consumer.allocator.num_free)  # so that it waits for blocks

        def ask_first() -> None:
            monkeypatch.undo()
            late.append(begin(pair.producer, 20))
            wait_until(lambda: late[0].has_outcome, "the answer")
            close()

        monkeypatch.setattr(pair.consumer.mover, "close", ask_first)
        pair.consumer.close()
        assert not pair.consumer.core.requests
        with pytest.raises(TransferError, match=r"decode-.* refused r: decode-.* is closing"):
            pair.producer.wait(late[0])
        pair.consumer.allocator.free(taken)


def test_a_consumer_that_closes_fails_what_it_had() -> None:
    with Pair(destination=make_cache("flashinfer_hnd", 32, num_blocks=3), mover="tcp") as pair:
        going, queued = begin(pair.producer, 40, "going"), begin(pair.producer, 40, "queued")
        pair.received("queued")
        ship(pair.producer, going, complete=False)
        wait_until(lambda: going.grant is not None and going.unsent == 0, "all layers sent")
        pair.consumer.close()
        for request in (going, queued):
            with pytest.raises(PdtxError, match=r"decode-.* (is closing|closed)|closed the connection"):
                pair.producer.wait(request)
        wait_until(lambda: pair.producer.core.session.lost is not None, "the producer to learn of it", 2.0)
        with pytest.raises(PeerLost, match="lost decode-"):
            pair.producer.wait(begin(pair.producer, 1, "late"))


def test_nobody_is_left_waiting_for_a_data_connection_that_broke() -> None:
    with Pair(mover="tcp") as pair:
        request = begin(pair.producer, 20)
        wait_until(lambda: request.grant is not None, "a grant")
        assert pair.producer.core.session.route is not None
        pair.producer.core.session.route.connection.close()
        with pytest.raises(TransferError, match=r"failed in payload: the data connection of prefill-.* ended"):
            pair.producer.wait(request)


def produce_and_hang(address: str, started: "multiprocessing.synchronize.Event", silence_s: float) -> None:
    """A prefill node with a request of each kind: ready, receiving and queued."""
    torch.set_num_threads(1)
    dialer = partial(Dialer, silence_s=silence_s, heartbeat_s=silence_s / 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdtx.engine.control_channel.Dialer", dialer)
        producer = make_producer(make_cache(), "tcp")
        producer.connect(address, security=OPEN)
    ship(producer, begin(producer, 20, "ready"))
    receiving = begin(producer, 40, "receiving")
    wait_until(lambda: receiving.grant is not None, "a grant")
    begin(producer, 40, "queued")
    started.set()
    try:
        producer.wait(receiving)
    except PdtxError as error:
        # What a user would see; the exit code tells the parent.
        told = isinstance(error, PeerLost | TransferError) and not isinstance(error, DeadlineExceeded)
        os._exit(3 if told else 4)


class Child:
    """A producer in a process of its own."""

    def __init__(self, address: str, silence_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.started = context.Event()
        self.process = context.Process(target=produce_and_hang, args=(address, self.started, silence_s), daemon=True)
        self.process.start()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()


SILENCE_S = 1.0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that gives up silent producers soon."""
    beat_s = SILENCE_S / 5
    monkeypatch.setattr("pdtx.engine.consumer.Listener", partial(Listener, silence_s=SILENCE_S, heartbeat_s=beat_s))
    monkeypatch.setattr("pdtx.engine.control_channel.Dialer", partial(Dialer, silence_s=SILENCE_S, heartbeat_s=beat_s))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_producer_costs_no_blocks_and_the_next_one_is_served(number: int) -> None:
    pool = make_cache("flashinfer_hnd", 32, num_blocks=4)
    with Pair(destination=pool, mover="tcp") as pair, Child(pair.address, SILENCE_S) as child:
        assert child.started.wait(60)
        ready = pair.next_ready()
        pair.received("queued")
        child.signal(number)
        wait_until(lambda: ready.error is not None, "the loss of the producer", SILENCE_S * 10)
        assert isinstance(ready.error, PeerLost)
        pair.consumer.let_go(ready)
        pair.require_all_free()
        ship(pair.producer, begin(pair.producer, 40, "next"))
        pair.finish(pair.next_ready())
        if number == signal.SIGSTOP:
            child.signal(signal.SIGCONT)
            child.process.join(SILENCE_S * 20)
            assert child.process.exitcode == 3, "it must learn that its session is over"


# -- times ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("intervals", "until", "seconds"),
    [
        ([], float("inf"), 0),
        ([(1, 3)], float("inf"), 2),
        ([(1, 3), (2, 5), (7, 8)], float("inf"), 5),
        ([(7, 8), (1, 10), (2, 3)], float("inf"), 9),
        ([(1, 3), (2, 5), (7, 8)], 4, 3),
        ([(1, 3)], 0, 0),
    ],
)
def test_overlapping_intervals_count_once(intervals: list[tuple[float, float]], until: float, seconds: float) -> None:
    assert union_seconds(intervals, until) == seconds


def test_hidden_is_the_share_before_the_end_of_prefill() -> None:
    times = TransferTimes.of(0.5, [(0, 1), (2, 3)], [(0, 2), (2, 4)], computed=3)
    assert (times.prepare, times.post, times.move, times.hidden) == (0.5, 2, 4, 0.75)
    assert TransferTimes.of(0, [], [], computed=3).hidden == 0


def test_a_request_has_times() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        ship(pair.producer, request)
        pair.finish(pair.next_ready())
        pair.producer.wait(request)
        assert 0 < request.times.post <= request.times.move
        assert 0 <= request.times.hidden <= 1
        assert request.num_runs > 0
