"""A row of blocks that threads work off: nothing is lost, and a job that was given up touches nothing any more."""

import threading
import time

import pytest

from pdtx.errors import TierBusy
from pdtx.tiers.block_job import Block, BlockJob, Failure
from pdtx.tiers.files import Header
from tests.tier_scenes import ids

WAIT_S = 20.0


def blocks(count: int) -> list[Block]:
    header = Header(b"d" * 32, b"p", "full", ("sglang",), 1, b"c" * 16)
    return [Block(place, header, ids(place + 1)) for place in range(count)]


def test_threads_take_each_block_once() -> None:
    job, taken = BlockJob(blocks(500), 4), list[int]()

    def work() -> None:
        while (block := job.take()) is not None:
            taken.append(block.place)
            assert job.ended(block, Failure("odd") if block.place % 2 else None)
        job.left("over")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert job.wait(WAIT_S)
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(taken) == list(range(500))
    assert sorted(job.failed) == list(range(1, 500, 2))


def test_a_job_of_nothing_is_over() -> None:
    assert BlockJob([], 0).wait(WAIT_S)


def test_silence_counts_from_the_last_block() -> None:
    job = BlockJob(blocks(3), 1)
    begun = time.monotonic()
    for _ in range(2):
        block = job.take()
        assert block is not None
        time.sleep(0.15)
        job.ended(block, None)
    assert not job.wait(0.2)
    assert time.monotonic() - begun >= 0.5


def test_what_no_thread_is_left_for_fails() -> None:
    job = BlockJob(blocks(3), 2)
    block = job.take()
    assert block is not None
    job.left("closed")
    assert not job.failed
    job.ended(block, None)
    job.left("closed")
    assert job.wait(0)
    assert job.failed == dict.fromkeys((1, 2), Failure("closed"))


def test_a_job_that_was_given_up_takes_and_lets_in_nobody() -> None:
    job = BlockJob(blocks(3), 1)
    block = job.take()
    assert block is not None
    assert job.give_up("silent") == 3
    assert job.failed == dict.fromkeys(range(3), Failure("silent"))
    assert job.take() is None
    with pytest.raises(TierBusy), job.at_cache():
        pytest.fail("the cache is another's")
    assert not job.ended(block, Failure("late"))
    assert job.failed[0] == Failure("silent")


def test_giving_up_waits_for_who_is_at_the_cache() -> None:
    job, inside, go, left = BlockJob(blocks(1), 1), threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        with job.at_cache():
            inside.set()
            assert go.wait(WAIT_S)
            left.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(WAIT_S)
    threading.Timer(0.1, go.set).start()
    job.give_up("silent")
    assert left.is_set()
    thread.join(WAIT_S)
