"""KVProducer and KVConsumer against each other: no model, random K/V, real sockets where they matter."""

import contextlib
import multiprocessing
import multiprocessing.synchronize
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, product
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import pytest
import torch

from pdtx import __version__
from pdtx.cache import BlockAllocator, PagedKVCache
from pdtx.engine import (
    InboundRequest,
    KVConsumer,
    KVProducer,
    OutboundRequest,
    TransferTimes,
    check_compatible,
    describe_cache,
    layout_of,
    union_seconds,
)
from pdtx.errors import (
    AddressInUse,
    AuthenticationFailed,
    DeadlineExceeded,
    IncompatiblePeer,
    InputError,
    OutOfBlocks,
    PdtxError,
    PeerLost,
    PeerUnreachable,
    PlanError,
    ProtocolError,
    TransferError,
    TransferRefused,
    VerificationError,
)
from pdtx.kvspec import FullAttentionSpec
from pdtx.layout import LAYOUT_ORDERS, KVCacheLayout
from pdtx.plan import Endpoint, Runs, build_plan
from pdtx.protocol import (
    PROTOCOL_VERSION,
    CacheDescription,
    Complete,
    Failure,
    Finished,
    Grant,
    Hello,
    LayerDone,
    Message,
    ReadReference,
    Refuse,
    Reject,
    TransferRequest,
    Welcome,
)
from pdtx.sidechannel import Dialer, Listener, Security
from pdtx.testing.pair import Leaks
from pdtx.transports import Connection, Mover, Receiver, Region, TransferHandle, TransferKey, make_mover

OPEN = Security()
PATIENCE_S = 10.0
LAYERS, HEADS, CHANNELS = 3, 2, 8
M = TypeVar("M")


def make_cache(
    layout: str = "flash_attn_nhd",
    block_size: int = 16,
    *,
    num_blocks: int = 9,
    num_layers: int = LAYERS,
    heads: int = HEADS,
    channels: int = CHANNELS,
    dtype: str = "bfloat16",
) -> PagedKVCache:
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=channels, dtype=dtype)
    return PagedKVCache(spec, layout=layout, num_layers=num_layers, num_blocks=num_blocks)


def describe(cache: PagedKVCache, fingerprint: str = "same") -> CacheDescription:
    return describe_cache(cache, model="a model", fingerprint=fingerprint)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.005)


def all_free(pool: BlockAllocator) -> bool:
    return pool.num_free == pool.num_blocks - 1


class Pair:
    """A consumer that listens and a producer connected to it. At the end every block must be free again."""

    def __init__(
        self,
        source: PagedKVCache | None = None,
        destination: PagedKVCache | None = None,
        *,
        mover: str = "inproc",
        plan_layout: KVCacheLayout | None = None,
        max_deadline_s: float = 600.0,
        wrap: Callable[[Mover], Mover] = lambda mover: mover,
    ) -> None:
        self.source, self.destination = source or make_cache(), destination or make_cache("flashinfer_hnd", 32)
        self.mover_name = mover
        self.producers = list[KVProducer]()
        self.consumer = KVConsumer(
            self.destination,
            describe(self.destination),
            make_mover(mover),
            verify=True,
            max_deadline_s=max_deadline_s,
            plan_layout=plan_layout,
        )
        try:
            self.address = self.consumer.listen("127.0.0.1:0", security=OPEN)
            self.producer = self.connect(self.source, wrap)
        except BaseException:
            self.close()
            raise

    def connect(self, cache: PagedKVCache | None = None, wrap: Callable[[Mover], Mover] = lambda x: x) -> KVProducer:
        """Connect one more producer."""
        cache = cache or make_cache()
        producer = KVProducer(cache, describe(cache), wrap(make_mover(self.mover_name)))
        self.producers.append(producer)
        producer.connect(self.address, security=OPEN)
        return producer

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self.require_all_free()
        finally:
            self.close()

    def require_all_free(self, timeout_s: float = PATIENCE_S) -> None:
        for name, pool in [("consumer", self.consumer.allocator), *(("producer", p.allocator) for p in self.producers)]:
            wait_until(partial(all_free, pool), f"all blocks of the {name} free", timeout_s)

    def close(self) -> None:
        for producer in self.producers:
            producer.close()
            producer.mover.close()
        self.consumer.close()

    # -- what the decode loop does -------------------------------------------------------------------------------

    def next_ready(self) -> InboundRequest:
        request = self.consumer.next_ready(PATIENCE_S)
        assert request is not None, "no request became ready"
        return request

    def finish(self, request: InboundRequest, *, verify: bool = True) -> None:
        """Verify a ready request and end it well."""
        if verify:
            found = self.consumer.verify(request)
            assert found.wrong == 0
            assert found.compared == LAYERS * 2 * request.num_tokens * HEADS * CHANNELS
        self.consumer.release(request)
        self.consumer.finish(request, finished(request))
        self.consumer.let_go(request)

    def received(self, request_id: str) -> InboundRequest:
        """The consumer's record of a request, once it is there."""

        def find() -> InboundRequest | None:
            with self.consumer._lock:
                return next((r for r in self.consumer._requests.values() if r.request_id == request_id), None)

        wait_until(lambda: find() is not None, f"request {request_id} at the consumer")
        found = find()
        assert found is not None
        return found


