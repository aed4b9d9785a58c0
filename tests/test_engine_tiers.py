"""KVProducer and KVConsumer where the consumer's tiers have a part of the prompt: what is sent, what is believed."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pdtx.cache import KVCaches
from pdtx.engine.inbound import InboundRequest
from pdtx.engine.states import InboundState
from pdtx.errors import ProtocolError, TierError, TierNotReady, TransferError, VerificationError
from pdtx.kvspec import FullAttentionSpec, SlidingWindowSpec
from pdtx.plan.runs import Int64s
from pdtx.protocol import Grant, Message
from pdtx.tiers import Moved, Side, hash_contents
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
from tests.test_engine_scales import MODES
from tests.test_engine_scales import cache as quantized
from tests.tier_scenes import FENCE, KEPT

BLOCK = 32
FINGERPRINT = b"f" * 32


def with_tier(cache: KVCaches) -> PrefixCache:
    memory = tier_caches(cache, block_tokens=BLOCK, nbytes=1 << 20, tokens_per_state=BLOCK)
    return PrefixCache(cache, CpuTier(memory, like=cache), FINGERPRINT)


def hashed_side(cache: KVCaches, tables: tuple[Int64s, ...]) -> Side:
    """A source whose blocks are stored with content hashes."""
    side = Side(cache, tables, hold=KEPT)
    return replace(side, contents=partial(hash_contents, side, BLOCK))


class Saved:
    """A pair whose consumer's tier holds what its producer is going to compute."""

    def __init__(
        self, source: KVCaches, destination: KVCaches, tokens: int, in_tier: int, *, last_bits: int = 0
    ) -> None:
        """last_bits: in which the contents of the first half of what the tier has differ the second time."""
        self.last_bits = last_bits
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
        moved: Moved = tier.store(keys, hashed_side(pair.sources, first.sources), places, FENCE).result(10)
        assert not moved.failed
        pair.finish(pair.next_ready())
        again = begin(pair.producer, self.tokens, "again")
        start = 0
        for stop in (20, self.tokens):  # the same contents, in two chunks
            for index, buffer in enumerate(pair.sources.buffers):
                for layer, name in enumerate(buffer.layer_names):
                    rows, table = contents[buffer.name, name].clone(), again.tables[buffer.group]
                    if pair.sources.groups[buffer.group].kind != "state":
                        rows[:, : self.in_tier // 2] ^= self.last_bits
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


@pytest.mark.parametrize(("mode", "layout"), [(mode, others[0]) for mode, (_, _, others) in MODES.items()])
def test_quantized_blocks_come_from_a_tier_with_their_scales(mode: str, layout: str) -> None:
    with Saved(quantized(mode, MODES[mode][1]), quantized(mode, layout, 32), 100, 64) as saved:
        contents, ready, whole = saved.run()
        assert ready.fetched.num_tokens == 64
        assert ready.received_bytes == whole // 100 * 36
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
    send = pair.consumer.core.effects.send

    def forged(peer: bytes, message: Message) -> None:
        send(peer, change(message) if isinstance(message, Grant) else message)

    pair.consumer.core.effects.send = forged  # type: ignore[method-assign]


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

    def fetch(
        self, request: Request, num_tokens: int, deadline: float, *, resume: bool, checked: bool = False
    ) -> Fetched:
        assert self.gate.wait(PATIENCE_S)
        if self.error:
            raise RuntimeError("a bug")
        return super().fetch(request, num_tokens, deadline, resume=resume, checked=checked)


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
        tier.store = lambda keys, source, places, fence: store(  # type: ignore[method-assign]
            keys, source, places, lambda: (gate.wait(PATIENCE_S), None)[1]
        )
        return prefix

    with Pair(prefix=make) as pair:
        request = begin(pair.producer, 40)
        ship(pair.producer, request)
        ready = pair.next_ready()
        pair.consumer.verify(ready)
        kept = pair.consumer.keep(ready, ready.ask.token_ids)
        assert kept is not None
        pair.finish(ready)
        assert pair.consumer.allocator.num_free == (pair.destination.num_blocks - 3,)
        gate.set()
        assert not kept.result(10).failed
        wait_until(lambda: pair.consumer.allocator.num_free == (pair.destination.num_blocks - 1,), "its blocks")
        assert pair.consumer.prefix is not None
        pair.consumer.prefix.close()


@pytest.mark.parametrize("in_tier", [32, 64])
def test_other_last_bits_at_the_producer_are_not_held_against_what_a_tier_had(in_tier: int) -> None:
    source, destination = make_cache(num_blocks=20), make_cache("flashinfer_hnd", 32, num_blocks=20)
    with Saved(KVCaches.single(source), KVCaches.single(destination), 70, in_tier, last_bits=1) as saved:
        contents, ready, _ = saved.run()
        assert ready.fetched.num_tokens == in_tier
        require_contents(saved.pair, ready, contents)
        saved.pair.finish(ready)  # which counts that all elements have been compared


def two_groups(layout: str, size: int) -> KVCaches:
    return join(
        [attention(FullAttentionSpec, "full", layout, size, num_blocks=40), latent("l", 24, size, num_blocks=40)],
        [attention(SlidingWindowSpec, "window", layout, size, num_blocks=40, sliding_window=70)],
    )


def flip(cache: KVCaches, tables: tuple[Int64s, ...], name: str, position: int) -> None:
    """Change one bit of a buffer's last layer at a position."""
    buffer = next(each for each in cache.buffers if each.name == name)
    table, layer = torch.as_tensor(tables[buffer.group]), buffer.num_layers - 1
    rows = buffer.canonical(layer, table, position, position + 1)
    rows[-1, 0, -1, -1] ^= 1
    buffer.write_canonical(layer, table, position, rows)


@pytest.mark.parametrize(
    ("name", "position", "words"),
    [
        ("full", 0, "1 of 6 blocks from tier cpu are wrong; first: buffer full block 0 (tokens 0..32) does not hold"),
        ("full", 95, "1 of 6 blocks from tier cpu are wrong; first: buffer full block 2 (tokens 64..96) does not hold"),
        ("l", 40, "1 of 6 blocks from tier cpu are wrong; first: group full buffer l block 1 (tokens 32..64) does not"),
        ("window", 64, "1 of 6 blocks from tier cpu are wrong; first: buffer window block 2 (tokens 64..96) does not"),
        ("full", 96, "buffer full layer 1 V token 96 head 0"),
        ("full", 99, "buffer full layer 1 V token 99 head 0"),
    ],
)
def test_one_bit_that_changed_is_found_wherever_it_came_from(name: str, position: int, words: str) -> None:
    source, destination = two_groups("flash_attn_nhd", 16), two_groups("flashinfer_hnd", 32)
    with Saved(source, destination, 100, 96) as saved:
        _, ready, _ = saved.run()
        flip(destination, ready.tables, name, position)
        with pytest.raises(VerificationError) as caught:
            saved.pair.consumer.verify(ready)
        assert words.replace("head 0", "head") in str(caught.value)
        assert caught.value.wrong > 0
        assert not ready.verified
        flip(destination, ready.tables, name, position)
        saved.pair.finish(ready)
        assert ready.verified


@pytest.mark.parametrize("swap", [(0, 1), (2, 0)])
def test_blocks_that_were_swapped_are_found_and_named(swap: tuple[int, int]) -> None:
    source, destination = two_groups("flash_attn_nhd", 16), two_groups("flashinfer_hnd", 32)
    with Saved(source, destination, 100, 96) as saved:
        _, ready, _ = saved.run()
        table = torch.as_tensor(ready.tables[0])
        for buffer in destination.buffers[:2]:
            for layer in range(buffer.num_layers):
                one, other = (buffer.canonical(layer, table, 32 * at, 32 * at + 32) for at in swap)
                buffer.write_canonical(layer, table, 32 * swap[0], other)
                buffer.write_canonical(layer, table, 32 * swap[1], one)
        first, second = sorted(swap)
        words = (
            f"2 of 6 blocks from tier cpu are wrong; first: buffer full block {first} (tokens {32 * first}.."
            f"{32 * first + 32}) holds the content of block {second} (tokens {32 * second}..{32 * second + 32})"
        )
        with pytest.raises(VerificationError) as caught:
            saved.pair.consumer.verify(ready)
        assert words in str(caught.value)
        saved.pair.consumer.fail(ready, caught.value)
        saved.pair.consumer.let_go(ready)


def test_a_block_of_other_tokens_in_the_tier_is_found() -> None:
    """The tier's own memory goes wrong after a block was kept: its hash is that of what it should be."""
    source, destination = make_cache(num_blocks=20), make_cache("flashinfer_hnd", 32, num_blocks=20)
    with Saved(KVCaches.single(source), KVCaches.single(destination), 70, 64) as saved:
        tier = saved.prefix.tier
        assert isinstance(tier, CpuTier)
        copy = tier._move_out

        def other_tokens(into: Side, wanted: Any, done: Any) -> None:  # noqa: ANN401 - a tier's own
            copy(into, replace(wanted, held=unused.numpy()[-len(wanted.held) :]), done)

        buffer = tier.cache.buffers[0]
        unused = torch.arange(1, buffer.num_blocks)
        tier._move_out = other_tokens  # type: ignore[method-assign]
        random = torch.randint(256, buffer.rows_shape(buffer.block_size * 2), dtype=torch.uint8)
        for layer in range(buffer.num_layers):
            buffer.write_canonical(layer, unused[-2:], 0, random)
        _, ready, _ = saved.run()
        with pytest.raises(VerificationError, match=r"2 of 2 blocks from tier cpu are wrong.*nor any other block"):
            saved.pair.consumer.verify(ready)
        saved.pair.consumer.fail(ready, VerificationError("as it was", 1))
        saved.pair.consumer.let_go(ready)


def stored(prefix: PrefixCache) -> int:
    return sum(group.stored.blocks for usage in prefix.usages() for group in usage.groups)


def test_what_has_not_arrived_or_was_not_verified_is_not_kept() -> None:
    with Pair(prefix=with_tier) as pair:
        prefix = pair.consumer.prefix
        assert prefix is not None
        request = begin(pair.producer, 40)
        sent = ship(pair.producer, request, complete=False)
        received = pair.received("r")
        wait_until(lambda: received.state is InboundState.RECEIVING, "the grant")
        with pytest.raises(TierNotReady, match=r"^request r is not kept: it has not all arrived: "):
            pair.consumer.keep(received, received.ask.token_ids)
        pair.producer.computed(request, 7)
        ready = pair.next_ready()
        with pytest.raises(TierNotReady, match=r"^request r is not kept: it has arrived and was not verified"):
            pair.consumer.keep(ready, ready.ask.token_ids)
        flip(pair.destinations, ready.tables, pair.destination.name, 3)
        with pytest.raises(VerificationError):
            pair.consumer.verify(ready)
        with pytest.raises(TierNotReady, match="was not verified"):
            pair.consumer.keep(ready, ready.ask.token_ids)
        assert stored(prefix) == 0
        flip(pair.destinations, ready.tables, pair.destination.name, 3)
        pair.consumer.verify(ready)
        with pytest.raises(TierError, match="are not those of its prompt"):
            pair.consumer.keep(ready, [5, *ready.ask.token_ids[1:]])
        kept = pair.consumer.keep(ready, ready.ask.token_ids)
        assert isinstance(kept, Future)
        assert kept.result(10).num_blocks == stored(prefix) == 1
        assert torch.equal(bits(arrived(pair.destination, ready)), bits(sent.data))
        pair.finish(ready, verify=False)
        prefix.close()


@pytest.mark.parametrize("answered", [0, 3])
def test_a_state_that_went_on_to_the_answer_is_not_kept_as_the_prompts(answered: int) -> None:
    def caches(layout: str, size: int) -> KVCaches:
        return join([attention(FullAttentionSpec, "full", layout, size, num_blocks=20)], [states()])

    with Pair(caches("flash_attn_nhd", 16), caches("flashinfer_hnd", 32), prefix=with_tier) as pair:
        prefix = pair.consumer.prefix
        assert prefix is not None
        request = begin(pair.producer, 64)
        wait_until(lambda: request.grant is not None, "the grant")
        produce(pair.producer, request, [20])
        ready = pair.next_ready()
        pair.consumer.verify(ready)
        kept = pair.consumer.keep(ready, [*ready.ask.token_ids, *range(answered)])
        assert kept is not None
        assert [len(places) for places in kept.result(10).places] == [2, 0 if answered else 1]
        pair.finish(ready, verify=False)
        prefix.close()


def test_a_copy_on_another_rank_that_differs_in_a_block_from_a_tier_is_found() -> None:
    def caches(layout: str, size: int, tp_size: int) -> KVCaches:
        return join([attention(FullAttentionSpec, "full", layout, size, heads=1, num_blocks=20, tp_size=tp_size)])

    source, destination = caches("flash_attn_nhd", 16, 1), caches("flashinfer_hnd", 32, 2)
    with Saved(source, destination, 70, 64) as saved:
        _, ready, _ = saved.run()
        first, before = destination.buffers[0].ranks[0].memory, destination.buffers[0].ranks[0].memory.clone()
        flip(destination, ready.tables, "full", 40)
        first.copy_(before)  # rank 1 keeps the bit
        with pytest.raises(VerificationError, match=r"positions 0\.\.70: 1 elements differ between ranks"):
            saved.pair.consumer.verify(ready)
        flip(destination, ready.tables, "full", 40)
        first.copy_(before)
        destination.buffers[0].ranks[1].memory.copy_(before)
        saved.pair.finish(ready)
