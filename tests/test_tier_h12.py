"""Case H12: pin on lookup; a failed load is a miss; an equal hash is not equal content."""

import os
import random
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import dataclass

import pytest

from pdtx.cache import KVCaches
from pdtx.plan.runs import Int64s
from pdtx.tiers import CpuTier, Lease, Moved, PrefixKeys
from pdtx.tiers.copies import Copier
from pdtx.tiers.shelf import Shelf
from tests.tier_scenes import FENCE, SECONDS, Contents, Target, full, ids, one_block_prompts, tier_of

KEYS = 16


@dataclass(frozen=True)
class Case:
    source: Contents
    tier: CpuTier
    target: Target
    keys: PrefixKeys

    def store(self, *places: int) -> Moved:
        return self.tier.store(self.keys, self.source.side, (ids(*places),), FENCE).result(SECONDS)

    def lookup(self, *places: int) -> Lease:
        return self.tier.lookup(self.keys, (ids(*places),))

    def load(self, lease: Lease, *places: int) -> Moved:
        return lease.load(self.target.side, (ids(*places),)).result(SECONDS)

    def here(self) -> set[int]:
        """The keys that are found, without a trace in order or pins."""
        entries = set(self.tier._shelves[0].entries().digests)
        return {place for place, digest in enumerate(self.keys.digests) if digest in entries}


def case(policy: str = "lru", copier: type[Copier] = Copier) -> Case:
    source = Contents.of(full(KEYS + 5), KEYS)
    tier = tier_of(source.cache, 4, policy=policy, copier=copier)
    return Case(source, tier, Target.of(full(KEYS + 5, "flashinfer_hnd"), KEYS), one_block_prompts(KEYS))


def pin_and_evict(case: Case) -> None:
    """(a): k1 ... k9 are places 1 ... 9."""
    assert case.store(1, 2, 3, 4).places[0].tolist() == [1, 2, 3, 4]
    lease = case.lookup(1, 2)
    assert lease.found[0].tolist() == [True, True]
    assert case.store(5, 6).failed == ()
    assert case.here() == {1, 2, 5, 6}
    assert case.store(7, 8).failed == ()
    assert case.here() == {1, 2, 7, 8}
    moved = case.load(lease, 1, 2)
    assert (moved.places[0].tolist(), moved.failed) == ([1, 2], ())
    assert case.target.wrong([1, 2]) == 0
    assert case.target.written() == {1, 2}
    (group,) = case.tier.usage().groups
    counts = [group.stored, group.evicted, group.loaded, group.missed, group.refused]
    assert [count.blocks for count in counts] == [8, 4, 2, 0, 0]
    size = 2 * 2 * 16 * 2 * 4 * 2  # K and V, layers, tokens, heads, channels, bytes
    assert [count.nbytes for count in counts] == [8 * size, 4 * size, 2 * size, 0, 0]
    lease.release()
    assert case.store(9).failed == ()
    assert {7, 8, 9} < case.here(), "of k1 and k2, which nobody pins now, one goes"
    case.tier.close()


def test_a_pinned_blocks_are_never_evicted() -> None:
    pin_and_evict(case())


def test_a_tooth_without_pins_the_case_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = Shelf.lookup
    monkeypatch.setattr(Shelf, "lookup", lambda *args, **_: looked_up(*args, pin=False))
    monkeypatch.setattr(Shelf, "unpin", lambda *_: None)
    monkeypatch.setattr(Shelf, "pin", lambda *_: None)
    with pytest.raises(AssertionError):
        pin_and_evict(case())


def test_a_tooth_without_pins_a_load_finds_other_blocks_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The case's own tooth, as the bytes see it: with no pins the verifier finds the codes of others."""
    looked_up = Shelf.lookup
    monkeypatch.setattr(Shelf, "lookup", lambda *args, **_: looked_up(*args, pin=False))
    monkeypatch.setattr(Shelf, "unpin", lambda *_: None)
    monkeypatch.setattr(Shelf, "pin", lambda *_: None)
    here = case()
    here.store(1, 2, 3, 4)
    lease = here.lookup(1, 2)
    for more in ((5, 6), (7, 8)):
        here.store(*more)
    here.load(lease, 1, 2)
    assert here.target.wrong([1, 2]) > 0
    here.tier.close()


