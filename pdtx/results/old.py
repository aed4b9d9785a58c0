"""Version 1: what `pdtx demo` and `pdtx-prefill --output` write, one row a request, as a run of cases."""

from collections import defaultdict
from typing import Any

import msgspec

from pdtx.results.model import (
    Case,
    CaseResult,
    Count,
    Link,
    LinkSample,
    NodeFacts,
    Registration,
    Result,
    Sample,
    Seconds,
)


class _Row(msgspec.Struct):
    """What of a request's row is kept; fields that the first files lack have defaults."""

    request_id: str
    prompt_tokens: int
    nbytes: Count = 0
    num_runs: Count = 0
    prepare_s: Seconds = 0.0
    post_s: Seconds = 0.0
    move_s: Seconds = 0.0
    wrong: Count | None = None
    transport: str = ""
    carried_by: str = ""
    emulated: bool = False
    mode_reason: str = ""
    error: str | None = None


class _Registered(msgspec.Struct):
    """What a node has registered."""

    registered_bytes: Count = 0
    registration_s: Seconds = 0.0


class _Old(msgspec.Struct):
    """A document of version 1. sides: flags of both nodes, as pdtx demo has them.

    registered_bytes, registration_s: of a lone prefill node; registration: of both sides.
    """

    requests: list[_Row]
    command: list[str] = []
    machine: dict[str, Any] = {}
    model: dict[str, Any] = {}
    sides: dict[str, dict[str, str]] = {}
    layout: str = ""
    block_size: int = 0
    tensor_parallel_size: int = 1
    path: dict[str, Any] | None = None
    registered_bytes: Count = 0
    registration_s: Seconds = 0.0
    registration: dict[str, _Registered] = {}


def from_version_1(document: dict[str, Any]) -> Result:
    """Return a document of version 1 as a result: a case for each length of prompt, a sample for each request.

    The receiver's own count of bytes and the decode side of a lone prefill node are not in such files: the sender's
    stand in. Raises msgspec.ValidationError for a document that is none.
    """
    old = msgspec.convert(document, type=_Old)
    lengths = defaultdict[int, list[_Row]](list)
    for row in old.requests:
        if row.error is not None or row.nbytes:
            lengths[row.prompt_tokens].append(row)
    date = str(old.machine.get("date", ""))
    return Result(
        version=1,
        command=[str(word) for word in old.command],
        config={},
        label="converted from version 1: one sample a request",
        started=date,
        complete=True,
        driver=old.machine,
        nodes=[NodeFacts(role=role, host="", rank=0, facts=old.machine) for role in ("prefill", "decode")],
        cases=[_case(old, rows) for rows in lengths.values()],
    )


def _case(old: _Old, rows: list[_Row]) -> CaseResult:
    first = rows[0]
    path = old.path or ({"kind": first.carried_by, "emulated": first.emulated} if first.carried_by else {})
    return CaseResult(
        case=Case(
            model=str(old.model.get("name", "")),
            tokens=first.prompt_tokens,
            block_size=_pair(old, "block_size", old.block_size),
            layout=_layouts(old),
            tp=_pair(old, "tensor_parallel_size", old.tensor_parallel_size),
            mover=first.transport or "tcp",
        ),
        iterations=len(rows),
        warmup=0,
        verified=all(row.wrong is not None for row in rows),
        links=[
            Link(prefill=0, decode=1, path=path, runs=max(row.num_runs for row in rows), mode_reason=first.mode_reason)
        ],
        registrations=_registrations(old),
        samples=[_sample(number, row) for number, row in enumerate(rows)],
    )


def _registrations(old: _Old) -> list[Registration]:
    """What was registered, where it was; nodes are numbered as from_version_1 lists them."""
    alone = _Registered(old.registered_bytes, old.registration_s)
    sides = [old.registration.get("prefill", alone), old.registration.get("decode", _Registered())]
    return [
        Registration(node=node, nbytes=side.registered_bytes, seconds=side.registration_s)
        for node, side in enumerate(sides)
        if side.registered_bytes
    ]


def _sample(number: int, row: _Row) -> Sample:
    link = LinkSample(
        link=0, begun=0.0, ended=row.move_s, prepare_s=row.prepare_s, post_s=row.post_s, move_s=row.move_s,
        claimed_bytes=row.nbytes, received_bytes=row.nbytes,
    )  # fmt: skip
    return Sample(
        iteration=number, warmup=False, wall_s=row.move_s, links=[link] if row.nbytes else [], wrong=row.wrong,
        error=row.error,
    )  # fmt: skip


def _pair(old: _Old, name: str, alone: int) -> tuple[int, int]:
    """A number of both sides; what is not a number was not told."""
    sides = [old.sides.get(side, {}).get(name, "") for side in ("prefill", "decode")]
    prefill, decode = (int(text) if text.isdecimal() else alone for text in sides)
    return prefill, decode


def _layouts(old: _Old) -> tuple[str, str]:
    return (
        old.sides.get("prefill", {}).get("layout", old.layout),
        old.sides.get("decode", {}).get("layout", old.layout),
    )
