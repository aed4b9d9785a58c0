"""Comparing two results: what matches, what is significant, and what is not."""

import numpy as np
import pytest

from pdtx.errors import InputError
from pdtx.results import significance
from pdtx.results.comparison import compare_results
from pdtx.results.model import Case, Result
from pdtx.results.significance import Difference, differences, wander
from tests.synthetic_results import MIB, recorded, result_of, sample, swept

pytest.importorskip("scipy", reason="comparing needs scipy (extra plot)")

NOISE = 0.05


@pytest.fixture(autouse=True)
def _fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdicts are the same with fewer, and come sooner."""
    monkeypatch.setattr(significance, "_RESAMPLES", 999)


def times(seed: int, *, middle: float = 0.01, spread: float = 0.05, count: int = 30) -> list[float]:
    return [float(one) for one in middle * np.random.default_rng(seed).lognormal(0, spread, count)]


def one(before: list[float], after: list[float], noise: float = NOISE) -> Difference:
    return differences([(before, after)], noise)[0]


class TestSignificance:
    def test_slower_is_told_with_its_interval(self) -> None:
        found = one(times(1), times(2, middle=0.0142))
        assert found.verdict == "slower"
        assert found.low < 1.42 < found.high
        assert str(found).startswith(f"{found.ratio:.2f}x slower (95% CI ")

    def test_faster_is_told_the_other_way_round(self) -> None:
        found = one(times(1, middle=0.02), times(2, middle=0.01))
        assert found.verdict == "faster"
        assert str(found).startswith(f"{1 / found.ratio:.2f}x faster (95% CI {1 / found.high:.2f} to ")

    def test_two_runs_of_the_same_are_not_significant(self) -> None:
        verdicts = [found.verdict for found in differences([(times(n), times(n + 500)) for n in range(40)], NOISE)]
        assert set(verdicts) == {"not significant"}

    def test_chance_is_not_found_in_a_long_sweep(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without adjusting for the number of comparisons, one in twenty of equals is found different."""
        monkeypatch.setattr(significance, "wander", lambda _: 0.0)
        pairs = [(times(n, spread=0.3), times(n + 500, spread=0.3)) for n in range(200)]
        found = differences(pairs, 0.0)
        assert sum(one.verdict != "not significant" for one in found) <= 1

    def test_runs_that_wander_are_not_told_apart(self) -> None:
        steps = [0.010] * 8 + [0.013] * 8 + [0.010] * 8 + [0.013] * 8
        drifting = [
            base * factor for base, factor in zip(steps, times(3, middle=1, spread=0.01, count=32), strict=True)
        ]
        steady = times(4, middle=0.0100, spread=0.01, count=32)
        assert wander(drifting) == pytest.approx(0.3, abs=0.05)
        assert one(steady, drifting).verdict == "not significant"
        assert "quarters of the same run differ" in str(one(steady, drifting))

    def test_less_than_two_runs_differ_by_is_not_significant(self) -> None:
        before, after = times(1, spread=0.001), times(2, middle=0.0103, spread=0.001)
        assert one(before, after, noise=0.01).verdict == "slower"
        assert one(before, after).verdict == "not significant"
        assert "two runs may differ by 5%" in str(one(before, after))

    @pytest.mark.parametrize("count", [0, 1, 4])
    def test_too_few_samples_are_told(self, count: int) -> None:
        found = one(times(1), times(2, middle=0.1, count=count))
        assert found.verdict == "too few"
        assert str(found) == f"too few samples (30 and {count}; 5 or more are needed)"

    def test_constant_times(self) -> None:
        assert one([0.01] * 10, [0.01] * 10).verdict == "not significant"
        assert one([0.01] * 10, [0.02] * 10).verdict == "slower"

    def test_the_answer_is_the_same_each_time(self) -> None:
        assert one(times(1), times(2)) == one(times(1), times(2))


