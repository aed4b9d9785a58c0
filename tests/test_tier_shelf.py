"""The index of a group: what is found, pinned, evicted, refused; and how fast."""

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from pdtx.errors import TierBusy, TierError
from pdtx.tiers import Shelf, prefix_keys
from pdtx.tiers.shelf import Evicted
from tests.tier_scenes import SECONDS, ids

PROOFS = "abcdefghij"


def names(letters: str) -> tuple[list[bytes], list[bytes]]:
    return [letter.encode() * 32 for letter in letters], [b"proof " + letter.encode() for letter in letters]


def put(shelf: Shelf, letters: str) -> str:
    """Store what there is room for; return it."""
    blocks = shelf.reserve(*names(letters)).blocks
    shelf.commit(blocks[blocks > 0])
    return "".join(letter for letter, block in zip(letters, blocks, strict=True) if block)


def here(shelf: Shelf) -> str:
    return "".join(sorted(digest[:1].decode() for digest in shelf.entries().digests))


def blocks_counted(shelf: Shelf) -> dict[str, int]:
    usage = shelf.usage()
    fields = ("capacity", "used", "pinned", "stored", "loaded", "evicted", "missed", "failed", "refused")
    return {name: getattr(usage, name).blocks for name in fields if getattr(usage, name).blocks}


def test_what_is_committed_is_found_in_its_block() -> None:
    shelf = Shelf("full", 4, block_nbytes=10)
    reserved = shelf.reserve(*names("abc"))
    assert sorted(reserved.blocks.tolist()) == [1, 2, 3]
    shelf.commit(reserved.blocks)
    assert shelf.lookup(*names("xcay")).tolist() == [0, reserved.blocks[2], reserved.blocks[0], 0]
    assert blocks_counted(shelf) == {"capacity": 4, "used": 3, "pinned": 2, "stored": 3, "missed": 2}
    assert shelf.usage().missed.nbytes == 20


def test_what_is_being_written_is_neither_found_nor_evicted() -> None:
    shelf = Shelf("full", 2)
    first = shelf.reserve(*names("ab"))
    assert not shelf.lookup(*names("ab")).any()
    again = shelf.reserve(*names("abc"))
    assert again.present.tolist() == [True, True, False]
    assert again.full.tolist() == [False, False, True]
    assert shelf.reserve(*names("c")).full.tolist() == [True]
    shelf.commit(first.blocks)
    assert put(shelf, "c") == "c"


def test_what_is_cancelled_was_never_here() -> None:
    shelf = Shelf("full", 2)
    reserved = shelf.reserve(*names("ab"))
    shelf.cancel(reserved.blocks)
    assert not shelf.lookup(*names("ab")).any()
    assert put(shelf, "cd") == "cd"
    assert blocks_counted(shelf) == {"capacity": 2, "used": 2, "stored": 2, "missed": 2}


def test_pinned_entries_stay_until_the_last_pin_is_gone() -> None:
    shelf = Shelf("full", 2)
    put(shelf, "ab")
    pinned = shelf.lookup(*names("ab"))
    shelf.pin(pinned[:1])
    assert put(shelf, "c") == ""
    shelf.unpin(pinned)
    assert put(shelf, "cd") == "c"
    assert here(shelf) == "ac"
    shelf.unpin(pinned[:1])
    assert put(shelf, "d") == "d"


def test_pins_are_counted_and_never_below_none() -> None:
    shelf = Shelf("full", 2)
    put(shelf, "a")
    block = shelf.lookup(*names("a"))
    shelf.unpin(block)
    with pytest.raises(TierError, match="nobody pins"):
        shelf.unpin(block)
    assert put(shelf, "bc") == "bc", "the pins are as they were"


def test_two_places_of_one_key_are_pinned_twice() -> None:
    shelf = Shelf("full", 1)
    put(shelf, "a")
    twice = shelf.lookup(*names("aa"))
    shelf.unpin(twice[:1])
    assert put(shelf, "b") == ""
    shelf.unpin(twice[:1])
    assert put(shelf, "b") == "b"


def test_one_digest_of_two_contents_is_kept_for_the_first() -> None:
    shelf = Shelf("full", 4)
    digests, proofs = names("aa")
    proofs[1] = b"proof of something else"
    reserved = shelf.reserve(digests, proofs)
    assert reserved.clash.tolist() == [False, True]
    shelf.commit(reserved.blocks[:1])
    assert shelf.lookup(digests, proofs).tolist() == [1, 0]
    assert shelf.reserve(digests, proofs).clash.tolist() == [False, True]
    assert blocks_counted(shelf)["refused"] == 2


def test_a_prompt_does_not_drive_out_its_own_beginning() -> None:
    shelf = Shelf("full", 3)
    put(shelf, "abx")
    shelf.unpin(shelf.lookup(*names("x")))
    assert put(shelf, "abcdef") == "c"
    assert here(shelf) == "abc"


