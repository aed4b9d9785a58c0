"""What no run can have written, though each value by itself is of the right kind."""

import re

from pdtx.errors import InputError
from pdtx.results.model import CaseResult, Result

_SIZE = re.compile(r"[0-9]{1,19}")


def refuse_impossible(result: Result, name: str) -> None:
    """Raise InputError, naming the case and the iteration, where an index leads nowhere or one is there twice."""
    for number, case in enumerate(result.cases):
        if fault := _fault(case, len(result.nodes)):
            raise InputError(f"{name} is damaged, or was changed by hand: case {number} {fault}")


def _fault(case: CaseResult, nodes: int) -> str:
    """What is impossible in a case; nothing where all is possible."""
    for link in case.links:
        if not all(_SIZE.fullmatch(size) for size in link.run_sizes):
            return "has a run_sizes without a size"
        if max(link.prefill, link.decode) >= nodes:
            return f"has a link from node {link.prefill} to node {link.decode} of {nodes} nodes"
    if any(one.node >= nodes for one in case.registrations):
        return f"has a registration of a node that is none of {nodes} nodes"
    seen = set[int]()
    for sample in case.samples:
        moved = [one.link for one in sample.links]
        if sample.iteration in seen:
            return f"has iteration {sample.iteration} twice"
        seen.add(sample.iteration)
        if len(set(moved)) < len(moved):
            return f"has a link twice in iteration {sample.iteration}"
        if any(link >= len(case.links) for link in (*moved, *(one.link for one in sample.transfers))):
            return f"has in iteration {sample.iteration} a link that is none of its {len(case.links)} links"
    return ""
