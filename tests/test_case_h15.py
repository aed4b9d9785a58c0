"""H15: units, ranks, warm-up and counted bytes, fed as recorded timings."""

import pytest

from pdtx.results.figures import rate_of
from pdtx.results.model import Case, CaseResult, Link, Result
from pdtx.results.stability import check_case
from pdtx.results.summary import summarize
from tests.synthetic_results import MIB, link_sample, recorded, result_of, sample, swept

GIB = 1 << 30


def test_one_gibibyte_in_a_tenth_of_a_second_in_every_unit() -> None:
    rate = rate_of(1_073_741_824, 0.100)
    assert f"{rate}" == "10.737 GB/s = 10.000 GiB/s = 85.899 Gb/s = 10,240 MiB/s"
    summary = summarize(recorded([0.1] * 10, GIB))
    assert summary.whole == rate
    assert summary.per_rank == rate


def four_ranks() -> CaseResult:
    """Each moves 64 MiB in 10 ms; they begin one after the other within 2 ms."""
    case = recorded([0.01] * 10, 64 * MIB, case=Case(tp=(4, 4), pattern="tp"))
    links = [link_sample(0.010, 64 * MIB, link=link, begun=0.002 * link / 3) for link in range(4)]
    case.samples = [sample(number, links) for number in range(10)]
    case.links = [Link(prefill=0, decode=1, wire_bytes=64 * MIB, unique_bytes=64 * MIB) for _ in range(4)]
    return case


def test_ranks_and_the_whole_are_two_rates() -> None:
    summary = summarize(four_ranks())
    assert summary.per_rank is not None
    assert summary.whole is not None
    assert summary.per_rank.mib_per_s == pytest.approx(6400)
    assert summary.per_rank.gb_per_s == pytest.approx(6.711, abs=5e-4)
    # Bytes summed over times summed is 6,400 again, and must not be taken for what the system reaches.
    assert summary.whole.mib_per_s == pytest.approx(21_333.3, abs=0.05)
    assert summary.whole.gb_per_s == pytest.approx(22.370, abs=5e-4)
    assert summary.wall is not None
    assert summary.wall.p50 == pytest.approx(0.012)


def test_a_cold_first_iteration_stands_apart() -> None:
    case = recorded([0.6] + [0.01] * 9, MIB)
    summary = summarize(case)
    assert (summary.asked, summary.count, summary.first_s) == (10, 10, 0.6)
    assert summary.move is not None
    assert summary.move.p50 == pytest.approx(0.01)
    assert summary.move.mean == pytest.approx(0.069)
    assert summary.move.max == pytest.approx(0.6)
    # The headline is made of medians: the mean would give a seventh of it.
    assert summary.whole is not None
    assert summary.whole.mib_per_s == pytest.approx(100)
    assert any(finding.code == "cold" for finding in check_case(case, summary, []))


def test_a_warm_up_does_not_count() -> None:
    case = recorded([0.6] + [0.01] * 9, MIB, warmup=1)
    summary = summarize(case)
    assert (summary.asked, summary.count, summary.warmups, summary.first_s) == (9, 9, 1, None)
    assert summary.move is not None
    assert summary.move.p50 == summary.move.max == pytest.approx(0.01)
    assert summary.move.mean == pytest.approx(0.01)
    assert not any(finding.code == "cold" for finding in check_case(case, summary, []))


@pytest.mark.parametrize("nbytes", [64 << 10, MIB, 64 * MIB])
def test_as_many_iterations_as_asked_for(nbytes: int) -> None:
    case = recorded([0.01] * 20, nbytes)
    assert (summarize(case).count, summarize(case).failures) == (20, ())
    case.samples = case.samples[:12]
    summary = summarize(case)
    assert (summary.asked, summary.count) == (20, 12)
    assert summary.failures == ("12 of 20 iterations were measured",)


def test_five_posts_of_bytes_that_arrived_once() -> None:
    case = recorded([0.01], MIB)
    case.samples = [sample(0, [link_sample(0.01, 5 * MIB, posts=5, deliveries=1, received_bytes=MIB)])]
    summary = summarize(case)
    assert not summary.ok
    assert "delivered 1 of 5" in summary.failures
    assert f"the receiver has counted {MIB:,} B of {5 * MIB:,} B that the sender claims" in summary.failures
    # The rate is of what arrived.
    assert summary.whole is not None
    assert summary.whole.mib_per_s == pytest.approx(100)


def test_a_surplus_in_one_iteration_makes_up_for_no_lack_in_another() -> None:
    case = recorded([0.01, 0.01], MIB)
    case.samples = [sample(number, [link_sample(0.01, MIB, deliveries=2 * number)]) for number in range(2)]
    assert "delivered 2 of 2" in summarize(case).failures


def test_transfers_one_after_the_other_on_two_threads() -> None:
    case = recorded([0.02], MIB, case=Case(depth=1))
    case.links = [Link(prefill=0, decode=1, num_transfers=10) for _ in range(2)]
    case.samples = [sample(0, [link_sample(0.02, 10 * MIB, link=link) for link in range(2)])]
    summary = summarize(case)
    assert summary.whole is not None
    assert summary.whole.mib_per_s == pytest.approx(1000)
    assert summary.latency is not None
    # Wall time over the number of all transfers would be 1 ms.
    assert summary.latency.p50 == pytest.approx(0.002)


def test_a_flipped_byte_is_told_by_iteration_and_coordinate() -> None:
    case = recorded([0.01] * 10, MIB)
    where = "layer 3 K token 5 head 1 channel 7"
    case.samples[7] = sample(7, case.samples[7].links, wrong=1, first_wrong=where)
    summary = summarize(case)
    assert (summary.wrong, summary.ok, summary.verdict) == (1, False, "1")
    assert summary.failures == (f"1 wrong elements; the first in iteration 7: {where}",)


def test_a_flipped_byte_that_nobody_looks_for_is_unverified() -> None:
    case = recorded([0.01] * 10, MIB)
    case.verified = False
    case.samples = [sample(one.iteration, one.links, wrong=None) for one in case.samples]
    summary = summarize(case)
    assert (summary.wrong, summary.verdict) == (None, "unverified")
    assert any(finding.code == "unverified" for finding in check_case(case, summary, []))


def test_a_record_holds_what_explains_it() -> None:
    result: Result = result_of(*swept(tokens=(512,), movers=("tcp",)).cases)
    summary = summarize(result.cases[0])
    assert result.command
    assert result.nodes[0].facts["torch"]
    assert summary.transport == "tcp"
    assert summary.run_sizes == ((32768, 512),)
    assert (summary.registered_bytes, summary.registered_regions, summary.registration_s) == (16 * MIB, 1, 0.002)
    assert (summary.warmups, summary.count, summary.verdict) == (2, 20, "0")
    assert summary.move is not None
    assert summary.move.min <= summary.move.p50 <= summary.move.p90 <= summary.move.p99 <= summary.move.max
    assert summary.limit is not None
    assert summary.limit.name == "socket"
