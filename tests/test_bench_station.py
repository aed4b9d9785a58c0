"""Stations: every kind of link moves and proves what it moved, and every fault shows."""

import dataclasses
import gc
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection as Pipe
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pdtx.bench.station import Station
from pdtx.bench.station_caches import case_shape
from pdtx.bench.station_links import PostingLink
from pdtx.bench.station_receiver import LinkCount
from pdtx.bench.work import LinkChecked, LinkMoved, LinkWork, Role, StationWork
from pdtx.cache import shared
from pdtx.errors import DeadlineExceeded, InputError, PdtxError, TransferError, TransferRefused
from pdtx.layout import KVCacheLayout
from pdtx.plan import Runs
from pdtx.results.model import Case
from pdtx.transports import Region, TransferHandle, TransferKey

SMALL = Case(model="llama-3-8b", layers=3, tokens=70, batch=2)
ROOM = 512 << 20
LIMIT_S = 20.0


def change(case: Case, **fields: object) -> Case:
    return msgspec.structs.replace(case, **fields)


def whole(case: Case, number: int = 0, requests: range | None = None) -> LinkWork:
    return LinkWork(number, requests or range(case.batch), range(case.tp[0]), range(case.tp[1]))


class Bench:
    """Stations of one case, and the links between them; posts and written: sides of the case."""

    def __init__(self, case: Case, links: dict[LinkWork, tuple[Station, Station]], pool: int | None = None) -> None:
        self.case, self.links, self.pool = case, links, pool or case.batch * len(links)
        self.paths: list[object] = []
        prefills, decodes = (dict.fromkeys(pair[side] for pair in links.values()) for side in range(2))
        self.prefills, self.decodes = list(prefills), list(decodes)
        self.posts, listens = (0, 1) if case.op == "push" else (1, 0)
        roles: tuple[Role, Role] = ("prefill", "decode")
        addresses = dict[Station, tuple[str, bytes]]()
        for side, stations in enumerate((self.prefills, self.decodes)):
            for station in stations:
                mine = tuple(link for link, pair in links.items() if pair[side] is station)
                ranks = [link.prefill_ranks if side == 0 else link.decode_ranks for link in mine]
                held = range(min(r.start for r in ranks), max(r.stop for r in ranks))
                made = station.prepare(StationWork(case, roles[side], held, self.pool, mine), "127.0.0.1")
                addresses[station] = made.address, made.token
        for link, pair in links.items():
            self.paths.append(pair[self.posts].connect(link.number, *addresses[pair[listens]], 5.0))

    def ready(self, iteration: int) -> None:
        for station in (*self.prefills, *self.decodes):
            station.ready(iteration)

    def move(self, timeout_s: float = LIMIT_S) -> list[LinkMoved]:
        found = list[LinkMoved]()
        for station in self.prefills if self.posts == 0 else self.decodes:
            numbers = tuple(link.number for link, pair in self.links.items() if pair[self.posts] is station)
            found += station.move(numbers, time.monotonic() + 0.01, timeout_s)
        return found

    def check(self) -> list[LinkChecked]:
        found = list[LinkChecked]()
        for station in self.decodes:
            numbers = tuple(link.number for link, pair in self.links.items() if pair[1] is station)
            found += station.check(numbers, full=True)
        return found

    def round(self, iteration: int) -> tuple[list[LinkMoved], list[LinkChecked]]:
        self.ready(iteration)
        return self.move(), self.check()


@contextmanager
def pair(case: Case) -> Iterator[Bench]:
    with Station(max_bytes=ROOM) as prefill, Station(max_bytes=ROOM) as decode:
        yield Bench(case, {whole(case): (prefill, decode)})


def assert_good(moved: list[LinkMoved], checked: list[LinkChecked]) -> None:
    assert {one.link: one.claimed_bytes for one in moved} == {one.link: one.received_bytes for one in checked}
    for one in checked:
        assert (one.deliveries, one.wrong, one.first_wrong) == (1, 0, "")


