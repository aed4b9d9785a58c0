"""`pdtx replay`: a trace's requests, or a capture's, through tiers and transfers, with prefill emulated."""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdtx.cli import options as opt
from pdtx.cli.common import configure_logging, emit, note
from pdtx.cli.movers import mover_flags
from pdtx.errors import InputError
from pdtx.node.config import CacheConfig, SecurityConfig, SendConfig, TierConfig
from pdtx.node.model import load_synthetic, open_cache, open_security
from pdtx.node.tiers import open_tiers
from pdtx.node.transport import open_mover, parse_mode, parse_require, read_costs, shares_memory
from pdtx.units import counted, parse_bytes

if TYPE_CHECKING:
    from pdtx.engine import KVProducer
    from pdtx.node.tiers import NodeTiers
    from pdtx.replay.plan import ReplayPlan
    from pdtx.replay.rows import ReplayRow
    from pdtx.replay.run import Outcome
    from pdtx.replay.synthetic import SyntheticComputer

_TRACE, _LOCAL = "Trace", "The decode node that is started"
_START_S = 120.0
_TELL_S = 2.0


def replay(
    trace: Annotated[Path, typer.Argument(help="Mooncake's JSON lines, or what 'pdtx capture' has recorded.")],
    model: Annotated[str, typer.Argument(help="Whose shapes: a preset, a config.json or a folder.")] = "llama-3-8b",
    layers: opt.Layers = None,
    max_requests: Annotated[
        int | None, typer.Option(help="The first so many only.", min=1, rich_help_panel=_TRACE, show_default=False)
    ] = None,
    speedup: Annotated[float, typer.Option(help="How much faster requests arrive.", rich_help_panel=_TRACE)] = 1.0,
    scale_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens of the trace that one here stands for; divides a block.", min=1, rich_help_panel=_TRACE
        ),
    ] = 1,
    trace_block_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a block in a trace; default: 512.", min=1, rich_help_panel=_TRACE, show_default=False
        ),
    ] = None,
    prefill_rate: opt.PrefillRate = 20000.0,
    decode_rate: opt.DecodeRate = 0.0,
    chunk_size: Annotated[
        int | None,
        typer.Option(help="Most tokens at a time; default: 2048, or the capture's.", min=1, show_default=False),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="Most prompts under way; default: 4, or the capture's.", min=1, show_default=False),
    ] = None,
    connect: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of a 'pdtx-decode --synthetic MODEL'; default: one is started here.", show_default=False
        ),
    ] = None,
    layout: opt.Layout = "flash_attn_nhd",
    block_size: opt.BlockSize = 16,
    pool_size: Annotated[str, typer.Option(help="Of either node's cache.")] = "512MiB",
    decode_layout: Annotated[str, typer.Option(help="Its layout.", rich_help_panel=_LOCAL)] = "flashinfer_hnd",
    decode_block_size: Annotated[int, typer.Option(help="Tokens in its blocks.", min=1, rich_help_panel=_LOCAL)] = 32,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Whether it compares every element.", rich_help_panel=_LOCAL)
    ] = True,
    mover: opt.Mover = "tcp",
    mover_option: opt.MoverOption = None,
    require: opt.Require = None,
    mode: opt.TransferMode = "auto",
    kv_offloading_size: opt.OffloadingSize = 0.0,
    kv_offloading_disk_size: opt.OffloadingDiskSize = 0.0,
    kv_offloading_dir: opt.OffloadingDir = None,
    kv_offloading_block_size: opt.OffloadingBlockSize = None,
    kv_offloading_policy: opt.OffloadingPolicy = "lru",
    kv_offloading_write: opt.OffloadingWrite = "through",
    peer_tier: opt.PeerTier = None,
    timeout: Annotated[float, typer.Option(help="Seconds within which a request must end.", min=0.1)] = 300.0,
    deadline: Annotated[
        float | None,
        typer.Option(help="Seconds after which the replay ends with what there is.", min=0.1, show_default=False),
    ] = None,
    key: opt.Key = None,
    peer_key: opt.PeerKey = None,
    insecure: opt.Insecure = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the result to this file.", show_default=False)
    ] = None,
    log_level: opt.LogLevel = None,
    log_format: opt.LogFormat = "text",
    json: opt.Json = False,
    verbose: opt.Verbose = False,
) -> None:
    """Replay requests at their times: prefixes come from tiers, the rest takes as long as computing it would."""
    configure_logging(verbose, log_level, log_format)
    from pdtx.layout import parse_layouts
    from pdtx.replay.plan import ReplayPlan
    from pdtx.replay.source import Scale, Source

    parse_layouts(layout)
    parse_layouts(decode_layout)
    tiers = TierConfig(
        kv_offloading_size,
        kv_offloading_disk_size,
        kv_offloading_dir,
        kv_offloading_block_size,
        kv_offloading_policy,
        kv_offloading_write,
        None,
        peer_tier,
    )
    source = Source.open(trace, trace_block_tokens)
    plan = ReplayPlan.of(
        source,
        Scale(source.block_tokens, scale_tokens, speedup),
        load_synthetic(model, layers, note),
        most=max_requests,
        pool=parse_bytes(pool_size),
        chunk_size=chunk_size,
        max_num_seqs=max_num_seqs,
        timeout_s=timeout,
        deadline_s=deadline,
    )
    plan.check({"prefill": block_size} | ({"decode": decode_block_size} if connect is None else {}))
    if source.header is None and (late := source.out_of_order(max_requests)):  # a capture is in the order of ends
        note(f"{trace.name} is not in the order of arrival: {counted(late, 'request')} moved to where they belong")
    if connect is None and key is not None:
        raise InputError("--key is for a decode node elsewhere; give its address with --connect")
    security = open_security(SecurityConfig(key, peer_key, insecure))
    transport = SendConfig(mover, mover_option, require, mode)
    required, picked, costs = parse_require(require), parse_mode(mode), read_costs()
    pace = plan.pace(prefill_rate)
    with ExitStack() as stack:
        moving = open_mover(transport)
        stack.callback(moving.close)
        started = connect is None
        if connect is None:
            serve = ["--synthetic", model, "--layout", decode_layout, "--block-size", str(decode_block_size)]
            serve += ["--num-blocks", str(plan.blocks(decode_block_size)), "--decode-rate", str(decode_rate)]
            serve += ["--layers", str(layers)] if layers is not None else []
            serve += ["--verify"] if verify else []
            connect = _start_decode([*serve, *mover_flags(mover, mover_option)], stack)

        from pdtx.engine import KVProducer
        from pdtx.replay.document import result_document
        from pdtx.replay.synthetic import SyntheticComputer

        shape = CacheConfig(layout, block_size, plan.blocks(block_size))
        cache, description = open_cache(plan.model, shape, shared=shares_memory(mover))
        opened = open_tiers(
            tiers,
            cache,
            plan.model,
            stack,
            block_size=block_size,
            security=security,
            transport=transport,
            costs=costs,
            on_note=note,
        )
        producer = KVProducer(cache, description, moving, mode=picked, costs=costs)
        stack.callback(producer.close)
        producer.connect(connect, security=security, timeout_s=10.0, require=required)
        note(f"connected to {producer.peer} at {connect}; the payload goes over {producer.path}")
        computer = SyntheticComputer(cache, tuple(plan.model.specs(block_size)), pace)
        outcome = _run(plan, computer, producer, opened)
        usages = opened.report(note) if opened is not None else []
    settings = {
        "model": model,
        "layers": layers,
        "layout": layout,
        "block_size": block_size,
        "prefill_rate": prefill_rate,
        "decode_rate": decode_rate,
        "mover": {"name": mover, "options": mover_option or []},
        "mode": mode,
        "decode": {"layout": decode_layout, "block_size": decode_block_size, "verify": verify} if started else None,
    }
    _finish(result_document(plan, outcome, computer, producer, settings=settings, tiers=usages), output, as_json=json)
    if outcome.stopped is not None and outcome.stopped.code is not None:
        sys.exit(outcome.stopped.code)