def finished(request: InboundRequest) -> Finished:
    return Finished(
        request_id=request.request_id,
        token_ids=[1, 2],
        text="done",
        verified=True,
        wrong=0,
        received_bytes=request.received_bytes,
        received_runs=request.received_runs,
        times={},
    )


@dataclass
class Sent:
    """What a request's K/V were, kept apart from the caches: (layer, K/V, token, head, channel)."""

    data: torch.Tensor


def begin(producer: KVProducer, tokens: int, request_id: str = "r", timeout_s: float = 30.0) -> OutboundRequest:
    return producer.begin(request_id, list(range(tokens)), max_tokens=2, timeout_s=timeout_s)


def ship(producer: KVProducer, request: OutboundRequest, chunks: Sequence[int] = (), *, complete: bool = True) -> Sent:
    """Compute random K/V layer by layer, in chunks of so many tokens (the last one takes the rest), and ship them."""
    cache, total = producer.cache, len(request.token_ids)
    data = torch.randn(cache.num_layers, 2, total, HEADS, CHANNELS).to(cache.dtype)
    for start, stop in pairwise((0, *accumulate(chunks), total)):
        for layer in range(cache.num_layers):
            ship_layer(producer, request, data, layer, start, stop)
    if complete:
        producer.computed(request, 7)
    return Sent(data)


def ship_layer(
    producer: KVProducer, request: OutboundRequest, data: torch.Tensor, layer: int, start: int, stop: int
) -> None:
    key, value = data[layer, :, start:stop]
    producer.cache.write(layer, torch.as_tensor(request.blocks.ids), start, key, value)
    producer.layer_ready(request, layer, start, stop)


def arrived(cache: PagedKVCache, request: InboundRequest) -> torch.Tensor:
    """What lies in the consumer's cache, in the order of Sent."""
    ids = torch.as_tensor(request.granted_ids)
    return torch.stack([torch.stack(cache.read(i, ids, 0, request.num_tokens)) for i in range(cache.num_layers)])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """For comparisons to the bit: NaN equals itself and 0 does not equal -0."""
    return tensor.contiguous().view(torch.uint8)


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
        assert len(second.waiting) == 2 * LAYERS
        pair.finish(ready)
        ready = pair.next_ready()
        assert torch.equal(bits(arrived(pair.destination, ready)), bits(sent.data))
        pair.finish(ready)


def test_layers_after_their_grant_go_at_once() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        wait_until(lambda: request.grant is not None, "a grant")
        ship(pair.producer, request, [10], complete=False)
        wait_until(lambda: request.unsent == 0, "all layers sent before computed()")
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
        assert pair.producer.allocator.num_free < pair.source.num_blocks - 1
        pair.consumer.release(ready)
        assert pair.producer.wait_for_blocks(pair.source.num_blocks - 1, PATIENCE_S)
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
        assert pair.consumer.allocator.num_free == pair.destination.num_blocks - 2
        pair.consumer.let_go(ready)
        assert pair.consumer.allocator.num_free == pair.destination.num_blocks - 1


# -- verification --------------------------------------------------------------------------------------------------

