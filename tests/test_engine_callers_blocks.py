"""Engines over blocks of a caller that schedules by itself: tables from outside, expected requests, poll()."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from pdtx.cache import CacheGroup, CallerBlocks, CallerTables, ForeignBuffer, KVCaches
from pdtx.cache.codes import POISON
from pdtx.engine import Arrived, KVConsumer, KVProducer, OutboundRequest
from pdtx.errors import (
    CacheError,
    DeadlineExceeded,
    InputError,
    PdtxError,
    PeerLost,
    TransferAborted,
    TransferError,
    VerificationError,
)
from pdtx.layout import KVCacheLayout, Layout
from pdtx.plan.runs import Int64s
from pdtx.transports import make_mover
from tests.engine_pair import (
    OPEN,
    PATIENCE_S,
    Pair,
    begin,
    bits,
    caches_of,
    describe,
    make_cache,
    settle,
    ship,
    wait_until,
)

TOKENS = 40


T = TypeVar("T")


def poll(ended: Callable[[], list[T]]) -> list[T]:
    """What has ended, once something has."""
    found = list[T]()

    def look() -> bool:
        found.extend(ended())
        return bool(found)

    wait_until(look, "the end of a request")
    return found


class Callers:
    """A producer and a consumer whose blocks belong to the test."""

    def __init__(
        self,
        mover: str = "tcp",
        *,
        verify: bool = True,
        plan_layout: Layout | None = None,
        on_free: Callable[[str], None] = lambda side: None,
    ) -> None:
        def freed(tables: CallerTables) -> None:
            self.freed.append(tables)
            on_free("producer")

        def back(tables: CallerTables) -> None:
            self.back.append(tables)
            on_free("consumer")

        self.source, self.destination = make_cache(num_blocks=12), make_cache("flashinfer_hnd", 32, num_blocks=9)
        self.freed, self.back = list[CallerTables](), list[CallerTables]()
        sources, destinations = caches_of(self.source), caches_of(self.destination)
        self.consumer = KVConsumer(
            destinations, describe(destinations), make_mover(mover), verify=verify, plan_layout=plan_layout,
            blocks=CallerBlocks(destinations.groups, back),
        )  # fmt: skip
        address = self.consumer.listen("127.0.0.1:0", security=OPEN)
        self.producer = KVProducer(
            sources, describe(sources), make_mover(mover), blocks=CallerBlocks(sources.groups, freed)
        )
        self.producer.connect(address, security=OPEN)

    def __enter__(self) -> "Callers":
        return self

    def __exit__(self, *_: object) -> None:
        self.producer.close()
        self.producer.mover.close()
        self.consumer.close()

    def begin(self, name: str = "r", tables: list[list[int]] | None = None, tokens: int = TOKENS) -> OutboundRequest:
        return self.producer.begin(name, num_tokens=tokens, tables=tables or [[3, 1, 7]], timeout_s=20.0)

    def compute(self, request: OutboundRequest, start: int = 0, stop: int = TOKENS) -> None:
        for layer in range(self.source.num_layers):
            table = request.tables[0]
            key, value = torch.randn(2, stop - start, 2, 8).to(torch.bfloat16)
            self.source.write(layer, table, start, key, value)
            self.producer.layer_ready(request, 0, layer, start, stop)

    def arrived(self) -> Arrived:
        (found,) = poll(self.consumer.poll)
        return found

    def ended(self) -> OutboundRequest:
        (found,) = poll(self.producer.poll)
        return found

    def require_equal(self, request: OutboundRequest, table: list[int], start: int = 0) -> None:
        mine, theirs = torch.as_tensor(table), request.tables[0]
        for layer in range(self.source.num_layers):
            for found, meant in zip(
                self.destination.read(layer, mine, start, TOKENS),
                self.source.read(layer, theirs, start, TOKENS),
                strict=True,
            ):
                assert torch.equal(bits(found), bits(meant))


@pytest.mark.parametrize("first", ["asked", "expected"])
@pytest.mark.parametrize("mover", ["tcp", "shm"])
def test_a_request_and_its_blocks_wait_for_each_other(mover: str, first: str) -> None:
    with Callers(mover) as callers:
        callers.destination.view(0)[:, 6] = 1.0  # somebody else's block, in use
        others = callers.destination.canonical(0, torch.tensor([6]), 0, 32)
        if first == "asked":
            request = callers.begin()
            wait_until(lambda: bool(callers.consumer.core.expectations.unmatched), "the request")
            callers.consumer.expect("r", TOKENS, [[5, 4]], deadline_s=20.0)
        else:
            callers.consumer.expect("r", TOKENS, [[5, 4]], deadline_s=20.0)
            request = callers.begin()
        callers.compute(request)
        callers.producer.computed(request)
        arrived = callers.arrived()
        assert arrived.error is None
        assert arrived.request is not None
        assert arrived.request.verified
        callers.require_equal(request, [5, 4])
        ended = callers.ended()
        assert ended is request
        assert ended.error is None
        wait_until(lambda: bool(callers.freed and callers.back), "both sides' blocks")
        assert [len(callers.freed), len(callers.back)] == [1, 1]
        assert torch.equal(callers.destination.canonical(0, torch.tensor([6]), 0, 32), others)


def test_block_tables_grow_with_chunked_prefill() -> None:
    with Callers() as callers:
        callers.consumer.expect("r", TOKENS, [[5, 4]], deadline_s=20.0)
        request = callers.begin(tables=[[3]])
        callers.compute(request, 0, 16)
        callers.producer.extend(request, [[3, 9]])
        callers.compute(request, 16, 32)
        callers.producer.extend(request, [[3, 9, 2]])
        callers.compute(request, 32, TOKENS)
        callers.producer.computed(request)
        assert callers.arrived().error is None
        callers.require_equal(request, [5, 4])


def test_a_table_that_does_not_go_on_is_refused() -> None:
    with Callers() as callers:
        request = callers.begin(tables=[[3, 1]])
        with pytest.raises(CacheError, match="had block 1 at 1 and now has 2"):
            callers.producer.extend(request, [[3, 2, 5]])
        with pytest.raises(CacheError, match="tables only grow"):
            callers.producer.extend(request, [[3]])
        callers.producer.cancel(request, "enough")
        callers.producer.extend(request, [[3, 1, 5]])  # too late, which is nobody's fault
        assert isinstance(callers.ended().error, TransferAborted)


def test_what_is_cached_is_neither_sent_nor_touched_nor_compared() -> None:
    with Callers() as callers:
        table = torch.tensor([5, 4])
        callers.destination.view(0)[:, 5] = 3.0  # what an earlier request left, with other last bits
        kept = callers.destination.canonical(0, table, 0, 32)
        callers.consumer.expect("r", TOKENS, [[5, 4]], cached_tokens=32, deadline_s=20.0)
        request = callers.begin()
        callers.compute(request)
        callers.producer.computed(request)
        arrived = callers.arrived()
        assert arrived.error is None
        assert torch.equal(callers.destination.canonical(0, table, 0, 32), kept)
        callers.require_equal(request, [5, 4], start=32)
        assert arrived.request is not None
        assert arrived.request.received_bytes == 3 * 2 * (TOKENS - 32) * 2 * 8 * 2
        assert request.grant is not None
        assert request.grant.groups[0].block_ids[0] in (0, 5)


@pytest.mark.parametrize("cached", [1, 16, 31, 33, TOKENS - 1, TOKENS])
def test_a_cached_beginning_may_end_inside_a_block(cached: int) -> None:
    """Such a block was not filled with poison, and is no stray for it; what lies beside is compared all the same."""
    with Callers() as callers:
        for layer in range(callers.destination.num_layers):
            callers.destination.view(layer)[:, 4:6] = 3.0
        callers.consumer.expect("r", TOKENS, [[5, 4]], cached_tokens=cached, deadline_s=20.0)
        request = callers.begin()
        callers.compute(request)
        callers.producer.computed(request)
        assert callers.arrived().error is None
        callers.require_equal(request, [5, 4], start=cached)


@pytest.mark.parametrize(
    ("slice_", "text"),
    [
        ((1, 0, 0, 8), "buffer 1; this cache has 1: full"),
        ((0, 3, 0, 8), "layer 3; buffer full has 3"),
        ((0, 0, 0, TOKENS + 1), f"tokens 0..{TOKENS + 1}; the prompt has {TOKENS}"),
        ((0, 0, -1, 8), r"tokens -1..8"),
    ],
)
def test_what_the_cache_does_not_have_is_not_ready(slice_: tuple[int, int, int, int], text: str) -> None:
    with Callers() as callers:
        request = callers.begin()
        with pytest.raises(InputError, match=text):
            callers.producer.layer_ready(request, *slice_)
        callers.producer.cancel(request, "enough")


def test_only_blocks_that_a_request_names_are_poisoned_and_never_the_null_block() -> None:
    with Callers() as callers:
        for layer in range(callers.destination.num_layers):
            callers.destination.view(layer)[:] = 2.0
        callers.consumer.expect("r", TOKENS, [[5, 4]], deadline_s=20.0)
        settle(callers.consumer)
        wait_until(lambda: all(e.clean for e in callers.consumer.core.expectations.expected.values()), "the poison")
        poisoned = (callers.destination.view(0).view(torch.int16) == POISON).flatten(2).all(-1).all(0)
        assert poisoned.nonzero().flatten().tolist() == [4, 5]
        callers.consumer.cancel("r", "enough")
        assert isinstance(callers.arrived().error, TransferAborted)


def test_a_failed_poison_ends_the_expectation_that_it_was_for_and_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go, poison = threading.Event(), threading.Event(), KVCaches.poison

    def broken(cache: KVCaches, group: int, block_ids: Int64s) -> None:
        entered.set()
        assert go.wait(PATIENCE_S)
        monkeypatch.setattr(KVCaches, "poison", poison)
        raise RuntimeError("the device failed")

    monkeypatch.setattr(KVCaches, "poison", broken)
    with Callers() as callers:
        callers.consumer.expect("r", TOKENS, [[5, 4]], deadline_s=20.0)
        assert entered.wait(PATIENCE_S)
        callers.consumer.cancel("r", "enough")
        callers.consumer.expect("r", TOKENS, [[1, 2]], deadline_s=20.0)
        go.set()
        assert isinstance(callers.arrived().error, TransferAborted)
        request = callers.begin()
        callers.compute(request)
        callers.producer.computed(request)
        assert callers.arrived().error is None
        callers.require_equal(request, [1, 2])


def test_a_wrong_element_fails_the_request_before_it_is_handed_over() -> None:
    layout = make_cache("flashinfer_hnd", 32, num_blocks=9).layout
    assert isinstance(layout, KVCacheLayout)
    with Callers(plan_layout=layout.with_swapped("token", "head")) as callers:
        callers.consumer.expect("r", TOKENS, [[5, 4]], deadline_s=20.0)
        request = callers.begin()
        callers.compute(request)
        callers.producer.computed(request)
        arrived = callers.arrived()
        assert isinstance(arrived.error, VerificationError)
        assert arrived.wrong > 0
        assert "holds the value of" in str(arrived.error)
        assert isinstance(callers.ended().error, VerificationError)


def test_another_number_of_tokens_fails_both_sides_with_both_numbers() -> None:
    with Callers() as callers:
        callers.consumer.expect("r", TOKENS + 1, [[5, 4]], deadline_s=20.0)
        callers.begin()
        text = f"the prompt has {TOKENS} tokens, and {TOKENS + 1} are expected here"
        assert text in str(callers.arrived().error)
        assert f"failed in expect(): {text}" in str(callers.ended().error)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda c: c.expect("r", TOKENS, [[5]], deadline_s=1.0), InputError, "has 1 blocks; positions up to 40 take 2"),
        (lambda c: c.expect("r", TOKENS, [[5, 5]], deadline_s=1.0), CacheError, "block 5 stands twice"),
        (lambda c: c.expect("r", TOKENS, [[5, 99]], deadline_s=1.0), CacheError, "block id 99 is outside its pool"),
        (lambda c: c.expect("r", TOKENS, [], deadline_s=1.0), CacheError, "0 block tables were given"),
        (
            lambda c: c.expect("r", TOKENS, [[5, 0]], deadline_s=1.0),
            InputError,
            "has the null block at 1, where positions",
        ),
        (lambda c: c.expect("r", 4, [[5]], cached_tokens=5, deadline_s=1.0), InputError, "cached_tokens is 5"),
    ],
)
def test_tables_that_cannot_be_are_refused_at_once(
    call: Callable[[KVConsumer], None], error: type[PdtxError], text: str
) -> None:
    with Callers() as callers:
        with pytest.raises(error, match=text):
            call(callers.consumer)
        assert not callers.consumer.core.expectations.expected
        pool = callers.consumer.pool
        assert isinstance(pool, CallerBlocks)
        assert pool.num_leases == 0


def test_a_name_in_use_is_refused() -> None:
    with Callers() as callers:
        callers.consumer.expect("r", TOKENS, [[5, 4]], deadline_s=20.0)
        with pytest.raises(InputError, match="request id 'r' is in use"):
            callers.consumer.expect("r", TOKENS, [[1, 2]], deadline_s=20.0)
        callers.consumer.cancel("r", "enough")
        assert isinstance(callers.arrived().error, TransferAborted)
        wait_until(lambda: len(callers.back) == 2, "the blocks of both")


@pytest.mark.parametrize("asked", [False, True])
def test_nobody_waits_longer_than_the_deadline_of_the_expectation(asked: bool) -> None:
    """Also where no producer ever asks for it."""
    with Callers() as callers:
        request = callers.begin() if asked else None
        callers.consumer.expect("r", TOKENS, [[5, 4]], deadline_s=0.3)
        begun, error = time.monotonic(), callers.arrived().error
        assert time.monotonic() - begun < PATIENCE_S
        assert isinstance(error, DeadlineExceeded)
        assert error.phase == ("payload" if asked else "a request for it")
        if request is not None:
            with pytest.raises(TransferError, match="waiting for payload"):
                callers.producer.wait(request)


def test_a_request_that_nobody_expects_ends_by_its_deadline() -> None:
    with Callers() as callers:
        request = callers.producer.begin("r", num_tokens=TOKENS, tables=[[3, 1, 7]], timeout_s=0.5)
        with pytest.raises(TransferError, match=r"waiting for (expect\(\) from the decode node|a grant of blocks)"):
            callers.producer.wait(request)
        assert callers.ended() is request
        assert not callers.consumer.poll()


def test_a_request_that_is_not_expected_as_yet_ends_in_that_phase() -> None:
    with Callers() as callers:
        callers.begin()
        wait_until(lambda: bool(callers.consumer.core.expectations.unmatched), "the request")
        callers.consumer.cancel("r", "enough")
        assert "failed in expect(): request r was cancelled: enough" in str(callers.ended().error)


def test_closing_reports_what_was_expected() -> None:
    with Callers() as callers:
        callers.consumer.expect("r", TOKENS, [[5, 4]], deadline_s=20.0)
        callers.consumer.close()
        assert isinstance(callers.arrived().error, PeerLost)
        assert len(callers.back) == 1


def test_a_pool_of_its_own_takes_no_tables_and_the_other_way_round() -> None:
    with Callers() as callers:
        with pytest.raises(InputError, match="give tables, one for each group"):
            callers.producer.begin("r", num_tokens=TOKENS, timeout_s=1.0)
        with pytest.raises(InputError, match="there is no allocator"):
            _ = callers.producer.allocator
    cache = caches_of(make_cache())
    consumer = KVConsumer(cache, describe(cache), make_mover("inproc"), verify=False)
    with pytest.raises(InputError, match="give it blocks=CallerBlocks"):
        consumer.expect("r", TOKENS, [[1]], deadline_s=1.0)
    consumer.close()
    producer = KVProducer(cache, describe(cache), make_mover("inproc"))
    with pytest.raises(InputError, match="give it blocks=CallerBlocks"):
        producer.begin("r", num_tokens=TOKENS, tables=[[1]], timeout_s=1.0)
    producer.close()


def test_two_requests_may_share_blocks_of_a_cached_prefix() -> None:
    """The caller counts who uses a block; here each request is a lease of its own."""
    with Callers() as callers:
        for name, own in (("a", 4), ("b", 6)):
            callers.consumer.expect(name, TOKENS, [[5, own]], cached_tokens=32, deadline_s=20.0)
        for name, tables in (("a", [[3, 1, 7]]), ("b", [[3, 1, 8]])):
            request = callers.begin(name, tables)
            callers.compute(request)
            callers.producer.computed(request)
            assert callers.arrived().error is None
            callers.require_equal(request, [5, 4 if name == "a" else 6], start=32)
            assert callers.ended() is request


def test_foreign_memory_with_a_pool_of_pdtx_is_poisoned_block_by_block_as_it_is_granted() -> None:
    """What lay there before, in blocks that no request names, stays."""
    source = caches_of(make_cache(num_blocks=12))
    spec, names = source.buffers[0].spec, source.buffers[0].layer_names
    memory = torch.full((source.nbytes,), 0x11, dtype=torch.uint8)
    group = CacheGroup("full", "full", 16, 12, spec)
    foreign = KVCaches.over([group], [ForeignBuffer("full", "full", spec, "flash_attn_hnd", names, 12, memory)])
    with Pair(source, foreign) as pair:
        for number in range(3):
            request = begin(pair.producer, TOKENS, f"r{number}")
            ship(pair.producer, request)
            pair.finish(pair.next_ready())
            assert pair.producer.wait(request).text == "done"
        used = {int(block) for block in range(12) if bool((foreign.buffers[0].canonical(
            0, torch.tensor([block]), 0, 16) != 0x11).any())}  # fmt: skip
        assert used
        assert 0 not in used
        assert len(used) < 11


# -- callbacks that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deed", ["raises", "exits", "closes", "waits"])
def test_whatever_on_free_does_requests_are_reported_and_close_closes(deed: str) -> None:
    made = list[Callers]()
    request: OutboundRequest | None = None

    def on_free(side: str) -> None:
        assert deed != "raises"
        if deed == "exits":
            raise SystemExit
        if deed == "waits" and side == "producer" and request is not None:
            made[0].producer.wait(request)
        (made[0].producer if side == "producer" else made[0].consumer).close()

    with Callers(on_free=on_free) as callers:
        made.append(callers)
        callers.consumer.expect("r", TOKENS, [[2, 5]], deadline_s=20.0)
        request = callers.begin()
        callers.compute(request)
        callers.producer.computed(request)
        assert callers.arrived().error is None
        assert callers.ended() is request
        assert request.error is None
        pools = [callers.producer.pool, callers.consumer.pool]
        assert [pool.num_failed_calls for pool in pools if isinstance(pool, CallerBlocks)] == [1, 1]
        begun = [callers.begin(name) for name in ("x", "y")]
        callers.producer.close()
        assert callers.producer.poll() == begun
        assert [pool.num_leases for pool in pools if isinstance(pool, CallerBlocks)] == [0, 0]
        assert callers.producer.control.errors == 0
        assert not any(thread.name in ("pdtx-producer", "pdtx-shipper") for thread in threading.enumerate())
