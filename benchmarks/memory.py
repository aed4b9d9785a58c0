"""What a mover needs beside the two caches while it moves 256 MiB directly: no copy of the payload, on either side."""

from benchmarks.movers import UCX_TCP
from benchmarks.pair import MoverPair
from benchmarks.rows import Row
from benchmarks.settings import Settings
from benchmarks.workload import LLAMA_CASE
from pdtx.errors import InputError, PdtxError

_MIB = 1 << 20
BAR_MIB = 32

_OWN_BUFFERS = "what the mover's library allocates when it first moves something"
_PAIRS: dict[str, tuple[str, dict[str, str]]] = {
    "tcp": ("tcp", {}),
    "shm": ("shm", {}),
    "ucx over tcp": ("ucx", UCX_TCP),
    "ucx on one host": ("ucx", {}),
    "nixl": ("nixl", {}),
}


def memory(settings: Settings) -> list[Row]:
    """One row for each mover: MiB resident above the caches at the highest, of the side that needs more."""
    case = settings.case(LLAMA_CASE)
    return [_row(name, MoverPair(mover, case, environment=more), settings) for name, (mover, more) in _PAIRS.items()]


def _row(name: str, pair: MoverPair, settings: Settings) -> Row:
    title = f"{name} peak memory : {BAR_MIB} MiB"
    try:
        with pair:
            pair.watch_memory()
            rounds = [pair.rss_above() for _ in range(settings.rounds)]
    except PdtxError as error:
        failed = not isinstance(error, InputError)
        return Row(name=title, unit="MiB", at_least=1.0, less_is_better=True, missing=str(error), failed=failed)
    most = [f"{side} {max(above[side] for above in rounds) / _MIB:.1f} MiB" for side in rounds[0]]
    return Row(
        name=title,
        unit="MiB",
        # The highest so far counts, not the median: once is enough to run out of memory.
        ours=[max(max(above.values()) for above in rounds) / _MIB],
        reference=[float(BAR_MIB)],
        at_least=1.0,
        wrong=pair.wrong,
        less_is_better=True,
        against="the bar itself",
        detail=f"{', '.join(most)}; {pair.detail}",
        limit=_OWN_BUFFERS,
    )
