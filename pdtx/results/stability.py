"""Whether a case's figures are to be trusted, why not, and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdtx.results.figures import percentile
from pdtx.results.model import CaseResult, NodeFacts, Result, Sample
from pdtx.results.summary import CaseSummary, counted_samples, move_seconds, summarize

LEAST_SAMPLES = 10
LEAST_FOR_DRIFT = 9
MOST_P90 = 1.25
MOST_P99 = 2.0
MOST_DRIFT = 0.10
MOST_FIRST = 1.5
MOST_LOAD = 0.5
MOST_PERCENT = 105.0
MOST_YARDSTICK = 1.5
MOST_CLOCK = 0.10


@dataclass(frozen=True)
class Finding:
    """What is wrong with a case. code: for programs; text: what was found; advice: what to do."""

    code: str
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.text}; {self.advice}"


def check_result(result: Result) -> list[tuple[int, Finding]]:
    """Return what is wrong with a run's cases: the case's number and the finding."""
    found = [
        (number, finding)
        for number, case in enumerate(result.cases)
        if case.skipped is None
        for finding in check_case(case, summarize(case), result.nodes)
    ]
    if not result.complete:
        found.append((-1, Finding("incomplete", "the run was cut off", "give it a longer --deadline, or fewer cases")))
    return found


def grouped(found: Sequence[tuple[int, Finding]]) -> list[tuple[list[int], Finding]]:
    """Return what is said of several cases alike once, with the numbers of the cases; none of the whole run."""
    cases = dict[Finding, list[int]]()
    for number, finding in found:
        cases.setdefault(finding, []).extend([number] if number >= 0 else [])
    return [(numbers, finding) for finding, numbers in cases.items()]


def check_case(case: CaseResult, summary: CaseSummary, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Return what makes a case's figures wrong, unstable or incomparable; nothing of one that is stable."""
    found = [Finding("failed", text, "the figures mean nothing; find the cause first") for text in summary.failures]
    found += _looked(case, summary)
    found += _spread(summary)
    warm = counted_samples(case, cold=False)
    found += _drift(warm)
    found += _cold(summary, warm)
    found += _surroundings(case, summary, nodes)
    return found + _yardsticks(case, summary)


def drift(seconds: Sequence[float]) -> float:
    """Return by how much the median of the last third differs from that of the first, as a share of the first."""
    third = len(seconds) // 3
    first, last = percentile(seconds[:third], 50), percentile(seconds[-third:], 50)
    return last / first - 1 if first > 0 else 0.0


def _looked(case: CaseResult, summary: CaseSummary) -> list[Finding]:
    if summary.count and summary.wrong is None:
        return [Finding("unverified", "nobody has looked at what arrived", "run it again with --verify")]
    if summary.count and not case.verified:
        return [Finding("unverified", "the case is marked as not verified", "run it again with --verify")]
    return []


def _spread(summary: CaseSummary) -> list[Finding]:
    move = summary.move
    if move is None or move.p50 <= 0:
        return []
    found = []
    if summary.count < LEAST_SAMPLES:
        text = f"only {summary.count} iterations count"
        found.append(Finding("few", text, f"measure {LEAST_SAMPLES} or more with --iterations"))
    if (ratio := move.p90 / move.p50) > MOST_P90:
        text = f"one move in ten takes {ratio:.2f} times the median or longer"
        found.append(Finding("spread", text, "stop what else runs on the nodes, pin the processes, or measure more"))
    if (ratio := move.p99 / move.p50) > MOST_P99:
        text = f"the slowest moves take {ratio:.1f} times the median (p99 against p50)"
        found.append(Finding("outliers", text, "look for what else runs; tell the p50 and the p99, never a mean"))
    return found


def _drift(warm: Sequence[Sample]) -> list[Finding]:
    if len(warm) < LEAST_FOR_DRIFT:
        return []
    change = drift([move_seconds(sample) for sample in warm])
    if abs(change) <= MOST_DRIFT:
        return []
    text = f"moves get {'slower' if change > 0 else 'faster'} by {abs(change):.0%} from the first third to the last"
    advice = "let the nodes cool down, or look for what fills up" if change > 0 else "ask for a longer --warmup"
    return [Finding("drift", text, advice)]


def _cold(summary: CaseSummary, warm: Sequence[Sample]) -> list[Finding]:
    if summary.first_s is None or not warm:
        return []
    rest = percentile([move_seconds(sample) for sample in warm], 50)
    if rest <= 0 or summary.first_s <= MOST_FIRST * rest:
        return []
    times = f"{summary.first_s / rest:.1f} times the rest"
    text = f"there was no warm-up, and the first iteration, which counts, takes {times}"
    return [Finding("cold", text, "ask for --warmup 1 or more")]


def _surroundings(case: CaseResult, summary: CaseSummary, nodes: Sequence[NodeFacts]) -> list[Finding]:
    found = _loads(case, nodes)
    if len(summary.transports) > 1:
        text = f"links went over different transports: {', '.join(summary.transports)}"
        found.append(Finding("transports", text, "ask pdtx doctor why, and measure them as cases of their own"))
    wall = summary.wall.p50 if summary.wall is not None else 0.0
    error = max((node.clock_error_s for node in nodes), default=0.0)
    if len({(link.prefill, link.decode) for link in case.links}) > 1 and wall > 0 and error > MOST_CLOCK * wall:
        text = f"clocks are known to {error * 1e6:.0f} us only, {error / wall:.0%} of an iteration"
        found.append(Finding("clock", text, "the whole system's rate is as vague; move more bytes an iteration"))
    return found


def _loads(case: CaseResult, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Busy hosts, each once, however many nodes are on it."""
    found = dict[str, Finding]()
    for node, load in zip(nodes, case.load_average, strict=False):
        cpus = node.facts.get("cpus")
        if isinstance(cpus, int) and cpus > 0 and load > MOST_LOAD * cpus:
            host = node.host or f"the host of {node.role} {node.rank}"
            text = f"{host} had a load of {load:.1f} on {cpus} CPUs before the first iteration"
            found.setdefault(host, Finding("load", text, "stop what else runs there"))
    return list(found.values())


def _yardsticks(case: CaseResult, summary: CaseSummary) -> list[Finding]:
    found = []
    limit = summary.limit
    if limit is not None and limit.percent is not None and limit.percent > MOST_PERCENT:
        text = f"the reference {limit.name} is slower than what it is to limit ({limit.percent:.0f}%)"
        found.append(Finding("reference", text, "percentages mean nothing; choose another --reference"))
    for reference in case.references:
        if len(reference.seconds) < 3:
            continue
        low, high = (percentile(reference.seconds, percent) for percent in (10, 90))
        if low > 0 and high / low > MOST_YARDSTICK:
            text = f"rounds of the reference {reference.name} differ by {high / low:.1f} times"
            found.append(Finding("reference", text, "the machine is not steady; stop what else runs on it"))
    return found
