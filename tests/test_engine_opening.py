"""What an engine is made of, and in which order it is opened, used and closed: misuse is refused at the call."""

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pdtx.cache import CallerBlocks
from pdtx.engine import KVConsumer, KVProducer
from pdtx.errors import InputError
from pdtx.transports import make_mover
from tests.engine_pair import OPEN, PATIENCE_S, begin, caches_of, describe, make_cache, ship


@pytest.fixture
def apart() -> Iterator[tuple[KVProducer, KVConsumer, str]]:
    """A producer that is not connected, and a consumer that listens at an address."""
    source, destination = caches_of(make_cache()), caches_of(make_cache("flashinfer_hnd", 32))
    consumer = KVConsumer(destination, describe(destination), make_mover("tcp"), verify=False)
    address = consumer.listen("127.0.0.1:0", security=OPEN)
    producer = KVProducer(source, describe(source), make_mover("tcp"))
    yield producer, consumer, address
    producer.close()
    producer.mover.close()
    consumer.close()


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"layout": "flashinfer_hnd"}, r"buffers\[0\].layout is 'flashinfer_hnd', the cache has 'flash_attn_nhd'"),
        ({"num_blocks": 99}, r"groups\[0\].num_blocks is 99, the cache has 9"),
        ({"num_layers": 2}, r"buffers\[0\].layer_names is \["),
        ({"heads": 1, "channels": 16}, r"buffers\[0\].spec.head_size is 16|buffers\[0\].spec.num_kv_heads is 1"),
    ],
)
def test_the_description_of_another_cache_is_refused(other: dict[str, Any], text: str) -> None:
    cache, wrong = caches_of(make_cache()), describe(make_cache(**other))
    with pytest.raises(InputError, match=text):
        KVProducer(cache, wrong, make_mover("inproc"))
    with pytest.raises(InputError, match=text):
        KVConsumer(cache, wrong, make_mover("inproc"), verify=False)


def test_a_description_that_travelled_is_still_the_caches() -> None:
    cache = caches_of(make_cache())
    description = msgspec.structs.replace(describe(cache), device="another name of it")
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(description), type=type(description))
    KVProducer(cache, again, make_mover("inproc")).close()


def test_the_blocks_of_another_cache_are_refused() -> None:
    cache, larger = caches_of(make_cache()), caches_of(make_cache(num_blocks=600))
    text = "of another cache, with full of 600 blocks; this one has full of 9 blocks"
    with pytest.raises(InputError, match=text):
        KVProducer(cache, describe(cache), make_mover("inproc"), blocks=CallerBlocks(larger.groups))
    with pytest.raises(InputError, match=text):
        KVConsumer(cache, describe(cache), make_mover("inproc"), verify=True, blocks=CallerBlocks(larger.groups))


def test_begin_before_connect_is_refused(apart: tuple[KVProducer, KVConsumer, str]) -> None:
    producer, _, address = apart
    with pytest.raises(InputError, match=r"not connected; call connect\(\) before begin\(\)"):
        begin(producer, 20)
    assert producer.allocator.num_free == (8,)
    producer.connect(address, security=OPEN)
    request = begin(producer, 20)
    ship(producer, request)
    producer.cancel(request, "enough")


def test_a_producer_that_was_closed_connects_no_more(apart: tuple[KVProducer, KVConsumer, str]) -> None:
    producer, consumer, address = apart
    producer.close()
    with pytest.raises(InputError, match="the producer was closed; make another producer"):
        producer.connect(address, security=OPEN)
    assert not consumer.core.sessions


def test_a_consumer_listens_once_and_not_after_its_end(apart: tuple[KVProducer, KVConsumer, str]) -> None:
    _, consumer, address = apart
    with pytest.raises(InputError, match=f"listens at tcp://{address} already"):
        consumer.listen("127.0.0.1:0", security=OPEN)
    consumer.close()
    with pytest.raises(InputError, match="is closing; make another consumer"):
        consumer.listen("127.0.0.1:0", security=OPEN)


@pytest.mark.parametrize("timeout_s", [float("nan"), -1.0, float("inf"), "10"])
def test_connect_refuses_a_time_that_is_none(apart: tuple[KVProducer, KVConsumer, str], timeout_s: Any) -> None:  # noqa: ANN401
    producer, _, address = apart
    found = list[BaseException]()

    def connect() -> None:
        try:
            producer.connect(address, security=OPEN, timeout_s=timeout_s)
        except BaseException as error:  # noqa: BLE001 - looked at below
            found.append(error)

    thread = threading.Thread(target=connect, daemon=True)  # without a deadline it would wait for ever
    thread.start()
    thread.join(PATIENCE_S)
    assert [str(error)[:12] for error in found if isinstance(error, InputError)] == ["timeout_s is"]


def test_connect_and_listen_need_security(apart: tuple[KVProducer, KVConsumer, str]) -> None:
    producer, _, address = apart
    nothing: Any = None
    with pytest.raises(InputError, match=r"security is None; give Security"):
        producer.connect(address, security=nothing)
