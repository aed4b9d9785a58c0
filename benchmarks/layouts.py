"""What another layout on the other side costs, and what blocks side by side gain.

256 MiB of a Llama-3-8B cache. FlashAttention NHD to FlashInfer NHD moves the same 32 KiB atoms to other places; NHD to
HND cuts every atom into 256 bytes, one head of one token. Transfers are direct or staged as pdtx picks by itself.
"""

from dataclasses import replace

from benchmarks.contest import Measured, compare, measure_in_turns
from benchmarks.pair import MoverPair
from benchmarks.rows import Row
from benchmarks.settings import Settings
from benchmarks.workload import FLASHINFER_HND, FLASHINFER_NHD, LLAMA_CASE, NHD
from pdtx.plan import Mode

_SCATTER = "the destination's ranges are no longer in the order of the source's: more, shorter reads and writes"
_SMALL = "a copy of 1,048,576 runs of 256 bytes on one core, besides moving the bytes"
_MERGED = "the same bytes in fewer system calls"


def layouts(settings: Settings) -> list[Row]:
    """TCP held to bars, the other movers beside it."""
    return [row for mover in ("tcp", "shm", "ucx") for row in _layouts_of(mover, settings)]


def _layouts_of(mover: str, settings: Settings) -> list[Row]:
    case = settings.case(LLAMA_CASE)
    got = measure_in_turns(
        {
            key: MoverPair(mover, replace(case, layouts=(NHD, there)), mode=Mode.AUTO)
            for key, there in (("same", NHD), ("atoms", FLASHINFER_NHD), ("heads", FLASHINFER_HND))
        },
        settings.rounds,
    )
    held = 1.0 if mover == "tcp" else 0.0
    return [
        compare(
            f"{mover} FlashAttention NHD > FlashInfer NHD : same layout",
            got["atoms"],
            got["same"],
            at_least=0.95 * held,
            limit=_SCATTER,
        ),
        compare(f"{mover} NHD > HND : same layout", got["heads"], got["same"], at_least=0.5 * held, limit=_SMALL),
    ]


def contiguous(settings: Settings) -> list[Row]:
    """TCP with block ids side by side against scattered ones; and how many runs are left of them."""
    case = settings.case(LLAMA_CASE)
    together = replace(case, ids="contiguous")
    pair = MoverPair("tcp", together)
    got = measure_in_turns({"together": pair, "scattered": MoverPair("tcp", case)}, settings.rounds)
    rate = compare("tcp contiguous ids : scattered", got["together"], got["scattered"], at_least=1.0, limit=_MERGED)
    return [rate, _merged(got["together"], sum(len(plan.flat) for plan in together.plans()), 2 * case.layers)]


def _merged(measured: Measured, runs: int, least: int) -> Row:
    """Hold the number of runs to one for each layer's keys and values."""
    return Row(
        name=f"runs of contiguous ids : {least}",
        unit="runs",
        ours=[float(runs)],
        reference=[float(least)],
        at_least=1.0,
        less_is_better=True,
        against="one for each layer, K and V",
        detail=measured.detail,
        missing=measured.missing,
        failed=measured.failed,
    )
