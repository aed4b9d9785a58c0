"""`pdtx bench tier`: tiers against the machine's limit, and what a trace finds in them."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdtx.cli.common import emit, note
from pdtx.cli.options import BlockSize, Json, KVCacheDtype, Layout
from pdtx.cli.tables import aligned, both_sizes, named
from pdtx.errors import InputError, VerificationError
from pdtx.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from pdtx.bench.hits import HitRow
    from pdtx.bench.lookup import Lookup
    from pdtx.bench.rates import Rate
    from pdtx.bench.settings import RateSettings
    from pdtx.bench.trace import Progress

Record = dict[str, Any]

_RATES, _TRACE = "Rates", "Trace"
_LEAST_ROUNDS = 7
_RESULT_VERSION = 1
_RATE_HEADS = ("what", "GB/s", "against", "GB/s", "ratio", "#wrong", "detail")
_HIT_HEADS = ("policy", "tier", "blocks", "blocks found", "tokens found", "evicted")


def tier(
    model: Annotated[
        str, typer.Argument(help="config.json, a folder with one, or a preset.", show_default=True)
    ] = "llama-3-8b",
    kv_cache_dtype: KVCacheDtype = "auto",
    layout: Layout = "flash_attn_nhd",
    block_size: BlockSize = 16,
    tier_layout: Annotated[
        str | None, typer.Option(help="The tiers' layout; default: what suits the cache's.", show_default=False)
    ] = None,
    factor: Annotated[int, typer.Option(help="Blocks of the cache that make one of the tier.", min=1)] = 1,
    blocks: Annotated[
        int, typer.Option(help="Blocks of the cache that are stored and loaded.", min=1, rich_help_panel=_RATES)
    ] = 128,
    rounds: Annotated[int, typer.Option(help="The median of which counts.", min=1, rich_help_panel=_RATES)] = 9,
    directory: Annotated[
        Path | None,
        typer.Option(
            help="Where the disk tier is to be measured; default: the system's folder for temporary files.",
            rich_help_panel=_RATES,
            show_default=False,
        ),
    ] = None,
    page_cache: Annotated[
        str,
        typer.Option(
            help="What the system may remember of files: direct (past the page cache), dropped (before each load), "
            "cached, or auto: direct where the file system can.",
            rich_help_panel=_RATES,
        ),
    ] = "auto",
    rates: Annotated[
        bool | None,
        typer.Option(
            "--rates/--no-rates",
            help="Measure rates; default: unless there is a trace.",
            rich_help_panel=_RATES,
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Requests in Mooncake's format, JSON lines; finds the share that tiers of some sizes have of them.",
            rich_help_panel=_TRACE,
            show_default=False,
        ),
    ] = None,
    sizes: Annotated[
        str, typer.Option(help="Of the tier, as in '1,4,16 GiB' or '100,1000 blocks'.", rich_help_panel=_TRACE)
    ] = "64,256,1024,4096 GiB",
    policies: Annotated[
        str | None, typer.Option(help="With commas; default: all.", rich_help_panel=_TRACE, show_default=False)
    ] = None,
    trace_block_tokens: Annotated[
        int, typer.Option(help="Tokens of a block in the trace.", min=1, rich_help_panel=_TRACE)
    ] = 512,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw hit rates against sizes into this file.", rich_help_panel=_TRACE, show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure stores and loads of the CPU and disk tiers, or how much of a trace they would have."""
    from pdtx.bench.caches import token_layers
    from pdtx.models import layer_specs, load_config

    if plot is not None and trace is None:
        raise InputError("--plot draws the hit rates of a trace; give one with --trace")
    measured = rates if rates is not None else trace is None
    if not measured and trace is None:
        raise InputError("there is nothing to measure with --no-rates and without a --trace")
    every = layer_specs(load_config(model), block_size=block_size, kv_cache_dtype=kv_cache_dtype)
    layers = token_layers(every)
    if not layers:
        raise InputError(f"{model} keeps nothing for each token; there is nothing to put into a tier")
    if left := [name for name in every if name not in layers]:
        note(f"left out, for they do not count tokens: {named(left)}")
    record: Record = {"version": _RESULT_VERSION, "model": model, "rates": None, "lookup": None, "hits": None}
    text, wrong = list[str](), 0
    # The trace first: what is wrong with it shows before minutes have passed.
    if trace is not None:
        _simulate(model, layers, trace, trace_block_tokens, sizes, policies, plot, record, text)
    if measured:
        settings = _settings(layout, tier_layout, factor, blocks, rounds, directory, page_cache)
        wrong = _measure(model, layers, settings, record, text)
    emit(json.dumps(record, indent=2) if as_json else "\n".join(text))
    if wrong:
        raise VerificationError(f"{wrong:,} elements are not what was stored; the figures mean nothing", wrong)


def _settings(
    layout: str, tier_layout: str | None, factor: int, blocks: int, rounds: int, directory: Path | None, cache: str
) -> "RateSettings":
    from pdtx.bench.settings import PAGE_CACHES, RateSettings
    from pdtx.layout import parse_layouts

    state = next((state for state in PAGE_CACHES if state == cache), None)
    if state is None:
        raise InputError(f"--page-cache is one of {', '.join(PAGE_CACHES)}, not {cache!r}")
    if rounds < _LEAST_ROUNDS:
        note(f"a median of {rounds} rounds says little: {_LEAST_ROUNDS} is the least that counts")
    return RateSettings(
        layouts=parse_layouts(layout),
        tier_layouts=parse_layouts(tier_layout) if tier_layout else None,
        factor=factor,
        blocks=blocks,
        rounds=rounds,
        directory=directory,
        page_cache=state,
    )