def test_a_while_all_is_pinned_stores_are_refused_and_counted() -> None:
    here = case()
    here.store(1, 2, 3, 4)
    with here.lookup(1, 2, 3, 4):
        moved = here.store(5, 6)
        assert [(one.place, "full" in one.reason) for one in moved.failed] == [(5, True), (6, True)]
        assert here.tier.usage().groups[0].refused.blocks == 2
        assert here.here() == {1, 2, 3, 4}
    here.tier.close()


class FailingCopier(Copier):
    """Fails on one block of its source, after it has written part of it where it goes."""

    broken_block = -1

    def copy(self, group: int, src_table: Int64s, dst_table: Int64s, positions: range) -> tuple[int, int]:
        if self.broken_block in src_table.tolist():
            super().copy(group, src_table, dst_table, range(5))
            raise OSError(5, "Input/output error")
        return super().copy(group, src_table, dst_table, positions)


def test_b_a_failed_load_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    here = case(copier=FailingCopier)
    here.store(1, 2)
    lease = here.tier.lookup(here.keys, (ids(1, 2),))
    monkeypatch.setattr(FailingCopier, "broken_block", int(lease.tables(0)[2]))
    moved = here.load(lease, 1, 2)
    assert moved.places[0].tolist() == [1]
    assert [str(one) for one in moved.failed] == ["group full block 2: [Errno 5] Input/output error"]
    assert here.target.wrong([1]) == 0
    assert here.target.written() == {1}, "the second place is poison again"
    (group,) = here.tier.usage().groups
    assert (group.loaded.blocks, group.failed.blocks) == (1, 1)
    lease.release()
    here.tier.close()


@pytest.mark.parametrize("policy", ["lru", "arc", "fifo", "s3fifo"])
def test_c_an_equal_hash_of_other_tokens_is_a_miss(policy: str) -> None:
    here, constant = case(policy), one_block_prompts(KEYS, digest=lambda _: bytes(32))
    assert here.tier.store(constant, here.source.side, (ids(3),), FENCE).result(SECONDS).num_blocks == 1
    with here.tier.lookup(constant, (ids(*range(KEYS)),)) as lease:
        assert lease.found[0].nonzero()[0].tolist() == [3]
    moved = here.tier.store(constant, here.source.side, (ids(2, 3, 4),), FENCE).result(SECONDS)
    assert (moved.num_blocks, moved.present) == (0, 1)
    assert [(one.place, "other tokens" in one.reason) for one in moved.failed] == [(2, True), (4, True)]
    with here.tier.lookup(constant, (ids(3),)) as lease:
        assert here.load(lease, 3).failed == ()
    assert here.target.wrong([3]) == 0
    here.tier.close()


def test_c_the_digest_of_what_came_before_is_part_of_the_proof() -> None:
    """The same block behind another prefix, under one digest."""
    from pdtx.tiers import prefix_keys

    one, other = (
        prefix_keys([*prefix, *range(16)], 16, b"f", lambda _: bytes(32)) for prefix in (range(16), range(1, 17))
    )
    shelf = Shelf("full", 4)
    shelf.commit(shelf.reserve(one.digests[1:], one.proofs[1:]).blocks)
    assert one.digests == other.digests
    assert shelf.lookup(other.digests[1:], other.proofs[1:]).tolist() == [0]
    assert shelf.lookup(one.digests[1:], one.proofs[1:]).tolist() == [1]


_PRINT_KEYS = """
from tests.tier_scenes import one_block_prompts
keys = one_block_prompts(16)
print(b"".join(keys.digests + keys.proofs).hex())
"""


