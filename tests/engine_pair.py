"""A producer and a consumer against each other: no model, random contents, real sockets where they matter."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from types import TracebackType
from typing import Any

import numpy as np
import torch

from pdtx.cache import (
    CacheGroup,
    GroupAllocator,
    KVCaches,
    PagedBuffer,
    PagedKVCache,
    PagedLatentCache,
    PagedStateCache,
    group_kind,
)
from pdtx.engine import InboundRequest, KVConsumer, KVProducer, OutboundRequest, describe_cache
from pdtx.engine.control_thread import Owned
from pdtx.kvspec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    Segment,
    SlidingWindowSpec,
    StateSharding,
)
from pdtx.layout import Layout
from pdtx.protocol import CacheDescription, Finished
from pdtx.sidechannel import Security
from pdtx.tiers.prefix import PrefixCache
from pdtx.transports import Connection, Mover, Receiver, make_mover

OPEN = Security()
PATIENCE_S = 10.0
LAYERS, HEADS, CHANNELS = 3, 2, 8


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


def caches_of(cache: PagedBuffer | KVCaches) -> KVCaches:
    return cache if isinstance(cache, KVCaches) else KVCaches.single(cache)


def describe(
    cache: PagedBuffer | KVCaches, fingerprint: str = "same", not_transferred: Sequence[str] = ()
) -> CacheDescription:
    return describe_cache(caches_of(cache), model="a model", fingerprint=fingerprint, not_transferred=not_transferred)


def make_producer(
    cache: PagedBuffer | KVCaches,
    mover: str = "inproc",
    fingerprint: str = "same",
    not_transferred: Sequence[str] = (),
) -> KVProducer:
    return KVProducer(caches_of(cache), describe(cache, fingerprint, not_transferred), make_mover(mover))


def make_consumer(
    cache: PagedBuffer | KVCaches, mover: str = "inproc", *, verify: bool = False, not_transferred: Sequence[str] = ()
) -> KVConsumer:
    description = describe(cache, not_transferred=not_transferred)
    return KVConsumer(caches_of(cache), description, make_mover(mover), verify=verify)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.005)


def all_free(allocator: GroupAllocator) -> bool:
    return all(pool.num_free == pool.num_blocks - 1 for pool in allocator.pools)


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


class Pair:
    """A consumer that listens and a producer connected to it. At the end every block must be free again."""

    def __init__(
        self,
        source: PagedBuffer | KVCaches | None = None,
        destination: PagedBuffer | KVCaches | None = None,
        *,
        mover: str = "inproc",
        plan_layout: Layout | None = None,
        max_deadline_s: float = 600.0,
        wrap: Callable[[Mover], Mover] = lambda mover: mover,
        wrap_consumers: Callable[[Mover], Mover] = lambda mover: mover,
        prefix: Callable[[KVCaches], PrefixCache | None] = lambda cache: None,
        not_transferred: Sequence[str] = (),
    ) -> None:
        self.not_transferred = not_transferred  # as the producer says
        self.sources = caches_of(source or make_cache())
        self.destinations = caches_of(destination or make_cache("flashinfer_hnd", 32))
        self.mover_name = mover
        self.producers = list[KVProducer]()
        self.consumer = KVConsumer(
            self.destinations,
            describe(self.destinations),
            wrap_consumers(make_mover(mover)),
            verify=True,
            max_deadline_s=max_deadline_s,
            plan_layout=plan_layout,
            prefix=prefix(self.destinations),
        )
        try:
            self.address = self.consumer.listen("127.0.0.1:0", security=OPEN)
            self.producer = self.connect(self.sources, wrap)
        except BaseException:
            self.close()
            raise

    @property
    def source(self) -> PagedKVCache:
        """The producer's cache where that is one of keys and values."""
        (buffer,) = self.sources.buffers
        assert isinstance(buffer, PagedKVCache)
        return buffer

    @property
    def destination(self) -> PagedKVCache:
        """The consumer's, likewise."""
        (buffer,) = self.destinations.buffers
        assert isinstance(buffer, PagedKVCache)
        return buffer

    def connect(
        self, cache: PagedBuffer | KVCaches | None = None, wrap: Callable[[Mover], Mover] = lambda x: x
    ) -> KVProducer:
        """Connect one more producer."""
        cache = caches_of(cache or make_cache())
        description = describe(cache, not_transferred=self.not_transferred)
        producer = KVProducer(cache, description, wrap(make_mover(self.mover_name)))
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
            assert found.compared == self.elements(request)
        self.consumer.release(request)
        self.consumer.finish(request, finished(request))
        self.consumer.let_go(request)

    def elements(self, request: InboundRequest) -> int:
        """Elements of a request that must be compared, by shapes alone: copies on several ranks each."""
        found = 0
        for index, buffer in enumerate(self.destinations.buffers):
            positions = len(self.destinations.groups[buffer.group].positions(request.num_tokens))
            if buffer.kind == "state":  # what several senders have is compared with each
                pairs, src_tp = request.engine.expected[index].pairs, request.engine.tp_size
                one = sum(prod(buffer.common_shape(dst, src, src_tp, 1)) for src, dst in pairs)
            else:
                held = sum(len(buffer.common_units(rank, rank, buffer.tp_size)) for rank in buffer.tp_ranks)
                one = prod(buffer.rows_shape(1)) // buffer.rows_shape(1)[2] * held
            found += buffer.num_layers * positions * one // buffer.itemsize
        return found

    def received(self, request_id: str) -> InboundRequest:
        """The consumer's record of a request, once it is there."""

        def find() -> InboundRequest | None:
            requests = self.consumer.control.call(lambda: list(self.consumer.core.requests.values()))
            return next((request for request in requests if request.request_id == request_id), None)

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
    (cache,) = producer.cache.buffers
    assert isinstance(cache, PagedKVCache)
    total = request.num_tokens
    data = torch.randn(cache.num_layers, 2, total, cache.spec.num_kv_heads, cache.head_size).to(cache.dtype)
    for start, stop in pairwise((0, *accumulate(chunks), total)):
        for layer in range(cache.num_layers):
            ship_layer(producer, request, data, layer, start, stop)
    if complete:
        producer.computed(request, 7)
    settle(producer)
    return Sent(data)


