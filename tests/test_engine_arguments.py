"""What callers give to engines is taken, or refused at the call: nothing fails later, and nothing is left behind."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import pdtx
from pdtx.cache import CallerBlocks
from pdtx.engine import InboundRequest, KVConsumer, KVProducer, OutboundRequest
from pdtx.errors import CacheError, InputError, PdtxError, ProtocolError
from tests.engine_pair import Pair, begin, finished, ship
from tests.test_engine_callers_blocks import TOKENS, Callers

NAN = float("nan")
RAGGED = [[3, [1], 7]]


@pytest.fixture(scope="module")
def both() -> Iterator[Callers]:
    """One pair for all that is refused: nothing may be left of it."""
    with Callers() as callers:
        yield callers
        assert (callers.producer.control.errors, callers.consumer.control.errors) == (0, 0)


def require_refused(both: Callers, call: Callable[[], object], error: type[PdtxError], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
    for engine in (both.producer, both.consumer):
        assert isinstance(engine.pool, CallerBlocks)
        assert engine.pool.num_leases == 0
        assert engine.control.errors == 0
    assert not both.producer.core.requests
    assert not both.consumer.core.expectations.expected


IDS = [None, b"r", 5, ["r"], "", "a b", "r\n", "x" * 129]
TABLES: list[tuple[Any, str]] = [
    (RAGGED, "a block table is a list of ids"), (5, "block tables are 5"), ([5], "a block table is a list of ids"),
    ([[3.0]], "not float64"), ([["3"]], "a list of ids"), ([np.array([2**63 + 5], np.uint64)], "9223372036854775813"),
    ([torch.ones(2, requires_grad=True)], "a list of ids"), ([[3, 2**70]], "a list of ids"),
]  # fmt: skip
BEGIN: list[dict[str, Any]] = [
    {"num_tokens": "40"}, {"num_tokens": 40.0}, {"num_tokens": -1}, {"num_tokens": 2**70}, {"token_ids": [-1] * TOKENS},
    {"token_ids": [1.5] * TOKENS}, {"max_tokens": None}, {"max_tokens": -1}, {"timeout_s": NAN}, {"timeout_s": -1},
    {"timeout_s": float("inf")}, {"timeout_s": "4"}, {"timeout_s": None},
]  # fmt: skip
EXPECT: list[dict[str, Any]] = [
    {"num_tokens": "40"}, {"num_tokens": 40.0}, {"num_tokens": 0}, {"num_tokens": 2**70}, {"cached_tokens": None},
    {"cached_tokens": 16.5}, {"cached_tokens": TOKENS + 1}, {"deadline_s": "3"}, {"deadline_s": None},
    {"deadline_s": NAN}, {"deadline_s": -1}, {"deadline_s": 1e300},
]  # fmt: skip


@pytest.mark.parametrize("name", IDS)
def test_a_request_id_that_no_message_can_carry_is_refused(both: Callers, name: Any) -> None:  # noqa: ANN401
    text = "request id .* cannot be sent"
    require_refused(both, lambda: both.begin(name), InputError, text)
    require_refused(both, lambda: both.consumer.expect(name, TOKENS, [[5, 4]], deadline_s=9.0), InputError, text)


@pytest.mark.parametrize(("tables", "text"), TABLES)
def test_tables_that_are_none_are_refused(both: Callers, tables: Any, text: str) -> None:  # noqa: ANN401
    require_refused(both, lambda: both.begin(tables=tables), CacheError, text)
    require_refused(both, lambda: both.consumer.expect("r", TOKENS, tables, deadline_s=9.0), CacheError, text)


@pytest.mark.parametrize("wrong", BEGIN, ids=lambda wrong: str(wrong)[:30])
def test_begin_refuses_what_a_request_cannot_have(both: Callers, wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"num_tokens": TOKENS, "tables": [[3, 1, 7]], "timeout_s": 9.0}
    require_refused(both, lambda: both.producer.begin("r", **right | wrong), InputError, f"{next(iter(wrong))} is ")


@pytest.mark.parametrize("wrong", EXPECT, ids=lambda wrong: str(wrong)[:30])
def test_expect_refuses_what_a_request_cannot_have(both: Callers, wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"num_tokens": TOKENS, "tables": [[5, 4]], "deadline_s": 9.0}
    require_refused(both, lambda: both.consumer.expect("r", **right | wrong), InputError, f"{next(iter(wrong))} is ")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p, r: p.layer_ready(r, 0, 0, 0.0, 40.0), "start is 0.0"),
        (lambda p, r: p.layer_ready(r, 0, 0, 0, None), "stop is None"),
        (lambda p, r: p.layer_ready(r, 0, 1.0, 0, 40), "layer is 1.0"),
        (lambda p, r: p.layer_ready(r, "0", 0, 0, 40), "buffer is '0'"),
        (lambda p, r: p.computed(r, 3.0), "request r: first_token is 3.0; give an integer"),
        (lambda p, r: p.computed(r, "x"), "first_token is 'x'"),
        (lambda p, r: p.computed(r, 2**70), "first_token is 1180591620717411303424; give 0 to"),
        (lambda p, r: p.computed(r, -1), "first_token is -1"),
    ],
)
def test_what_is_no_layer_or_token_leaves_the_request_as_it_was(
    call: Callable[[KVProducer, OutboundRequest], None], text: str
) -> None:
    with Callers("inproc") as callers:
        callers.consumer.expect("r", TOKENS, [[5, 4]], deadline_s=20.0)
        request = callers.begin()
        with pytest.raises(InputError, match=text):
            call(callers.producer, request)
        callers.compute(request)
        callers.producer.computed(request, 7)
        assert callers.arrived().error is None
        assert callers.producer.control.errors == 0


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_numbers_and_lists_of_all_kinds_are_taken(kind: Callable[[Any], Any]) -> None:
    with Callers("inproc") as callers:
        time_s: Any = np.float32(20)
        tables: Any = [torch.tensor([5, 4]) if kind is torch.tensor else np.array([5, 4])]
        callers.consumer.expect("r", kind(TOKENS), tables, cached_tokens=kind(0), deadline_s=time_s)
        ids = kind(list(range(TOKENS)))
        request = callers.producer.begin(
            np.str_("r"), ids, num_tokens=kind(TOKENS), max_tokens=kind(2), tables=[[3, 1, 7]], timeout_s=time_s
        )
        assert request.token_ids == list(range(TOKENS))
        for layer in range(callers.source.num_layers):
            callers.producer.layer_ready(request, kind(0), kind(layer), kind(0), kind(TOKENS))
        callers.producer.computed(request, kind(3))
        arrived = callers.arrived()
        assert arrived.error is None
        assert arrived.request is not None
        assert arrived.request.complete is not None
        assert arrived.request.complete.first_token == 3


def test_an_end_that_no_message_can_carry_leaves_the_request_to_another_one() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        ship(pair.producer, request)
        ready = pair.next_ready()
        for wrong in ([-1], [np.int64(3)]):
            with pytest.raises(ProtocolError, match="a Finished that cannot be sent"):
                pair.consumer.finish(ready, msgspec.structs.replace(finished(ready), token_ids=wrong))
        pair.finish(ready)
        assert pair.producer.wait(request).text == "done"


def test_a_plan_is_not_carried_out_without_an_end_in_time() -> None:
    layout = pdtx.layout("flash_attn_nhd", pdtx.spec_of("llama-3-8b", block_size=16, num_layers=1), num_blocks=2)
    plan = pdtx.plan(layout, [1], layout, [1], 16)
    memory = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    with pytest.raises(InputError, match="timeout_s is nan"):
        pdtx.receive(pdtx.transport("tcp"), plan, memory, timeout_s=NAN)
    with pytest.raises(InputError, match="timeout_s is nan"):
        pdtx.send(pdtx.transport("tcp"), pdtx.Ticket("127.0.0.1:1", "s", bytes(32)), plan, memory, timeout_s=NAN)


@pytest.mark.parametrize(
    "call",
    [
        lambda p, r: p.cancel(r, "by mistake"), lambda p, r: p.extend(r, [[3, 1, 7, 8]]),
        lambda p, r: p.layer_ready(r, 0, 0, 0, 16), lambda p, r: p.prefix_ready(r, 16), lambda p, r: p.computed(r),
        lambda p, r: p.wait(r), lambda p, r: p.fail(r, ProtocolError("no")), lambda p, r: p.cancel("r", "by name"),
    ],
)  # fmt: skip
def test_a_request_of_another_producer_is_refused_and_goes_on(
    both: Callers, call: Callable[[KVProducer, OutboundRequest], None]
) -> None:
    with Callers("inproc") as other:
        request = other.begin()
        require_refused(both, lambda: call(both.producer, request), InputError, "'r' is not one of this producer")
        other.consumer.expect("r", TOKENS, [[5, 4]], deadline_s=20.0)
        other.compute(request)
        other.producer.computed(request)
        assert other.arrived().error is None
        assert other.ended() is request


@pytest.mark.parametrize(
    "call",
    [
        lambda c, r: c.cancel(r, "by mistake"), lambda c, r: c.verify(r), lambda c, r: c.release(r),
        lambda c, r: c.finish(r, finished(r)), lambda c, r: c.fail(r, ProtocolError("no")), lambda c, r: c.let_go(r),
        lambda c, r: c.keep(r, []),
    ],
)  # fmt: skip
def test_a_request_of_another_consumer_is_refused_and_goes_on(
    both: Callers, call: Callable[[KVConsumer, InboundRequest], None]
) -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        ship(pair.producer, request)
        ready = pair.next_ready()
        require_refused(both, lambda: call(both.consumer, ready), InputError, "'r' is not one of this consumer")
        pair.finish(ready)
        assert pair.producer.wait(request).text == "done"