@pytest.mark.parametrize("seed", [None, "1"])
def test_d_keys_are_the_same_in_another_process(seed: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    ran = subprocess.run(
        [sys.executable, "-c", _PRINT_KEYS], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    text = bytes.fromhex(ran.stdout)
    theirs = [text[32 * at : 32 * at + 32] for at in range(KEYS)]
    size = (len(text) - 32 * KEYS) // KEYS
    proofs = [text[32 * KEYS + size * at :][:size] for at in range(KEYS)]
    here = case()
    here.store(0, 1, 2, 3)
    with here.tier.lookup(PrefixKeys(16, tuple(theirs), tuple(proofs)), (ids(0, 1, 2, 3),)) as lease:
        assert lease.found[0].all()
    here.tier.close()


@pytest.mark.parametrize("policy", ["lru", "arc", "fifo", "s3fifo"])
def test_e_random_operations_load_exact_bytes(policy: str) -> None:
    operations = 20_000 if policy == "lru" else 2_000
    chosen = 1 if os.environ.get("CI") else random.SystemRandom().randrange(1 << 32)  # in CI no chance, see conftest.py
    seed = int(os.environ.get("PDTX_TIER_SEED", "0")) or chosen
    sys.stdout.write(f"PDTX_TIER_SEED={seed}\n")
    counts = Soak(case(policy), random.Random(seed)).run(operations)
    assert min(counts.values()) > operations // 20, f"seed {seed}: {counts}"


class Soak:
    """Stores, lookups, loads and releases by chance; every load is compared."""

    def __init__(self, here: Case, chance: random.Random) -> None:
        self.case, self.chance = here, chance
        self.leases = list[tuple[Lease, list[int]]]()
        self.pending = list[Future[Moved]]()

    def run(self, operations: int) -> dict[str, int]:
        counts = dict.fromkeys(("store", "lookup", "load", "release"), 0)
        for _ in range(operations):
            name = self.chance.choice(("store", "store", "lookup", "lookup", "load", "load", "load", "release"))
            counts[name] += bool(getattr(self, name)())
        for lease, _ in self.leases:
            lease.release()
        for future in self.pending:
            future.result(SECONDS)
        (group,) = self.case.tier.usage().groups
        assert group.pinned.blocks == 0
        assert group.used.blocks <= 4
        assert group.evicted.blocks == group.stored.blocks - group.used.blocks
        self.case.tier.close()
        return counts

    def some(self, most: int) -> list[int]:
        return self.chance.sample(range(KEYS), self.chance.randint(1, most))

    def store(self) -> bool:
        future = self.case.tier.store(self.case.keys, self.case.source.side, (ids(*self.some(3)),), FENCE)
        if self.chance.random() < 0.5:  # others go on under what follows
            future.result(SECONDS)
        self.pending = [one for one in self.pending if not one.done()] + [future]
        return True

    def lookup(self) -> bool:
        if len(self.leases) > 2:
            return self.release()
        asked = self.some(4)
        lease = self.case.lookup(*asked)
        found = [place for place, here in zip(asked, lease.found[0], strict=True) if here]
        self.leases.append((lease, found))
        return True

    def load(self) -> bool:
        usable = [(lease, found) for lease, found in self.leases if found]
        if not usable:
            return False
        lease, found = self.chance.choice(usable)
        target = self.case.target
        target.poison()
        moved = self.case.load(lease, *found)
        assert (moved.places[0].tolist(), moved.failed) == (found, ())
        assert target.wrong(found) == 0
        assert target.written() == set(found)
        return True

    def release(self) -> bool:
        if not self.leases:
            return False
        lease, _ = self.leases.pop(self.chance.randrange(len(self.leases)))
        lease.release()
        return True


def test_e_a_tooth_random_operations_see_what_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = Shelf.lookup
    monkeypatch.setattr(Shelf, "lookup", lambda *args, **_: looked_up(*args, pin=False))
    monkeypatch.setattr(Shelf, "unpin", lambda *_: None)
    monkeypatch.setattr(Shelf, "pin", lambda *_: None)
    with pytest.raises(AssertionError):
        Soak(case(), random.Random(1)).run(2000)


def test_the_case_is_of_four_blocks_and_shares_nothing() -> None:
    here = case()
    assert here.tier.usage().groups[0].capacity.blocks == 4
    assert isinstance(here.tier.cache, KVCaches)
    assert here.tier.cache.buffers[0].layout.name == "flash_attn_nhd_cross_layer"
    here.tier.close()