_ROW = r"layer (\d+) ([KV]) token (\d+) head (\d+)"


def row(cache: PagedKVCache, ids: torch.Tensor, coordinate: Sequence[str]) -> torch.Tensor:
    layer, token, head = (int(coordinate[i]) for i in (0, 2, 3))
    return cache.canonical(layer, ids, token, token + 1)["KV".index(coordinate[1]), 0, head]


def test_a_wrong_plan_is_caught_with_the_coordinate_and_its_true_source() -> None:
    destination = make_cache("flashinfer_hnd", 32)
    with Pair(destination=destination, plan_layout=destination.layout.with_swapped("token", "head")) as pair:
        request = begin(pair.producer, 64)
        ship(pair.producer, request)
        ready = pair.next_ready()
        with pytest.raises(VerificationError) as caught:
            pair.consumer.verify(ready)
        text = str(caught.value)
        found = re.search(rf"first: {_ROW} channel \d+ \(block (\d+)\) holds the value of {_ROW}$", text)
        assert found is not None, text
        where, block, origin = found.groups()[:4], int(found[5]), found.groups()[5:]
        here, there = torch.as_tensor(ready.granted_ids), torch.as_tensor(request.blocks.ids)
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
    return int(pair.consumer.allocator.free_blocks().ids[-1]), 0


def tail_of_last_block(pair: Pair, request: InboundRequest) -> tuple[int, int]:
    return int(request.granted_ids[-1]), request.num_tokens % 32


def block_for_new_tokens(pair: Pair, request: InboundRequest) -> tuple[int, int]:
    assert request.blocks is not None
    assert len(request.blocks) > request.num_granted
    return int(request.blocks.ids[-1]), 0


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
        with pytest.raises(VerificationError, match=r"^1 2-byte words outside the request's tokens were written"):
            pair.consumer.verify(ready)
        pair.destination.poison(torch.tensor([block]))
        pair.finish(ready, verify=False)


def test_a_changed_byte_is_caught() -> None:
    with Pair() as pair:
        ship(pair.producer, begin(pair.producer, 40))
        ready = pair.next_ready()
        pair.destination.view(1)[1, int(ready.granted_ids[1]), 3, 1, 5] += 1.0
        with pytest.raises(
            VerificationError, match=r"^1 of \d+ .* layer 1 V token 35 head 1 channel 5 \(block"
        ) as caught:
            pair.consumer.verify(ready)
        assert caught.value.wrong == 1
        pair.finish(ready, verify=False)


def test_what_was_never_written_is_named_as_poison() -> None:
    with Pair() as pair:
        ship(pair.producer, begin(pair.producer, 40))
        ready = pair.next_ready()
        pair.destination.poison(torch.as_tensor(ready.granted_ids[1:2]))
        with pytest.raises(VerificationError, match=r"token 32 .* was never written: it holds poison"):
            pair.consumer.verify(ready)
        pair.finish(ready, verify=False)


def test_nothing_is_compared_with_blocks_that_the_producer_has_given_back() -> None:
    with Pair() as pair:
        ship(pair.producer, begin(pair.producer, 20))
        ready = pair.next_ready()
        pair.consumer.release(ready)
        assert pair.producer.wait_for_blocks(pair.source.num_blocks - 1, PATIENCE_S)
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
        pair.producer.layer_ready(request, 0, 0, 10)  # what comes too late is dropped
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
        pair.producer.layer_ready(request, 0, 0, 20)
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
        pair.producer.layer_ready(request, 0, 0, 20)
        wait_until(lambda: bool(handles), "a transfer")
        received = pair.received("r")
        pair.consumer.finish(received, finished(received))
        assert pair.producer.wait(request).text == "done"
        assert not all_free(pair.producer.allocator)
        handles[0].finish()
        pair.require_all_free()


def test_a_device_that_fails_fails_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)

        def broken_fence() -> None:
            raise RuntimeError("device-side assert\nwith many lines")

        monkeypatch.setattr("pdtx.engine.producer.record_fence", lambda _: broken_fence)
        pair.producer.layer_ready(request, 0, 0, 20)
        with pytest.raises(TransferError, match=r"^shipping failed: RuntimeError: device-side assert with many lines$"):
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
        pair.consumer._send(
            ready.session, ReadReference(request_id="r", layer=layer, token_start=start, token_stop=stop)
        )
        wait_until(lambda: ready.error is not None, "a refusal")
        assert "failed in verification" in str(ready.error)
        pair.consumer.let_go(ready)