# -- rates ------------------------------------------------------------------------------------------------------------


def _measure(model: str, layers: Mapping[str, Any], settings: "RateSettings", record: Record, text: list[str]) -> int:
    """Measure rates; return how many elements are wrong."""
    from pdtx.bench.lookup import measure_lookup
    from pdtx.bench.rates import measure_rates
    from pdtx.report import machine_facts

    def told(what: str, number: int) -> None:
        # On a terminal every round; a log has enough of the first and the last, and shows that it lives.
        if sys.stderr.isatty() or number in (0, settings.rounds):
            note(f"{what}: round {number} of {settings.rounds}" if number else f"{what}: warmed up")

    note(f"measuring {model}: {settings.blocks} blocks, {settings.rounds} rounds of both tiers; some seconds a round")
    found = measure_rates(layers, settings, told)
    lookup = measure_lookup(settings.rounds)
    record["machine"] = machine_facts()
    record["rates"] = [_rate_record(rate) for rate in found]
    record["lookup"] = lookup.as_json()
    block_tokens = next(iter(layers.values())).block_size
    text += [
        *([""] if text else []),
        f"{model}: {settings.blocks} blocks of {block_tokens} tokens in {','.join(settings.layouts)}, "
        f"{both_sizes(found[0].nbytes)}; tiers with blocks of {settings.factor * block_tokens} tokens in "
        f"{','.join(settings.tier_layouts or ('layouts of their choice',))}; medians of {settings.rounds} rounds",
        "",
        *aligned(_RATE_HEADS, [_rate_cells(rate) for rate in found]),
        "",
        _lookup_text(lookup),
    ]
    return sum(rate.wrong for rate in found) + lookup.wrong


def _rate_record(rate: "Rate") -> Record:
    return {
        "name": rate.name,
        "bytes": rate.nbytes,
        "seconds": rate.seconds,
        "against": rate.against,
        "against_seconds": rate.against_seconds,
        "ratio": rate.ratio,
        "wrong": rate.wrong,
        "detail": rate.detail,
    }


def _rate_cells(rate: "Rate") -> tuple[str, ...]:
    ours, theirs = (f"{one / 1e9:.3f}" for one in (rate.rate, rate.against_rate))
    return rate.name, ours, rate.against, theirs, f"{rate.ratio:.3f}", f"{rate.wrong:,}", rate.detail


def _lookup_text(lookup: "Lookup") -> str:
    return (
        f"lookup of {lookup.blocks:,} blocks {format_seconds(lookup.lookup_s)}, their release "
        f"{format_seconds(lookup.release_s)}; names of {lookup.tokens:,} tokens {format_seconds(lookup.keys_s)}; "
        f"#wrong {lookup.wrong}"
    )


# -- hits -------------------------------------------------------------------------------------------------------------


def _simulate(
    model: str,
    layers: Mapping[str, Any],
    trace: Path,
    block_tokens: int,
    sizes: str,
    policies: str | None,
    plot: Path | None,
    record: Record,
    text: list[str],
) -> None:
    from pdtx.bench.caches import block_bytes
    from pdtx.bench.hits import simulate
    from pdtx.bench.plot import draw_hits
    from pdtx.bench.sizes import parse_sizes
    from pdtx.bench.trace import read_trace
    from pdtx.tiers.policies import POLICIES

    names = tuple(part.strip() for part in policies.split(",")) if policies else tuple(POLICIES)
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise InputError(f"no policy {unknown[0]!r}; one of {', '.join(POLICIES)}")
    nbytes = block_bytes(layers, block_tokens)
    rows = simulate(read_trace(trace, block_tokens, _progress(trace)), names, parse_sizes(sizes, nbytes), block_tokens)
    one = rows[0]
    record["hits"] = {
        "trace": trace.name,
        "block_tokens": block_tokens,
        "block_bytes": nbytes,
        "requests": one.requests,
        "blocks": one.blocks,
        "tokens": one.tokens,
        "rows": [row.as_json() for row in rows],
    }
    head = (
        f"{trace.name}: {one.requests:,} requests, {one.blocks:,} blocks, {one.tokens:,} tokens; a block of "
        f"{block_tokens} tokens of {model} is {both_sizes(nbytes)}"
    )
    text += [head, "", *aligned(_HIT_HEADS, [_hit_cells(row) for row in rows])]
    if plot is not None:
        draw_hits(plot, f"{trace.name} in a tier of {model}'s blocks", rows)
        note(f"drawn into {plot}")


def _progress(trace: Path) -> "Progress":
    """Return what tells on a terminal how far the trace is read, on one line."""

    def tell(done: int, total: int) -> None:
        sys.stderr.write(f"\r{trace.name}: {done * 100 // max(total, 1)}% of {format_bytes(total)}\x1b[K")
        sys.stderr.write("\r\x1b[K" if done >= total else "")
        sys.stderr.flush()

    return tell if sys.stderr.isatty() else lambda *_: None


def _hit_cells(row: "HitRow") -> tuple[str, ...]:
    blocks = "" if row.size.blocks is None else f"{row.size.blocks:,}"
    return (
        row.policy,
        str(row.size),
        blocks,
        f"{row.block_rate:.2%}",
        f"{row.token_rate:.2%}",
        f"{row.evicted:,}",
    )
