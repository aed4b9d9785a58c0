"""Direct or staged: what a run and a byte cost each mover on this machine, and whether auto picks the faster way.

Two requests of the same size are moved directly, one of few long runs and one of many of 256 bytes; the difference is
what the runs cost. Packing is measured on the same two. With --write-costs the figures go where pdtx looks for them.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.contest import Measured, compare, measure_in_turns
from benchmarks.pair import MoverPair
from benchmarks.peers import Peer
from benchmarks.rows import Row
from benchmarks.settings import Settings
from benchmarks.workload import FLASHINFER_HND, LLAMA_CASE, NHD, Case
from pdtx.plan import Costs, MeasuredCosts, Mode, choose_mode, save_costs
from pdtx.report import machine_facts
from pdtx.units import format_bytes, format_seconds

logger = logging.getLogger(__name__)

MOVERS = ("tcp", "shm", "ucx", "nixl")
_BLOCKS = 32
"""64 MiB: enough for a rate, and not too many runs for movers that post them one by one."""
_LEAST_RUN_S = 1e-10
"""Where many runs take no longer than few, noise has decided: a run is never free."""

_ESTIMATE = "costs are taken one by one, while a mover packs and sends at the same time"


@dataclass(frozen=True)
class Load:
    """How many runs a request has, how many ranges they are at the destination, and its bytes."""

    runs: int
    ranges: int
    nbytes: int

    @classmethod
    def of(cls, case: Case) -> "Load":
        """Add up the plans of a case."""
        plans = case.plans()
        runs, ranges = sum(plan.num_runs for plan in plans), sum(plan.num_destination_ranges for plan in plans)
        return cls(runs, ranges, case.nbytes)


class _Packing(Peer):
    """Packing at the source of a pair that is measured as well."""

    def __init__(self, pair: MoverPair) -> None:
        super().__init__(f"{pair.name} packing", "index_select", pair.nbytes)
        self._pair = pair

    def start(self) -> None:
        """The pair has been started."""

    def round(self) -> float:
        """Pack once."""
        return self._pair.pack()

    def stop(self) -> None:
        """The pair is stopped by who has started it."""


def modes(settings: Settings) -> list[Row]:
    """One row for each mover: what auto picks by the costs, against the other way; where there is one."""
    found, rows = list[MeasuredCosts](), list[Row]()
    for mover in MOVERS:
        few = replace(settings.case(replace(LLAMA_CASE, blocks=_BLOCKS)), ids="contiguous")
        many = replace(few, ids="random", layouts=(NHD, FLASHINFER_HND))
        got = _measure(mover, few, many, settings.rounds)
        costs = None if _missing(got) else costs_of(Load.of(few), Load.of(many), got)
        if costs is not None:
            found.append(_for_file(mover, costs, settings))
        rows.append(_picked(mover, Load.of(many), costs, got))
    if settings.write_costs is not None and found:
        place = save_costs(found, Path(settings.write_costs) if settings.write_costs else None)
        logger.warning("costs of %s written to %s", ", ".join(one.mover for one in found), place)
    return rows


def _measure(mover: str, few: Case, many: Case, rounds: int) -> dict[str, Measured]:
    pairs = {"few": MoverPair(mover, few), "many": MoverPair(mover, many)}
    packing = {f"pack {key}": _Packing(pair) for key, pair in pairs.items()}
    staged = MoverPair(mover, many, mode=Mode.STAGED)
    return measure_in_turns({**pairs, "staged": staged, **packing}, rounds, needed=tuple(pairs))


def _missing(got: Mapping[str, Measured]) -> bool:
    return any(one.missing for one in got.values())


def costs_of(few: Load, many: Load, got: Mapping[str, Measured]) -> Costs:
    """Return the costs that explain the seconds of both requests, directly and packed ("few", "pack few", ...)."""

    def line(prefix: str) -> tuple[float, float]:
        """Seconds a run and bytes a second, of a straight line through two points."""
        of_few, of_many = got[f"{prefix}few"].typical, got[f"{prefix}many"].typical
        run_s = max(_LEAST_RUN_S, (of_many - of_few) / (many.runs - few.runs))
        # What is left of the time for bytes, or half of it where runs would explain more than there is.
        return run_s, few.nbytes / max(of_few - few.runs * run_s, of_few / 2)

    (run_s, wire), (pack_run_s, pack) = line(""), line("pack ")
    return Costs(run_s=run_s, wire_bytes_per_s=wire, pack_run_s=pack_run_s, pack_bytes_per_s=pack)


def _picked(mover: str, many: Load, costs: Costs | None, got: Mapping[str, Measured]) -> Row:
    size = format_bytes(many.nbytes // many.runs)
    if costs is None:
        return compare(f"{mover} runs of {size}, picked : other", got["many"], got["staged"])
    if Mode.STAGED not in got["staged"].detail:
        row = compare(f"{mover} runs of {size} : few long runs", got["many"], got["few"])
        return replace(row, detail=f"never staged; {_said(costs)}; {row.detail}")
    choice = choose_mode(many.runs, many.nbytes, costs=costs, num_ranges=many.ranges)
    ways = got["many"], got["staged"]
    picked, other = ways if choice.mode is Mode.DIRECT else ways[::-1]
    row = compare(f"{mover} runs of {size}, picked : other", picked, other, limit=_ESTIMATE)
    return replace(row, detail=f"{choice.mode} picked, {choice.reason}; {_said(costs)}; {row.detail}")


def _said(costs: Costs) -> str:
    return (
        f"a run costs {format_seconds(costs.run_s)} and the wire carries {costs.wire_bytes_per_s / 1e9:.3g} GB/s; "
        f"packing a run costs {format_seconds(costs.pack_run_s)}, and {costs.pack_bytes_per_s / 1e9:.3g} GB/s"
    )


def _for_file(mover: str, costs: Costs, settings: Settings) -> MeasuredCosts:
    facts = machine_facts()
    return MeasuredCosts(
        mover=mover,
        device="cpu",
        run_s=costs.run_s,
        wire_bytes_per_s=costs.wire_bytes_per_s,
        pack_run_s=costs.pack_run_s,
        pack_bytes_per_s=costs.pack_bytes_per_s,
        measured=f"{facts['date']}, {facts['cpus']} x {facts['processor']}, {settings.rounds} rounds",
    )