class WrappedMover(Mover):
    """A mover whose connections are someone else's."""

    name = "inproc"

    def __init__(self, inner: Mover, wrap: Callable[[Connection], Connection]) -> None:
        self.inner, self.wrap = inner, wrap

    def listen(self, address: str, receiver: Receiver) -> str:
        return self.inner.listen(address, receiver)

    def connect(self, address: str, session_id: str, token: bytes, deadline: float) -> Connection:
        return self.wrap(self.inner.connect(address, session_id, token, deadline))

    def close(self) -> None:
        self.inner.close()


class FailingConnection(Connection):
    """Its at-th put fails, once computed() has been called: at once, or as a transfer (late)."""

    def __init__(self, inner: Connection, *, at: int, late: bool = False) -> None:
        self.inner, self.at, self.late, self.puts = inner, at, late, 0

    def put(self, key: TransferKey, region: Region, runs: Runs, deadline: float) -> TransferHandle:
        self.puts += 1
        if self.puts < self.at:
            return self.inner.put(key, region, runs, deadline)
        time.sleep(0.2)  # until computed() has been called
        if not self.late:
            raise PlanError("it cannot be put")
        handle = TransferHandle(key, 1, "peer", deadline)
        handle.finish(TransferError("it cannot be put"))
        return handle

    def close(self) -> None:
        self.inner.close()


class HoldingConnection(Connection):
    """Its transfers go on until the test ends them."""

    def __init__(self, inner: Connection, handles: list[TransferHandle]) -> None:
        self.inner, self.handles = inner, handles

    def put(self, key: TransferKey, region: Region, runs: Runs, deadline: float) -> TransferHandle:
        self.handles.append(TransferHandle(key, runs.source().total, "peer", deadline))
        return self.handles[-1]

    def close(self) -> None:
        self.inner.close()


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
        wait_until(lambda: request.unsent == 0, "all layers sent")
        request.nbytes += off_by
        pair.producer.computed(request, 7)
        with pytest.raises(TransferError, match=rf"completed r wrongly: claims {request.nbytes} bytes, noticed"):
            pair.producer.wait(request)
        assert pair.consumer.next_ready(0.1) is None


def test_a_completion_without_a_layer_is_refused() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        for layer in (0, 2):
            pair.producer.layer_ready(request, layer, 0, 20)
        pair.producer.computed(request, 7)
        with pytest.raises(TransferError, match="missing 20 of 60 layer x token slices, first layer 1 token 0"):
            pair.producer.wait(request)
        assert pair.consumer.next_ready(0.1) is None


def test_a_completion_without_the_last_token_is_refused() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        for layer in range(LAYERS):
            pair.producer.layer_ready(request, layer, 0, 19)
        pair.producer.computed(request, 7)
        with pytest.raises(TransferError, match="missing 3 of 60 layer x token slices, first layer 0 token 19"):
            pair.producer.wait(request)


def test_a_payload_that_comes_twice_is_refused() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        pair.producer.layer_ready(request, 0, 0, 20)
        pair.producer.layer_ready(request, 0, 10, 11)
        with pytest.raises(TransferRefused, match=r"layers 0..1 tokens 10..11 was received before"):
            pair.producer.wait(request)


@pytest.mark.parametrize("part", [(0, 4, 0, 20), (0, 1, 0, 21), (1, 1, 0, 20), (-1, 1, 0, 20), (0, 1, 5, 5)], ids=str)
def test_a_payload_outside_the_request_is_refused(part: tuple[int, int, int, int]) -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        received = pair.received("r")
        wait_until(lambda: request.grant is not None, "a grant")
        with pytest.raises(TransferRefused, match="is not a part of 3 layers x 20 tokens"):
            pair.consumer.place(received.session.session_id, TransferKey("r", *part))
        pair.producer.fail(request, TransferError("enough"))


