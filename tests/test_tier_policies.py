"""Policies: hand-worked sequences from the papers' pseudo-code, and what all of them must keep to."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtx.errors import TierError
from pdtx.tiers.policies import POLICIES, Arc, Fifo, Lru, Policy, S3Fifo, make_policy


class Cache:
    """Keys of one letter in a policy's order, as a shelf would use it."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.here, self.pins = policy, set[bytes](), set[bytes]()

    def store(self, *letters: str) -> str:
        """Take keys in; return the victims."""
        keys = [letter.encode() for letter in letters if letter.encode() not in self.here]
        room = min(self.policy.capacity - len(self.here), len(keys))
        victims = self.policy.admit(keys, room, lambda key: key not in self.here or key in self.pins)
        assert set(victims) <= self.here - self.pins
        self.here = (self.here - set(victims)) | set(keys[: room + len(victims)])
        return b"".join(victims).decode()

    def use(self, letters: str) -> None:
        self.policy.touch([letter.encode() for letter in letters])


def letters(line: list[bytes]) -> str:
    return b"".join(line).decode()


def test_lru_by_hand() -> None:
    cache = Cache(Lru(3))
    assert cache.store(*"abc") == ""
    cache.use("a")
    assert cache.store("d") == "c", "of what comes together the last of the prompt is the oldest"
    assert cache.store("e") == "b"
    assert cache.store("f") == "a"


def test_fifo_by_hand() -> None:
    cache = Cache(Fifo(3))
    for letter in "abc":
        cache.store(letter)
    cache.use("a")
    assert [cache.store(letter) for letter in "defg"] == ["a", "b", "c", "d"]


def test_what_had_to_stay_has_its_old_place_afterwards() -> None:
    cache = Cache(Fifo(3))
    for letter in "abc":
        cache.store(letter)
    cache.pins = {b"a", b"b"}
    assert cache.store("d") == "c"
    cache.pins = set()
    assert [cache.store(letter) for letter in "efg"] == ["a", "b", "d"]


def test_arc_by_hand() -> None:
    """The sequence a b [a] c d c a on two entries, followed through the paper's figure 4."""
    arc = Arc(2)
    cache = Cache(arc)

    def state() -> tuple[str, str, str, str, float]:
        return letters(arc.t1.keys), letters(arc.t2.keys), letters(arc.b1.keys), letters(arc.b2.keys), arc.p

    assert cache.store("a") == cache.store("b") == ""
    assert state() == ("ab", "", "", "", 0)
    cache.use("a")  # case I
    assert state() == ("b", "a", "", "", 0)
    assert cache.store("c") == "b"  # case IV B: replace, for |T1| = 1 > p = 0
    assert state() == ("c", "a", "b", "", 0)
    assert cache.store("d") == "c"  # case IV A: |L1| = 2, |T1| < 2: b is forgotten, then replace
    assert state() == ("d", "a", "c", "", 0)
    assert cache.store("c") == "a"  # case II: p = 0 + max(0 / 1, 1) = 1; |T1| = 1 is not > 1, so T2 gives
    assert state() == ("d", "c", "", "a", 1)
    assert cache.store("a") == "d"  # case III: p = 1 - max(0 / 1, 1) = 0; |T1| = 1 > 0
    assert state() == ("", "ca", "d", "", 0)


def test_arc_forgets_what_was_used_once_when_it_is_all_there_is() -> None:
    """Case IV A with |T1| = c: the victim leaves without a trace."""
    arc = Arc(2)
    cache = Cache(arc)
    cache.store("a")
    cache.store("b")
    assert cache.store("c") == "a"
    assert (letters(arc.t1.keys), letters(arc.b1.keys)) == ("bc", "")
    assert cache.store("a") == "b"
    assert letters(arc.t2.keys) == "", "a is no ghost"


def test_arc_keeps_what_was_used_twice_through_a_scan() -> None:
    cache = Cache(Arc(8))
    cache.store(*"abcd")
    cache.use("abcd")
    for number in range(100):
        cache.store(chr(0x400 + number))
    assert {b"a", b"b", b"c", b"d"} <= cache.here


