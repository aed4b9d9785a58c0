"""KVProducer and KVConsumer where the consumer's tiers have a part of the prompt: what is sent, what is believed."""

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pdtx.cache import KVCaches
from pdtx.engine.inbound import InboundRequest, InboundState
from pdtx.errors import ProtocolError, TransferError
from pdtx.kvspec import FullAttentionSpec, SlidingWindowSpec
from pdtx.protocol import Grant, Message
from pdtx.tiers import Moved, Side
from pdtx.tiers.cpu import CpuTier
from pdtx.tiers.geometry import tier_caches
from pdtx.tiers.prefix import Fetched, PrefixCache, Request
from tests.engine_pair import (
    PATIENCE_S,
    Contents,
    Pair,
    arrived,
    attention,
    begin,
    bits,
    join,
    latent,
    make_cache,
    produce,
    require_contents,
    ship,
    states,
    wait_until,
)
from tests.tier_scenes import FENCE, KEPT

BLOCK = 32
FINGERPRINT = b"f" * 32


def with_tier(cache: KVCaches) -> PrefixCache:
    memory = tier_caches(cache, block_tokens=BLOCK, nbytes=1 << 20, tokens_per_state=BLOCK)
    return PrefixCache(cache, CpuTier(memory, like=cache), FINGERPRINT)


class Saved:
    """A pair whose consumer's tier holds what its producer is going to compute."""

    def __init__(self, source: KVCaches, destination: KVCaches, tokens: int, in_tier: int) -> None:
        self.pair = Pair(source, destination, prefix=with_tier)
        self.tokens, self.in_tier = tokens, in_tier
        prefix = self.pair.consumer.prefix
        assert prefix is not None
        self.prefix = prefix

    def __enter__(self) -> "Saved":
        self.pair.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:  # noqa: ANN401
        self.pair.__exit__(*exc)
        self.prefix.close()

    def run(self) -> tuple[Contents, InboundRequest, int]:
        """Ship a prompt, keep it, and ship it again; return what it was, as it arrived, and the bytes then."""
        pair, tier = self.pair, self.prefix.tier
        assert tier is not None
        first = begin(pair.producer, self.tokens, "first")
        wait_until(lambda: first.grant is not None, "a grant, for which nothing was found")
        contents = produce(pair.producer, first, [20])
        keys, count = self.prefix.keys(first.token_ids), self.in_tier // BLOCK
        places = [np.arange(0 if group.kind == "state" else count) for group in pair.sources.groups]
        moved: Moved = tier.store(keys, Side(pair.sources, first.sources, hold=KEPT), places, FENCE).result(10)
        assert not moved.failed
        pair.finish(pair.next_ready())
        again = begin(pair.producer, self.tokens, "again")
        start = 0
        for stop in (20, self.tokens):  # the same contents, in two chunks
            for index, buffer in enumerate(pair.sources.buffers):
                for layer, name in enumerate(buffer.layer_names):
                    rows, table = contents[buffer.name, name], again.tables[buffer.group]
                    buffer.write_canonical(layer, table, 0, rows)
                    pair.producer.layer_ready(again, index, layer, start, stop)
            start = stop
        pair.producer.computed(again, 7)
        ready = pair.next_ready()
        return contents, ready, first.nbytes


@pytest.mark.parametrize("in_tier", [32, 64, 96])
@pytest.mark.parametrize("sizes", [(16, 32), (32, 8)], ids=str)
def test_only_what_the_tier_lacks_is_sent_and_all_is_verified(sizes: tuple[int, int], in_tier: int) -> None:
    def caches(layout: str, size: int) -> KVCaches:
        return join(
            [attention(FullAttentionSpec, "full", layout, size, num_blocks=40), latent("l", 24, size, num_blocks=40)],
            [attention(SlidingWindowSpec, "window", layout, size, num_blocks=40, sliding_window=40)],
            [states()],
        )

    source, destination = caches("flash_attn_nhd", sizes[0]), caches("flashinfer_hnd", sizes[1])
    with Saved(source, destination, 100, in_tier) as saved:
        contents, ready, whole = saved.run()
        assert ready.fetched.num_tokens == in_tier
        per_token = {b.name: b.bytes_per_position * b.num_layers for b in destination.buffers}
        # A window of 40 needs positions 61 to 99.
        spared = (per_token["full"] + per_token["l"]) * in_tier + per_token["window"] * max(0, in_tier - 61)
        assert ready.received_bytes == whole - spared
        require_contents(saved.pair, ready, contents)
        saved.pair.finish(ready)