def test_a_payload_for_a_request_of_another_session_is_refused() -> None:
    with Pair(destination=make_cache("flashinfer_hnd", 32, num_blocks=20), mover="tcp") as pair:
        mine = begin(pair.producer, 20, "mine")
        other = pair.connect()
        wait_until(lambda: mine.grant is not None, "a grant")
        key = TransferKey("mine", 0, 1, 0, 20)
        assert other._connection is not None
        assert mine.grant is not None
        plan = build_plan(
            Endpoint.of(other.cache.layout, [1, 2]),
            Endpoint.of(pair.destination.layout, mine.grant.block_ids),
            range(20),
            range(1),
        )
        handle = other._connection.put(key, Region(other.cache.memory), plan.flat, time.monotonic() + PATIENCE_S)
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
            pair.consumer.place(session_id, key)
        for request in (queued, first):
            pair.producer.fail(request, TransferError("enough"))
        pair.require_all_free()
        with pytest.raises(TransferRefused, match="was not granted"):
            pair.consumer.place(session_id, key)


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
    with Pair(max_deadline_s=0.3) as pair:
        request = begin(pair.producer, 20)
        received = pair.received("r")
        pair.producer.layer_ready(request, 0, 0, 20)
        with pytest.raises(TransferError) as caught:
            pair.producer.wait(request)
        nbytes = 2 * 20 * HEADS * CHANNELS * 2
        assert isinstance(received.error, DeadlineExceeded)
        assert (received.error.phase, received.error.peer) == ("payload", pair.producer.engine_id)
        for text in (str(caught.value), str(received.error)):
            assert f"deadline of 0.3 s exceeded while waiting for payload from {pair.producer.engine_id}" in text
            assert f"{nbytes} bytes received; missing 40 of 60 layer x token slices, first layer 1 token 0" in text


def test_the_consumers_deadline_holds_for_the_queue_too() -> None:
    with Pair(destination=make_cache("flashinfer_hnd", 32, num_blocks=3)) as pair:
        first, queued = begin(pair.producer, 40, "first"), begin(pair.producer, 40, "queued", timeout_s=0.3)
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
            wait_until(lambda: request.completed, "a completion")
        request.deadline = time.monotonic() + 0.1
        with pytest.raises(DeadlineExceeded) as caught:
            pair.producer.wait(request)
        assert (caught.value.phase, caught.value.peer) == (phase, pair.consumer.engine_id)
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
        assert pair.consumer.place(session_id, key).deadline == received.deadline
        pair.consumer.placed(session_id, key, 0, TransferError("enough"))


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
            assert pair.consumer.allocator.num_free < 3
            pair.finish(ready)
        assert [pair.producer.wait(request).text for request in requests] == ["done"] * len(requests)


def test_the_producers_pool_is_not_exceeded() -> None:
    with Pair(make_cache(num_blocks=3)) as pair:
        request = begin(pair.producer, 32)
        with pytest.raises(OutOfBlocks):
            begin(pair.producer, 1, "second")
        assert not pair.producer.wait_for_blocks(1, 0.05)
        pair.producer.fail(request, TransferError("enough"))
        assert pair.producer.wait_for_blocks(2, PATIENCE_S)


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
        pair.consumer.place(session_id, key)
        pair.producer.fail(request, TransferError("enough"))
        wait_until(lambda: received.error is not None, "the consumer to learn of it")
        second = begin(pair.producer, 40, "second")
        pair.received("second")
        time.sleep(0.1)
        assert second.grant is None
        assert pair.consumer.allocator.num_free == 0
        pair.consumer.placed(session_id, key, 5, ending)
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
        with pytest.raises(ProtocolError, match="request_id"):
            begin(pair.producer, 20, "no spaces\n")
        assert not pair.producer._requests


# -- the handshake -------------------------------------------------------------------------------------------------

INCOMPATIBLE = {
    "dtype": (make_cache(dtype="float16"), "float16", "bfloat16"),
    "num_kv_heads": (make_cache(heads=1), "1", "2"),
    "head_size": (make_cache(channels=16), "16", "8"),
    "num_layers": (make_cache(num_layers=2), "2", "3"),
    "block_size": (make_cache(block_size=24), "24", "32"),
    "fingerprint": (make_cache(), "other", "same"),
}


