"""A sweep: from lists of values to the cases that are measured, one after another."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import msgspec

from pdtx.bench import axes
from pdtx.bench.limits import MOST_BLOCK_SIZE, MOST_RANKS, MOST_REQUESTS, MOST_STREAMS, MOST_TOKENS
from pdtx.bench.sweep_shapes import agent_bytes, request_bytes, tokens_for, why_impossible
from pdtx.errors import InputError, PdtxError
from pdtx.results.model import Case, ModeName, Op, Pattern
from pdtx.transports.options import typed_options
from pdtx.transports.registry import mover_class
from pdtx.units import format_bytes

Read = Callable[[str, str], Any]
Tables = Sequence[tuple[list[int], list[int]]]

_MOST_CASES = 100_000
_SIZES = "tokens", "bytes"


def _layout(flag: str, text: str) -> str:
    # A comma separates values of the sweep, so kinds of layers within one layout are joined by a plus.
    return text.replace("+", ",")


AXES: Mapping[str, tuple[str, Read]] = {
    "model": ("model", axes.word),
    "kv-cache-dtype": ("kv_cache_dtype", axes.word),
    "layers": ("layers", axes.whole_or_none(1)),
    "pattern": ("pattern", axes.one_of(Pattern)),
    "tp": ("tp", axes.pair(axes.whole(1, MOST_RANKS))),
    "layout": ("layout", axes.pair(_layout)),
    "block-size": ("block_size", axes.pair(axes.whole(1, MOST_BLOCK_SIZE))),
    "mover": ("mover", axes.word),
    "streams": ("streams", axes.whole(1, MOST_STREAMS)),
    "op": ("op", axes.one_of(Op)),
    "mode": ("mode", axes.one_of(ModeName)),
    "merge": ("merge", axes.switch),
    "mean-run": ("mean_run", axes.mean_run),
    "depth": ("depth", axes.whole_or_all(1)),
    "layers-per-transfer": ("layers_per_transfer", axes.whole_or_all(1)),
    "layer-compute": ("layer_compute_s", axes.seconds),
    "batch": ("batch", axes.whole(1, MOST_REQUESTS)),
    "tokens": ("tokens", axes.whole(1, MOST_TOKENS)),
    "bytes": ("", axes.size),
}
"""From a flag to the field of Case that it sweeps, and what reads one value. In the order of nesting: what is last
changes from case to case, so that rows below one another make a curve over sizes."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is to be measured.

    values: from an axis' flag to its values; of tokens and bytes one is there. mover_options, isolated, seed: of every
    case. block_tables: recorded ones, (prefill, decode) of each request; each is a case, and says how many tokens.
    """

    values: Mapping[str, tuple[Any, ...]]
    mover_options: Mapping[str, str] = field(default_factory=dict)
    block_tables: Tables = ()
    isolated: bool = False
    seed: int = 0

    @classmethod
    def of(cls, flags: Mapping[str, str], **others: Any) -> "Sweep":  # noqa: ANN401 - the fields of this class
        """Read the axes' texts; an axis that is not given has its field's default.

        Raises InputError for a text that cannot be read, and for sizes given in two ways.
        """
        unknown = next((flag for flag in flags if flag not in AXES), None)
        if unknown is not None:
            raise InputError(f"nothing is swept by {unknown!r}; axes are {', '.join(AXES)}")
        sizes = [f"--{flag}" for flag in _SIZES if flag in flags] + ["--block-tables"] * bool(
            others.get("block_tables")
        )
        if len(sizes) > 1:
            raise InputError(f"{' and '.join(sizes)} both say how large requests are; give one of them")
        read = {flag: axes.values(flag, text, AXES[flag][1]) for flag, text in flags.items()}
        if others.get("block_tables") and read.get("batch", (1,)) != (1,):
            raise InputError("recorded block tables are measured one by one; leave --batch out")
        return cls(values=read, **others)


@dataclass(frozen=True)
class Point:
    """A case of a sweep, and what is known of it before it runs.

    request_bytes: that one request moves, each element once. memory: about what one prefill agent and one decode agent
    need. skipped: why it is not measured, or None.
    """

    case: Case
    request_bytes: int = 0
    memory: tuple[int, int] = (0, 0)
    skipped: str | None = None


def expand(sweep: Sweep, agents: tuple[int, int], max_bytes: Sequence[int | None] = (None, None)) -> list[Point]:
    """Return every combination of a sweep's values, sizes innermost.

    agents: how many prefill and decode agents there are. max_bytes: what one of each may take; None where unknown.
    What cannot be is a point with its reason. Raises InputError for more combinations than anybody would wait for.
    """
    flags = [flag for flag in AXES if flag in sweep.values and flag not in _SIZES]
    sizes = _sizes(sweep)
    count = len(sizes)
    for flag in flags:
        count *= len(sweep.values[flag])
    if count > _MOST_CASES:
        raise InputError(f"the sweep has {count:,} cases; {_MOST_CASES:,} at most: give fewer values")
    return [
        _point(sweep, dict(zip(flags, chosen, strict=True)), size, agents, max_bytes)
        for *chosen, size in product(*(sweep.values[flag] for flag in flags), sizes)
    ]


def _sizes(sweep: Sweep) -> list[tuple[str, Any]]:
    """Return what the innermost loop goes over: pairs of how a size is given, and the size."""
    if sweep.block_tables:
        # Each request by itself: in what was recorded, one takes the blocks that another has given back.
        return [("tables", [(here, there)]) for here, there in sweep.block_tables]
    flag = next((flag for flag in _SIZES if flag in sweep.values), None)
    return [(flag, size) for size in sweep.values[flag]] if flag else [("tokens", Case().tokens)]


def _point(
    sweep: Sweep,
    chosen: Mapping[str, Any],
    size: tuple[str, Any],
    agents: tuple[int, int],
    max_bytes: Sequence[int | None],
) -> Point:
    fields: dict[str, Any] = {AXES[flag][0]: value for flag, value in chosen.items()}
    fields |= {"mover_options": dict(sweep.mover_options), "isolated": sweep.isolated, "seed": sweep.seed}
    case = msgspec.convert(fields, Case)
    how, amount = size
    try:
        if how == "tables":
            case = _with_tables(case, amount)
        elif how == "tokens":
            case = msgspec.structs.replace(case, tokens=amount)
        else:
            case = msgspec.structs.replace(case, tokens=tokens_for(case, amount))
        reason = next(_reasons(case), None)
        if reason is not None:
            return Point(case, skipped=reason)
        nbytes, memory = request_bytes(case), agent_bytes(case, agents)
    except PdtxError as error:
        return Point(case, skipped=str(error))
    return Point(case, nbytes, memory, _too_large(memory, max_bytes))


def _with_tables(case: Case, tables: list[tuple[list[int], list[int]]]) -> Case:
    here, there = tables[0]
    tokens = min(len(here) * case.block_size[0], len(there) * case.block_size[1])
    if not tokens:
        raise InputError("a recorded block table is empty")
    return msgspec.structs.replace(case, tokens=tokens, block_tables=tables)


def _reasons(case: Case) -> Iterator[str]:
    """Yield why a case cannot be measured."""
    if case.mover == "inproc":
        yield "the mover inproc works within one process, and agents are processes of their own; use shm"
    if case.op == "pull" and case.mode == "staged":
        yield "a pull has no staged mode: what is packed is packed by the side that posts"
    mismatch = _of_mover(case) or why_impossible(case)
    if mismatch is not None:
        yield mismatch


def _of_mover(case: Case) -> str | None:
    """Return why a case's mover cannot be had as it wants it, as far as that shows without making one."""
    options = [f"{key}={value}" for key, value in case.mover_options.items()]
    try:
        cls = mover_class(case.mover)
        typed_options(case.mover, cls, options)
        if case.streams is not None:
            typed_options(case.mover, cls, [f"streams={case.streams}"])
    except InputError as error:
        return str(error)
    return None


def _too_large(memory: tuple[int, int], max_bytes: Sequence[int | None]) -> str | None:
    for needed, limit, side in zip(memory, max_bytes, ("prefill", "decode"), strict=True):
        if limit is not None and needed > limit:
            return (
                f"a {side} agent would need about {format_bytes(needed)} and may take {format_bytes(limit)}; "
                "give fewer tokens, a smaller batch or fewer --layers, or its --max-bytes"
            )
    return None