class TestMatching:
    def test_cases_match_by_their_parameters_and_not_by_their_order(self) -> None:
        before, after = swept(seed=1), swept(seed=2)
        after.cases.reverse()
        found = compare_results(before, after)
        assert [row.case.tokens for row in found.rows] == [case.case.tokens for case in before.cases]
        assert all(row.before.nbytes == row.after.nbytes for row in found.rows)
        assert {row.difference.verdict for row in found.rows} == {"not significant"}

    def test_a_capped_run_is_slower(self) -> None:
        found = compare_results(swept(seed=1), swept(seed=2, rate=2e9))
        assert {row.difference.verdict for row in found.rows} == {"slower"}
        assert all(row.slower_than(0.05) and not row.slower_than(0.7) for row in found.rows)
        assert found.geometric_mean == pytest.approx(1.5, abs=0.05)

    def test_movers_can_be_compared(self) -> None:
        before, after = swept(movers=("tcp",)), swept(movers=("shm",))
        found = compare_results(before, after)
        assert len(found.rows) == 4
        assert "mover tcp | shm" in found.differing

    def test_what_moves_other_amounts_does_not_match(self) -> None:
        with pytest.raises(InputError, match="no case of one result has the parameters"):
            compare_results(swept(tokens=(512,)), swept(tokens=(1024,)))

    def test_a_case_that_only_one_has_is_told(self) -> None:
        found = compare_results(swept(tokens=(512, 2048)), swept(tokens=(512, 8192)))
        assert {case.tokens for case in found.only_before} == {2048}
        assert {case.tokens for case in found.only_after} == {8192}

    def test_equal_cases_match_one_by_one(self) -> None:
        fast, slow = recorded([0.01] * 10, MIB), recorded([0.02] * 10, MIB)
        found = compare_results(result_of(fast, slow), result_of(fast, slow))
        assert [row.difference.ratio for row in found.rows] == [1.0, 1.0]

    def test_the_cold_iteration_is_not_compared(self) -> None:
        before = result_of(recorded([0.01] * 6, MIB))
        after = result_of(recorded([0.9, *[0.01] * 4], MIB))
        assert compare_results(before, after).rows[0].difference.counts == (5, 4)

    def test_other_machines_and_configurations_are_told(self) -> None:
        before, after = result_of(recorded([0.01] * 9, MIB)), result_of(recorded([0.01] * 9, MIB), config={"tokens": 3})
        after.nodes = [
            type(node)(role=node.role, host="other", rank=0, facts={**node.facts, "torch": "9"}) for node in after.nodes
        ]
        found = compare_results(before, after).differing
        assert "prefill 0: torch 2.13.0 | 9" in found
        assert "decode 0: host 127.0.0.1 | other" in found
        assert "config: tokens - | 3" in found

    def test_what_explains_nothing_is_not_told_and_the_label_is_first(self) -> None:
        def run(label: str, port: int, **more: object) -> Result:
            config = {
                "prefill": [f"a:{port}", f"b:{port + 1}"], "decode": f"[::1]:{port}", "key": f"/keys/{port}/k",
                "peer-key": [f"/keys/{port}/p"], "output": f"/results/{port}/out", "block-size": "16:16", **more,
            }  # fmt: skip
            return result_of(recorded([0.01] * 9, MIB), label=label, config=config)

        found = compare_results(run("rate=2gbit", 4001), run("rate=4gbit", 4011, **{"block-size": "16:32"}))
        assert found.differing == ("label rate=2gbit | rate=4gbit", "config: block-size 16:16 | 16:32")
        moved = compare_results(run("", 4001), run("", 4001, prefill=["a:4001", "c:4001"]))
        assert moved.differing == ("config: prefill a b | a c",)

    def test_unsteady_runs_are_told_with_the_load_as_their_cause(self) -> None:
        busy = recorded([0.01, 0.01, 0.013] * 4, MIB)
        busy.load_average = [6.5, 6.5]
        found = compare_results(result_of(recorded([0.01] * 12, MIB)), result_of(busy))
        assert found.unsteady == (("B", "127.0.0.1 had a load of 6.5 on 8 CPUs before the first iteration"),)
        assert found.rows[0].unsteady == ("load in B",)
        spread = compare_results(result_of(recorded([0.01, 0.01, 0.013] * 4, MIB)), result_of(busy))
        assert spread.rows[0].unsteady == ("spread in A", "load in B")

    def test_wrong_data_is_no_speed(self) -> None:
        after = recorded([0.005] * 9, MIB)
        after.samples[3] = sample(3, after.samples[3].links, wrong=2)
        (row,) = compare_results(result_of(recorded([0.01] * 9, MIB)), result_of(after)).rows
        assert row.failures == ("B: 2 wrong elements; the first in iteration 3",)

    def test_other_metrics(self) -> None:
        before, after = recorded([0.01] * 9, MIB), recorded([0.01] * 9, MIB, case=Case(op="pull"))
        after.samples = [sample(one.iteration, one.links, wall_s=0.03) for one in after.samples]
        results: tuple[Result, Result] = (result_of(before), result_of(after))
        assert compare_results(*results).rows[0].difference.ratio == pytest.approx(1)
        assert compare_results(*results, metric="wall").rows[0].difference.ratio == pytest.approx(3)
