"""Whether a case's figures are to be trusted, why not, and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdtx.results.figures import percentile
from pdtx.results.model import CaseResult, NodeFacts, Result, Sample
from pdtx.results.summary import CaseSummary, counted_samples, move_seconds, summarize

LEAST_SAMPLES = 10
LEAST_FOR_DRIFT = 9
MOST_P90 = 1.25
MOST_P99 = 2.0
MOST_DRIFT = 0.10
MOST_FIRST = 1.5
MOST_LOAD = 0.75
MOST_PERCENT = 105.0
MOST_YARDSTICK = 1.5
MOST_CLOCK = 0.10


_FIRST = ("incomplete", "nothing", "failed", "load")
"""What explains other findings, and so stands before them."""
_OF_LOAD = frozenset({"spread", "outliers", "drift", "reference"})
UNSTEADY = frozenset({"load", "spread", "outliers", "drift"})
"""What moves times by itself, so that two runs of the same thing differ."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with a case. code: for programs; text: what was found; advice: what to do.

    alike: the text without figures, the same in all cases of which it can be said at once. size: how bad it is.
    """

    code: str
    text: str
    advice: str
    alike: str = ""
    size: float = 0.0

    def __str__(self) -> str:
        return f"{self.text}; {self.advice}"


def check_result(result: Result) -> list[tuple[int, Finding]]:
    """Return what is wrong with a run: the case's number and the finding, -1 for the whole run; causes first."""
    measured = [(number, case) for number, case in enumerate(result.cases) if case.skipped is None]
    found = [(number, one) for number, case in measured for one in check_case(case, summarize(case), result.nodes)]
    if not result.complete:
        found.append((-1, Finding("incomplete", "the run was cut off", "give it a longer --deadline, or fewer cases")))
    if not measured:
        text = "every case was skipped" if result.cases else "there are no cases"
        found.append((-1, Finding("nothing", f"nothing was measured: {text}", "pdtx show tells why; measure again")))
    return sorted(found, key=lambda one: _FIRST.index(one[1].code) if one[1].code in _FIRST else len(_FIRST))


def grouped(found: Sequence[tuple[int, Finding]]) -> list[tuple[list[int], Finding]]:
    """Return what is said of several cases alike once, with the numbers of the cases; none of the whole run.

    Of those that differ in their figures only, the worst is told, and that it is the worst.
    """
    groups = dict[tuple[str, str, str], list[tuple[int, Finding]]]()
    for number, finding in found:
        key = (finding.code, finding.alike or finding.text, finding.advice)
        groups.setdefault(key, []).append((number, finding))
    return [([number for number, _ in group if number >= 0], _worst(group)) for group in groups.values()]


def _worst(group: Sequence[tuple[int, Finding]]) -> Finding:
    worst = max((finding for _, finding in group), key=lambda finding: finding.size)
    alone = all(finding.text == worst.text for _, finding in group)
    return worst if alone else replace(worst, text=f"at worst, {worst.text}")


