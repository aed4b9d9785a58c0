"""Every pair of layouts x every pair of block sizes with the real model: tokens and every element of the K/V.

Minutes long, so not run by default: scripts/test -m matrix. The nodes' own scheduler and loop run in this process, over
real sockets, so that the model is loaded once.
"""

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from pdtx.cli.generate import generate_locally
from pdtx.engine import KVConsumer, KVProducer
from pdtx.layout import LAYOUT_ORDERS
from pdtx.node.config import CacheConfig
from pdtx.node.loop import ModelLoop
from pdtx.node.model import open_cache
from pdtx.report import RequestRow
from pdtx.runner import ModelRunner, resolve_model
from pdtx.serving import Job, ModelComputer, PrefillScheduler
from pdtx.sidechannel import Security
from pdtx.transports import make_mover

BLOCK_SIZES = (16, 32)
LENGTHS = sorted({n for size in BLOCK_SIZES for n in (1, size - 1, size, size + 1, 2 * size - 1)})
NEW_TOKENS = 6
CHUNK = 24
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(300)]


@dataclass
class Truth:
    """A loaded model, prompts, and what one process doing both makes of them."""

    runner: ModelRunner
    jobs: list[Job]
    tokens: dict[str, list[int]]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def truth(request: pytest.FixtureRequest) -> Truth:
    runner = ModelRunner.load(resolve_model(None), request.param, threads=1)
    text = runner.encode("Between a prefill node and a decode node gigabytes must move, fast and exactly. " * 8)
    jobs = [Job(f"n{n}", text[n : 2 * n]) for n in LENGTHS]
    cache, _ = open_cache(runner, CacheConfig("flash_attn_nhd", 16, 16))
    tokens = {
        job.request_id: generate_locally(runner, cache, list(job.token_ids), NEW_TOKENS, CHUNK, ignore_eos=True)
        for job in jobs
    }
    return Truth(runner, jobs, tokens)


def sides() -> Iterator[tuple[str, int]]:
    return itertools.product(LAYOUT_ORDERS, BLOCK_SIZES)


@pytest.mark.parametrize(("prefill", "decode"), list(itertools.product(sides(), sides())))
def test_pair(truth: Truth, prefill: tuple[str, int], decode: tuple[str, int]) -> None:
    rows = disaggregate(truth, prefill, decode)
    assert [(row.error, row.wrong) for row in rows] == [(None, 0)] * len(rows)
    assert {row.request_id: row.token_ids for row in rows} == truth.tokens


def disaggregate(truth: Truth, prefill: tuple[str, int], decode: tuple[str, int]) -> list[RequestRow]:
    """Run the prompts through a producer and a consumer with these layouts and block sizes."""
    runner, stop = truth.runner, threading.Event()
    ours, description = open_cache(runner, CacheConfig(*prefill, 40))
    theirs, their_description = open_cache(runner, CacheConfig(*decode, 40))
    consumer = KVConsumer(theirs, their_description, make_mover("tcp"), verify=True)
    mover = make_mover("tcp")
    producer = KVProducer(ours, description, mover)
    loop = threading.Thread(target=ModelLoop(runner, consumer, stop, None).run)
    try:
        address = consumer.listen("127.0.0.1:0", security=Security())
        loop.start()
        producer.connect(address, security=Security())
        scheduler = PrefillScheduler(
            ModelComputer(runner),
            producer,
            max_tokens=NEW_TOKENS,
            chunk_size=CHUNK,
            max_num_seqs=4,
            timeout_s=120,
            ignore_eos=True,
        )
        rows = scheduler.run(truth.jobs)
        assert producer.allocator.num_free == tuple(group.num_blocks - 1 for group in ours.groups)
        return rows
    finally:
        stop.set()
        producer.close()
        mover.close()
        loop.join()
        consumer.close()