@pytest.mark.parametrize("field", INCOMPATIBLE)
def test_incompatible_peers_are_told_the_field_and_both_values(field: str) -> None:
    cache, ours, theirs = INCOMPATIBLE[field]
    with Pair() as pair:
        description = describe(cache, "other" if field == "fingerprint" else "same")
        producer = KVProducer(cache, description, make_mover("inproc"))
        with pytest.raises(IncompatiblePeer) as caught:
            producer.connect(pair.address, security=OPEN)
        assert (caught.value.field, caught.value.producer, caught.value.consumer) == (field, ours, theirs)
        producer.close()
        producer.mover.close()
        with pytest.raises(IncompatiblePeer):
            check_compatible(description, describe(pair.destination))
        ship(pair.producer, begin(pair.producer, 20))
        pair.finish(pair.next_ready())


def test_tensor_parallel_sizes_must_agree() -> None:
    mine = describe(make_cache())
    with pytest.raises(IncompatiblePeer, match="tp_size is 2 on the prefill side and 1 on the decode side"):
        check_compatible(msgspec.structs.replace(mine, tp_size=2), mine)


def test_movers_must_agree() -> None:
    with Pair() as pair:
        producer = KVProducer(pair.source, describe(pair.source), make_mover("tcp"))
        with pytest.raises(IncompatiblePeer, match="mover is tcp on the prefill side and inproc on the decode side"):
            producer.connect(pair.address, security=OPEN)
        producer.close()
        producer.mover.close()


def test_layout_pool_and_block_size_may_differ() -> None:
    check_compatible(describe(make_cache()), describe(make_cache("flashinfer_hnd", 48, num_blocks=2)))


@pytest.mark.parametrize("layout", LAYOUT_ORDERS)
def test_a_layout_survives_its_description(layout: str) -> None:
    cache = make_cache(layout)
    assert layout_of(describe(cache)) == cache.layout


def broken(**changes: object) -> CacheDescription:
    return msgspec.structs.replace(describe(make_cache()), **changes)


def layout(**changes: object) -> CacheDescription:
    return broken(layout=msgspec.structs.replace(describe(make_cache()).layout, **changes))


def axes(**changes: tuple[int, int]) -> CacheDescription:
    """A description whose axes have other (extent, stride)."""
    wire = describe(make_cache()).layout
    changed = [
        msgspec.structs.replace(axis, extent=changes[axis.name][0], stride=changes[axis.name][1])
        if axis.name in changes
        else axis
        for axis in wire.axes
    ]
    return broken(layout=msgspec.structs.replace(wire, axes=changed))


