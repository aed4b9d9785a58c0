"""What the benchmarks move, and that the pairs that move it do, with next to no bytes."""

import mmap
import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.pair import MoverPair
from benchmarks.resident import PeakMemory
from benchmarks.workload import (
    DEEPSEEK_CASE,
    FLASHINFER_HND,
    FLASHINFER_NHD,
    LLAMA_CASE,
    NHD,
    Case,
    Contents,
    Side,
)
from pdtx.errors import InputError
from pdtx.plan import Mode
from pdtx.transports import make_mover

MIB = 1 << 20
SMALL = replace(LLAMA_CASE, layers=2, blocks=3)
SMALL_MLA = replace(DEEPSEEK_CASE, layers=2, blocks=3)
CASES = {
    "nhd": SMALL,
    "flashinfer": replace(SMALL, layouts=(NHD, FLASHINFER_NHD)),
    "hnd": replace(SMALL, layouts=(NHD, FLASHINFER_HND)),
    "mla": SMALL_MLA,
    "together": replace(SMALL, ids="contiguous"),
}


def contents(case: Case, side: Side) -> tuple[Contents, torch.Tensor]:
    memory = torch.empty(case.room, dtype=torch.uint8)
    made = Contents(case, side, memory)
    made.poison()
    return made, memory


class TestCases:
    def test_the_issue_s_workloads(self) -> None:
        assert (LLAMA_CASE.nbytes, LLAMA_CASE.pool) == (256 * MIB, 257)
        assert sum(plan.num_runs for plan in LLAMA_CASE.plans()) == 8192
        assert (DEEPSEEK_CASE.nbytes, sum(plan.num_runs for plan in DEEPSEEK_CASE.plans())) == (61 * 128 * 18432, 7808)
        one = LLAMA_CASE.one_block()
        assert [(plan.num_runs, plan.nbytes) for plan in one.plans()] == [(64, 2 * MIB)]

    def test_blocks_side_by_side_are_one_run_for_each_layer_and_part(self) -> None:
        assert sum(plan.num_runs for plan in replace(LLAMA_CASE, ids="contiguous").plans()) == 64

    def test_heads_apart_cut_every_run_into_256_bytes(self) -> None:
        plans = CASES["hnd"].plans()
        assert {size for plan in plans for size in plan.sizes} == {256}

    @pytest.mark.parametrize("case", [LLAMA_CASE, DEEPSEEK_CASE], ids=["llama", "deepseek"])
    def test_yardsticks_get_the_same_runs(self, case: Case) -> None:
        runs = case.of_peers().runs
        ours = [plan.flat for plan in case.plans()]
        for name in ("src", "dst", "nbytes"):
            assert np.array_equal(np.concatenate([getattr(flat, name) for flat in ours]), getattr(runs, name))

    def test_yardsticks_know_no_change_of_layout(self) -> None:
        with pytest.raises(InputError, match="equal caches"):
            CASES["hnd"].of_peers()

    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_tables_are_in_the_pool_and_never_block_0(self, case: Case) -> None:
        for side in ("source", "destination"):
            ids = case.block_ids(side)
            assert len(set(ids.tolist())) == case.blocks
            assert ids.min() > 0
            assert ids.max() < case.pool


class TestContents:
    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_what_a_plan_moves_by_hand_is_right_and_nothing_else(self, case: Case) -> None:
        (source, memory), (destination, there) = contents(case, "source"), contents(case, "destination")
        source.fill()
        assert destination.wrong() >= case.nbytes // 2 * 0.99  # poison, which a code may be by chance
        for plan in case.plans():
            for src, dst, nbytes in zip(plan.flat.src, plan.flat.dst, plan.flat.nbytes, strict=True):
                there[dst : dst + nbytes] = memory[src : src + nbytes]
        assert destination.wrong() == 0
        assert destination.strays() == 0

    def test_every_eight_bytes_are_like_no_others(self) -> None:
        source, memory = contents(SMALL, "source")
        source.fill()
        (poison,) = contents(SMALL, "source")[1][:8].view(torch.int64)
        words = memory[: source.layout.size_bytes].view(torch.int64)
        codes = words[words != poison]
        assert len(codes) == SMALL.nbytes // 8
        assert len(set(codes.tolist())) == len(codes)

    def test_two_heads_swapped_are_found(self) -> None:
        source, memory = contents(SMALL, "source")
        source.fill()
        first = int(SMALL.plans()[0].flat.src[0])
        one, other = (slice(first + at, first + at + 256) for at in (0, 256))
        memory[one], memory[other] = memory[other].clone(), memory[one].clone()
        assert 250 <= source.wrong() <= 256

    def test_a_stray_byte_is_found(self) -> None:
        destination, memory = contents(SMALL, "destination")
        memory[10] ^= 1  # block 0 is never handed out
        assert destination.strays() == 1

    def test_memory_that_is_too_small_is_refused(self) -> None:
        with pytest.raises(InputError, match="does not fit"):
            Contents(SMALL, "source", torch.empty(100, dtype=torch.uint8))