def _run(
    plan: "ReplayPlan", computer: "SyntheticComputer", producer: "KVProducer", tiers: "NodeTiers | None"
) -> "Outcome":
    """Run it all; what there is counts, whatever ends it before the last request."""
    from pdtx.replay.run import Outcome, Stopped, run_replay

    outcome = Outcome()
    until = time.monotonic() + plan.deadline_s if plan.deadline_s is not None else float("inf")
    try:
        run_replay(
            plan.scale.jobs(plan.source.requests(plan.most)),
            computer,
            producer,
            outcome,
            chunk_size=plan.chunk_size,
            max_num_seqs=plan.max_num_seqs,
            timeout_s=plan.timeout_s,
            until=until,
            prefix=tiers.prefix if tiers is not None else None,
            told=_teller(outcome),
        )
    except KeyboardInterrupt:
        outcome.stopped = Stopped("interrupted", 130)
    except SystemExit as error:
        outcome.stopped = Stopped("terminated", error.code if isinstance(error.code, int) else 1)
    else:
        if time.monotonic() >= until:
            outcome.stopped = Stopped(f"the deadline of {plan.deadline_s:g} s")
    return outcome


def _teller(outcome: "Outcome") -> "Callable[[ReplayRow], None]":
    """Return what says how far it is now and then, and which requests fail."""
    last = time.monotonic()

    def tell(row: "ReplayRow") -> None:
        nonlocal last
        now = time.monotonic()
        if row.error is not None:
            note(f"{row.request_id} failed: {row.error}")
        elif now - last > _TELL_S:
            last = now
            ended = counted(len(outcome.rows), "request")
            since = f"{now - outcome.begun:.1f} s after the begin; it had arrived after {row.arrival_s:.1f} s"
            note(f"{ended} ended, the last of them {since}")

    return tell


def _start_decode(flags: list[str], stack: ExitStack) -> str:
    """Start a decode node that stack ends; return its address."""
    from pdtx.process import Node

    node = stack.enter_context(Node("decode ", "decode_node", ["--listen", "127.0.0.1:0", "--json", *flags]))
    return str(node.event("listening", _START_S)["address"])


def _finish(document: dict[str, Any], output: Path | None, *, as_json: bool) -> None:
    """Print and write the result; exit 1 if a request is wrong, or has failed and not only for lack of time."""
    import msgspec

    from pdtx.replay.document import summary_lines
    from pdtx.report import write_json

    if output is not None:
        write_json(output, document)
        note(f"result written to {output}")
    emit(msgspec.json.encode(document).decode() if as_json else "\n".join(summary_lines(document)))
    found = document["figures"]
    if found["wrong"] or (document["complete"] and found["failed"]):
        raise typer.Exit(1)
