"""`pdtx doctor`: what this machine can move KV caches with, what it lacks, and how to mend it."""

import json as json_module
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from pdtx.cli.common import emit, note
from pdtx.cli.options import Json
from pdtx.units import counted

if TYPE_CHECKING:
    from pdtx.doctor import Finding

_MARKS = {"info": "-", "ok": "ok", "warning": "WARNING", "problem": "PROBLEM"}


def doctor(
    want: Annotated[
        list[str] | None,
        typer.Option(help="rdma, tcp, shm, cuda, ucx or nixl: exit 1 if it cannot run here; may be repeated."),
    ] = None,
    listen: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT that must be free to listen at; may be repeated.")
    ] = None,
    reach: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT that somebody must answer at; may be repeated.")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(help="Host that others are told to reach this one at.", show_default=False)
    ] = None,
    two_nodes: Annotated[
        bool, typer.Option("--two-nodes", help="The peer is on another host: loopback is no address for it.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each --reach.", min=0.1)] = 5.0,
    trial_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds within which each mover must have started; more on slow machines.", min=0.1, max=86400
        ),
    ] = 60.0,
    json: Json = False,
) -> None:
    """Examine this machine; each finding that needs one comes with its fix. Exit 1 if what was asked for cannot run."""
    from pdtx.doctor import Machine, examine, parse_wants

    wants = parse_wants(want or [])
    findings = examine(
        Machine(),
        wants,
        listen=listen or [],
        reach=reach or [],
        advertise=advertise,
        two_nodes=two_nodes,
        timeout_s=timeout,
        trial_s=trial_timeout,
    )
    if json:
        from msgspec import to_builtins

        emit(json_module.dumps({"wants": wants, "findings": to_builtins(findings)}, indent=2))
    else:
        emit("\n".join(_text(findings)))
    problems = [f"{finding.subject} {finding.name}" for finding in findings if finding.level == "problem"]
    if problems:
        note(
            f"pdtx doctor: {counted(len(problems), 'problem')}, so that what was asked for cannot run as it is: "
            f"{'; '.join(problems)}"
        )
        raise typer.Exit(1)


def _text(findings: "Sequence[Finding]") -> list[str]:
    lines, subject = list[str](), ""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        if finding.subject != subject:
            lines += [*([""] if lines else []), finding.subject]
            subject = finding.subject
        lines.append(f"  {_MARKS[finding.level]:<8} {finding.name:<{width}}  {finding.value}")
        if finding.fix:
            only = f"for {', '.join(finding.stops)}: " if finding.level == "info" else ""
            lines.append(f"  {'':<8} {'':<{width}}  -> {only}{finding.fix}")
    return lines
