"""What is told of results that are not to be trusted, one fault at a time."""

import pytest

from pdtx.results.model import CaseResult, Link, NodeFacts, Reference
from pdtx.results.stability import check_case, check_result, drift, grouped
from pdtx.results.summary import summarize
from tests.synthetic_results import FACTS, MIB, TCP, link_sample, recorded, result_of, sample, swept

STEADY = [0.0100, 0.0101, 0.0099, 0.0102, 0.0100, 0.0098, 0.0101, 0.0100, 0.0099, 0.0100, 0.0101, 0.0100]


def codes(case: CaseResult, nodes: list[NodeFacts] | None = None) -> set[str]:
    return {finding.code for finding in check_case(case, summarize(case), nodes or [])}


def steady() -> CaseResult:
    return recorded(STEADY, MIB)


def of_two_links(path: dict[str, object]) -> CaseResult:
    case = steady()
    case.links = [Link(prefill=0, decode=1, path=TCP), Link(prefill=0, decode=2, path=path)]
    case.samples = [sample(one.iteration, [*one.links, link_sample(0.01, MIB, link=1)]) for one in case.samples]
    return case


def test_a_steady_case_has_no_findings() -> None:
    assert codes(steady()) == set()
    assert check_result(swept(tokens=(512,))) == []


def test_too_few_iterations() -> None:
    assert codes(recorded(STEADY[:9], MIB)) == {"few"}


def test_a_wide_spread() -> None:
    assert codes(recorded([0.01, 0.01, 0.013] * 4, MIB)) == {"spread"}


def test_outliers() -> None:
    assert codes(recorded([*STEADY * 8, 0.05, 0.05], MIB)) == {"outliers"}


@pytest.mark.parametrize("steps", [range(15), range(14, -1, -1)])
def test_drift(steps: range) -> None:
    assert codes(recorded([0.01 + 0.0001 * step for step in steps], MIB, warmup=0)) == set()
    assert codes(recorded([0.01 + 0.00015 * step for step in steps], MIB, warmup=0)) == {"drift"}


def test_drift_is_of_thirds() -> None:
    assert drift([1, 1, 1, 5, 5, 5, 2, 2, 2]) == pytest.approx(1.0)


def test_a_cold_first_iteration_counts_only_without_warm_up() -> None:
    assert "cold" in codes(recorded([0.016, *STEADY], MIB))
    assert codes(recorded([0.016, *STEADY], MIB, warmup=1)) == set()


def test_a_cut_off_case_and_run() -> None:
    case = steady()
    case.samples = case.samples[:-1]
    assert codes(case) == {"failed"}
    whole = result_of(steady())
    whole.complete = False
    assert [(number, finding.code) for number, finding in check_result(whole)] == [(-1, "incomplete")]


def test_unverified_in_part_is_not_unverified() -> None:
    case = steady()
    case.samples = [sample(one.iteration, one.links, wrong=0 if one.iteration < 2 else None) for one in case.samples]
    assert codes(case) == set()
    assert summarize(case).verdict == "0 in 2 of 12"
    case.samples = [sample(one.iteration, one.links, wrong=None) for one in case.samples]
    assert codes(case) == {"unverified"}


def test_mixed_transports() -> None:
    assert codes(of_two_links({"kind": "shm"})) == {"transports"}


def test_a_busy_machine() -> None:
    case = steady()
    nodes = [NodeFacts(role="prefill", host="a", rank=0, facts=FACTS)]
    case.load_average = [6.0]
    assert codes(case, nodes) == set()
    case.load_average = [6.1]
    assert codes(case, nodes) == {"load"}
    case.load_average = [6.1, 6.1]
    nodes.append(NodeFacts(role="decode", host="a", rank=0, facts=FACTS))
    assert len(check_case(case, summarize(case), nodes)) == 1


def test_clocks_that_differ_matter_between_several_links_only() -> None:
    case = steady()
    nodes = [NodeFacts(role="prefill", host="a", rank=0, facts=FACTS, clock_error_s=0.002)]
    assert codes(case, nodes) == set()
    assert codes(of_two_links(TCP), nodes) == {"clock"}


def test_a_reference_slower_than_what_it_limits() -> None:
    case = steady()
    case.references = [Reference(name="memcpy", nbytes=MIB, seconds=[0.01] * 3, limits=True)]
    assert codes(case) == set()
    case.references = [Reference(name="memcpy", nbytes=MIB, seconds=[0.011] * 3, limits=True)]
    assert codes(case) == {"reference"}
    case.references = [Reference(name="memcpy", nbytes=MIB, seconds=[0.004, 0.005, 0.01], limits=True)]
    assert codes(case) == {"reference"}


def test_what_is_said_of_several_cases_is_said_once() -> None:
    few = recorded(STEADY[:9], MIB)
    whole = result_of(few, steady(), few)
    whole.complete = False
    assert [(numbers, finding.code) for numbers, finding in grouped(check_result(whole))] == [
        ([], "incomplete"),
        ([0, 2], "few"),
    ]


def test_the_load_stands_first_and_explains_the_rest() -> None:
    cases = []
    for load, slow in ((6.2, 0.013), (6.5, 0.014)):
        case = recorded([0.01, 0.01, slow] * 4, MIB)
        case.load_average = [load, load]
        cases.append(case)
    found = grouped(check_result(result_of(*cases)))
    assert [(numbers, finding.code) for numbers, finding in found] == [([0, 1], "load"), ([0, 1], "spread")]
    assert found[0][1].text == "at worst, 127.0.0.1 had a load of 6.5 on 8 CPUs before the first iteration"
    assert found[1][1].text.startswith("at worst, one move in ten takes 1.40 times")
    assert "most likely for the load" in found[1][1].advice


def test_moves_that_get_slower_are_not_explained_by_heat_alone() -> None:
    (found,) = check_case(case := recorded([0.01 + 0.00015 * step for step in range(15)], MIB), summarize(case), [])
    assert "what else began to run" in found.advice


def test_what_arrived_is_held_against_what_was_planned() -> None:
    case = steady()
    case.samples[4] = sample(4, [link_sample(0.01, MIB // 2)])
    (failure,) = summarize(case).failures
    assert failure == ("iteration 4, link 0: 524,288 B received and 524,288 B claimed; 1,048,576 B were planned")
    case.samples[4] = sample(4, [link_sample(0.01, MIB // 2)], warmup=True)
    case.iterations -= 1
    assert summarize(case).failures == ()


def test_a_link_of_which_nothing_is_told() -> None:
    case = of_two_links(TCP)
    case.samples[3] = steady().samples[3]
    assert summarize(case).failures == ("iteration 3: nothing is told of link 1",)


def test_wrong_elements_do_not_make_up_for_one_another() -> None:
    case = steady()
    for number, wrong in ((2, 5), (3, -5)):
        case.samples[number] = sample(number, case.samples[number].links, wrong=wrong)
    summary = summarize(case)
    assert (summary.wrong, summary.ok) == (10, False)


def test_a_skipped_case_is_no_fault() -> None:
    case = steady()
    case.samples, case.skipped, case.load_average = [], "no such mover here", [9.0, 9.0]
    assert check_result(result_of(steady(), case)) == []
    assert [(number, one.code) for number, one in check_result(result_of(case))] == [(-1, "nothing")]


def test_nothing_measured_is_not_stable() -> None:
    assert [(number, one.code) for number, one in check_result(result_of())] == [(-1, "nothing")]
    case = recorded([], MIB)
    assert codes(case) == {"nothing"}
    case = recorded([0.01], MIB, warmup=1)
    assert codes(case) == {"nothing"}
