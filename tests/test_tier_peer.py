"""A tier served to another node: what may be read, what may not, and what becomes of it when a side goes away."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from pdtx.cache import KVCaches, PagedBuffer
from pdtx.engine import PeerTier, TierServer, describe_cache, peer_tier, tier_server
from pdtx.engine.control_channel import ControlChannel
from pdtx.engine.waking import Mailbox
from pdtx.errors import DeadlineExceeded, IncompatiblePeer, PdtxError, PeerError, TierError, TransferRefused
from pdtx.kvspec import FullAttentionSpec, SlidingWindowSpec
from pdtx.plan import Runs
from pdtx.plan.runs import Int64s
from pdtx.protocol import Failure, Reject
from pdtx.sidechannel import Dialer, Security, generate_keys, load_public, load_secret
from pdtx.testing.pair import Leaks
from pdtx.tiers import PrefixKeys, Side, prefix_keys
from pdtx.tiers.cpu import CpuTier
from pdtx.tiers.geometry import tier_caches
from pdtx.tiers.shelved import ShelfLease
from pdtx.transports import Placement, Region, TransferKey, make_mover
from tests.engine_pair import OPEN, PATIENCE_S, attention, join, latent, states, wait_until
from tests.tier_scenes import FENCE, KEPT

BLOCK, TOKENS = 32, 160
PLACES = np.arange(TOKENS // BLOCK)
FINGERPRINT = b"f" * 32


def keys(seed: int = 0) -> PrefixKeys:
    return prefix_keys([seed + token for token in range(TOKENS)], BLOCK, FINGERPRINT)


def caches(layout: str = "flash_attn_nhd", block_size: int = 16, tp_size: int = 1) -> KVCaches:
    """Full attention and its latents, a window, and states."""
    count = TOKENS // block_size + 1
    kinds: dict[str, Any] = {"num_blocks": count, "tp_size": tp_size}
    groups: list[list[PagedBuffer]] = [
        [attention(FullAttentionSpec, "full", layout, block_size, **kinds), latent("latent", 24, block_size, **kinds)],
        [attention(SlidingWindowSpec, "window", layout, block_size, sliding_window=40, **kinds)],
    ]
    return join(*groups, [states(tp_size=tp_size)])


def tables(cache: KVCaches, seed: int = 0) -> tuple[Int64s, ...]:
    """A block table for each group, in an order of its own."""
    chance = np.random.default_rng(seed)
    return tuple(
        np.array([1]) if group.kind == "state" else 1 + chance.permutation(TOKENS // group.block_size)
        for group in cache.groups
    )


def describe(cache: KVCaches, fingerprint: str = "same") -> Any:  # noqa: ANN401 - a description
    return describe_cache(cache, model="a model", fingerprint=fingerprint)


def fill(cache: KVCaches, table: Sequence[Int64s]) -> list[list[torch.Tensor]]:
    """Write random contents into every layer; return them."""
    contents = list[list[torch.Tensor]]()
    for buffer in cache.buffers:
        count = 1 if cache.groups[buffer.group].kind == "state" else TOKENS
        rows = [torch.randint(256, buffer.rows_shape(count), dtype=torch.uint8) for _ in range(buffer.num_layers)]
        for layer, each in enumerate(rows):
            buffer.write_canonical(layer, torch.as_tensor(table[buffer.group]), 0, each)
        contents.append(rows)
    return contents


class Gated(TierServer):
    """Lets readers wait at a gate, and then fail or go on."""

    gate: threading.Event
    waiting: threading.Event

    def offer(self, session_id: str, key: TransferKey) -> Placement:
        placement = super().offer(session_id, key)
        self.waiting.set()
        self.gate.wait(PATIENCE_S)
        return placement


@dataclass
class Served:
    tier: CpuTier
    server: Gated
    peer: PeerTier
    contents: list[list[torch.Tensor]]


@contextmanager
def served(
    source: KVCaches | None = None,
    into: KVCaches | None = None,
    *,
    mover: str = "inproc",
    lease_s: float = 30.0,
    load_s: float = 5.0,
    nbytes: int = 1 << 20,
    block_tokens: int = BLOCK,
    fingerprint: str = "same",
    security: tuple[Security, Security] = (OPEN, OPEN),
) -> Iterator[Served]:
    source, into = source or caches(), into or caches("flashinfer_hnd", 32)
    tier = CpuTier(tier_caches(source, block_tokens=BLOCK, nbytes=nbytes, tokens_per_state=BLOCK), like=source)
    table = tables(source, 3)
    contents = fill(source, table)
    state = [PLACES[-1:]] if len(source.groups) > 2 else []
    assert not tier.store(keys(), Side(source, table, hold=KEPT), [PLACES, PLACES, *state], FENCE).result(10).failed
    with ExitStack() as stack:
        stack.callback(tier.close)
        server = Gated(tier, describe(tier.cache), make_mover(mover), lease_s=lease_s)
        server.gate, server.waiting = threading.Event(), threading.Event()
        server.gate.set()
        stack.callback(server.close)
        stack.callback(server.gate.set)
        address = server.listen("127.0.0.1:0", security=security[0])
        peer = PeerTier(
            address,
            into,
            describe(into, fingerprint),
            make_mover(mover),
            block_tokens=block_tokens,
            security=security[1],
            load_s=load_s,
        )
        stack.callback(peer.close)
        yield Served(tier, server, peer, contents)


def asked(cache: KVCaches) -> list[Int64s]:
    return [PLACES[-1:] if group.kind == "state" else PLACES for group in cache.groups]


@pytest.mark.parametrize("mover", ["tcp", "inproc"])
@pytest.mark.parametrize(
    ("source", "into"),
    [
        (caches, lambda: caches("flashinfer_hnd", 32)),
        (lambda: caches("flash_attn_hnd", 32), lambda: caches("flash_attn_nhd", 8)),
        (lambda: caches(tp_size=2), lambda: caches("flashinfer_nhd", 32)),
        (caches, lambda: caches("flash_attn_hnd", 32, 2)),
    ],
    ids=["16-32", "32-8", "tp2-tp1", "tp1-tp2"],
)
def test_every_coordinate_arrives(mover: str, source: Callable[[], KVCaches], into: Callable[[], KVCaches]) -> None:
    here = into()
    with served(source(), here, mover=mover) as one:
        table = tables(here, 5)
        with one.peer.lookup(keys(), asked(here)) as lease:
            assert all(found.all() for found in lease.found)
            moved = lease.load(Side(here, table), asked(here)).result(10)
        assert not moved.failed
        assert moved.num_blocks == sum(map(len, asked(here)))
        for buffer, contents in zip(here.buffers, one.contents, strict=True):
            for layer, rows in enumerate(contents):
                found = buffer.canonical(layer, torch.as_tensor(table[buffer.group]), 0, rows.shape[1])
                assert torch.equal(found, rows), buffer.name
                assert not buffer.replicas_differ(layer, torch.as_tensor(table[buffer.group]), 0, rows.shape[1])
        usage = one.peer.usage()
        assert [group.loaded.blocks for group in usage.groups] == [len(each) for each in asked(here)]
        wait_until(lambda: one.server.num_lent == 0, "the lease given back")


def test_only_what_is_asked_for_is_written() -> None:
    here = caches("flashinfer_hnd", 32)
    with served(into=here) as one:
        table, nothing = tables(here, 5), PLACES[:0]
        with one.peer.lookup(keys(), asked(here)) as lease:
            moved = lease.load(Side(here, table), [PLACES[1::2], nothing, nothing]).result(10)
        assert moved.places[0].tolist() == [1, 3]
        full = here.buffers[0]
        written = full.written_blocks().nonzero().reshape(-1).tolist()
        assert written == sorted(table[0][[1, 3]].tolist())
        assert not here.buffers[2].written_blocks().any()


def test_equal_digests_of_other_tokens_are_a_miss() -> None:
    here = caches("flashinfer_hnd", 32)
    with served(into=here) as one:
        forged = PrefixKeys(BLOCK, keys().digests, keys(1).proofs)
        for wrong in (forged, keys(1)):
            with one.peer.lookup(wrong, asked(here)) as lease:
                assert not any(found.any() for found in lease.found)
                with pytest.raises(TierError, match="was not found"):
                    lease.load(Side(here, tables(here)), asked(here))
        assert sum(group.missed.blocks for group in one.peer.usage().groups) == 2 * sum(map(len, asked(here)))
        assert one.server.num_lent == 0


def test_a_peer_that_goes_away_in_the_middle_is_a_miss_that_names_the_blocks() -> None:
    here = caches("flashinfer_hnd", 32)
    with served(into=here, mover="tcp", load_s=5.0) as one:
        lease = one.peer.lookup(keys(), asked(here))
        one.server.gate.clear()
        future = lease.load(Side(here, tables(here)), asked(here))
        assert one.server.waiting.wait(PATIENCE_S)
        future.add_done_callback(lambda _: one.server.gate.set())  # not before the peer has lost the server
        one.server.close()
        moved = future.result(10)
        assert moved.num_blocks < sum(map(len, asked(here)))
        named = {(failed.group, failed.place) for failed in moved.failed}
        for group, wanted, places in zip(here.groups, asked(here), moved.places, strict=True):
            assert {place for name, place in named if name == group.name} == set(wanted.tolist()) - set(places.tolist())
        lease.release()
        begun = time.monotonic()
        for _ in range(20):
            with pytest.raises((PeerError, TierError)):
                one.peer.lookup(keys(), asked(here))
        assert time.monotonic() - begun < 8.0
    assert all(not group.pinned.blocks for group in one.tier.usage().groups)


def test_a_load_ends_at_its_deadline() -> None:
    here = caches("flashinfer_hnd", 32)
    with served(into=here, mover="tcp", load_s=0.3) as one:
        lease = one.peer.lookup(keys(), asked(here))
        one.server.gate.clear()
        begun = time.monotonic()
        moved = lease.load(Side(here, tables(here)), asked(here)).result(10)
        assert time.monotonic() - begun < 4.0
        assert moved.num_blocks == 0
        assert "deadline" in moved.failed[0].reason
        lease.release()
        one.server.gate.set()


def test_leases_end_and_are_not_read_after() -> None:
    here = caches("flashinfer_hnd", 32)
    with served(into=here, lease_s=2.0) as one:
        lease = one.peer.lookup(keys(), asked(here))
        assert sum(group.pinned.blocks for group in one.tier.usage().groups) == 11
        wait_until(lambda: one.server.num_lent == 0, "the lease's end")
        assert sum(group.pinned.blocks for group in one.tier.usage().groups) == 0
        moved = lease.load(Side(here, tables(here)), asked(here)).result(10)
        assert moved.num_blocks == 0
        assert "was not found here, or too long ago" in moved.failed[0].reason
        lease.release()


def test_blocks_count_as_lent_until_they_are_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    here, lent, release = caches("flashinfer_hnd", 32), list[int](), ShelfLease.release
    with served(into=here) as one:

        def count(lease: ShelfLease) -> None:
            lent.append(one.server.num_lent)
            release(lease)

        monkeypatch.setattr(ShelfLease, "release", count)
        one.peer.lookup(keys(), asked(here)).release()
        wait_until(lambda: one.server.num_lent == 0, "the lease given back")
        assert lent == [11]


def test_closing_ends_a_session_that_is_being_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    here, dialling, closed, dial = (
        caches("flashinfer_hnd", 32),
        threading.Event(),
        threading.Event(),
        ControlChannel._dial,
    )

    def late(channel: ControlChannel, timeout_s: float) -> Dialer:
        dialling.set()
        closed.wait(0.3)  # as long as close() has to wait for this
        return dial(channel, timeout_s)

    with served(into=here) as one:
        leaks = Leaks()
        peer = PeerTier(
            one.peer.address,
            here,
            describe(here),
            make_mover("inproc"),
            block_tokens=BLOCK,
            security=OPEN,
            answer_s=1.0,
        )

        def look_up() -> None:
            with suppress(PdtxError):
                peer.lookup(keys(), asked(here))

        monkeypatch.setattr(ControlChannel, "_dial", late)
        opener = threading.Thread(target=look_up)
        opener.start()
        assert dialling.wait(PATIENCE_S)
        peer.close()
        closed.set()
        opener.join()
        leaks.require_none("a peer's tier that was closed while its session was opened")


T = TypeVar("T")


class TooLate(Mailbox[T]):
    """One whose item comes at the moment at which nobody waits any more."""

    def get(self, timeout_s: float) -> T:
        super().get(timeout_s)
        raise queue.Empty


def test_an_answer_that_comes_with_its_timeout_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    here = caches("flashinfer_hnd", 32)
    with served(into=here) as one:
        one.peer.lookup(keys(), asked(here)).release()
        wait_until(lambda: one.server.num_lent == 0, "the lease given back")
        monkeypatch.setattr(peer_tier, "Mailbox", TooLate)
        with pytest.raises(DeadlineExceeded, match="blocks to be found"):
            one.peer.lookup(keys(), asked(here))
        wait_until(lambda: one.server.num_lent == 0, "the lease given back")


def test_blocks_that_are_read_outlast_their_lease() -> None:
    here = caches("flashinfer_hnd", 32)
    with served(into=here, lease_s=2.0) as one:
        lease = one.peer.lookup(keys(), asked(here))
        one.server.gate.clear()
        future = lease.load(Side(here, tables(here)), asked(here))
        assert one.server.waiting.wait(PATIENCE_S)
        time.sleep(2.5)
        assert sum(group.pinned.blocks for group in one.tier.usage().groups) == 11
        one.server.gate.set()
        future.result(10)
        lease.release()
        wait_until(lambda: not sum(group.pinned.blocks for group in one.tier.usage().groups), "no pins")


def test_peers_pin_a_bounded_share() -> None:
    here = caches("flashinfer_hnd", 32)
    with served(into=here, nbytes=100_000) as one:
        capacity = sum(group.capacity.blocks for group in one.tier.usage().groups)
        leases = list[Any]()

        def take_all() -> None:
            for _ in range(capacity):
                leases.append(one.peer.lookup(keys(), asked(here)))

        with pytest.raises(TierError, match=r"would pin more than .* for peers"):
            take_all()
        assert one.server.num_lent <= capacity // 2 + 1
        for group in one.tier.usage().groups:
            assert group.pinned.blocks <= max(1, group.capacity.blocks // 2), group.name
        for lease in leases:
            lease.release()
        wait_until(lambda: one.server.num_lent == 0, "the leases given back")


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(TransferRefused) as caught:
        call()
    return str(caught.value)


def test_nothing_can_be_written_and_nothing_read_beside_a_lease() -> None:
    here = caches("flashinfer_hnd", 32)
    with served(into=here, mover="tcp") as one:
        nothing = PLACES[:0]
        with one.peer.lookup(keys(), [PLACES[:2], nothing, nothing]) as lease:
            way, name = one.peer._way, lease._request_id
            assert way is not None
            region = Region(torch.zeros(1 << 20, dtype=torch.uint8))
            runs = Runs(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([64]))

            def get(*key: int, request: str = name) -> str:
                wanted = TransferKey(request, *key)
                return refusal(way.connection.get(wanted, region, runs, time.monotonic() + 5).wait)

            put = way.connection.put(TransferKey(name, 0, 1, 0, 16), region, runs, time.monotonic() + 5)
            assert "nothing can be written to this tier" in refusal(put.wait)
            assert "was not found here" in get(0, 1, 0, 16, request="another")
            assert "beyond the 2 blocks" in get(0, 1, 0, 2 * BLOCK + 1)
            assert "beyond the 0 blocks" in get(0, 1, 0, 16, 2)
            assert "is for buffer 9 of 4" in get(0, 1, 0, 16, 9)
            assert "is not a part of the 2 layers" in get(0, 3, 0, 16)
            assert "rank 0 takes nothing" in get(0, 1, 0, 16, 0, 1, 0)
            assert "not one of the 0 states" in get(0, 1, 4, 5, 3)
            assert "bytes" in get(0, 1, 0, 16)
        assert not region.memory.any()
        with pytest.raises(TierError, match="can be read and not written"):
            one.peer.store(keys(), Side(here, tables(here), hold=KEPT), asked(here), FENCE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_tokens": 64}, "block size of the tier is 32 on the prefill side and 64"),
        ({"fingerprint": "another"}, "fingerprint is same on the prefill side and another"),
    ],
)
def test_who_does_not_match_is_refused_by_field(changes: dict[str, Any], words: str) -> None:
    here = caches("flashinfer_hnd", 32)
    with served(into=here, **changes) as one:
        wanted = prefix_keys(list(range(TOKENS)), changes.get("block_tokens", BLOCK), FINGERPRINT)
        with pytest.raises(IncompatiblePeer, match=words):
            one.peer.lookup(wanted, [PLACES[:1]] * 3)


def test_a_peers_words_are_printed_as_one_short_line(monkeypatch: pytest.MonkeyPatch) -> None:
    here, words = caches("flashinfer_hnd", 32), "\x1b[2J\n" + "x" * 100_000
    with served(into=here) as one:
        fail = lambda session, ask: one.server._send(  # noqa: E731
            session.peer, Failure(request_id=ask.request_id, phase="\x1b[31m", reason=words)
        )
        monkeypatch.setattr(one.server, "_on_lookup", fail)
        with pytest.raises(TierError, match="failed in") as failed:
            one.peer.lookup(keys(), asked(here))
    reject = Reject(field=words, producer=words, consumer=words, advice=words)
    monkeypatch.setattr(tier_server, "make_reject", lambda error: reject)
    with served(into=here, fingerprint="another") as one, pytest.raises(IncompatiblePeer) as refused:
        one.peer.lookup(keys(), asked(here))
    for error in (failed.value, refused.value):
        assert str(error).isprintable()
        assert len(str(error)) < 5000


def test_keys_are_needed_where_they_are_asked_for(tmp_path: Path) -> None:
    pairs = [generate_keys(tmp_path, name) for name in ("ours", "theirs", "stranger")]
    ours, theirs, stranger = (load_secret(secret) for _, secret in pairs)
    server = Security(own=ours, peer_public=[load_public(pairs[1][0])])
    for own, good in ((theirs, True), (stranger, False)):
        here, public = caches("flashinfer_hnd", 32), load_public(pairs[0][0])
        with served(into=here, security=(server, Security(own=own, peer_public=[public]))) as one:
            if good:
                with one.peer.lookup(keys(), asked(here)) as lease:
                    assert lease.found[0].all()
            else:
                with pytest.raises(PdtxError):
                    one.peer.lookup(keys(), asked(here))


def test_nobody_there_is_said_at_once_the_second_time() -> None:
    here = caches("flashinfer_hnd", 32)
    peer = PeerTier(
        "127.0.0.1:9", here, describe(here), make_mover("inproc"), block_tokens=BLOCK, security=OPEN, answer_s=0.3
    )
    with pytest.raises(PeerError, match="nobody answers"):
        peer.lookup(keys(), asked(here))
    begun = time.monotonic()
    with pytest.raises(PeerError, match="left alone for a while"):
        peer.lookup(keys(), asked(here))
    assert time.monotonic() - begun < 2
    peer.close()