IMPOSSIBLE = {
    "too few axes": layout(axes=[]),
    "overlapping axes": axes(head=(2, 2)),
    "beyond its region": layout(size_bytes=64),
    "more blocks than it says": broken(num_blocks=10),
    "more tokens in a block than its spec": broken(spec={**describe(make_cache()).spec, "block_size": 32}),
    "another element size than its dtype": layout(itemsize=1),
    "no block size": broken(spec={k: v for k, v in describe(make_cache()).spec.items() if k != "block_size"}),
    "a block size in words": broken(spec={**describe(make_cache()).spec, "block_size": "sixteen"}),
    "block size 0": broken(spec={**describe(make_cache()).spec, "block_size": 0}),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_an_impossible_cache_is_rejected_and_the_consumer_serves_on(what: str) -> None:
    with Pair() as pair:
        with Rogue(pair.address, IMPOSSIBLE[what]) as rogue:
            assert isinstance(rogue.answer, Reject), rogue.answer
        ship(pair.producer, begin(pair.producer, 20))
        pair.finish(pair.next_ready())


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
            TransferRequest(request_id=request_id, token_ids=list(range(tokens)), max_tokens=2, deadline_s=30.0)
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
        assert f"claims {total} bytes, noticed {total}, received 0; missing 60 of 60" in reason
        assert pair.consumer.next_ready(0.05) is None


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
        pair.producer._send(Complete(request_id="r", first_token=1, num_tokens=20, nbytes=5))
        pair.producer._send(Complete(request_id="r", first_token=7, num_tokens=20, nbytes=request.nbytes))
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
    with Pair() as pair, Rogue(pair.address, IMPOSSIBLE["beyond its region"]) as rogue:
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
        producer = KVProducer(make_cache(), describe(make_cache()), make_mover("inproc"))
        with pytest.raises(DeadlineExceeded, match=f"the handshake's answer from {address}"):
            producer.connect(address, security=OPEN, timeout_s=0.5)
        producer.close()
        producer.mover.close()
        thread.join()


def test_nobody_listening_leaves_nothing_behind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    leaks = Leaks()
    producer = KVProducer(make_cache(), describe(make_cache()), make_mover("inproc"))
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
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    cache = make_cache()
    consumer = KVConsumer(cache, describe(cache), make_mover("inproc"), verify=False)
    producer = KVProducer(cache, describe(cache), make_mover("inproc"))
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
    consumer = KVConsumer(cache, describe(cache), make_mover("tcp"), verify=False)
    with pytest.raises(InputError, match="give one to advertise"):
        consumer.listen("0.0.0.0:0", security=Security(insecure=True))
    consumer.close()


def test_a_taken_port_leaves_nothing_behind() -> None:
    with Pair(mover="tcp") as pair:
        leaks = Leaks()
        cache = make_cache()
        consumer = KVConsumer(cache, describe(cache), make_mover("tcp"), verify=False)
        with pytest.raises(AddressInUse):
            consumer.listen(pair.address, security=OPEN)
        consumer.close()
        leaks.require_none("a consumer that could not listen")


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


def test_a_consumer_that_closes_fails_what_it_had() -> None:
    with Pair(destination=make_cache("flashinfer_hnd", 32, num_blocks=3), mover="tcp") as pair:
        going, queued = begin(pair.producer, 40, "going"), begin(pair.producer, 40, "queued")
        pair.received("queued")
        ship(pair.producer, going, complete=False)
        wait_until(lambda: going.unsent == 0, "all layers sent")
        pair.consumer.close()
        for request in (going, queued):
            with pytest.raises(PdtxError, match=r"decode-.* (is closing|closed)|closed the connection"):
                pair.producer.wait(request)
        wait_until(lambda: pair.producer._lost is not None, "the producer to learn of it", 2.0)
        with pytest.raises(PeerLost, match="lost decode-"):
            begin(pair.producer, 1, "late")


def test_nobody_is_left_waiting_for_a_data_connection_that_broke() -> None:
    with Pair(mover="tcp") as pair:
        request = begin(pair.producer, 20)
        wait_until(lambda: request.grant is not None, "a grant")
        assert pair.producer._connection is not None
        pair.producer._connection.close()
        with pytest.raises(TransferError, match="failed in payload: the data connection ended"):
            pair.producer.wait(request)


def produce_and_hang(address: str, started: "multiprocessing.synchronize.Event", silence_s: float) -> None:
    """A prefill node with a request of each kind: ready, receiving and queued."""
    torch.set_num_threads(1)
    dialer = partial(Dialer, silence_s=silence_s, heartbeat_s=silence_s / 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdtx.engine.producer.Dialer", dialer)
        producer = KVProducer(make_cache(), describe(make_cache()), make_mover("tcp"))
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
        os._exit(3 if isinstance(error, PeerLost | TransferError) else 4)


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
    monkeypatch.setattr("pdtx.engine.producer.Dialer", partial(Dialer, silence_s=SILENCE_S, heartbeat_s=beat_s))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_producer_costs_no_blocks_and_the_next_one_is_served(number: int) -> None:
    pool = make_cache("flashinfer_hnd", 32, num_blocks=4)
    with Pair(destination=pool, mover="tcp") as pair, Child(pair.address, SILENCE_S) as child:
        assert child.started.wait(60)
        ready = pair.next_ready()
        pair.received("queued")
        child.signal(number)
        wait_until(lambda: ready.error is not None, "the loss of the producer", SILENCE_S * 2)
        assert isinstance(ready.error, PeerLost)
        pair.consumer.let_go(ready)
        pair.require_all_free(1.0)
        ship(pair.producer, begin(pair.producer, 40, "next"))
        pair.finish(pair.next_ready())
        if number == signal.SIGSTOP:
            child.signal(signal.SIGCONT)
            child.process.join(SILENCE_S * 3)
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
