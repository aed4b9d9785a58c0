"""Results that nobody has measured: deterministic, in the shapes that real runs have."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pdtx.results.model import (
    Case,
    CaseResult,
    Link,
    LinkSample,
    NodeFacts,
    Reference,
    Registration,
    Result,
    Sample,
    Transfer,
)

MIB = 1 << 20
FACTS: dict[str, Any] = {"pdtx": "0.9", "python": "3.11.2", "torch": "2.13.0", "processor": "Example 1", "cpus": 8}
TCP: dict[str, Any] = {"kind": "tcp", "detail": "tcp eth0", "emulated": False, "library": "pdtx"}


def link_sample(move_s: float, nbytes: int, *, link: int = 0, begun: float = 0.0, **more: object) -> LinkSample:
    fields: dict[str, Any] = {
        "prepare_s": 1e-4,
        "post_s": 2e-4,
        "claimed_bytes": nbytes,
        "received_bytes": nbytes,
        **more,
    }
    return LinkSample(link=link, begun=begun, ended=begun + move_s, move_s=move_s, **fields)


def sample(iteration: int, links: Sequence[LinkSample], *, warmup: bool = False, **more: object) -> Sample:
    wall = max(link.ended for link in links) - min(link.begun for link in links)
    fields: dict[str, Any] = {"wall_s": wall, "wrong": 0, **more}
    return Sample(iteration=iteration, warmup=warmup, links=list(links), **fields)


def recorded(moves: Sequence[float], nbytes: int, *, warmup: int = 0, case: Case | None = None) -> CaseResult:
    """One link whose iterations took so long, the first of them warm-ups."""
    samples = [sample(number, [link_sample(move, nbytes)], warmup=number < warmup) for number, move in enumerate(moves)]
    return CaseResult(
        case=case or Case(),
        iterations=len(moves) - warmup,
        warmup=warmup,
        verified=True,
        links=[Link(prefill=0, decode=1, path=TCP, wire_bytes=nbytes, unique_bytes=nbytes)],
        samples=samples,
    )


def result_of(*cases: CaseResult, **more: object) -> Result:
    roles: tuple[Any, ...] = ("prefill", "decode")
    nodes = [NodeFacts(role=role, host="127.0.0.1", rank=0, facts=FACTS, clock_error_s=2e-6) for role in roles]
    fields: dict[str, Any] = {
        "command": ["pdtx", "bench", "--local"],
        "config": {"local": True},
        "nodes": nodes,
        **more,
    }
    return Result(started="2026-01-02T03:04:05+00:00", seconds=12.5, complete=True, cases=list(cases), **fields)


def layered(rng: np.random.Generator, rate: float, case: Case, layers: int, links: int) -> tuple[list[Transfer], float]:
    """Transfers of one iteration: layers that are computed one after the other and moved as soon as they are there."""
    nbytes = case.tokens * 4096
    transfers, ended = list[Transfer](), 0.0
    for link in range(links):
        free = 0.0
        for layer in range(layers):
            ready = case.layer_compute_s * (layer + 1)
            posted = max(ready, free) + 1e-5
            sent = posted + 0.6 * nbytes / rate
            free = posted + nbytes / rate * rng.lognormal(0, 0.1)
            transfers.append(Transfer(link, 0, 0, layer, layer + 1, 0, 0, nbytes, ready, posted, sent, free))
        ended = max(ended, free)
    return transfers, ended


def swept(
    *,
    rate: float = 3e9,
    movers: Sequence[str] = ("tcp", "shm"),
    tokens: Sequence[int] = (512, 2048, 8192, 32768),
    iterations: int = 20,
    links: int = 1,
    layers: int = 8,
    compute_s: float = 0.0,
    seed: int = 1,
) -> Result:
    """A sweep over tokens and movers, with a reference for each case."""
    rng = np.random.default_rng(seed)
    cases = []
    for number, mover in enumerate(movers):
        for count in tokens:
            case = Case(tokens=count, mover=mover, layers=layers, layer_compute_s=compute_s)
            cases.append(_case(rng, case, rate * (1 + 1.5 * number), iterations, links, layers))
    return result_of(*cases)


def _case(rng: np.random.Generator, case: Case, rate: float, iterations: int, links: int, layers: int) -> CaseResult:
    nbytes = case.tokens * 4096 * layers
    path = TCP if case.mover == "tcp" else {"kind": "shm", "detail": "shm memfd", "library": "pdtx"}
    samples = []
    for number in range(iterations + 2):
        transfers, ended = layered(rng, rate / (1 + 3e5 / case.tokens / 4096), case, layers, links)
        begin = min(one.posted for one in transfers)
        made = [link_sample(ended - begin, nbytes, link=link, begun=begin, posts=layers) for link in range(links)]
        made = [_delivered(one, layers) for one in made]
        samples.append(sample(number, made, warmup=number < 2, transfers=transfers))
    seconds = [(nbytes / rate / 1.3) * float(rng.lognormal(0, 0.03)) for _ in range(9)]
    return CaseResult(
        case=case,
        iterations=iterations,
        warmup=2,
        verified=True,
        links=[
            Link(
                prefill=0, decode=1, path=path, wire_bytes=nbytes, unique_bytes=nbytes, runs=nbytes // 32768,
                run_sizes={"32768": nbytes // 32768}, num_transfers=layers,
            )
            for _ in range(links)
        ],
        registrations=[Registration(node=0, nbytes=nbytes, seconds=0.002)],
        samples=samples,
        references=[
            Reference(name="socket", nbytes=nbytes, seconds=seconds, limits=True),
            Reference(name="memcpy", nbytes=nbytes, seconds=[one / 2.5 for one in seconds]),
            Reference(name="ucx_perftest", nbytes=0, seconds=[], missing="not installed"),
        ],
        load_average=[0.5, 0.5],
    )  # fmt: skip


def _delivered(link: LinkSample, times: int) -> LinkSample:
    fields = {name: getattr(link, name) for name in LinkSample.__struct_fields__}
    return LinkSample(**{**fields, "deliveries": times})