CASES = {
    "push over tcp": SMALL,
    "pull over tcp": change(SMALL, op="pull"),
    "push over shm": change(SMALL, mover="shm"),
    "pull over shm": change(SMALL, mover="shm", op="pull"),
    "push inproc": change(SMALL, mover="inproc"),
    "pull inproc": change(SMALL, mover="inproc", op="pull"),
    "staged": change(SMALL, mode="staged", layout=("flash_attn_nhd", "flashinfer_hnd")),
    "windows": change(SMALL, model="gpt-oss-20b", tokens=200),
    "windows that begin in a block": change(SMALL, model="gemma-3-27b", layers=6, tokens=1100, batch=1),
    "latent vectors": change(SMALL, model="deepseek-v3"),
    "an indexer's keys, blocks that move whole": change(SMALL, model="deepseek-v3.2"),
    "states": change(SMALL, model="jamba", layers=5),
    "an encoder's output": change(SMALL, model="whisper-large-v3", layers=1, batch=1),
    "other layouts": change(SMALL, layout=("flash_attn_nhd", "flashinfer_hnd")),
    "transposed keys": change(SMALL, layout=("flash_attn_hnd", "cpu_attn_lbhnc")),
    "larger blocks": change(SMALL, block_size=(16, 32)),
    "smaller blocks": change(SMALL, block_size=(32, 8), layout=("vllm_blnhc", "flashinfer_hnd")),
    "fp8": change(SMALL, kv_cache_dtype="fp8"),
    "more ranks": change(SMALL, tp=(1, 2)),
    "fewer ranks": change(SMALL, tp=(2, 1), op="pull"),
    "copied heads": change(SMALL, tp=(2, 16), layers=1),
    "read once of copied heads": change(SMALL, tp=(16, 4), layers=1),
    "latent vectors on all ranks": change(SMALL, model="deepseek-v3", layers=1, tp=(2, 4)),
    "in one piece": change(SMALL, mean_run=0.0),
    "in pieces": change(SMALL, mean_run=3.0, layers_per_transfer=0),
    "unmerged": change(SMALL, mean_run=0.0, merge=False),
    "one at a time": change(SMALL, depth=1),
    "several streams": change(SMALL, streams=3, mover_options={"part_bytes": "65536"}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_all_that_is_asked_for_moves_and_nothing_else(case: Case) -> None:
    with pair(case) as bench:
        for iteration in range(2):
            assert_good(*bench.round(iteration))


@pytest.mark.parametrize("tp", [(1, 2), (2, 1), (2, 4)])
@pytest.mark.parametrize("op", ["push", "pull"])
def test_ranks_in_stations_of_their_own(tp: tuple[int, int], op: str) -> None:
    case = change(SMALL, tp=tp, op=op, layers=2)
    with ExitStack() as stack:
        sides = [[stack.enter_context(Station(max_bytes=ROOM)) for _ in range(size)] for size in tp]
        links = {
            LinkWork(source * tp[1] + target, range(case.batch), range(source, source + 1), range(target, target + 1)):
                (sides[0][source], sides[1][target])
            for source in range(tp[0])
            for target in range(tp[1])
        }  # fmt: skip
        bench = Bench(case, links, pool=case.batch)
        moved, checked = bench.round(0)
        assert all((one.wrong, one.deliveries, one.first_wrong) == (0, 1, "") for one in checked)
        assert sum(one.claimed_bytes for one in moved) == sum(one.received_bytes for one in checked)
        facts = [pair[0].facts(link.number) for link, pair in links.items()]
        assert sum(int(str(one["unique_bytes"])) for one in facts) == case.batch * 70 * 2 * 8 * 128 * 2 * 2


def test_several_links_at_once() -> None:
    case = SMALL
    with Station(max_bytes=ROOM) as one, Station(max_bytes=ROOM) as two, Station(max_bytes=ROOM) as decode:
        first, second = whole(case), whole(case, 1, range(2, 4))
        bench = Bench(case, {first: (one, decode), second: (two, decode)})
        assert_good(*bench.round(0))
    with Station(max_bytes=ROOM) as prefill, Station(max_bytes=ROOM) as decode:
        bench = Bench(case, {first: (prefill, decode), second: (prefill, decode)})
        assert_good(*bench.round(0))
        assert_good(*bench.round(1))


def test_some_links_of_several_in_isolation() -> None:
    first, second = whole(SMALL), whole(SMALL, 1, range(2, 4))
    with Station(max_bytes=ROOM) as prefill, Station(max_bytes=ROOM) as decode:
        bench = Bench(SMALL, {first: (prefill, decode), second: (prefill, decode)})
        bench.ready(0)
        assert_good(list(prefill.move((1,), time.monotonic(), LIMIT_S)), list(decode.check((1,), full=True)))
        (other,) = decode.check((0,), full=True)
        assert other.received_bytes == other.deliveries == 0
        assert other.wrong


def test_facts_say_what_moves() -> None:
    with pair(change(SMALL, tp=(2, 16), batch=1, mode="direct")) as bench:
        facts = bench.prefills[0].facts(0)
        (moved,) = bench.round(0)[0]
    payload = 3 * 2 * 70 * 8 * 128 * 2
    assert (facts["wire_bytes"], facts["unique_bytes"]) == (2 * payload, payload)
    assert facts["num_transfers"] == len(moved.transfers) == 16 * 3
    assert facts["runs"] == 16 * 3 * 2 * 70
    assert facts["run_sizes"] == {"256": facts["runs"]}
    assert facts["modes"] == {"direct": 48}
    assert "as asked for" in str(facts["mode_reason"])


@pytest.mark.parametrize(
    ("mover", "op", "mode"), [("tcp", "push", "staged"), ("tcp", "pull", "direct"), ("shm", "push", "direct")]
)
def test_facts_say_how_it_moves(mover: str, op: str, mode: str) -> None:
    asked = "staged" if op == "push" else "auto"
    with pair(change(SMALL, mover=mover, op=op, mode=asked)) as bench:
        stations = bench.prefills[0], bench.decodes[0]
        assert stations[bench.posts].facts(0)["modes"] == {mode: 6}
        (moved,) = bench.round(0)[0]
        assert {one.staged for one in moved.transfers} == {mode == "staged"}


def test_merging_joins_runs_and_can_be_left_out() -> None:
    runs = []
    for merge in (True, False):
        with pair(change(SMALL, mean_run=0.0, merge=merge)) as bench:
            runs.append(bench.prefills[0].facts(0)["runs"])
    assert runs[0] == 2 * 3 * 2  # request, layer, K or V
    assert runs[1] == runs[0] * 5


# -- times -------------------------------------------------------------------------------------------------------------


def test_times_of_an_iteration_are_in_order() -> None:
    with pair(SMALL) as bench:
        (moved,) = bench.round(0)[0]
    assert moved.begun <= moved.ended
    assert 0 < moved.move_s <= moved.ended - moved.begun
    assert moved.prepare_s > 0
    assert moved.post_s > 0
    for one in moved.transfers:
        assert one.ready == 0.0
        assert 0 <= one.posted <= one.sent <= one.ended <= moved.ended - moved.begun


def test_a_layer_is_not_posted_before_it_has_been_computed() -> None:
    case = change(SMALL, model="gpt-oss-20b", layers=4, layer_compute_s=0.02)
    with pair(case) as bench:
        moved, checked = bench.round(0)
    assert_good(moved, checked)
    transfers = moved[0].transfers
    # Windows and full attention in turns: a buffer's second layer is the model's third or fourth.
    steps = {(0, 0): 1, (1, 0): 2, (0, 1): 3, (1, 1): 4}
    assert {(t.buffer, t.layer_start): round(t.ready / 0.02) for t in transfers} == steps
    assert all(one.posted >= one.ready for one in transfers)
    assert [one.ready for one in transfers] == sorted(one.ready for one in transfers)


def test_depth_bounds_what_is_under_way() -> None:
    with pair(change(SMALL, depth=1)) as bench:
        (moved,) = bench.round(0)[0]
    ends = [(one.posted, one.ended) for one in moved.transfers]
    assert len(ends) == 6
    assert all(ended <= posted for (_, ended), (posted, _) in pairwise(ends))


def test_a_deadline_ends_an_iteration_with_nothing_left_under_way() -> None:
    with pair(change(SMALL, layer_compute_s=5.0)) as bench:
        bench.ready(0)
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="emulated computation"):
            bench.move(timeout_s=0.2)
        assert time.monotonic() - begun < 4.0
        # What has failed is not used again, and the next case is as good as any.
        with pytest.raises(PdtxError):
            bench.move(timeout_s=5.0)
        again = Bench(SMALL, bench.links)
        assert_good(*again.round(0))


def test_a_link_that_fails_stops_the_others() -> None:
    case = change(SMALL, layers=12, layer_compute_s=1.0)
    with Station(max_bytes=ROOM) as prefill, Station(max_bytes=ROOM) as decode, Station(max_bytes=ROOM) as other:
        links = {whole(case): (prefill, decode), whole(case, 1, range(2, 4)): (prefill, other)}
        bench = Bench(case, links)
        bench.ready(0)
        other.ready(1)  # refuses pieces of iteration 0
        begun = time.monotonic()
        with pytest.raises(TransferRefused, match="no part of iteration 1"):
            prefill.move((0, 1), begun, LIMIT_S)
        assert time.monotonic() - begun < 6.0  # all twelve layers would have taken 12 s


# -- teeth -------------------------------------------------------------------------------------------------------------


def memory(station: Station, buffer: int = 0, rank: int = 0) -> torch.Tensor:
    assert station._prepared is not None
    return station._prepared._caches.regions[buffer, rank].memory


def test_a_flipped_byte_is_named_with_its_iteration() -> None:
    with pair(SMALL) as bench:
        bench.ready(7)
        bench.move()
        shape = case_shape(SMALL, SMALL.batch)
        layout, block = shape.decode.facts.buffers[0].layout, int(shape.decode.tables[0][1][1])
        assert isinstance(layout, KVCacheLayout)
        at = {"layer": 2, "kv": 1, "block": block, "token": 3, "head": 5, "channel": 9}
        memory(bench.decodes[0])[sum(layout.stride(name) * step for name, step in at.items())] ^= 1
        (checked,) = bench.check()
    assert checked.wrong == 1
    assert checked.first_wrong.startswith(
        f"iteration 7: request r1 buffer full layer 2 V token 19 head 5 channel 9 (block {block}) is 0x"
    )
    assert checked.deliveries == 1


def test_what_has_not_moved_is_never_taken_for_the_present_iteration() -> None:
    with pair(SMALL) as bench:
        bench.round(0)
        bench.ready(1)
        (untouched,) = bench.check()
        assert (untouched.received_bytes, untouched.deliveries) == (0, 0)
        assert "poison: it was never written" in untouched.first_wrong
        elements = 2 * 3 * 2 * 70 * 8 * 128
        assert untouched.wrong is not None
        assert 0.99 * elements < untouched.wrong <= elements  # one code in 65,536 is that of poison
        # Nor is what an earlier one has left, where nobody has poisoned it.
        bench.prefills[0].ready(0)
        bench.decodes[0].ready(0)
        bench.move()
        bench.decodes[0]._case._iteration = 1
        (stale,) = bench.check()
        assert stale.wrong is not None
        assert stale.wrong > 0.99 * elements


def test_requests_that_trade_places_show() -> None:
    with pair(SMALL) as bench:
        bench.ready(0)
        shape = bench.prefills[0]._case._shape
        tables = shape.prefill.tables[0]
        object.__setattr__(shape.prefill, "tables", ((tables[1], tables[0]),))
        bench.move()
        (checked,) = bench.check()
    assert checked.deliveries == 1
    assert checked.wrong is not None
    assert checked.wrong > 0.99 * 2 * 3 * 2 * 70 * 8 * 128


@pytest.mark.parametrize("axes", [("head", "token"), ("kv", "layer")])
def test_a_wrong_layout_at_the_source_shows(axes: tuple[str, str]) -> None:
    with pair(change(SMALL, layers=2, tokens=64, batch=1)) as bench:
        bench.ready(0)
        match = bench.prefills[0]._case._shape.match.buffers[0]
        assert isinstance(match.producer.layout, KVCacheLayout)
        object.__setattr__(
            match, "producer", dataclasses.replace(match.producer, layout=match.producer.layout.with_swapped(*axes))
        )
        bench.move()
        (checked,) = bench.check()
    assert checked.wrong


def test_a_write_beside_a_request_shows_and_is_told_once() -> None:
    with pair(SMALL) as bench:
        bench.ready(0)
        bench.move()
        used = {int(block) for table in case_shape(SMALL, 2).decode.tables[0] for block in table}
        free = next(block for block in range(1, 99) if block not in used)
        stride = bench.decodes[0]._case._shape.decode.facts.buffers[0].layout.parts[0].layout.stride("block")
        memory(bench.decodes[0])[free * stride + 5] ^= 0xFF
        (checked,) = bench.check()
        assert checked.wrong == 1
        assert checked.first_wrong.startswith(f"iteration 0: buffer full layer 0 block {free} was written at byte")
        assert_good(*bench.round(1))


def test_a_payload_that_comes_twice_counts_twice_and_a_missing_one_not_at_all() -> None:
    with pair(SMALL) as bench:
        bench.ready(0)
        receiver, case = bench.decodes[0]._case._receiver, bench.decodes[0]._case
        pieces = case._pieces[0]
        bench.move()
        for piece in pieces[1:]:
            key = piece.key(0)
            receiver.placed("link-0", key, receiver.place("link-0", key).slices.total, None)
        (checked,) = case.check((0,), full=False)
        assert (checked.deliveries, checked.wrong) == (1, None)
        key = pieces[0].key(0)
        receiver.placed("link-0", key, receiver.place("link-0", key).slices.total, None)
        assert case.check((0,), full=False)[0].deliveries == 2
        bench.ready(1)
        for piece in (*pieces[1:], pieces[1]):
            key = piece.key(1)
            receiver.placed("link-0", key, receiver.place("link-0", key).slices.total, None)
        (checked,) = case.check((0,), full=False)
        assert checked.received_bytes == 2 * 3 * 2 * 70 * 8 * 128 * 2
        assert checked.deliveries == 0


def test_five_posts_of_which_one_came() -> None:
    pieces = {(0, 0, 0, 1, 0, 0): object(), (0, 0, 1, 2, 0, 0): object()}
    count = LinkCount(200)
    count.times.update(pieces)
    assert count.deliveries(pieces, 200) == 1  # type: ignore[arg-type]
    count.nbytes = 1000
    assert count.deliveries(pieces, 200) == 5  # type: ignore[arg-type]


def test_only_pieces_of_the_present_iteration_are_let_in() -> None:
    with pair(SMALL) as bench:
        bench.ready(4)
        case = bench.decodes[0]._case
        good = case._pieces[0][0].key(4)
        assert case._receiver.place("link-0", good).slices.total > 0
        changed: list[dict[str, Any]] = [
            {"request_id": "i3.r0"}, {"request_id": "i4.r9"}, {"request_id": "r0"}, {"token_stop": 71},
            {"layer_stop": 3}, {"buffer": 1}, {"src_rank": 1}, {"request_id": "i4.r0 "},
        ]  # fmt: skip
        for change_ in changed:
            with pytest.raises(TransferRefused, match="is no part of iteration 4"):
                case._receiver.place("link-0", dataclasses.replace(good, **change_))
        with pytest.raises(TransferRefused, match="is no part of"):
            case._receiver.place("link-9", good)
        with pytest.raises(TransferRefused, match="nothing is read"):
            case._receiver.offer("link-0", good)


def test_a_wrong_token_is_refused() -> None:
    with Station(max_bytes=ROOM) as prefill, Station(max_bytes=ROOM) as decode:
        roles: tuple[Role, Role] = ("prefill", "decode")
        made = [
            station.prepare(StationWork(SMALL, role, range(1), 2, (whole(SMALL),)), "127.0.0.1")
            for station, role in zip((prefill, decode), roles, strict=True)
        ]
        assert not made[0].address
        assert len(made[1].token) == 32
        assert repr(made[1].token) not in repr(made[1])
        with pytest.raises(PdtxError, match=r"token|proof"):
            prefill.connect(0, made[1].address, bytes(32), 5.0)


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": 1 << 20}, "need 30.00 GiB here, and --max-bytes allows 512 MiB"),
        ({"tokens": 0}, "needs 1 token"),
        ({"model": "bert-of-nobody"}, "no preset of that name"),
        ({"layout": ("flash_attn_nhd", "nope")}, "nope"),
        ({"tp": (1, 3)}, "8 KV heads cannot be divided"),
        ({"block_size": (16, 24)}, "one must be a multiple of the other"),
        ({"model": "jamba", "tp": (1, 2)}, r"keeps a state, which moves with tp 1:1 only, not 1:2"),
        ({"mover": "shm", "streams": 2}, "has no streams"),
        ({"mover_options": {"strems": "2"}}, "has no option 'strems'"),
        ({"streams": 2, "mover_options": {"streams": "2"}}, "given twice"),
        ({"mover": "pigeon"}, "unknown mover"),
        ({"op": "pull", "mode": "staged"}, "not packed on the way"),
        ({"layers": 0}, "layers is 0"),
        ({"layers_per_transfer": -1}, "layers_per_transfer is -1"),
        ({"block_tables": [([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])]}, "1 block tables for 2 requests"),
        ({"block_tables": [([1], [1])] * 2}, "block table 0 has 1 blocks"),
        ({"block_tables": [([1, 2, 3, 4, 5], [9, 8, 7, 6, 5])] * 2}, "block 1 twice"),
        ({"block_tables": [([0, 2, 3, 4, 5], [9, 8, 7, 6, 5])] * 2}, "names block 0"),
    ],
)
def test_a_case_that_cannot_be_is_refused_in_one_line(changes: dict[str, Any], text: str) -> None:
    case = change(SMALL, **changes)
    with Station(max_bytes=ROOM) as station:
        with pytest.raises(InputError, match=text) as caught:
            station.prepare(StationWork(case, "decode", range(case.tp[1]), case.batch, (whole(case),)), "127.0.0.1")
        assert "\n" not in str(caught.value)
        assert station._prepared is None


