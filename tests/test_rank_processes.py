"""Ranks in processes of their own: a session for each pair that exchanges something, each complete when its part is."""

import time

import pytest

from pdtx.errors import PdtxError
from tests.rank_fleet import Fleet, all_of, sides, until
from tests.rank_process import Side, model

TOKENS = 75


def engines(kind: str, src: int, dst: int, mover: str = "tcp") -> tuple[list[Side], list[Side]]:
    prefill = Side(kind, mover=mover)
    decode = Side(kind, mover=mover, layout="flashinfer_hnd", block_size=32)
    return sides(src, prefill), sides(dst, decode)


@pytest.mark.parametrize(("src", "dst"), [(1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (1, 4), (4, 1)])
def test_ranks_in_processes_exchange_heads(src: int, dst: int) -> None:
    with Fleet(*engines("4", src, dst)) as fleet:
        for number in range(2):
            found = fleet.send(f"r{number}", TOKENS, number, 20)
            fleet.require_right(found, f"r{number}")
        per_rank = 4 * 2 * TOKENS * (4 // dst) * 8 * 2
        assert [nbytes for *_, nbytes in found] == [per_rank] * dst


@pytest.mark.parametrize(("src", "dst"), [(1, 4), (4, 1), (4, 2), (2, 4)])
def test_heads_are_copied_where_ranks_are_more(src: int, dst: int) -> None:
    """Two heads on four ranks: each is on two of them, and those of prefill that nobody reads learn that it is over."""
    with Fleet(*engines("2", src, dst)) as fleet:
        fleet.require_right(fleet.send("r", TOKENS, 3), "r")
        carrying = [sessions for sessions, _ in all_of(fleet.prefill, "about")]
        if src > dst:
            assert carrying == [1, 0, 1, 0]


def test_latent_vectors_of_eight_ranks_are_read_from_one() -> None:
    with Fleet(*engines("latent", 8, 1)) as fleet:
        fleet.require_right(fleet.send("r", TOKENS, 4), "r")
        assert [sessions for sessions, _ in all_of(fleet.prefill, "about")] == [1] + 7 * [0]


@pytest.mark.parametrize("mover", ["shm", "ucx"])
def test_other_transports_do_it_too(mover: str) -> None:
    if mover == "ucx":
        pytest.importorskip("ucxx")
    with Fleet(*engines("4", 2, 2, mover)) as fleet:
        fleet.require_right(fleet.send("r", TOKENS, 5), "r")


def test_ranks_in_one_process_and_ranks_in_processes_are_the_same_thing() -> None:
    decode = sides(2, Side("4", layout="flashinfer_hnd", block_size=32))
    with Fleet(sides(4, Side("4"), by_rank=False), decode) as fleet:
        fleet.require_right(fleet.send("r", TOKENS, 6), "r")


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_killed_rank_fails_the_request_on_the_others_with_the_cause(victim: str) -> None:
    with Fleet(*engines("4", 2, 2)) as fleet:
        killed = fleet.prefill[1] if victim == "prefill" else fleet.decode[1]
        for name in ("r", "s"):
            all_of(fleet.prefill, "begin", name, TOKENS, 1)
        for remote in fleet.prefill:
            if remote is not killed:
                remote.do("compute", "r")
        killed.process.kill()
        killed.process.wait()
        for name in ("r", "s"):  # s was not even computed
            with pytest.raises(PdtxError, match=rf"(lost|the data connection of) {victim} process 1 of 2"):
                fleet.prefill[0].do("wait", name)
        if victim == "prefill":
            until(lambda: fleet.decode[0].do("failed") == 2, "the end of both requests at the other process")
            assert fleet.decode[1].do("failed") == 2


def test_an_id_of_which_not_all_processes_had_heard_is_refused_at_once_until_its_deadline() -> None:
    """Nobody can tell whether a process that asks late means the request that has failed, or another try."""
    with Fleet(sides(2, Side("4")), sides(2, Side("4", layout="flashinfer_hnd", block_size=32))) as fleet:
        first, second = fleet.prefill
        first.do("begin", "half", TOKENS, 1, 0, 4.0)
        until(lambda: first.do("state", "half") == "COMPUTING", "grants")
        first.do("cancel", "half")
        until(lambda: all_of(fleet.decode, "failed") == [1, 1], "the end at both")
        for late in (second, first):
            late.do("begin", "half", TOKENS, 1)
            with pytest.raises(PdtxError, match=r"not all processes had asked .* take another id to try again"):
                late.do("wait", "half")
        fleet.require_right(fleet.send("other", TOKENS, 2), "other")

        def is_free_again() -> bool:
            first.do("begin", "half", TOKENS, 3)
            time.sleep(0.3)
            return bool(first.do("state", "half") == "COMPUTING")

        until(is_free_again, "the first one's deadline")
        second.do("begin", "half", TOKENS, 3)
        all_of(fleet.prefill, "compute", "half")
        fleet.require_right(all_of(fleet.decode, "take", 3), "half")
        assert [text for text, *_ in all_of(fleet.prefill, "wait", "half")] == ["done", "done"]


def test_an_id_of_which_not_all_processes_had_heard_can_be_used_after_its_deadline() -> None:
    with Fleet(sides(2, Side("4")), sides(2, Side("4", layout="flashinfer_hnd", block_size=32))) as fleet:
        fleet.prefill[0].do("begin", "half", TOKENS, 1, 0, 1.0)
        with pytest.raises(PdtxError, match="deadline"):
            fleet.prefill[0].do("wait", "half")
        until(lambda: all_of(fleet.decode, "failed") == [1, 1], "the end at both")
        fleet.require_right(fleet.send("half", TOKENS, 2), "half")


def test_the_addresses_of_some_processes_only_are_refused() -> None:
    prefill, decode = engines("4", 1, 2)
    with Fleet(prefill, decode) as fleet:
        fleet.addresses = fleet.addresses[:1]
        with pytest.raises(PdtxError, match="decode has 2 processes, and the addresses"):
            fleet.add_prefill(prefill[0])


@pytest.mark.parametrize(
    ("stages", "others"),
    [((3, 1), (2, 2)), ((4,), (1, 3)), ((1, 3), (4,)), ((2, 2), (2, 2)), ((1, 1, 2), (3, 1))],
)
def test_pipelines_of_any_cuts(stages: tuple[int, ...], others: tuple[int, ...]) -> None:
    names = list(model("4", 16))

    def cut(counts: tuple[int, ...]) -> list[list[str]]:
        stops = [sum(counts[: at + 1]) for at in range(len(counts))]
        return [names[stop - count : stop] for count, stop in zip(counts, stops, strict=True)]

    prefill = sides(1, Side("4"), stages=cut(stages))
    decode = sides(1, Side("4", layout="flashinfer_hnd", block_size=32), stages=cut(others))
    with Fleet(prefill, decode) as fleet:
        found = fleet.send("r", TOKENS, 8, 16, 50)
        fleet.require_right(found, "r")
        assert [nbytes for *_, nbytes in found] == [count * 2 * TOKENS * 4 * 8 * 2 for count in others]


def test_a_pipeline_of_a_hybrid_model() -> None:
    """Windows, full attention and states, of which a stage has not every kind."""
    names = list(model("hybrid", 16))
    prefill = sides(1, Side("hybrid"), stages=[names[:2], names[2:5], names[5:]])
    decode = sides(1, Side("hybrid", layout="flashinfer_hnd", block_size=32), stages=[names[:4], names[4:]])
    with Fleet(prefill, decode) as fleet:
        for number, chunks in enumerate([(), (30,), (16, 32, 70)]):
            fleet.require_right(fleet.send(f"r{number}", TOKENS, number, *chunks), f"r{number}")


def test_a_stage_that_nobody_has_is_refused_with_both_counts() -> None:
    names = list(model("4", 16))
    prefill = sides(1, Side("4"), stages=[names[:2], names[2:3]])
    decode = sides(1, Side("4", layout="flashinfer_hnd", block_size=32))
    with pytest.raises(PdtxError, match=r"layers of buffer full.0 is 3 on the prefill side and 4 on the decode side"):
        Fleet(prefill, decode)


def test_a_layer_that_two_stages_have_is_refused() -> None:
    names = list(model("4", 16))
    prefill = sides(1, Side("4"), stages=[names[:3], names[2:]])
    decode = sides(1, Side("4", layout="flashinfer_hnd", block_size=32))
    with pytest.raises(PdtxError, match=r"processes with rank 0 of layer layers.2 of buffer full.0"):
        Fleet(prefill, decode)