def test_nothing_is_kept_where_there_is_no_room_at_all() -> None:
    shelf = Shelf("cross", 0)
    assert put(shelf, "ab") == ""
    assert not shelf.lookup(*names("ab")).any()


@pytest.mark.parametrize("letters", ["", "abc"])
def test_forgotten_entries_are_gone_and_their_blocks_free_once_unpinned(letters: str) -> None:
    shelf = Shelf("full", 3)
    put(shelf, "abc")
    pinned = shelf.lookup(*names(letters))
    shelf.forget(ids(1, 2, 3, 3))
    assert here(shelf) == ""
    assert put(shelf, "def") == ("" if letters else "def")
    shelf.unpin(pinned)
    assert here(shelf) == ("" if letters else "def")
    put(shelf, "ghi")
    assert here(shelf) == "ghi"


def test_entries_can_be_taken_in_after_a_restart() -> None:
    shelf = Shelf("full", 3)
    shelf.adopt(*names("ab"), ids(3, 1))
    assert shelf.lookup(*names("ab")).tolist() == [3, 1]
    shelf.unpin(ids(3, 1))
    assert put(shelf, "cd") == "cd"
    assert len(here(shelf)) == 3
    for letters, blocks in (("x", ids(2)), ("x", ids(4)), ("x", ids(0)), ("xx", ids(1, 2)), ("c", ids(2))):
        with pytest.raises(TierError, match="to be taken in"):
            shelf.adopt(*names(letters), blocks)


class Lower:
    """What a stack does with what is leaving."""

    def __init__(self) -> None:
        self.told, self.futures = list[Evicted](), list[Future[object]]()
        self.called = threading.Event()

    def __call__(self, evicted: Evicted) -> "Future[object]":
        self.told.append(evicted)
        self.futures.append(Future())
        self.called.set()
        return self.futures[-1]


def test_a_block_is_not_reused_before_what_was_in_it_is_kept_elsewhere() -> None:
    lower = Lower()
    shelf, done = Shelf("full", 1, on_evict=lower), threading.Event()
    put(shelf, "a")

    def replace() -> None:
        put(shelf, "b")
        done.set()

    thread = threading.Thread(target=replace)
    thread.start()
    assert lower.called.wait(SECONDS)
    assert lower.told[0].digests == tuple(names("a")[0])
    assert lower.told[0].proofs == tuple(names("a")[1])
    assert lower.told[0].blocks.tolist() == [1]
    assert not done.wait(0.1), "the block was given away too early"
    assert not shelf.lookup(*names("a")).any(), "what is leaving is not found"
    assert not shelf.lookup(*names("b")).any()
    lower.futures[0].set_result(None)
    assert done.wait(SECONDS)
    assert here(shelf) == "b"
    thread.join(SECONDS)


def test_what_takes_too_long_to_be_kept_elsewhere_holds_its_block_and_nothing_hangs() -> None:
    lower = Lower()
    shelf = Shelf("full", 1, on_evict=lower)
    put(shelf, "a")
    begun = time.monotonic()
    reserved = shelf.reserve(*names("b"), seconds=0.05)
    assert time.monotonic() - begun < 5
    assert reserved.full.tolist() == [True]
    assert put(shelf, "c") == "", "the block is not free yet"
    lower.futures[0].set_result(None)
    assert put(shelf, "d") == "d"
    assert here(shelf) == "d"


def test_a_lower_tier_that_fails_costs_what_was_evicted_and_nothing_else() -> None:
    def busy(_: Evicted) -> "Future[object]":
        raise TierBusy("too much to do")

    shelf = Shelf("full", 1, on_evict=busy)
    put(shelf, "a")
    assert put(shelf, "b") == "b"
    failed = Future[object]()
    failed.set_exception(OSError(28, "No space left on device"))
    shelf.on_evict = lambda _: failed
    assert put(shelf, "c") == "c"


def test_what_is_not_being_written_can_be_neither_committed_nor_cancelled() -> None:
    shelf = Shelf("full", 2)
    put(shelf, "a")
    for call in (shelf.commit, shelf.cancel):
        for block in (1, 2):
            with pytest.raises(TierError, match="not being written"):
                call(ids(block))


@pytest.mark.parametrize("policy", ["lru", "arc", "fifo", "s3fifo"])
def test_looking_up_8192_blocks_takes_milliseconds(policy: str) -> None:
    keys = prefix_keys(np.arange(8192 * 16), 16, b"f")
    shelf, best = Shelf("full", 8192, policy), 1.0
    shelf.commit(shelf.reserve(keys.digests, keys.proofs).blocks)
    for _ in range(5):
        begun = time.perf_counter()
        blocks = shelf.lookup(keys.digests, keys.proofs)
        best = min(best, time.perf_counter() - begun)
        assert (blocks > 0).all()
        shelf.unpin(blocks)
    assert best < 0.05, f"{best * 1e3:.1f} ms; usually less than 5"