def test_a_prompt_that_is_all_cached_sends_nothing() -> None:
    with Saved(KVCaches.single(make_cache()), KVCaches.single(make_cache("flashinfer_hnd", 32)), 64, 64) as saved:
        contents, ready, whole = saved.run()
        assert whole > 0
        assert ready.received_bytes == 0
        require_contents(saved.pair, ready, contents)
        saved.pair.finish(ready)


def forge(pair: Pair, change: Callable[[Grant], Grant]) -> None:
    """Change what the consumer says of a grant, and nothing of what it expects."""
    send = pair.consumer._send

    def forged(session: Any, message: Message) -> None:  # noqa: ANN401 - a Session
        send(session, change(message) if isinstance(message, Grant) else message)

    pair.consumer._send = forged  # type: ignore[method-assign]


def test_who_is_told_not_to_send_what_is_not_there_cannot_complete() -> None:
    with Pair() as pair:
        forge(pair, lambda grant: msgspec.structs.replace(grant, cached_tokens=32))
        request = begin(pair.producer, 40)
        ship(pair.producer, request)
        with pytest.raises(TransferError, match=r"completed r wrongly.*have not arrived"):
            pair.producer.wait(request)
        assert pair.consumer.next_ready(0.2) is None


def test_more_cached_tokens_than_the_prompt_has_are_no_grant() -> None:
    with Pair() as pair:
        forge(pair, lambda grant: msgspec.structs.replace(grant, cached_tokens=41))
        request = begin(pair.producer, 40)
        ship(pair.producer, request)
        with pytest.raises(ProtocolError, match="claims 41 cached tokens of a prompt of 40"):
            pair.producer.wait(request)


class Slow(PrefixCache):
    """Loads only once it is let."""

    def __init__(self, cache: KVCaches) -> None:
        inner = with_tier(cache)
        super().__init__(cache, inner.tier, FINGERPRINT)
        self.gate, self.error = threading.Event(), False

    def fetch(self, request: Request, num_tokens: int, deadline: float, *, resume: bool) -> Fetched:
        assert self.gate.wait(PATIENCE_S)
        if self.error:
            raise RuntimeError("a bug")
        return super().fetch(request, num_tokens, deadline, resume=resume)


@pytest.mark.parametrize("error", [False, True])
def test_loading_holds_up_nobody_and_no_failure_of_it_ends_a_request(error: bool) -> None:
    slow = list[Slow]()

    def make(cache: KVCaches) -> PrefixCache:
        slow.append(Slow(cache))
        return slow[0]

    with Pair(destination=make_cache("flashinfer_hnd", 32, num_blocks=20), prefix=make) as pair:
        slow[0].error = error
        requests = [begin(pair.producer, 20, f"r{at}") for at in range(3)]
        sent = {request.request_id: ship(pair.producer, request) for request in requests}
        wait_until(lambda: pair.received("r0").state is InboundState.LOADING, "the loading")
        pair.consumer.fail(pair.received("r1"), TransferError("no more"))
        slow[0].gate.set()
        for _ in range(2):
            ready = pair.next_ready()
            assert torch.equal(bits(arrived(pair.destination, ready)), bits(sent[ready.request_id].data))
            pair.finish(ready)
        with pytest.raises(TransferError, match="no more"):
            pair.producer.wait(requests[1])
    slow[0].close()


def test_blocks_of_a_request_that_has_ended_stay_out_until_they_are_kept() -> None:
    gate = threading.Event()

    def make(cache: KVCaches) -> PrefixCache:
        prefix = with_tier(cache)
        tier = prefix.tier
        assert tier is not None
        store = tier.store
        tier.store = lambda keys, source, places, fence=None: store(  # type: ignore[method-assign]
            keys, source, places, lambda: (gate.wait(PATIENCE_S), None)[1]
        )
        return prefix

    with Pair(prefix=make) as pair:
        request = begin(pair.producer, 40)
        ship(pair.producer, request)
        ready = pair.next_ready()
        kept = pair.consumer.keep(ready, ready.ask.token_ids)
        assert kept is not None
        pair.finish(ready)
        assert pair.consumer.allocator.num_free == (pair.destination.num_blocks - 3,)
        gate.set()
        assert not kept.result(10).failed
        wait_until(lambda: pair.consumer.allocator.num_free == (pair.destination.num_blocks - 1,), "its blocks")
        assert pair.consumer.prefix is not None
        pair.consumer.prefix.close()