def serve(pair: Pair, request_id: str = "next", tokens: int = 20) -> None:
    """One request, from its beginning to its good end on both sides."""
    request = begin(pair.producer, tokens, request_id)
    ship(pair.producer, request)
    pair.finish(pair.next_ready())
    assert pair.producer.wait(request).text == "done"


def settle(engine: KVProducer | KVConsumer) -> None:
    """Return when all that was posted to an engine's control thread so far has been handled."""
    engine.control.call(lambda: None)


def change(engine: KVProducer | KVConsumer, request: Owned, **fields: object) -> None:
    """Change a request, on the thread that owns it."""
    for name, value in fields.items():
        engine.control.call(setattr, request, name, value)


def ship_layer(
    producer: KVProducer, request: OutboundRequest, data: torch.Tensor, layer: int, start: int, stop: int
) -> None:
    (cache,) = producer.cache.buffers
    assert isinstance(cache, PagedKVCache)
    key, value = data[layer, :, start:stop]
    cache.write(layer, request.tables[0], start, key, value)
    producer.layer_ready(request, 0, layer, start, stop)


def arrived(cache: PagedKVCache, request: InboundRequest) -> torch.Tensor:
    """What lies in the consumer's cache, in the order of Sent."""
    ids = torch.as_tensor(request.granted(0))
    return torch.stack([torch.stack(cache.read(i, ids, 0, request.num_tokens)) for i in range(cache.num_layers)])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """For comparisons to the bit: NaN equals itself and 0 does not equal -0."""
    return tensor.contiguous().view(torch.uint8)


# -- caches of several groups ------------------------------------------------------------------------------------------


def join(*groups: Sequence[PagedBuffer], encoder_positions: int = 0) -> KVCaches:
    """Caches of which each group has the given buffers and the name of their kind."""
    made, placed = list[CacheGroup](), list[tuple[int, PagedBuffer]]()
    for place, buffers in enumerate(groups):
        first, kind = buffers[0], group_kind(buffers[0].spec)
        encoder = encoder_positions if kind == "cross" else 0
        made.append(CacheGroup(kind, kind, first.block_size, first.num_blocks, first.spec, encoder))
        placed += [(place, buffer) for buffer in buffers]
    return KVCaches(made, placed)


def attention(
    cls: type[FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec | CrossAttentionSpec],
    name: str,
    layout: str = "flash_attn_nhd",
    block_size: int = 16,
    *,
    layers: Sequence[str] = ("layers.0", "layers.1"),
    num_blocks: int = 12,
    heads: int = HEADS,
    channels: int = CHANNELS,
    tp_size: int = 1,
    **fields: Any,  # noqa: ANN401 - of the spec's class
) -> PagedKVCache:
    spec = cls(block_size=block_size, num_kv_heads=heads, head_size=channels, dtype="bfloat16", **fields)
    return PagedKVCache(
        spec,
        layout=layout,
        num_layers=len(layers),
        num_blocks=num_blocks,
        name=name,
        layer_names=layers,
        tp_size=tp_size,
    )