def test_s3fifo_by_hand() -> None:
    """Algorithm 1 with three entries: S of one, M of two, G of two keys."""
    s3 = S3Fifo(3)
    cache = Cache(s3)

    def state() -> tuple[str, str, str]:
        return letters(s3.small.keys), letters(s3.main.keys), letters(s3.ghost.keys)

    assert cache.store(*"abc") == ""
    assert state() == ("abc", "", "")
    cache.use("abc")
    cache.use("abc")
    assert cache.store("d") == "a"  # a, b go to M; M is full when c comes, and gives a, which has no uses there
    assert state() == ("d", "bc", "")
    cache.use("b")
    assert cache.store("e") == "d"  # d was used at most once
    assert state() == ("e", "bc", "d")
    assert cache.store("d") == "e"  # and comes back to M, for G knows it
    assert state() == ("", "bcd", "e")
    assert cache.store("f") == "c"  # S is empty; b has a use, goes round, and c goes
    assert state() == ("f", "db", "e")


def test_s3fifo_sends_one_hit_wonders_away_soon() -> None:
    cache = Cache(S3Fifo(10))
    cache.store(*"abcd")
    cache.use("abcd" * 2)
    for number in range(100):
        cache.store(chr(0x400 + number))
    assert {b"a", b"b", b"c", b"d"} <= cache.here


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
def test_what_all_policies_keep_to(name: str, data: st.DataObject) -> None:
    """Victims are here and not pinned, there are as many as are needed and possible, and no key is lost or kept."""
    capacity = data.draw(st.integers(1, 6))
    policy = make_policy(name, capacity)
    cache, alphabet = Cache(policy), "abcdefghij"
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["store", "store", "use", "pin", "remove"]))
        some = data.draw(st.lists(st.sampled_from(alphabet), unique=True, min_size=1, max_size=4))
        keys = {letter.encode() for letter in some}
        if action == "store":
            cache.pins |= keys & cache.here  # what is here of what comes stays
            room = capacity - len(cache.here)
            new, evictable = keys - cache.here, cache.here - cache.pins
            victims = cache.store(*some)
            assert len(victims) == max(0, min(len(new) - room, len(evictable)))
            assert len(cache.here) <= capacity
            cache.pins = set()
        elif action == "use":
            cache.use("".join(letter for letter in some if letter.encode() in cache.here))
        elif action == "pin":
            cache.pins = keys & cache.here
        else:
            for key in keys & cache.here:
                policy.remove(key)
            cache.here -= keys
    cache.pins = set()
    before = set(cache.here)
    cache.store(*(chr(0x400 + number) for number in range(capacity)))
    assert not before & cache.here, "an entry that nobody asks for is lost in the policy"
    assert len(cache.here) == capacity


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_lru_is_an_ordered_dictionary(steps: list[tuple[bool, int]]) -> None:
    cache, model = Cache(Lru(3)), OrderedDict[str, None]()
    for use, number in steps:
        letter = "abcdef"[number]
        if letter in model:
            model.move_to_end(letter)
            cache.use(letter)
        elif not use:
            expected = model.popitem(last=False)[0] if len(model) == 3 else ""
            model[letter] = None
            assert cache.store(letter) == expected


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(TierError, match="unknown policy 'mru'; one of lru, arc, fifo, s3fifo"):
        make_policy("mru", 1)
    assert isinstance(make_policy(" ARC ", 1), Arc)


@pytest.mark.parametrize("name", POLICIES)
def test_many_pinned_entries_are_looked_at_once_and_not_once_a_victim(name: str) -> None:
    count, asked = 2000, 0
    policy = make_policy(name, 2 * count)

    def pinned(key: bytes) -> bool:
        nonlocal asked
        asked += 1
        return key.startswith((b"p", b"n"))

    policy.admit([b"p%d" % number for number in range(count)], count, pinned)
    policy.admit([b"f%d" % number for number in range(count)], count, pinned)
    assert len(policy.admit([b"n%d" % number for number in range(count)], 0, pinned)) == count
    assert asked <= 4 * count