def check_case(case: CaseResult, summary: CaseSummary, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Return what makes a case's figures wrong, unstable or incomparable; nothing of one that is stable."""
    found = [Finding("failed", text, "the figures mean nothing; find the cause first") for text in summary.failures]
    if not summary.count and not found:
        found.append(Finding("nothing", "nothing was measured: no iteration counts", "measure it with --iterations"))
    loads = _loads(case, nodes)
    found += loads
    found += _looked(case, summary)
    found += _spread(summary)
    warm = counted_samples(case, cold=False)
    found += _drift(warm)
    found += _cold(summary, warm)
    found += _surroundings(case, summary, nodes)
    found += _yardsticks(case, summary)
    return [_explained(one) for one in found] if loads else found


def _explained(finding: Finding) -> Finding:
    """What to do about unsteady times where the machine was busy: one thing, and that first."""
    if finding.code not in _OF_LOAD:
        return finding
    return replace(finding, advice="most likely for the load; measure again without it")


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
        advice = "stop what else runs on the nodes, pin the processes, or measure more"
        found.append(Finding("spread", text, advice, "one move in ten", ratio))
    if (ratio := move.p99 / move.p50) > MOST_P99:
        text = f"the slowest moves take {ratio:.1f} times the median (p99 against p50)"
        advice = "look for what else runs; tell the p50 and the p99, never a mean"
        found.append(Finding("outliers", text, advice, "the slowest moves", ratio))
    return found


def _drift(warm: Sequence[Sample]) -> list[Finding]:
    if len(warm) < LEAST_FOR_DRIFT:
        return []
    change = drift([move_seconds(sample) for sample in warm])
    if abs(change) <= MOST_DRIFT:
        return []
    way = "slower" if change > 0 else "faster"
    text = f"moves get {way} by {abs(change):.0%} from the first third to the last"
    advice = "look for what else began to run, fills up or gets hot" if change > 0 else "ask for a longer --warmup"
    return [Finding("drift", text, advice, way, abs(change))]


def _cold(summary: CaseSummary, warm: Sequence[Sample]) -> list[Finding]:
    if summary.first_s is None or not warm:
        return []
    rest = percentile([move_seconds(sample) for sample in warm], 50)
    if rest <= 0 or summary.first_s <= MOST_FIRST * rest:
        return []
    times = f"{summary.first_s / rest:.1f} times the rest"
    text = f"there was no warm-up, and the first iteration, which counts, takes {times}"
    return [Finding("cold", text, "ask for --warmup 1 or more", "cold", summary.first_s / rest)]


def _surroundings(case: CaseResult, summary: CaseSummary, nodes: Sequence[NodeFacts]) -> list[Finding]:
    found = []
    if len(summary.transports) > 1:
        text = f"links went over different transports: {', '.join(summary.transports)}"
        found.append(Finding("transports", text, "ask pdtx doctor why, and measure them as cases of their own"))
    wall = summary.wall.p50 if summary.wall is not None else 0.0
    error = max((node.clock_error_s for node in nodes), default=0.0)
    if len({(link.prefill, link.decode) for link in case.links}) > 1 and wall > 0 and error > MOST_CLOCK * wall:
        text = f"clocks are known to {error * 1e6:.0f} us only, {error / wall:.0%} of an iteration"
        advice = "the whole system's rate is as vague; move more bytes an iteration"
        found.append(Finding("clock", text, advice, "clocks", error / wall))
    return found


def _loads(case: CaseResult, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Busy hosts, each once, however many nodes are on it."""
    found = dict[str, Finding]()
    for node, load in zip(nodes, case.load_average, strict=False):
        cpus = node.facts.get("cpus")
        if isinstance(cpus, int) and cpus > 0 and load > MOST_LOAD * cpus:
            host = node.host or f"the host of {node.role} {node.rank}"
            text = f"{host} had a load of {load:.1f} on {cpus} CPUs before the first iteration"
            found.setdefault(host, Finding("load", text, "stop what else runs there", host, load))
    return list(found.values())


def _yardsticks(case: CaseResult, summary: CaseSummary) -> list[Finding]:
    found = []
    limit = summary.limit
    if limit is not None and limit.percent is not None and limit.percent > MOST_PERCENT:
        text = f"the reference {limit.name} is slower than what it is to limit ({limit.percent:.0f}%)"
        advice = "percentages mean nothing; choose another --reference"
        found.append(Finding("reference", text, advice, f"slower {limit.name}", limit.percent))
    for reference in case.references:
        if len(reference.seconds) < 3:
            continue
        low, high = (percentile(reference.seconds, percent) for percent in (10, 90))
        if low > 0 and high / low > MOST_YARDSTICK:
            text = f"rounds of the reference {reference.name} differ by {high / low:.1f} times"
            advice = "the machine is not steady; stop what else runs on it"
            found.append(Finding("reference", text, advice, f"rounds {reference.name}", high / low))
    return found
