"""`pdtx-prefill`: run prompts through a model here and send their K/V to a decode node."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from pdtx.cli import options as opt
from pdtx.cli.agent import Bench, BenchAdvertise, BenchListen, MaxBytes, serve_agent
from pdtx.cli.common import (
    configure_logging,
    emit,
    load_runner,
    note,
    open_cache,
    open_security,
    run_app,
    single_command,
)
from pdtx.cli.metrics import open_metrics
from pdtx.cli.movers import open_mover, parse_mode, parse_require, read_costs, shares_memory
from pdtx.cli.prompts import read_prompts
from pdtx.cli.tiers import TierOptions, open_tiers
from pdtx.errors import InputError
from pdtx.layout import parse_layouts


def prefill(
    connect: Annotated[str | None, typer.Option(help="HOST:PORT of the decode node.", show_default=False)] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.", show_default=False)] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts, a line each: plain, or JSON with prompt or token_ids (and features).", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.", min=1)] = 32,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate --max-tokens whatever comes.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts into the model's chat template.")] = False,
    chunk_size: Annotated[int, typer.Option(help="Most prompt tokens computed at a time.", min=1)] = 256,
    max_num_seqs: Annotated[int, typer.Option(help="Most prompts under way at once.", min=1)] = 4,
    deadline: Annotated[float, typer.Option(help="Seconds within which a request must end.", min=0.1)] = 300.0,
    connect_timeout: Annotated[float, typer.Option(help="Seconds to wait for the decode node.", min=0.1)] = 10.0,
    model: opt.Model = None,
    dtype: opt.Dtype = "bfloat16",
    device: opt.Device = "cpu",
    threads: opt.Threads = None,
    layout: opt.Layout = "flash_attn_nhd",
    block_size: opt.BlockSize = 16,
    num_blocks: opt.NumBlocks = 512,
    tensor_parallel_size: opt.TensorParallel = 1,
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
    serve_tier: opt.ServeTier = None,
    peer_tier: opt.PeerTier = None,
    key: opt.Key = None,
    peer_key: opt.PeerKey = None,
    insecure: opt.Insecure = False,
    output: Annotated[Path | None, typer.Option(help="Also write the result to this file.", show_default=False)] = None,
    bench: Bench = False,
    listen: BenchListen = "127.0.0.1:5601",
    advertise: BenchAdvertise = None,
    max_bytes: MaxBytes = None,
    capture: opt.Capture = None,
    capture_tokens: opt.CaptureTokens = False,
    metrics_port: opt.MetricsPort = None,
    metrics_host: opt.MetricsHost = "127.0.0.1",
    log_level: opt.LogLevel = None,
    log_format: opt.LogFormat = "text",
    json: opt.Json = False,
    verbose: opt.Verbose = False,
) -> None:
    """Compute prompts, ship their K/V to a decode node as layers finish, and print what it generates."""
    configure_logging(verbose, log_level, log_format)
    if bench:
        serve_agent(
            "prefill",
            listen,
            advertise=advertise,
            key=key,
            peer_key=peer_key,
            insecure=insecure,
            device=device,
            max_bytes=max_bytes,
            json=json,
        )
        return
    if connect is None:
        raise InputError("no decode node to send to; give --connect HOST:PORT, or --bench to be measured with")
    parse_layouts(layout)
    offloading = TierOptions(
        kv_offloading_size,
        kv_offloading_disk_size,
        kv_offloading_dir,
        kv_offloading_block_size,
        kv_offloading_policy,
        kv_offloading_write,
        serve_tier,
        peer_tier,
    )
    asked = read_prompts(prompt, prompts)
    security = open_security(key, peer_key, insecure=insecure)
    required, picked, costs = parse_require(require), parse_mode(mode), read_costs()
    with ExitStack() as stack:
        # Before the model is loaded: a mover that cannot be had fails at once.
        moving = open_mover(mover, mover_option)
        stack.callback(moving.close)
        metrics = open_metrics(metrics_port, metrics_host, stack, role="prefill", mover=mover)
        runner = load_runner(model, dtype, device, threads)

        from pdtx.engine import KVProducer
        from pdtx.serving import Job, ModelComputer, PrefillScheduler
        from prefill_node.watching import Watch, open_recorder

        cache, description = open_cache(
            runner,
            layout=layout,
            block_size=block_size,
            num_blocks=num_blocks,
            tp_size=tensor_parallel_size,
            shared=shares_memory(mover),
        )
        tiers = open_tiers(
            offloading,
            cache,
            runner,
            stack,
            block_size=block_size,
            security=security,
            mover=mover,
            mover_options=mover_option,
            costs=costs,
        )
        jobs = [
            Job(str(one.id), one.tokens(lambda text: runner.encode(text, chat)), one.load_features()) for one in asked
        ]
        producer = KVProducer(cache, description, moving, mode=picked, costs=costs)
        stack.callback(producer.close)
        recorder = open_recorder(
            capture,
            producer,
            stack,
            block_size=block_size,
            chunk_size=chunk_size,
            max_num_seqs=max_num_seqs,
            with_tokens=capture_tokens,
        )
        watch = Watch(producer, tiers, metrics, recorder)
        producer.connect(connect, security=security, timeout_s=connect_timeout, require=required)
        path, registration = producer.path, producer.registration
        note(f"connected to {producer.peer} at {connect}; the payload goes over {path}")
        scheduler = PrefillScheduler(
            ModelComputer(runner),
            producer,
            max_tokens=max_tokens,
            chunk_size=chunk_size,
            max_num_seqs=max_num_seqs,
            timeout_s=deadline,
            ignore_eos=ignore_eos,
            prefix=tiers.prefix if tiers is not None else None,
            on_end=watch.ended,
        )
        watch.begin()
        rows = scheduler.run(jobs)
        usages = tiers.report() if tiers is not None else []

    import msgspec

    from pdtx.report import console_for, machine_facts, render_rows, write_json

    document = {
        "version": 1,
        "command": sys.argv,
        "machine": machine_facts(),
        "model": {"name": runner.name, "fingerprint": runner.fingerprint, "dtype": dtype},
        "layout": layout,
        "block_size": block_size,
        "tensor_parallel_size": tensor_parallel_size,
        "mover": {"name": mover, "options": mover_option or []},
        "path": msgspec.to_builtins(path),
        "registered_bytes": registration.nbytes,
        "registration_s": registration.seconds,
        "tiers": usages,
        "requests": msgspec.to_builtins(rows),
    }
    if json:
        emit(msgspec.json.encode(document).decode())
    else:
        render_rows(rows, console_for(sys.stdout))
    if output is not None:
        write_json(output, document)
    if not all(row.ok for row in rows):
        raise typer.Exit(1)


def main() -> None:
    """Entry point of `pdtx-prefill`."""
    run_app(single_command(prefill, "PDTX_PREFILL"), "pdtx-prefill")


if __name__ == "__main__":
    main()