def latent(
    name: str, channels: int, block_size: int = 16, *, num_blocks: int = 12, tp_size: int = 1, ratio: int = 1
) -> PagedLatentCache:
    spec = MLAAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=channels, dtype="bfloat16", compress_ratio=ratio
    )
    return PagedLatentCache(spec, num_layers=2, num_blocks=num_blocks, name=name, tp_size=tp_size)


def states(
    layout: str = "mamba_sd", *, num_blocks: int = 5, layers: Sequence[str] = ("layers.1",), tp_size: int = 1
) -> PagedStateCache:
    """States of two heads, and a convolution over x of those heads and B, which all ranks have."""
    spec = MambaSpec(block_size=512, shapes=((3, 6), (2, 4, 5)), dtypes=("bfloat16", "float32"))
    segments = Segment(name="x", channels=4, units=2), Segment(name="B", channels=2, units=1)
    return PagedStateCache(
        spec,
        layout=layout,
        num_layers=len(layers),
        num_blocks=num_blocks,
        layer_names=layers,
        tp_size=tp_size,
        sharding=StateSharding(conv=(segments,), heads=2),
    )


def scramble(allocator: GroupAllocator, seed: int) -> None:
    """Put every pool's free blocks into an order of its own, so that no two tables are alike by chance."""
    chance = np.random.default_rng(seed)
    for pool in allocator.pools:
        taken = [pool.allocate(1) for _ in range(pool.num_free)]
        for place in chance.permutation(len(taken)).tolist():
            pool.free(taken[place])


Contents = dict[tuple[str, str], torch.Tensor]
"""What a request's cache was, kept apart from the caches: by buffer and layer, rows of all positions."""


def produce(
    producer: KVProducer,
    request: OutboundRequest,
    chunks: Sequence[int] = (),
    *,
    without: Sequence[str] = (),
    complete: bool = True,
    start_at: int = 0,
    stop_at: int | None = None,
    contents: Contents | None = None,
) -> Contents:
    """Compute random bytes in every layer of every buffer, in chunks of so many tokens, and ship them.

    without: buffers whose layers are computed but never said to be ready. start_at, stop_at: of the prompt; contents:
    what lies before start_at.
    """
    contents, last = dict(contents or {}), request.num_tokens if stop_at is None else stop_at
    edges = [*accumulate(chunks, initial=start_at), last]
    complete = complete and last == request.num_tokens
    for start, stop in pairwise(edges):
        for index, buffer in enumerate(producer.cache.buffers):
            for layer in range(buffer.num_layers):
                _compute(producer, request, buffer, layer, (start, stop), contents)
                if buffer.name not in without:
                    producer.layer_ready(request, index, layer, start, stop)
    if complete:
        producer.computed(request, 7)
    settle(producer)
    return contents


def _compute(
    producer: KVProducer,
    request: OutboundRequest,
    buffer: PagedBuffer,
    layer: int,
    tokens: tuple[int, int],
    contents: Contents,
) -> None:
    """Write what a model would: tokens' keys and values, the state after them, the encoder's with the first ones."""
    group, key = producer.cache.groups[buffer.group], (buffer.name, buffer.layer_names[layer])
    start, stop = tokens
    if group.kind == "state":
        start, stop = 0, 1
        contents.pop(key, None)  # every chunk overwrites it
    elif group.kind == "cross":
        if start > 0:
            return
        start, stop = 0, group.encoder_positions
    # A vector for several tokens is there once the last of them is.
    ratio = getattr(buffer.spec, "compress_ratio", 1)
    start, stop = start // ratio * ratio, stop // ratio * ratio
    rows = torch.randint(256, buffer.rows_shape(stop - start), dtype=torch.uint8)
    buffer.write_canonical(layer, request.tables[buffer.group], start, rows)
    contents[key] = torch.cat((contents[key], rows), 1) if key in contents else rows


def require_contents(pair: Pair, request: InboundRequest, contents: Contents) -> None:
    """Compare every needed position of every buffer of the consumer with what was computed."""
    require_contents_of(pair.destinations, request, contents)


def require_contents_of(destinations: KVCaches, request: InboundRequest, contents: Contents) -> None:
    """The same, of any consumer's cache."""
    for buffer in destinations.buffers:
        positions = destinations.groups[buffer.group].positions(request.num_tokens)
        table = torch.as_tensor(request.tables[buffer.group])
        for layer, name in enumerate(buffer.layer_names):
            found = buffer.canonical(layer, table, positions.start, positions.stop)
            meant = contents[buffer.name, name][:, positions.start : positions.stop]
            assert torch.equal(found, meant), f"{buffer.name} {name}"