HUGE = 2**31 - 1


@pytest.mark.parametrize(
    ("case", "work", "text"),
    [
        ({"tokens": 10**9}, {}, "tokens is 1,000,000,000; needs 1 to 67,108,864"),
        ({"tokens": 1 << 26, "block_size": (1, 1)}, {}, "--max-bytes allows 512 MiB"),
        ({"block_size": (16, 1 << 40)}, {}, "block_size is 1,099,511,627,776"),
        ({"block_size": (16, 0)}, {}, "block_size is 0"),
        ({"tp": (1, HUGE)}, {"ranks": range(HUGE)}, "tp is 2,147,483,647"),
        ({}, {"ranks": range(HUGE)}, r"ranks 0\.\.2147483647, of 1"),
        ({}, {"ranks": range(0)}, r"ranks 0\.\.0, of 1"),
        ({"tp": (1, 2)}, {"ranks": range(1)}, r"needs decode ranks 0\.\.2, and 0\.\.1 are here"),
        ({}, {"links": (LinkWork(0, range(1), range(HUGE), range(1)),)}, r"ranks 0\.\.2147483647, of 1"),
        ({}, {"links": (LinkWork(0, range(HUGE), range(1), range(1)),)}, r"requests 0\.\.2147483647, of 2"),
        ({}, {"links": ()}, "links is 0"),
        ({}, {"links": (whole(SMALL), whole(SMALL))}, "one number"),
        ({}, {"pool_requests": 10**8}, "pool_requests is 100,000,000"),
        ({}, {"pool_requests": 1 << 20}, "--max-bytes allows 512 MiB"),
        ({"tokens": 1, "batch": 1 << 20}, {"pool_requests": 1 << 20}, "transfers in an iteration"),
        ({"model": "gemma-2-9b", "tokens": 1 << 24, "layers": 1}, {"pool_requests": 8}, "block tables of this case"),
        (
            {
                "block_tables": [
                    ([at + 1, at + 2, at + 3, at + 4, 2**62 + at], [*range(at + 1, at + 6)]) for at in (0, 5)
                ]
            },
            {},
            "ids end at",
        ),
        ({"layer_compute_s": float("nan")}, {}, "layer_compute_s is nan"),
        ({"layer_compute_s": float("inf")}, {}, "layer_compute_s is inf"),
        ({"layer_compute_s": -1.0}, {}, "layer_compute_s is -1"),
        ({"mean_run": float("nan")}, {}, "not nan"),
        ({"depth": -1}, {}, "depth is -1"),
        ({"streams": 10**6}, {}, "streams is 1,000,000"),
    ],
)
def test_numbers_without_bounds_are_refused_before_anything_is_made(
    case: dict[str, Any], work: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("made")

    monkeypatch.setattr("pdtx.bench.station_memory.allocate", refuse)
    monkeypatch.setattr("pdtx.bench.station_caches.block_ids", refuse)
    limit = 1 << 40 if "transfers" in text else ROOM
    small = change(SMALL, **case)
    full: dict[str, Any] = {"ranks": range(small.tp[1]), "pool_requests": 2, "links": (whole(small),)} | work
    with Station(max_bytes=limit) as station, pytest.raises(InputError, match=text):
        station.prepare(StationWork(small, "decode", **full), "127.0.0.1")


def test_nothing_is_allocated_above_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr("pdtx.bench.station_memory.allocate", refuse)
    with Station(max_bytes=1 << 20) as station, pytest.raises(InputError, match="--max-bytes"):
        station.prepare(StationWork(SMALL, "decode", range(1), 2, (whole(SMALL),)), "127.0.0.1")


def test_calls_out_of_turn_are_refused() -> None:
    with Station(max_bytes=ROOM) as prefill, Station(max_bytes=ROOM) as decode:
        with pytest.raises(InputError, match="no case prepared"):
            prefill.ready(0)
        bench = Bench(SMALL, {whole(SMALL): (prefill, decode)})
        with pytest.raises(InputError, match="no iteration has begun"):
            bench.move()
        with pytest.raises(InputError, match="listens, and does not connect"):
            decode.connect(0, "127.0.0.1:1", bytes(32), 1.0)
        with pytest.raises(InputError, match="link 5 is not one"):
            prefill.connect(5, "127.0.0.1:1", bytes(32), 1.0)
        with pytest.raises(InputError, match="asked of the decode side"):
            prefill.check((0,), full=True)
        with pytest.raises(InputError, match="needs decode ranks"):
            decode.prepare(StationWork(change(SMALL, tp=(1, 2)), "decode", range(1), 2, (whole(change(SMALL, tp=(1, 2))),)), "127.0.0.1")  # fmt: skip  # noqa: E501


# -- memory and processes ----------------------------------------------------------------------------------------------


def test_recorded_block_tables_are_used() -> None:
    tables = [([5, 1, 9, 2, 7], [3, 4, 5, 6, 7]), ([11, 10, 12, 13, 14], [20, 1, 19, 2, 18])]
    case = change(SMALL, block_tables=tables)
    with pair(case) as bench:
        assert_good(*bench.round(0))
        shape = bench.decodes[0]._case._shape
        assert [table.tolist() for table in shape.prefill.tables[0]] == [pair_[0] for pair_ in tables]


def test_memory_is_used_again_for_the_next_case() -> None:
    with Station(max_bytes=ROOM) as prefill, Station(max_bytes=ROOM) as decode:
        links = {whole(SMALL): (prefill, decode)}
        first = Bench(SMALL, links)
        assert_good(*first.round(0))
        address = memory(decode).data_ptr()
        second = Bench(change(SMALL, layout=("flashinfer_hnd", "flash_attn_nhd"), seed=5), links)
        assert memory(decode).data_ptr() == address
        assert_good(*second.round(0))
        third = Bench(change(SMALL, mover="shm"), links)
        assert memory(decode).data_ptr() != address
        assert_good(*third.round(0))


def test_memory_is_given_back_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdtx.bench.station_memory._LARGE_BYTES", 1)
    gc.collect()  # of other tests
    before = len(shared._files)
    case = change(SMALL, mover="shm")
    gc.disable()  # nobody says when it would come round
    request.addfinalizer(gc.enable)
    with Station(max_bytes=ROOM) as prefill, Station(max_bytes=ROOM) as decode:
        links = {whole(case): (prefill, decode)}
        assert_good(*Bench(case, links).round(0))
        assert len(shared._files) == before + 2
        larger = change(case, tokens=2000)
        assert_good(*Bench(larger, {whole(larger): (prefill, decode)}).round(0))
        assert len(shared._files) == before + 2
    assert len(shared._files) == before


def test_without_verification_memory_is_written_once() -> None:
    with Station(max_bytes=ROOM) as station:
        station.prepare(StationWork(SMALL, "prefill", range(1), 2, (whole(SMALL),), verify=False), "127.0.0.1")
        station.ready(0)
        memory(station)[0] = 99
        before = memory(station).clone()
        station.ready(1)
        assert torch.equal(memory(station), before)


def test_both_sides_derive_the_same_tables_and_never_block_0() -> None:
    shapes = [case_shape(change(SMALL, mean_run=4.0), 6) for _ in range(2)]
    for side in ("prefill", "decode"):
        ours, theirs = (getattr(shape, side).tables[0] for shape in shapes)
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
        together = np.concatenate(ours)
        assert together.min() > 0
        assert len(set(together.tolist())) == len(together)
    assert not np.array_equal(shapes[0].prefill.tables[0][0], shapes[0].decode.tables[0][0])


def _decode(pipe: Pipe, case: Case) -> None:
    """Serve the decode side in a process of its own."""
    with Station(max_bytes=ROOM) as station:
        made = station.prepare(StationWork(case, "decode", range(1), case.batch, (whole(case),)), "127.0.0.1")
        pipe.send((made.address, made.token))
        address, token = pipe.recv()
        if case.op == "pull":
            station.connect(0, address, token, 5.0)
        station.ready(3)
        pipe.send("ready")
        pipe.recv()
        if case.op == "pull":
            station.move((0,), time.monotonic(), LIMIT_S)
        pipe.send(station.check((0,), full=True))
        pipe.recv()


@pytest.mark.parametrize(("mover", "op"), [("tcp", "push"), ("shm", "pull")])
def test_stations_in_two_processes(mover: str, op: str) -> None:
    case = change(SMALL, mover=mover, op=op)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_decode, args=(theirs, case), daemon=True)
    child.start()
    theirs.close()
    try:
        with Station(max_bytes=ROOM) as prefill:
            mine = prefill.prepare(StationWork(case, "prefill", range(1), case.batch, (whole(case),)), "127.0.0.1")
            assert ours.poll(60)
            address, token = ours.recv()
            ours.send((mine.address, mine.token))
            path = prefill.connect(0, address, token, 5.0) if op == "push" else None
            prefill.ready(3)
            assert ours.poll(30)
            ours.recv()
            if op == "push":
                prefill.move((0,), time.monotonic(), LIMIT_S)
                assert path is not None
                assert path.kind == mover
            ours.send("go")
            assert ours.poll(30)
            (checked,) = ours.recv()
            ours.send("end")
        assert (checked.wrong, checked.deliveries) == (0, 1)
    finally:
        ours.close()
        child.join(10)
        assert child.exitcode == 0


def test_a_mover_that_fails_at_once_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(SMALL) as bench:
        bench.ready(0)
        link: PostingLink = bench.prefills[0]._case._links[0]
        put, calls = link.connection.put, list[TransferKey]()

        def failing(key: TransferKey, region: Region, runs: Runs, deadline: float, *, staged: bool) -> TransferHandle:
            calls.append(key)
            if len(calls) == 3:
                raise TransferError("the device is gone")
            return put(key, region, runs, deadline, staged=staged)

        monkeypatch.setattr(link.connection, "put", failing)
        with pytest.raises(TransferError, match="the device is gone"):
            bench.move()
        assert len(calls) == 3
        assert all(posted.handle.state.final for posted in link._under_way)
