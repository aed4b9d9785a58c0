"""What an engine is made of, and in which order it is opened, used and closed: misuse is refused at the call."""

from typing import Any

import msgspec
import pytest

from pdtx.cache import CallerBlocks
from pdtx.engine import KVConsumer, KVProducer
from pdtx.errors import InputError
from pdtx.transports import make_mover
from tests.engine_pair import caches_of, describe, make_cache


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
