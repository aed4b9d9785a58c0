"""What a check finds."""

from collections.abc import Iterable
from typing import Literal

import msgspec

Level = Literal["ok", "info", "warning", "problem"]
Want = Literal["rdma", "tcp", "shm", "cuda", "ucx", "nixl"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at.

    value: what was found, for people. fix: what to do about it; empty where nothing has to be done.
    stops: what cannot run because of it. That is no fault of a machine on which nobody asks for it, so the level says
    so only to who wants it: to others an "ok" is then an "info", neither well nor ill.
    """

    subject: str
    name: str
    value: str
    level: Level = "ok"
    fix: str = ""
    stops: tuple[Want, ...] = ()


def judged(findings: Iterable[Finding], wants: Iterable[Want]) -> list[Finding]:
    """Return the findings as who wants these things sees them: a problem is what stops one of them."""
    wanted = frozenset(wants)
    return [msgspec.structs.replace(finding, level=_level(finding, wanted)) for finding in findings]


def _level(finding: Finding, wanted: frozenset[Want]) -> Level:
    if wanted.intersection(finding.stops):
        return "problem"
    return "info" if finding.level == "ok" and finding.stops else finding.level