@pytest.fixture(scope="module")
def tcp() -> Iterator[MoverPair]:
    """Two processes, large enough for every case."""
    with MoverPair("tcp", SMALL, room=max(case.room for case in CASES.values()), repeat=2) as pair:
        yield pair


class TestPairs:
    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_every_case_arrives(self, tcp: MoverPair, case: Case) -> None:
        tcp.lay(case)
        assert tcp.nbytes == case.nbytes
        for _ in range(2):
            assert 0 < tcp.round() < 10
        assert tcp.wrong == 0
        assert tcp.detail.startswith("tcp (")

    def test_what_never_moves_is_wrong(self, tcp: MoverPair, monkeypatch: pytest.MonkeyPatch) -> None:
        tcp.lay(SMALL)
        do = tcp._do

        def all_but_move(side: Side, method: str, *arguments: object) -> object:
            return 0.0 if method == "move" else do(side, method, *arguments)

        monkeypatch.setattr(tcp, "_do", all_but_move)
        tcp.round()
        found, tcp.wrong = tcp.wrong, 0
        assert found >= SMALL.nbytes // 2 * 0.99

    def test_memory_is_counted_on_both_sides(self, tcp: MoverPair) -> None:
        tcp.lay(SMALL)
        tcp.watch_memory()
        above = tcp.rss_above()
        assert above.keys() == {"source", "destination"}
        assert all(4096 <= nbytes < 32 * MIB for nbytes in above.values())
        assert tcp.wrong == 0

    def test_packing_takes_time(self, tcp: MoverPair) -> None:
        tcp.lay(CASES["hnd"])
        assert tcp.pack() > 0

    def test_get_moves_towards_who_connects(self) -> None:
        with MoverPair("tcp", SMALL, operation="get") as pair:
            assert pair.round() > 0
            assert (pair.wrong, pair.name) == (0, "pdtx tcp get")

    def test_staged_moves_the_same(self) -> None:
        with MoverPair("tcp", CASES["hnd"], mode=Mode.STAGED) as pair:
            pair.round()
            assert pair.wrong == 0
            assert "staged 2" in pair.detail

    def test_both_ends_may_live_in_one_process(self) -> None:
        with MoverPair("inproc", replace(SMALL, layers_per_put=0)) as pair:
            pair.round()
            assert pair.wrong == 0
            assert "direct 1" in pair.detail

    @pytest.mark.parametrize("mover", ["shm", "ucx", "nixl"])
    def test_the_other_movers_too(self, mover: str) -> None:
        try:
            make_mover(mover).close()
        except (InputError, ImportError) as error:
            pytest.skip(f"{mover} is not to be had: {error}")
        with MoverPair(mover, SMALL) as pair:
            pair.round()
            assert pair.wrong == 0

    def test_what_a_mover_cannot_be_is_an_error_of_input(self) -> None:
        with pytest.raises(InputError, match="pigeons"), MoverPair("inproc", SMALL, options={"pigeons": 2}):
            pass


class TestMemory:
    def test_what_is_freed_again_counts(self) -> None:
        watch = PeakMemory()
        held = np.ones(64 * MIB, np.uint8)
        del held
        assert 60 * MIB < watch.above() < 80 * MIB
        watch.forget()
        assert watch.above() < 8 * MIB

    def test_a_peer_s_memory_mapped_here_does_not(self) -> None:
        descriptor = os.memfd_create("pdtx-test")
        os.write(descriptor, bytes(32 * MIB))
        watch = PeakMemory()
        with mmap.mmap(descriptor, 32 * MIB, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            os.close(descriptor)
            assert sum(mapped[:: mmap.PAGESIZE]) == 0
            assert watch.above() < 8 * MIB
